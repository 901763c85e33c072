"""One run from its plan to the end of its workers, on this machine or as one node of several.

It changes the process that calls it: workers are forked from it, its threads are limited, and it handles stop signals
while the run lasts.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.activity import Activity
from trainwright.errors import EXIT_REQUEST, EXIT_STOPPED, Stopped, TrainingError, TrainwrightError
from trainwright.launch import run_directory
from trainwright.launch.batch import warning
from trainwright.launch.ending.stop import CHECKPOINT, NEWEST, Stopping
from trainwright.launch.limits import check_limits
from trainwright.launch.process import limit_threads, outlive_output, preload_libraries, run_in_child
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.launch.group.nodes import Nodes
    from trainwright.launch.request import Request
    from trainwright.machine.machine import Machine
    from trainwright.planning.resolve import Resolved


@dataclass(frozen=True)
class Meeting:
    """Where several nodes meet, the index of this one, and how long they wait for each other."""

    nodes: int
    node_rank: int
    host: str
    port: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """The functions that processes of a run execute.

    Attributes:
        prepare: once, before there are workers.
        train: in every worker: the directory, and whether to resume; ``fault`` and ``may_change`` by name.
    """

    prepare: Callable[[Path], None]
    train: Callable[..., int]


def start(
    request: Request,
    resolved: Resolved,
    machine: Machine,
    work: Work,
    meeting: Meeting | None = None,
    counted: Callable[[], Resolved] | None = None,
) -> Path:
    """Train to the end; return the run directory.

    Args:
        counted: plans again once the data is prepared; given if the plan is from estimated lengths. Several nodes keep
            the first plan.

    Raises:
        Stopped: a stop was requested; the message says what was saved and how to continue.
        TrainwrightError: the run could not start, or failed.
    """
    processes = resolved.recipe.parallel.num_processes
    assert isinstance(processes, int), "a resolved recipe has no auto left"
    here = processes // (meeting.nodes if meeting else 1)
    outlive_output()
    check_limits(here, processes)
    limit_threads(machine.cpu_cores, here, resolved.plan.chosen.choice.threads)
    if (said := warning()) is not None:
        say(f"warning: {said}", file=sys.stderr)
    if meeting is None:
        with Stopping() as stopping:
            return _train(request, resolved, here, work, stopping, None, counted)
    # Imports torch, so it comes after the thread limit.
    from trainwright.launch.group.nodes import LinkedStopping, Node, Nodes
    from trainwright.recipe.loading import dump_recipe

    mine = Node.here(here, len(machine.gpus), dump_recipe(request.recipe), request.run is not None)
    with LinkedStopping() as linked:
        with Activity(sys.stderr, f"waiting for the other nodes at {meeting.host}:{meeting.port}"):
            place = meeting.host, meeting.port
            nodes = Nodes.meet(meeting.node_rank, meeting.nodes, place, meeting.seconds, mine, linked)
        try:
            return _train(request, resolved, here, work, linked, nodes, None)
        finally:
            nodes.leave()


def _train(
    request: Request,
    resolved: Resolved,
    processes: int,
    work: Work,
    stopping: Stopping,
    nodes: Nodes | None,
    counted: Callable[[], Resolved] | None,
) -> Path:
    """Prepare the run directory, and run the workers of this machine to their end."""
    node = 0 if nodes is None else nodes.index
    with ExitStack() as held:
        run, resolved = _prepared(request, resolved, work, stopping, nodes, held, counted)
        if counted is not None:
            processes = int(resolved.recipe.parallel.num_processes)
            check_limits(processes, processes)
        if node == 0:
            from trainwright.planning.table import summary

            say(summary(resolved.plan))
        try:
            code = _launched(run, request, resolved, processes, work, stopping, nodes)
        except TrainwrightError as error:
            new = node == 0 and request.run is None
            if error.exit_code == EXIT_REQUEST and new and not (run / "events.jsonl").exists():
                # A request that only a worker could reject leaves nothing behind either.
                shutil.rmtree(run, ignore_errors=True)
            raise
    if code == EXIT_STOPPED:
        stopped = Stopped(f"{_left(run, stopping)}; continue with: trainwright train --resume {run}")
        stopped.run = run
        raise stopped
    if not (run / "final").is_dir():
        raise TrainingError(f"{run} is gone: the run's directory was deleted or moved after the training was done")
    return run


def _prepared(
    request: Request,
    resolved: Resolved,
    work: Work,
    stopping: Stopping,
    nodes: Nodes | None,
    held: ExitStack,
    counted: Callable[[], Resolved] | None,
) -> tuple[Path, Resolved]:
    """Return the run directory, locked by this launch, with everything in the cache that its workers need, and the
    recipe as it was planned at last.
    """
    with ExitStack() as until_prepared:

        def make() -> tuple[Path, str]:
            run = request.run or run_directory.create(resolved.recipe.logging.run_directory, request.stem)
            held.enter_context(run_directory.only_launch(run))
            until_prepared.enter_context(run_directory.undone_on_error(run, created=request.run is None))
            (run / "logs").mkdir(exist_ok=True)
            return run, _record(run, request, resolved)

        def get_ready() -> None:
            with Activity(sys.stderr, "importing torch and transformers"):
                preload_libraries()
                # Imported before forking: otherwise each worker would import them again.
                import_module("trainwright.launch.run_worker")
                from trainwright.tasks.registry import task_module

                task_module(resolved.recipe)
            log = run / "logs" / (f"prepare-node-{nodes.index}.log" if nodes and nodes.index else "prepare.log")
            run_in_child(functools.partial(work.prepare, run), log, stopping)
            if stopping.requested:
                raise Stopped()

        if nodes is None:
            run = make()[0]
            get_ready()
            if counted is not None:
                threads = resolved.plan.chosen.choice.threads
                resolved = counted()
                _record(run, request, resolved)
                _set_threads(threads, resolved.plan.chosen.choice.threads)
            if request.run is None and resolved.plan.is_close:
                from trainwright.launch.probe import fit

                fit(run, stopping)
        else:
            run = nodes.open(make)
            nodes.telling(get_ready)
            nodes.all_ready()
    return run, resolved


def _record(run: Path, request: Request, resolved: Resolved) -> str:
    """Write the recipe and its plan into the run directory; return the recipe's text."""
    text = run_directory.recipe_text(resolved.recipe)
    run_directory.record(run, text, request.stem, resolved.reasons, resolved.plan.as_json(), resolved.chosen)
    return text


