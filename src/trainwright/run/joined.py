"""A run whose processes another launcher has started: they meet, rank 0 prepares the run, the others follow.

Only rank 0 reads the recipe, rejects it or creates the run directory, and prepares data and weights. The others do not
wait in a collective meanwhile but poll the store, without a time limit. A process whose launcher has died stops.
"""

from __future__ import annotations

import _thread
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainwright.errors import (
    EXIT_FAULT,
    EXIT_FINISHED,
    EXIT_REQUEST,
    EXIT_STOPPED,
    EXIT_TRAINING,
    Stopped,
    TrainingError,
    TrainwrightError,
)
from trainwright.machine.detect import detect
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.registries import LAUNCHERS, WATCHERS
from trainwright.run import process, run_directory
from trainwright.run.group.addresses import LOOPBACK, format_address, set_interfaces
from trainwright.run.group.device_slots import DeviceSlot, Member, assign_device_slots, list_first_ranks
from trainwright.run.group.environment import (
    RENDEZVOUS_SECONDS,
    SUPERVISING_LAUNCHERS,
    LaunchEnvironment,
    Variables,
    list_accelerate_variables,
    read_environment,
)
from trainwright.run.group.failure_report import FailureReport, should_report
from trainwright.run.group.peers import Waiting
from trainwright.run.limits import check_limits
from trainwright.run.request import (
    AUTO,
    LauncherSettings,
    RunRequest,
    TrainingRequest,
    build_request,
    check_request,
    resolve_request,
    set_started_processes,
)
from trainwright.run.shutdown.exit_code import compute_launch_age, record_exit_code, record_start, refuse_stopped
from trainwright.run.shutdown.failure import run_to_end
from trainwright.run.shutdown.requests import Deadline, choose_deadline
from trainwright.run.shutdown.stop import STOP_SIGNALS, describe_stop, follow_signals, list_heeded_signals
from trainwright.run.start import open_recorded_run, warn_of_launcher
from trainwright.run.stored_runs import is_url
from trainwright.utils.text import quote_word, say

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo
    from trainwright.run.group.rendezvous import Rendezvous


# How long rank 0, which hosts the store, waits for the others at the end; after a rejected request some may never
# arrive.
_LEAVE_SECONDS, _REPORT_SECONDS = 20.0, 3.0


@dataclass(frozen=True)
class OpenedRun:
    """A run that rank 0 has opened, as it tells the others.

    Attributes:
        directory: of the run, as rank 0 wrote it.
        recipe: its text.
        firsts: the first rank of each machine but rank 0's, which prepares the run there.
    """

    directory: str
    working_directory: str
    recipe: str
    resume: bool
    firsts: list[int]

    @property
    def path(self) -> Path:
        """Return the run directory; the process may have been started in another working directory."""
        return Path(self.working_directory) / self.directory


