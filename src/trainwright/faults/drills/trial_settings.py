"""The runs that faults are put into: their recipe, which may be a user's, and how their commands are started."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trainwright
from trainwright.errors import EXIT_MACHINE, EXIT_REQUEST, EXIT_TRAINING, RequestError
from trainwright.faults.drills import watched_commands
from trainwright.faults.drills.invariants import Undisturbed
from trainwright.faults.drills.kinds import Spread
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.registries import SCHEDULES
from trainwright.recipe.schema import FaultsSection, OptimizerSection, RecipeSchema
from trainwright.recipe.strategy_spec import load_strategies, look_up_strategy
from trainwright.recipe.yaml_text import Tree


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a campaign have in common.

    Attributes:
        files: files that every trial's directory has, by their names; ``recipe.yaml`` is the recipe, shortened as
            watched_commands.py needs it.
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
    code: str = field(default_factory=lambda: hash_product_code())


def hash_product_code() -> str:
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
    directory = _locate_run(setting, files, spread, name, overrides)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (failure := _read_failure(directory)) is not None:
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


def read_refusals(setting: TrialSettings, spreads: Iterable[Spread]) -> dict[Spread, Undisturbed]:
    """Return the strategies and numbers of processes that the recipe has failed with, and how."""
    failures = {spread: _read_failure(_locate_reference(setting, spread)) for spread in spreads}
    return {spread: failure for spread, failure in failures.items() if failure is not None}


def forget_refusals(setting: TrialSettings, spreads: Iterable[Spread]) -> None:
    """Let runs that have failed be tried again."""
    for spread in spreads:
        (_locate_reference(setting, spread) / _FAILURE).unlink(missing_ok=True)


def _locate_reference(setting: TrialSettings, spread: Spread) -> Path:
    return _locate_run(setting, setting.files.values(), spread, REFERENCE, ())


def _locate_run(
    setting: TrialSettings, files: Iterable[Path], spread: Spread, name: str, overrides: Sequence[str]
) -> Path:
    texts = [name, setting.code, spread[0], str(spread[1]), *overrides]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    digest = hashlib.sha256(json.dumps([*texts, *contents]).encode()).hexdigest()[:16]
    return setting.shared / "runs" / digest


def _read_failure(directory: Path) -> Undisturbed | None:
    try:
        code, text = json.loads((directory / _FAILURE).read_text())
    except (FileNotFoundError, ValueError):  # a kill has cut it
        return None
    return Undisturbed(code, text)


_SHORT = (
    "train.epochs=null",
    "train.max_tokens=null",
    f"train.max_steps={watched_commands.STEPS}",
    "train.deterministic=true",  # so that losses can be compared to the bit on every machine
    "train.gradient_accumulation_steps=auto",  # one number fits one number of processes
    "train.replan=offer",  # trials choose the strategy and the processes
    "train.profile=null",
    f"checkpoint.every={watched_commands.SAVES_EVERY}",
    "checkpoint.keep_last=3",
    "checkpoint.keep_best=false",
    # Trials write to their own directories only, and read events.jsonl.
    "checkpoint.copies=[]",
    "logging.observers={tensorboard: false, report: false}",
    # Trials expect the defaults, and set what their fault is about.
    *(f"faults.{key}={json.dumps(field.default)}" for key, field in FaultsSection.model_fields.items()),
)
# Of the warm-up and of the decay, if they are numbers of steps of the whole run.
_MOST_SCHEDULED = watched_commands.STEPS // 4


def load_shortened_recipe(source: Path | Tree, overrides: Sequence[str]) -> RecipeSchema:
    """Return the recipe as it is trained in trials. Raises RequestError like load_recipe."""
    recipe = load_recipe(source, overrides)
    more = list(_iterate_schedule_overrides(recipe.optimizer))
    if recipe.validates or recipe.evaluate.prompts:
        more.append(f"evaluate.every={watched_commands.EVALUATES_EVERY}")
    return load_recipe(source, [*overrides, *_SHORT, *more])


def list_spreads(recipe: RecipeSchema, strategies: Sequence[str], processes: Sequence[int]) -> tuple[Spread, ...]:
    """Return the strategies with the numbers of processes that each of them supports.

    Args:
        strategies: by default the recipe's, or with ``auto`` all that need no other library.
        processes: by default 1 and 2.

    Raises:
        RequestError: a strategy is unknown, a number is below 1, or no strategy supports any of the numbers.
    """
    names = list(strategies) or [recipe.parallel.strategy]
    if names == ["auto"]:
        names = [name for name, spec in load_strategies().items() if spec.library is None]
    specs = load_strategies()
    for name in names:
        if name not in specs:
            raise RequestError(f"--strategies {name}: unknown; one of {', '.join(specs)}")
    numbers = list(processes) or [1, 2]
    if min(numbers) < 1:
        raise RequestError(f"--processes {min(numbers)}: expected at least 1")
    supported_spreads = tuple((name, number) for name in names for number in numbers if _supports(name, number))
    if not supported_spreads:
        raise RequestError(
            f"--processes {','.join(map(str, numbers))}: {', '.join(names)} supports none of these numbers"
        )
    return supported_spreads


def list_phases(recipe: RecipeSchema) -> tuple[str, ...]:
    """Return the phases that a run of the recipe has."""
    absent = set() if recipe.validates else {watched_commands.EVALUATION}
    if not recipe.evaluate.prompts:
        absent.add(watched_commands.GENERATION)
    return tuple(phase for phase in watched_commands.ALL if phase not in absent)


def build_setting(recipe: RecipeSchema, file: Path, spreads: tuple[Spread, ...], shared: Path) -> TrialSettings:
    """Return the setting of a shortened recipe, which is written to ``file``."""
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    package = str(Path(trainwright.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return TrialSettings(
        files={"recipe.yaml": file},
        spreads=spreads,
        shared=shared,
        variables={**os.environ, "PYTHONPATH": path},
        directory=Path.cwd(),
        evaluates=recipe.validates,
        halvable=tuple(_iterate_dropout_overrides(recipe.model_dump(), "")),
    )


def _iterate_dropout_overrides(section: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield overrides that switch off dropout, whose random numbers depend on the micro-batches."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _iterate_dropout_overrides(value, f"{prefix}{key}.")
        # A model without a value of its own has that of its configuration.
        elif key == "dropout" and (
            value or (value is None and prefix == "model." and (section["name"] or section["config"]))
        ):
            yield f"{prefix}{key}=0"


def _iterate_schedule_overrides(optimizer: OptimizerSection) -> Iterator[str]:
    """Yield overrides for a warm-up and a decay that fit in the short run; fractions of the run stay as they are."""
    lengths = {"warmup_steps": optimizer.warmup_steps}
    if SCHEDULES.get(optimizer.schedule).in_decay_steps:
        lengths["decay_steps"] = optimizer.decay_steps
    fractions = sum(length for length in lengths.values() if isinstance(length, float))
    remaining = int(watched_commands.STEPS * (1 - fractions))
    for key, length in lengths.items():
        if isinstance(length, int):
            yield f"optimizer.{key}={min(length, remaining, _MOST_SCHEDULED)}"


def _supports(strategy: str, processes: int) -> bool:
    spec = look_up_strategy(strategy)
    return spec.least_processes <= processes <= (spec.most_processes or processes)
