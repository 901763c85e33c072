"""Drills: faults put into short runs of a recipe, and whether anything is lost.

A campaign: trials, each in a process of its own, their verdicts in a file that the next start goes on from, and a
table of them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.api.recipe import Recipe, choose_stem, extract_source
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
from trainwright.faults.drills import trial_settings
from trainwright.faults.drills.invariants import InvariantBroken, Missed, Skipped, Undisturbed
from trainwright.faults.drills.kinds import KINDS, DrillTrial, Spread, move_trials, schedule_trials, select_kinds
from trainwright.faults.drills.trial_environment import inject_fault, measure_undisturbed_seconds
from trainwright.faults.drills.trial_settings import TrialSettings
from trainwright.machine.sharing import lock_directory
from trainwright.recipe.loading import dump_recipe
from trainwright.run.shutdown.stop import interrupt_on_stop, signal_after_parent
from trainwright.utils import text
from trainwright.utils.activity import Activity
from trainwright.utils.paths import expand_user_path, write_file
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.recipe import schema
    from trainwright.recipe.yaml_text import Tree


HELD, BROKEN, SKIPPED, MISSED = "held", "broken", "skipped", "missed"


@dataclass(frozen=True)
class CampaignResults:
    """The verdicts so far: one JSON object a line, the last one of a trial counts."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the verdicts by the trials' keys."""
        texts = self.path.read_text().splitlines() if self.path.exists() else []
        lines = {}
        for line_text in texts:
            with contextlib.suppress(ValueError):  # cut by a kill or a full disk
                line = json.loads(line_text)
                lines[f"{line['seed']}:{line['trial']}:{line['case']}"] = line
        return lines

    def add(self, line: dict[str, Any]) -> None:
        """Append a verdict."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            begins = b"\n" if file.read(1) not in (b"", b"\n") else b""  # the last line was cut
            file.write(begins + json.dumps(line).encode() + b"\n")

    def of(self, trials: Iterable[DrillTrial]) -> dict[DrillTrial, dict[str, Any] | None]:
        """Return the verdict of each trial; None where there is none yet."""
        lines = self.read()
        return {trial: lines.get(trial.key) for trial in trials}


def run_trials(
    trials: Sequence[DrillTrial],
    setting: TrialSettings,
    work: Path,
    jobs: int = 1,
    keep: bool = False,
    until: Callable[[], bool] = lambda: False,
    waiting: Callable[[Sequence[DrillTrial], float], None] = lambda trials, seconds: None,
) -> Iterator[dict[str, Any]]:
    """Perform the trials, ``jobs`` at once, and yield the line of each as it comes.

    Args:
        work: for the directories of trials.
        keep: keep also those of trials that held.
        until: asked before each trial whether to begin no more.
        waiting: called once a second with the trials that are going on, and the seconds that the oldest has taken.
    """
    context = multiprocessing.get_context("fork")
    to_come = list(trials)
    reported_at = time.monotonic()
    going: dict[Any, tuple[DrillTrial, Path, float]] = {}
    try:
        while to_come or going:
            while to_come and len(going) < jobs:
                if until():
                    to_come.clear()
                    break
                trial = to_come.pop(0)
                directory = work / f"{trial.seed}-{trial.name.replace('/', '-').replace(' ', '_')}"
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
                process = context.Process(target=_run_in_process, args=(trial, directory, setting))
                process.start()
                going[process] = (trial, directory, time.monotonic())
            for process in list(going):
                trial, directory, start_time = going[process]
                seconds = time.monotonic() - start_time
                if process.is_alive() and seconds < KINDS[trial.kind].seconds + 2 * setting.patience:
                    continue
                verdict, why, measures = _read_verdict(process, directory, seconds)
                del going[process]
                if verdict in (HELD, SKIPPED) and not keep:
                    shutil.rmtree(directory, ignore_errors=True)
                yield {
                    "trial": trial.name,
                    "seed": trial.seed,
                    "case": str(trial.case),
                    "verdict": verdict,
                    "why": why,
                    "seconds": round(seconds, 1),
                    **{name: round(value, 3) for name, value in measures.items()},
                    "code": setting.code,
                }
            if going and time.monotonic() - reported_at >= 1:
                reported_at = time.monotonic()
                trials_now, _, starts = zip(*going.values(), strict=True)
                waiting(trials_now, reported_at - min(starts))
            time.sleep(0.05)
    finally:
        for process in going:
            _end(process)


def _run_in_process(trial: DrillTrial, directory: Path, setting: TrialSettings) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the trial ends its commands
    signal_after_parent(signal.SIGTERM, os.getppid())
    kind = KINDS[trial.kind]
    verdict, why, measures = HELD, "", {}
    try:
        if reason := kind.needs():
            raise Skipped(reason)
        measures = inject_fault(trial, directory, setting)
    except InvariantBroken as error:
        verdict, why = BROKEN, str(error)
    except Missed as error:
        verdict, why = MISSED, str(error)
    except (Skipped, Undisturbed) as error:
        verdict, why = SKIPPED, str(error)
    except Exception:
        verdict, why = BROKEN, f"the trial itself failed:\n{traceback.format_exc()}"
    (directory / "verdict.json").write_text(json.dumps([verdict, why, measures]))


def _read_verdict(process: Any, directory: Path, seconds: float) -> tuple[str, str, dict[str, float]]:
    if process.is_alive():
        _end(process)
        return BROKEN, f"no end in {seconds:.0f} s", {}
    process.join()
    try:
        verdict, why, measures = json.loads((directory / "verdict.json").read_text())
    except (OSError, ValueError):
        return BROKEN, f"the trial's process ended with {process.exitcode} and no verdict", {}
    return verdict, why, measures


def _end(process: Any) -> None:
    """End a trial's process and what it has started: its commands are its children, in sessions of their own."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.join()