def run_joined(
    options: TrainingRequest,
    report: Callable[[int, str], None] = lambda code, message: None,
    *,
    number: int = 0,
    launcher: int | None = None,
) -> tuple[int, Path | None]:
    """Run this process's part in a run; return its exit code, and the run directory unless it could not start.

    A failure is printed once in the whole run.

    Args:
        report: called in every process with the exit code and the message of a failure, before the process ends.
        number: of earlier runs that the same processes trained in sequence.
        launcher: pid of the launcher or of the process it started; None: this process's parent.
    """
    terminal = process.open_lossy_text(os.dup(2), None, "replace")
    record_start()
    environment = read_environment(parent=launcher)
    if number:
        environment = replace(environment, job=f"{environment.job}-{number}")
    settings = next((s for launcher in LAUNCHERS.present() if (s := launcher.of_environment()) is not None), None)
    os.environ.update(environment.build_torch_variables())
    if (parent := _find_parent(environment)) is not None:
        process.die_with_parent(parent)
    check_limits(environment.local_size, environment.size)
    own_threads = "OMP_NUM_THREADS" in os.environ
    process.prepare_environment(detect().cpu_cores, environment.local_size)
    # Imports torch from here on.
    try:
        rendezvous = _meet(environment, options)
    except TrainwrightError as error:
        report(error.exit_code, str(error))
        # Without rank 0, rank 1 reports for the other ranks of its job.
        job = f"{environment.address}:{environment.port} {_build_words(options)}"
        if environment.rank <= 1 and should_report(environment.rank, job):
            say(f"error: {error}", file=terminal)
        return error.exit_code, None
    failures = FailureReport(environment.rank, terminal, None if rendezvous is None else rendezvous.peers, report)
    participant = _Participant(options, environment, rendezvous, failures)
    with ExitStack() as stack:
        try:
            deadline = None
            if environment.rank == 0:
                _interrupt_preparation(failures)
                seconds_before = compute_launch_age(launcher, number)
                deadline = choose_deadline(options.until, options.time_limit, 0.0 if number else seconds_before)
                opened_run, slot = participant.open(settings, stack, seconds_before, deadline)
            else:
                opened_run, slot = participant.follow()
        except Exception as error:
            return participant.refuse(error), None
        if not own_threads:
            os.environ["OMP_NUM_THREADS"] = str(_count_threads(slot))
        follow_signals()
        stop_without_launcher(environment.launcher)
        if environment.rank == 0:
            warn_of_launcher(environment.launcher, terminal)
        failures.set_interrupt(None)
        run = Path(opened_run.directory) if environment.rank == 0 else opened_run.path
        code = participant.train(run, opened_run, slot, deadline)
        if environment.rank == 0 and code == EXIT_FINISHED:
            from trainwright.run.hub import push_finished

            push_finished(run, terminal)  # while the others wait: some launchers end what runs longest
        participant.leave_together()
        if environment.rank == 0 and code == EXIT_STOPPED:
            say(f"{describe_stop(run)}; continue with --resume {quote_word(run)}", file=terminal)
        return code, run


def _build_words(options: TrainingRequest) -> list[str]:
    """Return the request as words of a command line; the same in all processes of a run."""
    return [*options.words(), *([] if options.resume is None else ["--resume", options.resume])]


def _meet(environment: LaunchEnvironment, options: TrainingRequest) -> Rendezvous | None:
    from trainwright.run.group.rendezvous import meet_ranks

    if environment.size == 1:
        return None
    address = LOOPBACK if environment.nodes == 1 else environment.address
    if address is not None:
        set_interfaces(address)
    member = Member.here(environment)  # before the others arrive, as they expect an answer at once
    shared = run_directory.RUNS if environment.nodes == 1 else _choose_shared_folder(options)
    rendezvous = meet_ranks(
        environment, _build_words(options), options.rendezvous_timeout or RENDEZVOUS_SECONDS, shared
    )
    rendezvous.post(member.to_plain())
    return rendezvous


def _choose_shared_folder(options: TrainingRequest) -> Path:
    """Return the folder of the run's directory, which all machines see."""
    if options.resume not in (None, "", AUTO) and not is_url(options.resume):
        return Path(options.resume).absolute().parent
    with suppress(TrainwrightError):  # rank 0 reports it
        if options.recipe is not None:
            return run_directory.choose_folder(load_recipe(options.recipe, options.overrides).logging.run_directory)
    return run_directory.RUNS


