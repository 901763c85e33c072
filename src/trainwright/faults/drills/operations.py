"""Drills: faults put into short runs of a recipe, and whether anything is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.api.recipe import Recipe, source_of
from trainwright.api.separate_process import run_in_process
from trainwright.errors import (
    EXIT_MACHINE,
    EXIT_REQUEST,
    Interrupted,
    MachineError,
    RequestError,
    Stopped,
    TrainingError,
    TrainwrightError,
)
from trainwright.machine.sharing import lock_directory
from trainwright.recipe.loading import dump_recipe
from trainwright.utils import text
from trainwright.utils.activity import Activity
from trainwright.utils.paths import user_path, write_file
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.faults.drills.campaign import CampaignResults
    from trainwright.faults.drills.invariants import Undisturbed
    from trainwright.faults.drills.kinds import DrillTrial, Spread
    from trainwright.faults.drills.trial_settings import TrialSettings
    from trainwright.recipe import schema
    from trainwright.recipe.yaml_text import Tree

SUMMARY = "drill.json"
_TRIALS, _RECIPE = "trials.jsonl", "recipe.yaml"
_ERRORS: dict[int, type[TrainwrightError]] = {EXIT_REQUEST: RequestError, EXIT_MACHINE: MachineError}
# A day: how long an undisturbed run takes is not known before the first one.
_FIRST_RUN_SECONDS = 86_400.0
# How many trials are drawn where only the time limits them.
_MOST_TRIALS = 10_000


@dataclass(frozen=True)
class Drill:
    """The results of a drill; ``str()`` gives the table that ``trainwright drill`` prints.

    Attributes:
        directory: contains the verdicts as ``trials.jsonl``, the rows as ``drill.json``, and the directories of trials
            that did not hold.
        rows: one of each kind of fault, and the last one of all: ``kind``, ``tries``, how many ``held``, are
            ``broken``, ``missed`` (the run had passed the moment) and ``skipped`` (this fault cannot be put in here),
            and medians: seconds from the fault until it was told (``median_detection``) and until the next step
            (``median_recovery``; an undisturbed start takes ``median_start``), and steps that were repeated
            (``median_lost``).
        left: trials without a verdict.
        cells: the table, by row.
        notes: its notes: trials that did not hold, and kinds, strategies and numbers of processes that could not be
            tried here.
        refused: strategies with numbers of processes (`ddp on 2`) that the recipe could not be trained with, and why.
    """

    directory: Path
    rows: tuple[dict[str, Any], ...]
    left: int
    cells: Sequence[Sequence[str]] = field(repr=False)
    notes: Sequence[str] = field(repr=False)
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int | None = None) -> str:
        """Return the table for a terminal with ``width`` columns. None: as wide as it is."""
        from trainwright.faults.drills.campaign import shown

        return shown(self.cells, self.notes, width)

    def values(self) -> dict[str, Any]:
        """Return the results as in ``drill.json``."""
        return {"held": self.held, "left": self.left, "kinds": list(self.rows), "refused": dict(self.refused)}

    @property
    def held(self) -> bool:
        """Return whether every trial held that could be tried, and there was one."""
        return self.rows[-1]["held"] == self.rows[-1]["tries"] > 0


def drill(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    output: str | PathLike[str] | None = None,
    seed: int = 0,
    tries: int | None = None,
    minutes: float | None = None,
    kinds: Sequence[str] = (),
    strategies: Sequence[str] = (),
    processes: Sequence[int] = (),
    jobs: int = 1,
    resume: bool = False,
    progress: bool = False,
) -> Drill:
    """Inject faults into short runs of a recipe, and see whether anything is lost; what ``trainwright drill`` does.

    The recipe is shortened to 24 steps. The seed draws the kinds, moments, ranks and places of the faults.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        output: the directory of the drill, which must not exist. Default: ``drills/<recipe>``.
        tries: how many faults. Default: one of each kind, or with ``minutes`` as many as there is time for.
        minutes: begin no fault after this time.
        kinds: shell patterns of the names of kinds. Default: all.
        strategies: strategies to train with. Default: the recipe's, or with ``auto`` all that need no other library.
        processes: numbers of processes to train with. Default: 1 and 2.
        jobs: how many faults at once.
        resume: continue the drill of the same recipe in ``output``; what did not hold is tried again.
        progress: show each verdict.

    Raises:
        RequestError: an argument is invalid, ``output`` exists, or is not a drill of this recipe to resume.
        MachineError, TrainingError: the recipe does not train without a fault.
        Stopped: it was stopped; the verdicts so far are kept.

    Examples:
        >>> import trainwright as tw
        >>> tw.drill("tiny.yaml", kinds=["earthquake"])
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: --kinds earthquake: no kind of fault has such a name; known are: ...
    """
    source = source_of(recipe)
    directory = user_path(output or Path("drills") / _stem(source)).absolute()
    request = DrillRequest(
        source,
        overrides,
        directory,
        seed,
        tries,
        minutes,
        tuple(kinds),
        tuple(strategies),
        tuple(processes),
        jobs,
        resume,
    )
    return run_in_process(_drill, request, progress, progress=progress)


@dataclass(frozen=True)
class DrillRequest:
    """A request for a drill; the fields are the arguments of `drill`."""

    recipe: Path | Tree
    overrides: tuple[str, ...]
    directory: Path
    seed: int
    tries: int | None
    minutes: float | None
    kinds: tuple[str, ...]
    strategies: tuple[str, ...]
    processes: tuple[int, ...]
    jobs: int
    resume: bool


def _drill(request: DrillRequest, progress: bool) -> Drill:
    """Perform the trials that have no verdict yet, in a process that does nothing else."""
    from trainwright.faults.drills.campaign import CampaignResults, cells, notes, rows_of
    from trainwright.faults.drills.shortened import setting_of, shortened, spreads_of
    from trainwright.run.group.environment import refuse_worker
    from trainwright.run.shutdown.stop import interruptible

    refuse_worker("drill")
    if not Path("/proc").is_dir():
        raise MachineError("a drill finds the processes of its runs in /proc, which only Linux has")
    started, directory = time.monotonic(), request.directory
    recipe = shortened(request.recipe, request.overrides)
    spreads = spreads_of(recipe, request.strategies, request.processes)
    trials = _trials(request, recipe, spreads)
    _check_directory(request, dump_recipe(recipe))
    directory.mkdir(parents=True, exist_ok=True)
    results = CampaignResults(directory / _TRIALS)
    with lock_directory(directory, f"{directory} is used by another drill"), interruptible():
        setting = setting_of(recipe, directory / _RECIPE, spreads, directory / "undisturbed")
        try:
            _perform(request, recipe, trials, results, setting, started, progress)
        except Interrupted:
            raise Stopped(f"stopped; to continue, repeat the command with --resume --output {directory}") from None
        trials, refused = _possible(trials, recipe, setting)
        lines = results.of(trials)
        rows = tuple(row.as_json() for row in rows_of(lines))
        remaining = sum(line is None for line in lines.values())
        why = {f"{strategy} on {processes}": str(failure) for (strategy, processes), failure in refused.items()}
        result = Drill(directory, rows, remaining, cells(lines), notes(lines, why), why)
        write_file(directory / SUMMARY, json.dumps(result.values(), indent=2) + "\n")
    return result


def _check_directory(request: DrillRequest, recipe: str) -> None:
    """Raise RequestError unless the directory is new, or that of the drill to resume."""
    directory = request.directory
    if not request.resume:
        if directory.exists():
            raise RequestError(
                f"--output: {directory} exists; choose another directory, or continue the drill in it with --resume"
            )
        return
    try:
        begun_with = (directory / _RECIPE).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--resume: {directory} has no drill to continue: {error.strerror}") from None
    if begun_with != recipe:
        raise RequestError(f"--resume: the drill in {directory} is of another recipe; choose another --output")


def _trials(request: DrillRequest, recipe: schema.Recipe, spreads: tuple[Spread, ...]) -> list[DrillTrial]:
    """Return the trials in their order. Raises RequestError if there are none."""
    from trainwright.faults.drills import damage, kills  # noqa: F401
    from trainwright.faults.drills.kinds import KINDS, matching, schedule
    from trainwright.faults.drills.shortened import phases_of

    for name, value in (("tries", request.tries), ("minutes", request.minutes), ("jobs", request.jobs)):
        if value is not None and value <= 0:
            raise RequestError(f"--{name} {value}: expected more than 0")
    for pattern in request.kinds:
        if not matching([pattern]):
            kinds = ", ".join(KINDS)
            raise RequestError(f"--kinds {pattern}: no kind of fault has such a name; known are: {kinds}")
    phases = phases_of(recipe)
    cases = {name: kind.cases(spreads, phases) for name, kind in matching(request.kinds).items()}
    one_of_each = sum(map(bool, cases.values()))
    trials = schedule(request.seed, request.tries or (_MOST_TRIALS if request.minutes else one_of_each), cases)
    if not trials:
        raise RequestError("--processes: these kinds of faults need several processes; add a number above 1")
    return trials


def _possible(
    trials: Sequence[DrillTrial], recipe: schema.Recipe, setting: TrialSettings
) -> tuple[list[DrillTrial], dict[Spread, Undisturbed]]:
    """Return the trials, none on a spread that the recipe has failed with if there is another, and these spreads."""
    from trainwright.faults.drills.kinds import KINDS, moved
    from trainwright.faults.drills.shortened import phases_of
    from trainwright.faults.drills.undisturbed import refusals

    refused = refusals(setting, dict.fromkeys([*setting.spreads, *(trial.case.spread for trial in trials)]))
    others = [spread for spread in setting.spreads if spread not in refused]
    kinds = {trial.kind for trial in trials if trial.case.spread in refused}
    cases = {kind: KINDS[kind].cases(others, phases_of(recipe)) if others else () for kind in kinds}
    return moved(trials, refused, cases), refused


def _remaining(trials: Sequence[DrillTrial], results: CampaignResults) -> list[DrillTrial]:
    """Return the trials without a verdict, and those that did not hold."""
    from trainwright.faults.drills.campaign import BROKEN, MISSED

    return [trial for trial, line in results.of(trials).items() if line is None or line["verdict"] in (BROKEN, MISSED)]


def _perform(
    request: DrillRequest,
    recipe: schema.Recipe,
    trials: list[DrillTrial],
    results: CampaignResults,
    setting: TrialSettings,
    started: float,
    progress: bool,
) -> None:
    """Perform the trials that are left, as long as there is time."""
    from trainwright.faults.drills.campaign import run_trials

    stream = sys.stderr if progress else None
    refused: Mapping[Spread, Undisturbed] = {}
    done: set[tuple[str, str]] = set()
    of = ""

    def still_left() -> list[DrillTrial]:
        nonlocal refused
        possible, refused = _possible(trials, recipe, setting)
        return [trial for trial in _remaining(possible, results) if (trial.name, str(trial.case)) not in done]

    if not (remaining := still_left()):
        return
    setting = replace(setting, patience=max(setting.patience, 10 * _undisturbed_seconds(setting, remaining, stream)))

    def over() -> bool:
        return request.minutes is not None and time.monotonic() - started >= 60 * request.minutes

    def over_or_refused() -> bool:
        return over() or len(_possible(trials, recipe, setting)[1]) > len(refused)

    def waiting(trials: Sequence[DrillTrial], seconds: float) -> None:
        # Drawn from the loop, as processes are forked from this one: a thread could hold a lock meanwhile.
        if stream and text.is_terminal(stream):
            names = ", ".join(trial.name for trial in trials)
            text.draw(f"[{len(done) + 1}{of}] {names}", stream, f" … {text.duration(seconds)}")

    # That the recipe cannot be trained with a strategy is only known once it has failed: its trials are moved then.
    while (remaining := still_left()) and not over():
        of = "" if request.minutes else f"/{len(done) + len(remaining)}"
        work = request.directory / "trials"
        for line in run_trials(remaining, setting, work, request.jobs, until=over_or_refused, waiting=waiting):
            results.add(line)
            done.add((line["trial"], line["case"]))
            if stream:
                why = line["why"].splitlines()[0][:200] if line["why"] else ""
                about = f"{line['trial']} ({line['case']}): {line['verdict']}"
                say(f"[{len(done)}{of}] {about}  {why}".rstrip(), file=stream)


def _undisturbed_seconds(setting: TrialSettings, trials: Sequence[DrillTrial], stream: TextIO | None) -> float:
    """Return what a run takes without a fault. Raises MachineError, RequestError or TrainingError if none finishes."""
    from trainwright.faults.drills.invariants import Undisturbed
    from trainwright.faults.drills.trial_environment import undisturbed_seconds

    try:
        with Activity(stream, "training once without a fault"):
            return undisturbed_seconds(replace(setting, patience=_FIRST_RUN_SECONDS), trials)
    except Undisturbed as error:
        raise _ERRORS.get(error.code, TrainingError)(str(error)) from None


def _stem(source: Path | Tree) -> str:
    file = source if isinstance(source, Path) else source.file
    return "recipe" if file is None else Path(file).stem