# Measured by some trials: seconds until the fault was reported, and until the next step; repeated steps.
_MEASURES = {"detection": "noticed", "recovery": "recovered", "lost": "lost"}


@dataclass
class Row:
    """The results of the trials of one kind."""

    kind: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def count(self, *verdicts: str) -> int:
        """Return the number of trials with one of the verdicts."""
        return sum(line["verdict"] in verdicts for line in self.lines)

    def median(self, measure: str) -> float | None:
        """Return the median of a measure over the trials that have it."""
        values = [line[measure] for line in self.lines if measure in line]
        return round(statistics.median(values), 3) if values else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as a mapping; ``tries`` are the trials that were not skipped."""
        return {
            "kind": self.kind,
            "tries": self.count(HELD, BROKEN, MISSED),
            **{verdict: self.count(verdict) for verdict in (HELD, BROKEN, MISSED, SKIPPED)},
            **{f"median_{measure}": self.median(measure) for measure in (*_MEASURES, "start")},
            "skipped_because": sorted({line["why"] for line in self.lines if line["verdict"] == SKIPPED}),
        }


def build_rows(lines: Mapping[DrillTrial, dict[str, Any] | None]) -> list[Row]:
    """Return a row for each kind with a verdict, by name, and the last one for all."""
    rows: dict[str, Row] = {}
    for trial, line in sorted(lines.items(), key=lambda item: item[0].name):
        if line is not None:
            rows.setdefault(trial.kind, Row(trial.kind)).lines.append(line)
    return [*rows.values(), Row("all", [line for row in rows.values() for line in row.lines])]


def format_drill_table(lines: Mapping[DrillTrial, dict[str, Any] | None]) -> str:
    """Return the table, as wide as it is, with its notes."""
    return format_results(format_cells(lines), list_notes(lines))


def format_cells(lines: Mapping[DrillTrial, dict[str, Any] | None]) -> list[list[str]]:
    """Return the cells of the table by row, the head first."""
    table = [["kind", "tries", HELD, BROKEN, MISSED, SKIPPED, *_MEASURES.values()]]
    for row in build_rows(lines):
        counts = [
            str(row.count(*verdicts))
            for verdicts in ((HELD, BROKEN, MISSED), (HELD,), (BROKEN,), (MISSED,), (SKIPPED,))
        ]
        table.append([row.kind, *counts, *(_format_measure(measure, row.median(measure)) for measure in _MEASURES)])
    return table


def list_notes(
    results: Mapping[DrillTrial, dict[str, Any] | None], refused: Mapping[str, str] | None = None
) -> list[str]:
    """Return the trials that did not hold with their reasons, and what could not be tried here.

    Args:
        refused: strategies with numbers of processes that the recipe could not be trained with, and why.
    """
    lines = [
        f"\n{line['verdict']}: {trial.name} ({trial.case})\n  {line['why'][:1500]}"
        for trial, line in results.items()
        if line and line["verdict"] in (BROKEN, MISSED)
    ]
    skips = {(row.kind, why) for row in build_rows(results)[:-1] for why in row.as_json()["skipped_because"]}
    skips |= set((refused or {}).items())
    lines += [f"not tried here: {kind}: {why}" for kind, why in sorted(skips)]
    if missing := sum(line is None for line in results.values()):
        lines.append(f"{missing} of {len(results)} trials are left")
    return lines


def format_results(cells: Sequence[Sequence[str]], notes: Sequence[str], width: int | None = None) -> str:
    """Return the table and its notes as text.

    Args:
        width: columns of the terminal: if they are too few, what no trial has is left out. None: as many as needed.
    """
    lines = list(text.format_table(cells, numbers=True))
    if width is not None and max(map(len, lines)) > width:
        columns = [column for column in zip(*cells, strict=True) if {*column[1:]} - {"0", "-"}]
        lines = list(text.format_table([*zip(*columns, strict=True)], width, numbers=True))
    return "\n".join([*lines, *notes])


def _format_measure(measure: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g} step{'' if value == 1 else 's'}" if measure == "lost" else f"{value:.1f} s"


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
        return format_results(self.cells, self.notes, width)

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
    source = extract_source(recipe)
    directory = expand_user_path(output or Path("drills") / choose_stem(source)).absolute()
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
    from trainwright.run.group.environment import refuse_worker

    refuse_worker("drill")
    if not Path("/proc").is_dir():
        raise MachineError("a drill finds the processes of its runs in /proc, which only Linux has")
    start, directory = time.monotonic(), request.directory
    recipe = trial_settings.load_shortened_recipe(request.recipe, request.overrides)
    spreads = trial_settings.list_spreads(recipe, request.strategies, request.processes)
    trials = _list_trials(request, recipe, spreads)
    _check_directory(request, dump_recipe(recipe))
    directory.mkdir(parents=True, exist_ok=True)
    results = CampaignResults(directory / _TRIALS)
    with lock_directory(directory, f"{directory} is used by another drill"), interrupt_on_stop():
        setting = trial_settings.build_setting(recipe, directory / _RECIPE, spreads, directory / "undisturbed")
        try:
            _run_campaign(request, recipe, trials, results, setting, start, progress)
        except Interrupted:
            raise Stopped(f"stopped; to continue, repeat the command with --resume --output {directory}") from None
        trials, refused_spreads = _select_possible_trials(trials, recipe, setting)
        lines = results.of(trials)
        rows = tuple(row.as_json() for row in build_rows(lines))
        remaining = sum(line is None for line in lines.values())
        why = {f"{strategy} on {processes}": str(failure) for (strategy, processes), failure in refused_spreads.items()}
        result = Drill(directory, rows, remaining, format_cells(lines), list_notes(lines, why), why)
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


def _list_trials(request: DrillRequest, recipe: schema.RecipeSchema, spreads: tuple[Spread, ...]) -> list[DrillTrial]:
    """Return the trials in their order. Raises RequestError if there are none."""
    from trainwright.faults.drills import damage, kills  # noqa: F401

    for name, value in (("tries", request.tries), ("minutes", request.minutes), ("jobs", request.jobs)):
        if value is not None and value <= 0:
            raise RequestError(f"--{name} {value}: expected more than 0")
    for pattern in request.kinds:
        if not select_kinds([pattern]):
            kinds = ", ".join(KINDS)
            raise RequestError(f"--kinds {pattern}: no kind of fault has such a name; known are: {kinds}")
    phases = trial_settings.list_phases(recipe)
    cases = {name: kind.list_cases(spreads, phases) for name, kind in select_kinds(request.kinds).items()}
    one_of_each = sum(map(bool, cases.values()))
    trials = schedule_trials(request.seed, request.tries or (_MOST_TRIALS if request.minutes else one_of_each), cases)
    if not trials:
        raise RequestError("--processes: these kinds of faults need several processes; add a number above 1")
    return trials


def _select_possible_trials(
    trials: Sequence[DrillTrial], recipe: schema.RecipeSchema, setting: TrialSettings
) -> tuple[list[DrillTrial], dict[Spread, Undisturbed]]:
    """Return the trials, none on a spread that the recipe has failed with if there is another, and these spreads."""
    spreads = dict.fromkeys([*setting.spreads, *(trial.case.spread for trial in trials)])
    refused_spreads = trial_settings.read_refusals(setting, spreads)
    other_spreads = [spread for spread in setting.spreads if spread not in refused_spreads]
    kinds = {trial.kind for trial in trials if trial.case.spread in refused_spreads}
    cases = {
        kind: KINDS[kind].list_cases(other_spreads, trial_settings.list_phases(recipe)) if other_spreads else ()
        for kind in kinds
    }
    return move_trials(trials, refused_spreads, cases), refused_spreads


def _run_campaign(
    request: DrillRequest,
    recipe: schema.RecipeSchema,
    trials: list[DrillTrial],
    results: CampaignResults,
    setting: TrialSettings,
    started: float,
    progress: bool,
) -> None:
    """Perform the trials without a verdict, and again those that did not hold, as long as there is time."""
    stream = sys.stderr if progress else None
    refused: Mapping[Spread, Undisturbed] = {}
    finished_trials: set[tuple[str, str]] = set()
    of = ""

    def still_left() -> list[DrillTrial]:
        nonlocal refused
        possible, refused = _select_possible_trials(trials, recipe, setting)
        verdicts = results.of([trial for trial in possible if (trial.name, str(trial.case)) not in finished_trials])
        return [trial for trial, line in verdicts.items() if line is None or line["verdict"] in (BROKEN, MISSED)]

    if not (remaining := still_left()):
        return
    setting = replace(setting, patience=max(setting.patience, 10 * _measure_undisturbed(setting, remaining, stream)))

    def over() -> bool:
        return request.minutes is not None and time.monotonic() - started >= 60 * request.minutes

    def over_or_refused() -> bool:
        return over() or len(_select_possible_trials(trials, recipe, setting)[1]) > len(refused)

    def waiting(trials: Sequence[DrillTrial], seconds: float) -> None:
        # Drawn from the loop, as processes are forked from this one: a thread could hold a lock meanwhile.
        if stream and text.is_terminal(stream):
            names = ", ".join(trial.name for trial in trials)
            text.draw(f"[{len(finished_trials) + 1}{of}] {names}", stream, f" … {text.format_duration(seconds)}")

    # That the recipe cannot be trained with a strategy is only known once it has failed: its trials are moved then.
    while (remaining := still_left()) and not over():
        of = "" if request.minutes else f"/{len(finished_trials) + len(remaining)}"
        work = request.directory / "trials"
        for line in run_trials(remaining, setting, work, request.jobs, until=over_or_refused, waiting=waiting):
            results.add(line)
            finished_trials.add((line["trial"], line["case"]))
            if stream:
                why = line["why"].splitlines()[0][:200] if line["why"] else ""
                about = f"{line['trial']} ({line['case']}): {line['verdict']}"
                say(f"[{len(finished_trials)}{of}] {about}  {why}".rstrip(), file=stream)


def _measure_undisturbed(setting: TrialSettings, trials: Sequence[DrillTrial], stream: TextIO | None) -> float:
    """Return what a run takes without a fault. Raises MachineError, RequestError or TrainingError if none finishes."""
    try:
        with Activity(stream, "training once without a fault"):
            return measure_undisturbed_seconds(replace(setting, patience=_FIRST_RUN_SECONDS), trials)
    except Undisturbed as error:
        raise _ERRORS.get(error.code, TrainingError)(str(error)) from None
