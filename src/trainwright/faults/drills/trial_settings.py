"""The runs that faults are put into: their recipe, and how their commands are started."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trainwright
from trainwright.faults.drills.kinds import Spread


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a campaign have in common.

    Attributes:
        files: files that every trial's directory has, by their names; ``recipe.yaml`` is the recipe, shortened as
            phases.py needs it.
        spreads: the strategies and numbers of processes of the trials.
        shared: for undisturbed runs and prepared data.
        variables: of the environment of commands. The cache and the directory for temporary files are the trial's own
            in any case, HOME only if it is not among them.
        directory: where commands are started; None: in the trial's own directory.
        evaluates: whether evaluations are in the events; texts are generated without, too.
        halvable: overrides with which smaller micro-batches make no other run.
        patience: how many seconds a command may take.
    """

    files: Mapping[str, Path]
    spreads: tuple[Spread, ...]
    shared: Path
    variables: Mapping[str, str]
    directory: Path | None = None
    evaluates: bool = True
    halvable: tuple[str, ...] = ()
    patience: float = 150.0
    code: str = field(default_factory=lambda: code_of_the_product())


def code_of_the_product() -> str:
    """Return a digest of the product's source: another source has other undisturbed runs."""
    root = Path(trainwright.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
