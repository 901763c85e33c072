"""Which nodes of a run take part in each launch, and with how many processes.

A launch begins when every node that is still there has ended the one before. Nodes that come back, or for which there
is no use, wait for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, FaultError, Stopped, TrainwrightError
from trainwright.run import run_directory
from trainwright.run.group.elastic import Elastic
from trainwright.run.shutdown.stop import Stopping

if TYPE_CHECKING:
    from trainwright.run.nodes import Nodes


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

    def next(self) -> int:
        """Return how many processes to go on with here, after all nodes have ended a launch; 0 if none, see ``code``.

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
        where = self._spread([number])
        if where is None:
            raise FaultError(self.nodes.lost or f"there is no room for {number} processes on the nodes that are left")
        recipe = "" if self.run is None else (self.run / run_directory.RECIPE).read_text(encoding="utf-8")
        self.nodes.begin(where, recipe)
        return where.each

    def _largest(self, usable: Sequence[int]) -> int | None:
        """Return the largest of these numbers that there is room for."""
        if not self.nodes.running:  # nothing else looks for nodes that come back
            self.nodes.poll()
        best = self._spread(usable)
        return None if best is None else best.processes

    def _spread(self, usable: Sequence[int]) -> Spread | None:
        return spread(usable, {**self.nodes.rooms, 0: self.room()})


@contextmanager
def taking_part(nodes: Nodes) -> Iterator[None]:
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

    def first_rank(self, node: int) -> int:
        """Return the lowest rank on a node."""
        return self.each * self.nodes.index(node)


@dataclass(frozen=True)
class Launch:
    """One launch of the workers: its number, its nodes, and the port of the workers' store at node 0."""

    number: int
    spread: Spread
    port: int


def spread(usable: Collection[int], rooms: Mapping[int, int]) -> Spread | None:
    """Return the spread of the largest usable number of processes, over as many nodes as possible; None if there is
    room for none.

    Args:
        rooms: how many processes each node has room for, by its index.
    """
    best: Spread | None = None
    for each in range(max(rooms.values(), default=0), 0, -1):
        able = sorted(index for index, room in rooms.items() if room >= each)
        for count in range(len(able), 0, -1):
            number = count * each
            if able[0] == 0 and number in usable and (best is None or number >= best.processes):
                best = Spread(tuple(able[:count]), each)
    return best
