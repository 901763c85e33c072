"""One run from its plan to the end of its workers, on this machine or as one node of several.

It changes the process that calls it: workers are forked from it, its threads are limited, and it handles stop signals
while the run lasts. Before the first launch a trial of a few steps shows whether the plan fits (`fit`).
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trainwright.errors import (
    EXIT_FINISHED,
    EXIT_REQUEST,
    EXIT_STOPPED,
    MachineError,
    Stopped,
    TrainingError,
    TrainwrightError,
)
from trainwright.machine.usage import compute_process_age
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.registries import START_HOOKS
from trainwright.run import process, run_directory
from trainwright.run.group.addresses import format_address
from trainwright.run.group.device_slots import count_devices
from trainwright.run.group.failure_report import record_failure
from trainwright.run.launches import LocalLaunches, NodeLaunches, take_part
from trainwright.run.limits import check_limits
from trainwright.run.process import raise_oom_score
from trainwright.run.relaunch import Relaunch
from trainwright.run.request import RunRequest, resolve_request
from trainwright.run.resolve import Resolved
from trainwright.run.run_directory import choose_folder
from trainwright.run.shutdown.failure import Failure
from trainwright.run.shutdown.requests import find_stop_before_steps, forget_stops
from trainwright.run.shutdown.stop import Stopping, describe_stop
from trainwright.utils.activity import Activity
from trainwright.utils.text import quote_word, say

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine
    from trainwright.run.group.environment import NodeRendezvous
    from trainwright.run.nodes import LinkedStopping, Nodes


def start(request: RunRequest, resolved: Resolved, machine: Machine, rendezvous: NodeRendezvous | None = None) -> Path:
    """Train to the end; return the run directory.

    A plan from estimated lengths is made again once the data is prepared; several nodes keep the first plan.

    Raises:
        Stopped: a stop was requested; the message says what was saved and how to continue.
        TrainwrightError: the run could not start, or failed.
    """
    if not request.force:
        resolved.plan.refuse_shortage()
    local_size = -(-resolved.processes // (rendezvous.nodes if rendezvous else 1))
    process.ignore_closed_output()
    check_limits(local_size, resolved.processes)
    process.prepare_environment(machine.cpu_cores, local_size, resolved.plan.threads)
    warn_of_launcher("trainwright", sys.stderr)
    if rendezvous is None:
        with Stopping() as stopping:
            return LocalRun(request, resolved, stopping, machine).train()
    # Imports torch, so it comes after the thread limit.
    from trainwright.run.nodes import LinkedStopping, NodeDropped

    with LinkedStopping() as linked_stopping:
        while True:
            try:
                return _train_as_node(request, resolved, machine, rendezvous, linked_stopping, local_size)
            except NodeDropped:
                say("the other nodes go on without this one, which did not answer; joining them again", file=sys.stderr)


def _train_as_node(
    request: RunRequest,
    resolved: Resolved,
    machine: Machine,
    rendezvous: NodeRendezvous,
    linked: LinkedStopping,
    max_processes: int,
) -> Path:
    """Train as one of several nodes, with at most ``max_processes``; raise NodeDropped if others go on alone."""
    from trainwright.run.nodes import NodeInfo, NodeRules, Nodes

    info = NodeInfo.here(max_processes, len(machine.gpus), dump_recipe(request.recipe), request.run is not None)
    rules = NodeRules(may_lose=bool(resolved.usable), on_hang=resolved.recipe.faults.on_hang)

    def enough(number: int) -> bool:
        return bool(resolved.usable) and number * max_processes >= resolved.usable[0]

    with Activity(sys.stderr, f"waiting for the other nodes at {format_address(rendezvous.host, rendezvous.port)}"):
        directory = request.recipe.logging.run_directory
        shared = choose_folder(directory) if request.run is None else request.run.absolute().parent
        nodes = Nodes.meet(rendezvous, info, linked, rules, enough, shared)

    def room() -> int:
        devices = count_devices(machine) if resolved.usable else None
        return max_processes if devices is None else devices

    with take_part(nodes):
        return LocalRun(request, resolved, linked, machine, nodes, room).train()


@dataclass
class LocalRun:
    """A run on this machine, launch after launch.

    Attributes:
        resolved: the recipe and its plan; replaced if the plan is made again once the data is prepared.
        nodes: all nodes of the run, if there are several.
        room: returns how many processes this one of several nodes has room for.
    """

    request: RunRequest
    resolved: Resolved
    stopping: Stopping
    machine: Machine
    nodes: Nodes | None = None
    room: Callable[[], int] = lambda: 0

    def train(self) -> Path:
        """Prepare the run directory, and run the workers of this machine to their end."""
        is_first = self.nodes is None or self.nodes.index == 0
        with ExitStack() as stack:
            try:
                run, launches, processes = self._prepare(stack)
            except Stopped:
                if self.request.run is None:
                    raise
                reason = "stopped before the first step; the existing run was not changed"
                raise Stopped(f"{reason}; {_describe_next(self.request.run)}") from None
            if is_first:
                say(self.resolved.plan.summary)
            try:
                code = self._run_workers(run, launches, processes)
            except TrainwrightError as error:
                if error.exit_code == EXIT_REQUEST and is_first:
                    self.request.discard_unstarted(run)
                if is_first:
                    record_failure(run, str(error))
                raise
        if code == EXIT_STOPPED:
            if is_first:
                record_failure(run, None)
            stop_error = Stopped(f"{describe_stop(run, self.stopping.resumes_from)}; {_describe_next(run)}")
            stop_error.run = run
            raise stop_error
        if not (run / "final").is_dir():
            raise TrainingError(f"{run} is gone: the run's directory was deleted or moved after the training was done")
        return run

    def _prepare(self, stack: ExitStack) -> tuple[Path, LocalLaunches | NodeLaunches, int]:
        """Return the run directory, locked by this process, with everything in the cache that its workers need; the
        launches of the run, and how many processes the first one has here.
        """
        request, nodes, stopping = self.request, self.nodes, self.stopping
        launches: LocalLaunches | NodeLaunches
        with ExitStack() as until_prepared:

            def make() -> tuple[Path, str]:
                recorded_run = open_recorded_run(
                    request, self.resolved, stack, _refuse_stopped, lambda: stopping.requested
                )
                return until_prepared.enter_context(recorded_run)

            if nodes is not None:
                run = nodes.open(make)
                nodes.run_reporting_failure(functools.partial(self._get_ready, run))
                usable = self.resolved.usable or (self.resolved.processes,)
                launches = NodeLaunches(run, nodes, usable, self.room, stopping)
                return run, launches, launches.first()
            run = make()[0]
            self._get_ready(run)
            if self.resolved.plan.estimated:
                self._replan(run)
            launches = LocalLaunches(run, self.resolved, self.machine, stopping)
            processes = launches.first()
            if request.run is None and self.resolved.plan.is_close:
                fit_micro_batch(run, stopping, processes)
        return run, launches, processes

    def _get_ready(self, run: Path) -> None:
        process.preload_worker(self.resolved.recipe)
        node = 0 if self.nodes is None else self.nodes.index
        log = run / "logs" / (f"prepare-node-{node}.log" if node else "prepare.log")
        with self._look_for_stops(run):
            process.run_in_child(functools.partial(process.prepare, run), log, self.stopping)
            if self.stopping.requested:
                raise Stopped()

    def _look_for_stops(self, run: Path) -> AbstractContextManager[None]:
        """Look for requests to stop while no process trains, which would look for them otherwise."""
        return self.stopping.add_look(functools.partial(find_stop_before_steps, run, self.request.deadline))

    def _replan(self, run: Path) -> None:
        """Plan with the lengths of the prepared rows."""
        with Activity(sys.stderr, "planning with the lengths of the prepared rows"):
            resolution = resolve_request(self.request, self.machine)
            if not self.request.force:
                resolution.plan.refuse_shortage()
        before, self.resolved = self.resolved.plan.threads, resolution
        self.request.record(run, resolution)
        process.set_threads(before, resolution.plan.threads)
        check_limits(resolution.processes, resolution.processes)

    def _run_workers(self, run: Path, launches: LocalLaunches | NodeLaunches, processes: int) -> int:
        """Run the workers until the run has ended or stopped, launch after launch: after a failure that a restart or a
        smaller micro-batch may mend, with another number of processes, or with another plan.
        """
        from trainwright.run.run_worker import Worker, train
        from trainwright.run.supervisor import run_workers

        relaunch = Relaunch(run, self.resolved.recipe.faults.restarts)
        resume, event = self.request.run is not None or launches.has_launched, None
        while processes:
            worker = Worker(run, resume, reported=event, may_change=launches.changes, deadline=self.request.deadline)
            result = run_workers(
                functools.partial(train, worker),
                processes=processes,
                logs=run / "logs",
                stopping=self.stopping,
                nodes=self.nodes,
                watched=run,
                elastic=launches.elastic,
            )
            resume, event, failed = True, None, isinstance(result, Failure)
            if not isinstance(result, Failure):
                if result == EXIT_FINISHED or self.stopping.requested or not launches.changes:
                    return result
            elif launches.leads:
                event = relaunch.decide(result, not self.stopping.flag.value and launches.may_go_on)
            with self._look_for_stops(run):
                processes = launches.next(failed=failed)
        return launches.code


def warn_of_launcher(launcher: str, terminal: TextIO) -> None:
    """Let what is registered begin a run with this launcher, and show its warnings."""
    for begin in START_HOOKS.present():
        if (warning := begin(launcher)) is not None:
            say(f"warning: {warning}", file=terminal)


@contextmanager
def open_recorded_run(
    request: RunRequest,
    resolved: Resolved,
    stack: ExitStack,
    check: Callable[[Path], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Path, str]]:
    """Open the run's directory until ``stack`` ends, and write recipe and plan into it; undone if the context raises.

    Args:
        check: raises if the run is not to begin.
        stopped: of ``RunRequest.open_directory``.

    Yields:
        The directory, and the text of its recipe.
    """
    run = stack.enter_context(request.open_directory(resolved, stopped))
    with request.undo_on_error(run):
        check(run)
        (run / "logs").mkdir(exist_ok=True)
        yield run, request.record(run, resolved)


def _refuse_stopped(run: Path) -> None:
    if forget_stops(run, compute_process_age()):
        raise Stopped("stopped before the first step: the run was asked to stop while this waited for it")


def _describe_next(run: Path) -> str:
    return f"continue with: trainwright train --resume {quote_word(run)}"


_STEPS = 2  # the second step also has the optimizer state in memory
_FIRST_TO_BE_KILLED = 1000


def try_largest_step(recipe: str, stopping: Stopping, processes: int) -> Failure | None:
    """Take the step with the largest micro-batch twice, for the resolved `recipe` (YAML); return how it failed, if it
    did.

    Data and weights must be in the cache and the libraries imported, as before `launch`; nothing is kept.

    Raises:
        Stopped: a stop was requested meanwhile.
    """
    from trainwright.run.supervisor import run_workers

    run = Path(tempfile.mkdtemp(prefix="trainwright-probe-"))
    try:
        run_directory.record(run, recipe, run.name, [])
        work = functools.partial(_run_trial, run)
        result = run_workers(work, processes=processes, logs=run / "logs", stopping=stopping)
        if stopping.requested:
            raise Stopped()
    finally:
        shutil.rmtree(run, ignore_errors=True)
    return result if isinstance(result, Failure) else None


def fit_micro_batch(run: Path, stopping: Stopping, processes: int) -> None:
    """Try the largest step of a new run in `processes`, and halve its micro-batch until it fits.

    Data and weights must be in the cache and the libraries imported, as before `launch`. Other failures are left to the
    run itself to report.

    Raises:
        MachineError: even one row per micro-batch does not fit.
        Stopped: a stop was requested meanwhile.
    """
    from trainwright.engine.policies.micro_batch_halving import (  # torch, which a refusal does not wait for
        halve_rows,
        set_rows,
    )

    while True:
        text = (run / run_directory.RECIPE).read_text(encoding="utf-8")
        failure = try_largest_step(text, stopping, processes)
        if failure is None or failure.ran_out is None:
            return
        recipe = load_recipe(run / run_directory.RECIPE)
        rows = recipe.train.micro_batch_size
        if not isinstance(rows, int) or rows == 1:
            raise MachineError(
                f"the run's largest step was tested and does not fit: {failure.message}; `trainwright plan` shows what "
                "would fit"
            )
        why = f"train.micro_batch_size {halve_rows(rows)}: the largest step ran out of memory with {rows}"
        run_directory.change_recipe(run, run_directory.format_recipe(set_rows(recipe, halve_rows(rows))), why)


def _run_trial(run: Path) -> int:
    """Run in every worker."""
    from trainwright.run.run_worker import TrialRun, Worker, run_worker

    raise_oom_score(_FIRST_TO_BE_KILLED)
    return run_worker(Worker(run), trial=TrialRun(_STEPS, largest=True))
