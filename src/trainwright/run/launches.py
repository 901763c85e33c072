"""How many processes each launch of a run has, and on which nodes; as many as there are devices for, if the recipe
leaves their number open.

On several nodes a launch begins when every node that is still there has ended the one before. Nodes that come back, or
for which there is no use, wait for the next one.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, FaultError, MachineError, Stopped, TrainwrightError
from trainwright.run import run_directory
from trainwright.run.group.device_slots import count_devices
from trainwright.run.process import set_threads
from trainwright.run.relaunch import take_replan
from trainwright.run.resolve import Resolved
from trainwright.run.shutdown.stop import BEFORE_FIRST_STEP, RESIZE_AT_CHECKPOINT, RESIZE_NOW, RESIZE_SAVING, Stopping
from trainwright.utils.text import format_ranges, say

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine
    from trainwright.run.nodes import Nodes


class LocalLaunches:
    """The launches of a run on this machine alone.

    Attributes:
        elastic: chooses the number of processes, if the recipe leaves it open.
        code: how the run has ended, if there is no further launch.
    """

    leads = changes = may_go_on = True
    has_launched = False
    code = EXIT_STOPPED

    def __init__(self, run: Path, resolved: Resolved, machine: Machine, stopping: Stopping) -> None:
        self._run = run
        self._processes, self._threads = resolved.processes, resolved.plan.threads
        self.elastic: Elastic | None = None
        if resolved.usable:
            devices = functools.partial(count_devices, machine)
            self.elastic = Elastic(run, resolved.usable, build_device_limit(devices), stopping)

    def first(self) -> int:
        """Return how many processes to begin with. Raises MachineError if there are too few devices."""
        return self._processes if self.elastic is None else self.elastic.first()

    def next(self, *, failed: bool) -> int:
        """Return how many processes to go on with, those of another plan if the run asks for one; 0 if it has stopped.

        Args:
            failed: whether the newest launch has failed.

        Raises:
            FaultError: there were too few devices for too long.
        """
        if self.elastic is not None:
            return self.elastic.next()
        if failed:
            return self._processes
        if (new_plan := take_replan(self._run)) is None:
            return 0
        recipe, threads = new_plan
        self._processes = int(recipe.parallel.processes)
        say(f"continuing with {recipe.parallel.strategy} on {self._processes}")
        set_threads(self._threads, threads)
        return self._processes


@dataclass
class NodeLaunches:
    """The launches of a run on several nodes.

    Attributes:
        run: the directory of the run; None for a script, whose number of processes is fixed.
        usable: the numbers of processes on all nodes together that the run can go on with.
        room: returns how many processes this node has room for.
        elastic: chooses among several usable numbers, on node 0; set by ``first``.
        code: how the run has ended, if there is no further launch.
    """

    run: Path | None
    nodes: Nodes
    usable: Sequence[int]
    room: Callable[[], int]
    stopping: Stopping
    elastic: Elastic | None = field(default=None, init=False)
    code: int = field(default=EXIT_FINISHED, init=False)

    @property
    def leads(self) -> bool:
        """Whether this node decides."""
        return self.nodes.index == 0

    @property
    def changes(self) -> bool:
        """Whether the run can go on with another number of processes."""
        return len(self.usable) > 1

    @property
    def has_launched(self) -> bool:
        """Whether there was a launch before the newest one, perhaps without this node."""
        return self.nodes.launch is not None and self.nodes.launch.number > 0

    @property
    def may_go_on(self) -> bool:
        """Whether there can be a further launch with the nodes that are left."""
        return self.changes or self.nodes.lost is None

    def first(self) -> int:
        """Return how many processes to begin with here, when all nodes are ready; 0 if none, see ``code``.

        Raises:
            MachineError: there are too few devices.
        """
        if self.leads and self.changes:
            assert self.run is not None, "a script has one number"
            self.elastic = Elastic(self.run, self.usable, self._largest, self.stopping)
        elif self.changes:
            self.nodes.room = self.room
        return self._next(None if self.elastic is None else self.elastic.first)

    def next(self, *, failed: bool = False) -> int:
        """Return how many processes to go on with here, after all nodes have ended a launch; 0 if none, see ``code``.

        Args:
            failed: makes no difference here, as several nodes keep their plan.

        Raises:
            FaultError: there were too few nodes for too long.
        """
        return self._next(None if self.elastic is None else self.elastic.next)

    def _next(self, choose: Callable[[], int] | None) -> int:
        if not self.leads:
            outcome = self.nodes.follow(self.room())
            if isinstance(outcome, int):
                self.code = outcome
                return 0
            return outcome.spread.each
        self.nodes.settle()
        number = 0 if self.stopping.flag.value else self.usable[-1] if choose is None else choose()
        if not number:
            self.code = EXIT_STOPPED
            return 0
        placement = self._spread([number])
        if placement is None:
            raise FaultError(self.nodes.lost or f"there is no room for {number} processes on the nodes that are left")
        recipe = "" if self.run is None else (self.run / run_directory.RECIPE).read_text(encoding="utf-8")
        self.nodes.begin(placement, recipe)
        return placement.each

    def _largest(self, usable: Sequence[int]) -> int | None:
        """Return the largest of these numbers that there is room for."""
        if not self.nodes.running:  # nothing else looks for nodes that come back
            self.nodes.poll()
        best = self._spread(usable)
        return None if best is None else best.processes

    def _spread(self, usable: Sequence[int]) -> Spread | None:
        return choose_spread(usable, {**self.nodes.rooms, 0: self.room()})


@contextmanager
def take_part(nodes: Nodes) -> Iterator[None]:
    """Leave the other nodes at the end of the context in every case; tell those that wait for a launch how it ended."""
    try:
        yield
        nodes.over(EXIT_FINISHED)
    except Stopped:
        nodes.over(EXIT_STOPPED)
        raise
    except TrainwrightError as error:
        nodes.over(error.exit_code, str(error))
        raise
    finally:
        nodes.leave()


@dataclass(frozen=True)
class Spread:
    """The nodes that take part in a launch, in the order of their ranks, and the number of processes on each."""

    nodes: tuple[int, ...]
    each: int

    @property
    def processes(self) -> int:
        """Return the number of processes on all nodes."""
        return self.each * len(self.nodes)

    def find_first_rank(self, node: int) -> int:
        """Return the lowest rank on a node."""
        return self.each * self.nodes.index(node)


@dataclass(frozen=True)
class Launch:
    """One launch of the workers: its number, its nodes, and the port of the workers' store at node 0."""

    number: int
    spread: Spread
    port: int