def _launched(
    run: Path,
    request: Request,
    resolved: Resolved,
    processes: int,
    work: Work,
    stopping: Stopping,
    nodes: Nodes | None,
) -> int:
    """Run the workers to their end; relaunch with another plan if the plan proved wrong and the recipe asks for it."""
    from trainwright.launch.local import launch
    from trainwright.launch.relaunch import Relaunch
    from trainwright.launch.replan import take

    again = functools.partial(work.train, run, True, may_change=nodes is None)
    relaunch = Relaunch(run, lambda fault: functools.partial(again, fault=fault))
    more: dict[str, Any] = {"logs": run / "logs", "stopping": stopping, "nodes": nodes, "relaunch": relaunch}
    entry = functools.partial(work.train, run, request.run is not None, may_change=nodes is None)
    code = launch(entry, processes=processes, **more)
    while code == EXIT_STOPPED and not stopping.requested and (changed := take(run)) is not None:
        recipe, threads = changed
        say(f"continuing with {recipe.parallel.strategy} on {recipe.parallel.num_processes}")
        _set_threads(resolved.plan.chosen.choice.threads, threads)
        code = launch(again, processes=int(recipe.parallel.num_processes), **more)
    return code


def _set_threads(before: int | None, threads: int | None) -> None:
    """Set the threads per process for another plan than the one with ``before``, unless the user has set them."""
    if threads is not None and os.environ.get("OMP_NUM_THREADS") == str(before):
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _left(run: Path, stopping: Stopping) -> str:
    """Return how a stopped run ended, and what it can be resumed from."""
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_best=False)
    steps = checkpoints.steps()
    if not steps:
        return "stopped before the first checkpoint; nothing was kept"
    if stopping.left == CHECKPOINT:
        return "stopped after a checkpoint"
    said = "killed" if stopping.left == NEWEST else "stopped before another step"
    return f"{said}; the newest complete checkpoint is kept ({checkpoints.path(steps[-1])})"
