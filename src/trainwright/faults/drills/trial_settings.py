"""The runs that faults are put into: their recipe, and how their commands are started."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trainwright
from trainwright.errors import EXIT_MACHINE, EXIT_REQUEST, EXIT_TRAINING
from trainwright.faults.drills.invariants import Undisturbed
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


# What trials are compared with.
REFERENCE = "undisturbed"
# A run that ends with one of these codes would end so again.
_LASTING = (EXIT_REQUEST, EXIT_MACHINE, EXIT_TRAINING)
_FAILURE = "failure.json"


def make_once(
    setting: TrialSettings,
    files: Sequence[Path],
    spread: Spread,
    name: str,
    overrides: Sequence[str],
    make: Callable[[Path, Sequence[str]], None],
) -> Path:
    """Return the run that ``make`` makes at a path, one for each spread, recipe and version of the code.

    Raises:
        Undisturbed: it does not finish. If it would not do so another time, it is not tried again.
    """
    directory = _directory(setting, files, spread, name, overrides)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (failure := _failure(directory)) is not None:
            raise failure
        if not (directory / "run").exists():
            for file in files:
                shutil.copy(file, directory / file.name)
            shutil.rmtree(directory / "scratch", ignore_errors=True)
            try:
                make(directory / "scratch", overrides)
            except Undisturbed as error:
                if error.code in _LASTING:
                    (directory / _FAILURE).write_text(json.dumps([error.code, error.text]))
                raise
            (directory / "scratch").rename(directory / "run")
    return directory / "run"


def refusals(setting: TrialSettings, spreads: Iterable[Spread]) -> dict[Spread, Undisturbed]:
    """Return the strategies and numbers of processes that the recipe has failed with, and how."""
    failures = {spread: _failure(_reference(setting, spread)) for spread in spreads}
    return {spread: failure for spread, failure in failures.items() if failure is not None}


def forget_refusals(setting: TrialSettings, spreads: Iterable[Spread]) -> None:
    """Let runs that have failed be tried again."""
    for spread in spreads:
        (_reference(setting, spread) / _FAILURE).unlink(missing_ok=True)


def _reference(setting: TrialSettings, spread: Spread) -> Path:
    return _directory(setting, setting.files.values(), spread, REFERENCE, ())


def _directory(
    setting: TrialSettings, files: Iterable[Path], spread: Spread, name: str, overrides: Sequence[str]
) -> Path:
    texts = [name, setting.code, spread[0], str(spread[1]), *overrides]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    digest = hashlib.sha256(json.dumps([*texts, *contents]).encode()).hexdigest()[:16]
    return setting.shared / "runs" / digest


def _failure(directory: Path) -> Undisturbed | None:
    try:
        code, text = json.loads((directory / _FAILURE).read_text())
    except (FileNotFoundError, ValueError):  # a kill has cut it
        return None
    return Undisturbed(code, text)
