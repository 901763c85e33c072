"""The checkpoint of another run that a run starts from (``train.fork``). Imports no torch before it is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.engine.checkpoints.manifest import (
    RECIPE,
    CheckpointError,
    Manifest,
    build_checkpoint_path,
    list_checkpoints,
)
from trainwright.errors import RequestError, build_error
from trainwright.recipe.loading import load_recipe
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import quote_word

if TYPE_CHECKING:
    from trainwright.engine.checkpoints.checkpoint import Checkpoint
    from trainwright.parallel.world import World
    from trainwright.recipe.schema import RecipeSchema

KEY = "train.fork"
_REFERENCE = re.compile(r"(?P<run>.+?)(?:@(?P<step>[0-9]+))?(?:@sha256:(?P<sha256>[0-9a-f]{64}))?", re.DOTALL)


@dataclass(frozen=True)
class ParentCheckpoint:
    """A checkpoint of a run. ``sha256``: the checksum of its manifest, which has those of all its files."""

    run: Path
    step: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.run}@{self.step}@sha256:{self.sha256}"

    @property
    def fields(self) -> dict[str, Any]:
        """Return what events and checkpoints record."""
        return {"run": str(self.run), "step": self.step, "sha256": self.sha256}

    @classmethod
    def of(cls, reference: str) -> ParentCheckpoint:
        """Return the checkpoint that ``RUN[@STEP][@sha256:CHECKSUM]`` names; without a step, the newest one.

        Raises:
            RequestError: there is no such run or checkpoint, its manifest is damaged, or it is another one than before.
        """
        run, step, expected_sha256 = _parse_reference(reference)
        if not (run / RECIPE).is_file():
            raise RequestError(f"{KEY}: {run} is not a run: it has no {RECIPE}; name the directory of one")
        steps = list(list_checkpoints(run / "checkpoints"))
        if not steps or (step is not None and step not in steps):
            hint = f"it has those of steps {', '.join(map(str, steps))}" if steps else "it has none"
            raise RequestError(f"{KEY}: {run} has no checkpoint{'' if step is None else f' of step {step}'}; {hint}")
        step = steps[-1] if step is None else step
        try:
            sha256 = Manifest.read(build_checkpoint_path(run / "checkpoints", step)).sha256
        except CheckpointError as error:
            raise RequestError(f"{KEY}: {error}; name another step: {quote_word(str(run))}@STEP") from error
        if expected_sha256 is not None and sha256 != expected_sha256:
            path = build_checkpoint_path(run / "checkpoints", step)
            raise RequestError(f"{KEY}: {path} is not the checkpoint that this run starts from: its checksum differs")
        return cls(run, step, sha256)

    def open(self, world: World) -> Checkpoint:
        """Return the checkpoint, all of which rank 0 has read and verified.

        Raises:
            RequestError: a file is damaged or missing.
        """
        from trainwright.engine.checkpoints.checkpoint import Checkpoint

        path = build_checkpoint_path(self.run / "checkpoints", self.step)
        problem: tuple[int, str] | None = None
        if world.is_main:
            try:
                ParentCheckpoint.of(str(self))
                Checkpoint.open(path)
            except CheckpointError as error:
                problem = RequestError.exit_code, f"{KEY}: {error}; name another step: {quote_word(str(self.run))}@STEP"
            except RequestError as error:
                problem = error.exit_code, str(error)
        if (problem := world.broadcast(problem)) is not None:
            raise build_error(*problem)
        return Checkpoint.open(path, verify=False)


def is_same(reference: object, of_run: object) -> bool:
    """Return whether a recipe's ``train.fork`` agrees with the resolved one of a run: it is not set, or the same."""
    if not isinstance(reference, str) or not isinstance(of_run, str):
        return reference is None
    run, *rest = _parse_reference(reference)
    own_run, *own_rest = _parse_reference(of_run)
    return run == own_run and all(value in (None, run_value) for value, run_value in zip(rest, own_rest, strict=True))


def has_same_batches(recipe: RecipeSchema, checkpoint: Path) -> bool:
    """Return whether the run of a checkpoint took the same global batches, if the rows are the same."""
    return _order(recipe) == _order(load_recipe(checkpoint / RECIPE))


def _order(recipe: RecipeSchema) -> dict[str, object]:
    """Return what the global batches follow from, beside the rows."""
    train, data = recipe.train, recipe.data.model_dump()
    excluded_keys = {"validation"} if train.batch_unit == "packs" else {"validation", "pack_length"}
    keys = ("seed", "global_batch_size", "batch_unit", "initial_batch_size", "batch_warmup_steps")
    return {
        "task": recipe.task,
        **{key: value for key, value in data.items() if key not in excluded_keys},
        **{key: getattr(train, key) for key in keys},
    }


def _parse_reference(reference: str) -> tuple[Path, int | None, str | None]:
    match = _REFERENCE.fullmatch(reference)
    assert match is not None, "a text that is not empty"
    step = match["step"]
    return expand_user_path(match["run"]).absolute(), None if step is None else int(step), match["sha256"]
