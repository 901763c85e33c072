"""A run whose processes another launcher has started: they meet, rank 0 prepares the run, the others follow.

Only rank 0 reads the recipe, rejects it or creates the run directory, and prepares data and weights. The others do not
wait in a collective meanwhile but poll the store, without a time limit.
"""

from __future__ import annotations

import _thread
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainwright.errors import (
    EXIT_REQUEST,
    EXIT_STOPPED,
    EXIT_TRAINING,
    MachineError,
    Stopped,
    TrainingError,
    TrainwrightError,
)
from trainwright.launch import run_directory
from trainwright.launch.ending.stop import STOP_SIGNALS, follow_signals
from trainwright.launch.group.environment import Environment, read_environment
from trainwright.launch.group.told import is_mine_to_tell
from trainwright.launch.limits import check_limits
from trainwright.launch.process import (
    die_with_parent,
    enter_process,
    limit_threads,
    lossy_text,
    threads_allowed,
)
from trainwright.launch.request import Request, check_request, for_started, request_of, resolve_request
from trainwright.machine.detect import detect
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.launch.accelerate.meaning import Meaning
    from trainwright.launch.group.first_failure import FailureReport
    from trainwright.launch.group.members import Place
    from trainwright.launch.group.rendezvous import Meeting
    from trainwright.parallel.world import RankInfo
    from trainwright.recipe.yaml_text import Tree

# How long rank 0, which may host the store, waits for the others at the end; after a rejected request some may never
# arrive.
_LEAVE_SECONDS, _TOLD_SECONDS = 20.0, 3.0


@dataclass(frozen=True)
class Opened:
    """What rank 0 has decided. `directory` is the run directory as rank 0 wrote it."""

    directory: str
    working_directory: str
    recipe: str
    resume: bool

    @property
    def path(self) -> Path:
        """Return the run directory; the process may have been started in another working directory."""
        return Path(self.working_directory) / self.directory


@dataclass(frozen=True)
class JoinAsked:
    """The request to every process of the run.

    Attributes:
        resume: None, a run directory, or "" for the newest.
        seconds: how long to wait for the other processes.
        force: start even if the plan says that the run does not fit.
        number: of earlier runs that the same processes trained in sequence.
        launcher: pid of the launcher or of the process it started; None: this process's parent.
    """

    recipe: Path | Tree | None
    overrides: tuple[str, ...]
    resume: str | None = None
    seconds: float = 600.0
    force: bool = False
    number: int = 0
    launcher: int | None = None


def run_joined(
    asked: JoinAsked,
    prepare: Callable[[Path], None],
    work: Callable[[Path, bool, RankInfo], int],
    tell: Callable[[int, str], None] = lambda code, message: None,
) -> int:
    """Run this process's part in a run; return its exit code. A failure is printed once in the whole run.

    Args:
        prepare: called on rank 0 with the run directory.
        work: trains, given the run directory, whether to resume, and the seat.
        tell: called in every process with the exit code and the message of a failure, before the process ends.
    """
    terminal = lossy_text(os.dup(2), None, "replace")
    environment = read_environment(parent=asked.launcher)
    if asked.number:
        environment = replace(environment, job=f"{environment.job}-{asked.number}")
    meaning = _accelerate()
    os.environ.update(environment.torch_variables())
    if (parent := _parent(environment)) is not None:
        die_with_parent(parent)
    check_limits(environment.local_size, environment.size)
    own_threads = "OMP_NUM_THREADS" in os.environ
    limit_threads(detect().cpu_cores, environment.local_size)
    # Imports torch from here on.
    from trainwright.launch.group.first_failure import FailureReport

    try:
        meeting = _meet(environment, asked)
    except TrainwrightError as error:
        tell(error.exit_code, str(error))
        # Without rank 0, rank 1 reports for the other ranks of its job.
        job = f"{environment.address}:{environment.port} {_words(asked)}"
        if environment.rank <= 1 and is_mine_to_tell(environment.rank, job):
            say(f"error: {error}", file=terminal)
        return error.exit_code
    failures = FailureReport(environment.rank, terminal, None if meeting is None else meeting.peers, tell)
    part = _Part(asked, environment, meeting, failures, tell)
    with ExitStack() as held:
        try:
            if environment.rank == 0:
                held.enter_context(_interruptible(failures))
                opened, place = part.open(meaning, prepare, held)
            else:
                opened, place = part.follow()
        except Exception as error:
            return part.refuse(error)
        if not own_threads:
            os.environ["OMP_NUM_THREADS"] = str(_threads(place))
        follow_signals()
        failures.interrupting(None)
        rank_info = part.rank_info(place)
        run = Path(opened.directory) if environment.rank == 0 else opened.path
        try:
            code = work(run, opened.resume, rank_info)
        except Exception as error:
            code = failures.fail(error)
            if environment.rank == 0 and code == EXIT_REQUEST and not opened.resume:
                run_directory.discard_unbegun(run)
            part.end(code)
        part.leave_together()
        if environment.rank == 0 and code == EXIT_STOPPED:
            say(f"stopped after a checkpoint; continue with --resume {run}", file=terminal)
        return code


