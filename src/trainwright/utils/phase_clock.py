"""The seconds of a process by what they were used for."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol


class Use(NamedTuple):
    """What seconds were used for: a phase, and whether this rank was inside a collective then."""

    phase: str
    waiting: bool


class DeviceEvent(Protocol):
    """A point in the work of a device, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def elapsed_time(self, end: DeviceEvent) -> float:
        """Return the milliseconds from this point to a later one."""


class Spent:
    """The seconds of the device that a process drives, by use.

    A host runs ahead of its GPU, so that its own clock would count most of a step where it waits for the results.
    """

    def __init__(self) -> None:
        self.in_collectives = 0.0
        self._seconds: dict[Use, float] = {}
        self._marks: deque[tuple[Use, DeviceEvent]] = deque()

    def follow_device(self, event: DeviceEvent) -> None:
        """Count from ``event`` on, which marks what the device has been given by now."""
        self._marks.append((Use("", waiting=False), event))

    def end(self, use: Use, event: DeviceEvent) -> None:
        """Add to ``use`` what the device does up to ``event``, once it has done it."""
        self._marks.append((use, event))
        while len(self._marks) > 1 and self._marks[1][1].query():
            (_, before), (of, reached) = self._marks.popleft(), self._marks[0]
            seconds = before.elapsed_time(reached) / 1000
            self._seconds[of] = self._seconds.get(of, 0.0) + seconds
            if of.waiting:
                self.in_collectives += seconds

    def read(self) -> dict[Use, float]:
        """Return the seconds that are known by now; what a device has not done yet is left out."""
        return self._seconds.copy()