@dataclass(frozen=True)
class _Participant:
    """This process as a participant of the run.

    Attributes:
        rendezvous: with the other processes; None if there are none.
        failures: of this process and of others.
    """

    options: TrainingRequest
    environment: LaunchEnvironment
    rendezvous: Rendezvous | None
    failures: FailureReport

    def open(
        self, settings: LauncherSettings | None, stack: ExitStack, seconds_before: float, deadline: Deadline | None
    ) -> tuple[OpenedRun, DeviceSlot]:
        """Do on rank 0 everything before the first step that has to be done once."""
        environment, rendezvous, failures = self.environment, self.rendezvous, self.failures
        if rendezvous is None:
            members = [Member.here(environment)]
        else:
            member_fields = rendezvous.gather(self.options.rendezvous_timeout or RENDEZVOUS_SECONDS)
            members = [Member.read(fields) for fields in member_fields.values()]
        request = self._request(settings)
        if request.recipe.parallel.device == "cpu":
            members = [replace(member, gpus=()) for member in members]
        slots = assign_device_slots(members)
        machines = len({(member.host, member.node) for member in members})
        check_request(request)
        resolution = resolve_request(request, detect(), machines, check_gpus=False)
        if not self.options.force:
            resolution.plan.refuse_shortage()

        def refuse(run: Path) -> None:
            refuse_stopped(run, seconds_before, deadline, resumed=request.run is not None)

        with open_recorded_run(request, resolution, stack, refuse) as (run, text):
            logs = run / "logs"
            failures.clear(logs, environment.size)
            process.enter_process(logs / "rank-0.log", parent=_find_parent(environment), keep_console=True)
            process.prepare(run)
            failures.begin(logs)
        opened_run = OpenedRun(str(run), os.getcwd(), text, request.run is not None, list_first_ranks(members)[1:])
        if rendezvous is not None:
            rendezvous.publish("opened", {"opened": vars(opened_run), "slots": [astuple(slot) for slot in slots]})
        return opened_run, slots[0]

    def _request(self, settings: LauncherSettings | None) -> RunRequest:
        if settings is None and list_accelerate_variables(Variables()):
            LAUNCHERS.get("accelerate")  # is not installed: its settings must not be ignored
        if settings is not None and settings.refusal is not None:
            raise settings.refusal
        options = self.options
        request = build_request(options.recipe, list(options.overrides), options.resume, settings)
        return set_started_processes(request, self.environment.size, self.environment.launcher)

    def follow(self) -> tuple[OpenedRun, DeviceSlot]:
        """Wait on the other ranks for rank 0's decision, and read what it has prepared."""
        assert self.rendezvous is not None, "a world of one is rank 0"
        follow_signals()
        rendezvous, waiting = self.rendezvous, Waiting(f"rank {self.environment.rank}")
        address = format_address(rendezvous.address, rendezvous.port)
        decision = rendezvous.wait_for("opened", lambda: waiting.tell(lambda: f"rank 0 at {address} to begin the run"))
        if "refused" in decision:
            raise _PeerRefused(int(decision["refused"]), str(decision["why"]))
        opened_run = OpenedRun(**decision["opened"])
        member = f"rank {self.environment.rank} on {socket.gethostname()}"
        run_directory.check_visible(opened_run.path, opened_run.recipe, member, "rank 0")
        log = opened_run.path / "logs" / f"rank-{self.environment.rank}.log"
        process.enter_process(log, parent=_find_parent(self.environment), keep_console=False)
        self.failures.begin(log.parent)
        return opened_run, DeviceSlot(*decision["slots"][self.environment.rank])

    def refuse(self, error: Exception) -> int:
        """End before training has begun: rank 0 reports the reason, and every rank exits with the same code."""
        if isinstance(error, _PeerRefused):
            self.failures.report(error.exit_code, str(error))
            self.leave_together(_REPORT_SECONDS)
            return error.exit_code
        if self.environment.rank != 0:
            self.end(self.failures.exit_code if self.failures.heard.is_set() else self.failures.fail(error))
        code, message = EXIT_TRAINING, "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, TrainwrightError):
            code, message = error.exit_code, str(error)
        self.failures.set_interrupt(lambda: None)
        if self.rendezvous is not None:
            self.rendezvous.publish("opened", {"refused": code, "why": message})
        self.failures.report(code, message)
        say(f"{'' if code == EXIT_STOPPED else 'error: '}{message}", file=self.failures.terminal)
        self.leave_together(_REPORT_SECONDS)
        return code

    def train(self, run: Path, opened: OpenedRun, slot: DeviceSlot, deadline: Deadline | None) -> int:
        """Train as this rank; return the exit code. A failure is reported, and ends the process."""
        rank_info, failures = self._rank_info(slot), self.failures
        try:
            from trainwright.run.group.rendezvous import prepare_each_machine
            from trainwright.run.run_worker import Worker, train

            prepare_each_machine(lambda: process.prepare(run), self.rendezvous, opened.firsts)
            with ExitStack() as stack:
                for watcher in WATCHERS.present():
                    stack.enter_context(watcher.watch_beside(run, rank_info, failures.terminal, lambda: failures.text))
                worker = Worker(run, opened.resume, rank_info, deadline=deadline, launcher=self.environment.launcher)
                return run_to_end(functools.partial(train, worker), rank_info.rank)
        except Exception as error:
            code = failures.fail(error)
            if rank_info.rank == 0 and code == EXIT_REQUEST and not opened.resume:
                run_directory.discard_unstarted(run, keep=self.options.resume == AUTO)
            self.end(code)

    def _rank_info(self, slot: DeviceSlot) -> RankInfo:
        """Return this process's rank and its device."""
        from torch.distributed import PrefixStore

        from trainwright.parallel.world import RankInfo

        environment, rendezvous = self.environment, self.rendezvous
        store = None if rendezvous is None else PrefixStore("job", rendezvous.store)
        return RankInfo(environment.rank, environment.size, environment.local_rank, slot.local_size, slot.gpu, store)

    def leave_together(self, seconds: float = _LEAVE_SECONDS) -> None:
        """End in order: the others wait until rank 0 is done.

        Rank 0, which hosts the store, waits until they have left.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # sent by a launcher that ends the others after the first has ended
        rendezvous = self.rendezvous
        if rendezvous is None:
            return
        try:
            if self.environment.rank == 0:
                rendezvous.publish("done", True)
                rendezvous.wait_until_left(seconds)
            else:
                rendezvous.wait_for("done", seconds=None)
                rendezvous.leave()
        except (TrainwrightError, RuntimeError, TimeoutError):
            pass  # it has ended already
        rendezvous.close()

    def end(self, code: int) -> NoReturn:
        """Exit immediately: the other ranks wait for this one, and its threads may not be joinable any more."""
        if self.rendezvous is not None:
            self.rendezvous.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(record_exit_code(code))


class _PeerRefused(TrainwrightError):
    """Rank 0 has rejected the request and reports it itself."""

    def __init__(self, exit_code: int, why: str) -> None:
        super().__init__(why)
        self.exit_code = exit_code


def _interrupt_preparation(failures: FailureReport) -> None:
    """Let a stop signal, or the failure of another rank, end the preparation on rank 0 at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if failures.heard.is_set():
            error = TrainingError(failures.text)
            error.exit_code = failures.exit_code
            raise error
        raise Stopped()

    for number in list_heeded_signals():
        signal.signal(number, interrupt)
    failures.set_interrupt(lambda: _thread.interrupt_main(signal.SIGTERM))


def _find_parent(environment: LaunchEnvironment) -> int | None:
    """Return the pid of the process that this one ends with; None if it is a shell, which the run may outlive."""
    return None if environment.launcher == "python" else os.getppid()


def _count_threads(slot: DeviceSlot) -> int:
    cores = detect().cpu_cores
    return max(1, cores if slot.own_cores else cores // slot.local_size) if cores else process.count_allowed_threads()


_PARENT_CHECK_SECONDS = 1.0
# How long a worker may take for its step and the checkpoint; one that hangs must not keep its GPU.
_ORPHAN_SECONDS = 600.0


def stop_without_launcher(launcher: str) -> None:
    """Let the death of this process's launcher request a stop, instead of killing this process at once.

    SIGTERM must request a stop already, as after ``follow_signals``.
    """
    parent = os.getppid()
    if launcher not in SUPERVISING_LAUNCHERS:
        return
    process.die_with_parent(parent, signal.SIGTERM)
    threading.Thread(target=_end_after, args=(parent,), daemon=True, name="launcher").start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    time.sleep(_ORPHAN_SECONDS)
    os._exit(record_exit_code(EXIT_FAULT))