def choose_spread(usable: Collection[int], rooms: Mapping[int, int]) -> Spread | None:
    """Return the spread of the largest usable number of processes, over as many nodes as possible; None if there is
    room for none.

    Args:
        rooms: how many processes each node has room for, by its index.
    """
    best: Spread | None = None
    for node_processes in range(max(rooms.values(), default=0), 0, -1):
        able = sorted(index for index, room in rooms.items() if room >= node_processes)
        for count in range(len(able), 0, -1):
            number = count * node_processes
            if able[0] == 0 and number in usable and (best is None or number >= best.processes):
                best = Spread(tuple(able[:count]), node_processes)
    return best


# In the run directory: how many processes there may be.
SLOTS_FILE = "slots"
_LOOK_SECONDS = 1.0
# A number has to last before the run is interrupted for it, as each change costs a start.
_STEADY_SECONDS = 2.0
# More processes wait for the next checkpoint; after this time one is asked for. If that cannot be written, as on a full
# disk, they wait on: the run can do without them.
_CHECKPOINT_SECONDS = 60.0
# How long a run waits for the least number of processes.
_LEAST_SECONDS = 600.0


class Elastic:
    """Choose the number of processes of each launch.

    Args:
        usable: the numbers that the run can go on with, in order.
        largest: returns the largest of some usable numbers that there are devices for now; None if there are too few.
    """

    def __init__(
        self,
        run: Path,
        usable: Sequence[int],
        largest: Callable[[Sequence[int]], int | None],
        stopping: Stopping,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._usable, self._largest = run, usable, largest
        self._stopping, self._clock = stopping, clock
        self._running = usable[-1]
        self._target: int | None = self._running
        self._since = self._looked_at = clock()
        self._saves = False  # whether a checkpoint was asked for to have the target number of processes

    def available(self) -> int | None:
        """Return the largest usable number for which there are devices and slots; None if there are too few."""
        slots = _read_slots(self._run)
        return self._largest([number for number in self._usable if slots is None or number <= slots])

    def first(self) -> int:
        """Return the number of processes to begin with. Raises MachineError if there are too few devices."""
        if (number := self.available()) is None:
            raise MachineError(
                f"parallel.num_processes: the run needs at least {self._usable[0]}, and there are fewer usable GPUs, "
                f"nodes or slots ({self._run / SLOTS_FILE}); lower its min, or raise the slots"
            )
        self._running = self._target = number
        return number

    def check(self) -> None:
        """Look for a change; ask the workers to end after a checkpoint if it lasts. Call it repeatedly."""
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at, available, flag = now, self.available(), self._stopping.flags.resize
        if available != self._target:
            self._target, self._since, self._saves = available, now, False
        duration = now - self._since
        if available == self._running or duration < _STEADY_SECONDS:
            flag.value = 0
        elif available is None or available < self._running:
            flag.value = RESIZE_NOW
        elif duration >= _STEADY_SECONDS + _CHECKPOINT_SECONDS and not self._saves:
            flag.value, self._saves = RESIZE_SAVING, True
        elif not flag.value:
            flag.value = RESIZE_AT_CHECKPOINT

    def next(self) -> int:
        """Return the number of processes of the next launch, waiting for enough devices; 0 if a stop is requested.

        Raises:
            FaultError: there were too few for too long.
        """
        until, is_shown = self._clock() + _LEAST_SECONDS, False
        while not self._stopping.requested:
            if (number := self.available()) is not None:
                if number != self._running:
                    say(f"going on with {_format_process_count(number)} instead of {self._running}", file=sys.stderr)
                self._running = self._target = number
                return number
            if not is_shown:
                few = (
                    f"waiting for at least {_format_process_count(self._usable[0])} (usable: "
                    f"{format_ranges(self._usable, ' to ')})"
                )
                say(few, file=sys.stderr)
                is_shown = True
            if self._clock() > until:
                raise FaultError(
                    f"{_LEAST_SECONDS:.0f} s without enough GPUs, nodes or slots for "
                    f"{_format_process_count(self._usable[0])}; "
                    "resume the run when they are back"
                )
            time.sleep(_LOOK_SECONDS)
        self._stopping.resumes_from = BEFORE_FIRST_STEP
        return 0


def build_device_limit(count: Callable[[], int | None]) -> Callable[[Sequence[int]], int | None]:
    """Return the argument ``largest`` for one node.

    Args:
        count: returns how many devices work now; None if a process needs none.
    """

    def largest(usable: Sequence[int]) -> int | None:
        devices = count()
        return max((number for number in usable if devices is None or number <= devices), default=None)

    return largest


def _read_slots(run: Path) -> int | None:
    """Return the number in the run's file ``slots``; None if there is none, or while it is written."""
    try:
        return int((run / SLOTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _format_process_count(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"
