"""The number of processes of a run whose recipe leaves it open: as many as there are devices for.

The launcher, of several that of node 0, looks before every launch and while the workers run: if the number changes, the
run goes on with another one from a checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainwright.errors import FaultError, MachineError
from trainwright.recipe.checks import in_words
from trainwright.run.shutdown.stop import BEFORE_FIRST_STEP, RESIZE_AT_CHECKPOINT, RESIZE_NOW, RESIZE_SAVING, Stopping
from trainwright.utils.text import say

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
        self._wanted: int | None = self._running
        self._since = self._looked = clock()
        self._saves = False  # whether a checkpoint was asked for to have the processes that are wanted

    def available(self) -> int | None:
        """Return the largest usable number for which there are devices and slots; None if there are too few."""
        slots = _slots(self._run)
        return self._largest([number for number in self._usable if slots is None or number <= slots])

    def first(self) -> int:
        """Return the number of processes to begin with. Raises MachineError if there are too few devices."""
        if (number := self.available()) is None:
            raise MachineError(
                f"parallel.num_processes: the run needs at least {self._usable[0]}, and there are fewer usable GPUs, "
                f"nodes or slots ({self._run / SLOTS_FILE}); lower its min, or raise the slots"
            )
        self._running = self._wanted = number
        return number

    def check(self) -> None:
        """Look for a change; ask the workers to end after a checkpoint if it lasts. Call it repeatedly."""
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked, available, flag = now, self.available(), self._stopping.flags.resize
        if available != self._wanted:
            self._wanted, self._since, self._saves = available, now, False
        lasted = now - self._since
        if available == self._running or lasted < _STEADY_SECONDS:
            flag.value = 0
        elif available is None or available < self._running:
            flag.value = RESIZE_NOW
        elif lasted >= _STEADY_SECONDS + _CHECKPOINT_SECONDS and not self._saves:
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
                    say(f"going on with {_processes(number)} instead of {self._running}", file=sys.stderr)
                self._running = self._wanted = number
                return number
            if not is_shown:
                few = f"waiting for at least {_processes(self._usable[0])} (usable: {in_words(self._usable)})"
                say(few, file=sys.stderr)
                is_shown = True
            if self._clock() > until:
                raise FaultError(
                    f"{_LEAST_SECONDS:.0f} s without enough GPUs, nodes or slots for {_processes(self._usable[0])}; "
                    "resume the run when they are back"
                )
            time.sleep(_LOOK_SECONDS)
        self._stopping.left = BEFORE_FIRST_STEP
        return 0


def devices_for(count: Callable[[], int | None]) -> Callable[[Sequence[int]], int | None]:
    """Return the argument ``largest`` for one node.

    Args:
        count: returns how many devices work now; None if a process needs none.
    """

    def largest(usable: Sequence[int]) -> int | None:
        devices = count()
        return max((number for number in usable if devices is None or number <= devices), default=None)

    return largest


def _slots(run: Path) -> int | None:
    """Return the number in the run's file ``slots``; None if there is none, or while it is written."""
    try:
        return int((run / SLOTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"