def _words(asked: JoinAsked) -> list[str]:
    """Return the request as words of a command line; the same in all processes of a run."""
    recipe = [] if asked.recipe is None else [str(asked.recipe)]
    return [*recipe, *asked.overrides, *([] if asked.resume is None else ["--resume", asked.resume])]


def _accelerate() -> Meaning | None:
    """Return what `accelerate launch` read from its file; hide the GPUs that the file excludes."""
    from trainwright.launch.accelerate.environment import from_environment

    meaning = from_environment()
    if meaning is not None:
        os.environ.update(meaning.device_environment())
    return meaning


def _meet(environment: Environment, asked: JoinAsked) -> Meeting | None:
    from trainwright.launch.group import rendezvous
    from trainwright.launch.group.members import Member

    if environment.size == 1:
        return None
    address = rendezvous.LOOPBACK if environment.nodes == 1 else environment.address
    if address is not None:
        rendezvous.set_interfaces(address)
    member = Member.here(environment)  # before the others arrive, as they expect an answer at once
    meeting = rendezvous.meet_ranks(environment, _words(asked), asked.seconds)
    meeting.post(member.posted())
    return meeting


@dataclass(frozen=True)
class _Part:
    """The part of this process in the run.

    Attributes:
        meeting: with the other processes; None if there are none.
        failures: of this process and of others.
        tell: called with the exit code and the message of a failure.
    """

    asked: JoinAsked
    environment: Environment
    meeting: Meeting | None
    failures: FailureReport
    tell: Callable[[int, str], None]

    def open(self, meaning: Meaning | None, prepare: Callable[[Path], None], held: ExitStack) -> tuple[Opened, Place]:
        """Do on rank 0 everything before the first step that has to be done once."""
        from trainwright.launch.group.members import Member, places

        environment, meeting, failures = self.environment, self.meeting, self.failures
        if meeting is None:
            members = [Member.here(environment)]
        else:
            members = [Member.read(posted) for posted in meeting.gather(self.asked.seconds)]
        request = self._request(meaning)
        if request.recipe.parallel.device == "cpu":
            members = [replace(member, gpus=()) for member in members]
        everyone = places(members)
        machines = len({(member.host, member.node) for member in members})
        resolved = resolve_request(request, detect(), machines, check_gpus=False)
        check_request(request, resolved.recipe)
        if not self.asked.force:
            resolved.plan.refuse_shortage()
        run = request.directory(resolved)
        held.enter_context(run_directory.only_launch(run))
        with run_directory.undone_on_error(run, created=request.run is None):
            text = request.record(run, resolved)
            logs = run / "logs"
            logs.mkdir(exist_ok=True)
            failures.clear(logs, environment.size)
            enter_process(logs / "rank-0.log", parent=_parent(environment), keep_console=True)
            prepare(run)
            failures.begin(logs)
        opened = Opened(str(run), os.getcwd(), text, request.run is not None)
        if meeting is not None:
            shown = [[place.gpu, place.own_cores, place.local_size] for place in everyone]
            meeting.publish("opened", {"opened": vars(opened), "places": shown})
        return opened, everyone[0]

    def _request(self, meaning: Meaning | None) -> Request:
        if meaning is not None:
            from trainwright.launch.accelerate.machine import require

            if meaning.one_of_several:
                raise MachineError(
                    f"{meaning.source}: accelerate launch starts one process for {meaning.distributed_type} on a CPU, "
                    "whatever num_processes says; start the recipe with trainwright train RECIPE --accelerate-config "
                    "FILE, or with torchrun --nproc-per-node"
                )
            meaning.refuse_problems()
            require(meaning, detect())
        asked = self.asked
        request = request_of(asked.recipe, list(asked.overrides), asked.resume, meaning)
        return for_started(request, self.environment.size, self.environment.launcher)

    def follow(self) -> tuple[Opened, Place]:
        """Wait on the other ranks for rank 0's decision, and read what it has prepared."""
        from trainwright.launch.group.members import Place

        assert self.meeting is not None, "a world of one is rank 0"
        follow_signals()
        said = self.meeting.wait_for("opened")
        if "refused" in said:
            raise _PeerRefused(int(said["refused"]), str(said["why"]))
        opened = Opened(**said["opened"])
        recipe = opened.path / run_directory.RECIPE
        if not recipe.is_file() or recipe.read_text(encoding="utf-8") != opened.recipe:
            raise MachineError(
                f"rank {self.environment.rank} on {socket.gethostname()} does not see the run directory {opened.path}, "
                "which rank 0 created; set logging.run_directory to a file system that all machines share"
            )
        log = opened.path / "logs" / f"rank-{self.environment.rank}.log"
        enter_process(log, parent=_parent(self.environment), keep_console=False)
        self.failures.begin(log.parent)
        return opened, Place(*said["places"][self.environment.rank])

    def refuse(self, error: Exception) -> int:
        """End before training has begun: rank 0 reports the reason, and every rank exits with the same code."""
        if isinstance(error, _PeerRefused):
            self.tell(error.exit_code, str(error))
            self.leave_together(_TOLD_SECONDS)
            return error.exit_code
        if self.environment.rank != 0:
            self.end(self.failures.exit_code if self.failures.heard.is_set() else self.failures.fail(error))
        code, said = EXIT_TRAINING, "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, TrainwrightError):
            code, said = error.exit_code, str(error)
        self.failures.interrupting(lambda: None)
        if self.meeting is not None:
            self.meeting.publish("opened", {"refused": code, "why": said})
        self.tell(code, said)
        say(f"{'' if code == EXIT_STOPPED else 'error: '}{said}", file=self.failures.terminal)
        self.leave_together(_TOLD_SECONDS)
        return code

    def rank_info(self, place: Place) -> RankInfo:
        """Return this process's rank and its device."""
        from torch.distributed import PrefixStore

        from trainwright.parallel.world import RankInfo

        environment, meeting = self.environment, self.meeting
        return RankInfo(
            environment.rank,
            environment.size,
            environment.local_rank,
            place.local_size,
            place.gpu,
            None if meeting is None else PrefixStore(f"job/{environment.job}", meeting.store),
        )

    def leave_together(self, seconds: float = _LEAVE_SECONDS) -> None:
        """End in order: the others wait until rank 0 is done.

        Rank 0, which may host the store, waits until they have left.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # sent by a launcher that ends the others after the first has ended
        meeting = self.meeting
        if meeting is None:
            return
        try:
            if self.environment.rank == 0:
                meeting.publish("done", True)
                meeting.wait_until_left(seconds)
            else:
                meeting.wait_for("done", seconds=None)
                meeting.leave()
        except (TrainwrightError, RuntimeError, TimeoutError):
            pass  # it has ended already
        meeting.close()

    def end(self, code: int) -> NoReturn:
        """Exit immediately: the other ranks wait for this one, and its threads may not be joinable any more."""
        if self.meeting is not None:
            self.meeting.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _PeerRefused(TrainwrightError):
    """Rank 0 has rejected the request and reports it itself."""

    def __init__(self, exit_code: int, why: str) -> None:
        super().__init__(why)
        self.exit_code = exit_code


@contextmanager
def _interruptible(failures: FailureReport) -> Iterator[None]:
    """Let a stop signal, or the failure of another rank, end the preparation on rank 0 at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if failures.heard.is_set():
            error = TrainingError(failures.text)
            error.exit_code = failures.exit_code
            raise error
        raise Stopped()

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    failures.interrupting(lambda: _thread.interrupt_main(signal.SIGTERM))
    yield


def _parent(environment: Environment) -> int | None:
    # If started by hand, the parent is a shell, which the process may be meant to outlive.
    return None if environment.launcher == "python" else os.getppid()


def _threads(place: Place) -> int:
    cores = detect().cpu_cores
    return max(1, cores if place.own_cores else cores // place.local_size) if cores else threads_allowed()
