"""Stragglers: a rank that computes more slowly than the others, for which all of them wait in every step."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainwright.engine.events import Notice
from trainwright.engine.policies.base import StepGradients, StepPolicy, TrainingContext
from trainwright.machine.slowdowns import Slowdown, describe_causes
from trainwright.machine.usage import OwnProcess
from trainwright.utils import heartbeat

# The phases in which ranks are compared, with those of the heartbeat that belong to them; fields of RankReport.
_PHASES = {
    "data": ("data",),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("gradient norm", "optimizer"),
    "exchange": (),  # collectives, of which only stalls count
}
_seconds_of = attrgetter(*_PHASES)
# Steps are compared in blocks: a slow process may be slow in some steps only, and a single one proves nothing.
_BLOCK, _BLOCKS = 4, 4
WINDOW = _BLOCK * _BLOCKS
# The first steps include compilation and the first use of memory.
IGNORED = 10
# A straggler takes longer than every other rank by this part in all blocks but the slowest, and by these multiples of
# the standard error: as far as the blocks differ now, and as they have usually differed.
_SLOWER, _ERRORS, _USUAL_ERRORS = 0.1, 4.0, 6.0
# A step's seconds count up to this multiple of the median of all.
_OUTLIER = 4.0
# A slower rank that costs a smaller part of a step is not worth a notice: what ranks are compared in is short.
_GAIN = 0.02
# It is named again only after it was no slower than this.
_RECOVERED = 0.05
_NOISE_WINDOWS = 20
_SHORT_SECONDS = 1.0  # a shorter window is judged when all its steps are new, and this is over: it takes a millisecond
_COUNTED_SECONDS = 2.0  # reading the counters of all threads takes a millisecond


class Straggler(NamedTuple):
    """A rank that is slower than all others.

    Attributes:
        phase: the one in which it loses most.
        slower: by which part it takes longer than the slowest of the others.
        gain: the part of a step's time that the run would save without it.
    """

    rank: int
    phase: str
    slower: float
    gain: float


class RankComparison:
    """Compare the seconds of ranks over the last steps.

    Args:
        processors_exchange: whether collectives are the work of processors, as on a CPU.
    """

    def __init__(self, *, processors_exchange: bool = True) -> None:
        self.taken = 0
        self._processors_exchange = processors_exchange
        self._seconds: deque[Sequence[Sequence[float]]] = deque(maxlen=WINDOW)
        self._totals: deque[list[float]] = deque(maxlen=WINDOW)
        self._unjudged = 0.0  # seconds since it was judged
        self._walls: deque[float] = deque(maxlen=WINDOW)
        # Of windows without a slow rank: how much blocks differ, and the seconds of a step.
        self._noise: deque[float] = deque(maxlen=_NOISE_WINDOWS)
        self._usual: deque[float] = deque(maxlen=_NOISE_WINDOWS * _BLOCKS)
        self._named: int | None = None

    def add(self, seconds: Sequence[Sequence[float]], wall: float) -> Straggler | None:
        """Add a step; return a rank that has become a straggler.

        Args:
            seconds: of every rank by phase.
            wall: seconds since the step before.
        """
        self.taken += 1
        if self.taken <= IGNORED:
            return None
        self._seconds.append(seconds)
        self._totals.append(list(map(sum, seconds)))
        self._unjudged += max(self._totals[-1])
        self._walls.append(wall)
        if self.taken % _BLOCK or len(self._walls) < WINDOW:
            return None
        # The seconds of ranks are the same everywhere, so that all ranks judge at the same steps; walls are not.
        is_short = sum(map(max, self._totals)) < _SHORT_SECONDS
        if is_short and (self.taken % WINDOW or self._unjudged < _SHORT_SECONDS):
            return None
        self._unjudged = 0.0
        return self._judge()

    def _judge(self) -> Straggler | None:
        of_ranks = _replace_outliers(np.array(self._totals))
        rank, steps = _find_slowest(of_ranks)
        # Of a few numbers, Python's own functions take a fraction of the time.
        blocks: list[float] = steps.reshape(_BLOCKS, _BLOCK).mean(axis=1).tolist()
        mean = sum(blocks) / _BLOCKS
        spread = math.dist(blocks, [mean] * _BLOCKS) / (_BLOCKS - 1) ** 0.5
        usual = statistics.median(self._noise) if self._noise else 0.0
        if abs(mean) < _SLOWER:
            if self.taken % WINDOW == 0:
                self._noise.append(spread)
            self._usual.append(float(_replace_outliers(np.array(self._walls)).mean()))
        errors = _ERRORS * spread / _BLOCKS**0.5, _USUAL_ERRORS * usual / _BLOCKS**0.5
        without_largest = (sum(blocks) - max(blocks)) / (_BLOCKS - 1)
        if mean > errors[0] and without_largest > max(_SLOWER, errors[1]) and min(blocks) > _RECOVERED:
            is_reported, self._named = self._named == rank, rank
            return None if is_reported else self._straggler(np.array(self._seconds), of_ranks, rank, mean)
        if self._named is not None and (rank != self._named or mean < _RECOVERED):
            self._named = None
        return None

    def _straggler(
        self, seconds: NDArray[np.float64], of_ranks: NDArray[np.float64], rank: int, slower: float
    ) -> Straggler:
        late = slice(WINDOW // 2, None)  # it may have become slow within the window
        lost = (seconds[late, rank] - np.delete(seconds[late], rank, axis=1).max(axis=1)).sum(axis=0)
        step_seconds = float(_replace_outliers(np.array(self._walls)[late]).mean())  # such as an evaluation in between
        slowest, second = of_ranks[late, rank].mean(), np.delete(of_ranks[late], rank, axis=1).max(axis=1).mean()
        bound = step_seconds - float(slowest - second)  # what a step takes without the straggler
        if self._usual:
            usual = statistics.median(self._usual)
        else:  # the others have never been seen without it; a processor that computes slowly exchanges slowly, too
            exchange = (step_seconds - slowest) * (1 - second / slowest) if self._processors_exchange else 0.0
            usual = step_seconds - float(slowest - second + exchange)
        without = min(usual, bound)
        return Straggler(rank, list(_PHASES)[int(lost.argmax())], slower, max(0.0, 1 - without / step_seconds))


def _replace_outliers(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds with those far above the median replaced by the highest that count."""
    sorted_seconds = np.sort(seconds, axis=None)  # several times faster than np.median on arrays of this size
    middle = sorted_seconds.size // 2
    return np.minimum(seconds, _OUTLIER * (sorted_seconds[middle] + sorted_seconds[-1 - middle]) / 2)


def _find_slowest(seconds: NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
    """Return the slowest rank, and by which part it took longer than any other rank in each step.

    Args:
        seconds: [steps, ranks].
    """
    rank = int(seconds.sum(axis=0).argmax())
    other_seconds = seconds.copy()
    other_seconds[:, rank] = -np.inf
    slowest_other = other_seconds.max(axis=1)
    return rank, (seconds[:, rank] - slowest_other) / max(float(slowest_other.mean()), 1e-9)


class Stragglers(StepPolicy):
    """Name a rank that is slower than the others by more than noise, and count how long this rank waits for others."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        world = training.world
        on_cpu = world.device.type == "cpu"
        self._comparison, self._since = RankComparison(processors_exchange=on_cpu), time.monotonic()
        self._straggler: Straggler | None = None
        self._process = OwnProcess(torch.get_num_threads(), world.local_size, None if on_cpu else world.device.index)
        self._before = self._process.counters(), heartbeat.sum_collective_seconds()

    def metrics(self, step: int, gradients: StepGradients) -> dict[str, float]:
        """Take the seconds that all ranks have reported for this step; they are no metrics."""
        local_heartbeat, world = heartbeat.find_own_heartbeat(), self.training.world
        now = time.monotonic()
        wall, self._since = now - self._since, now
        if local_heartbeat is not None and world.size > 1:
            seconds = [_seconds_of(report) for report in gradients.reports]
            local_heartbeat.behind += max(map(sum, seconds)) - sum(seconds[world.rank])
            self._straggler = self._comparison.add(seconds, wall)
            if self._comparison.taken % WINDOW == IGNORED and now - self._before[0].wall > _COUNTED_SECONDS:
                self._before = self._process.counters(), heartbeat.sum_collective_seconds()
        return {}

    def after(self, step: int) -> None:
        """Emit a notice about a straggler, with what it knows about itself. Every rank has found the same."""
        if self._straggler is None:
            return
        straggler, world = self._straggler, self.training.world
        causes: list[Slowdown] = []
        threads = world.gather(self._process.threads)
        if straggler.rank == world.rank:
            before, wait_seconds = self._before
            causes = self._process.find_causes(
                before,
                elsewhere=heartbeat.sum_collective_seconds() - wait_seconds,
                planned_threads=statistics.median(threads),
                sleeps=False,
            )
        causes = world.gather(causes, Slowdown)[straggler.rank]
        self._straggler = None
        if straggler.gain < _GAIN:  # only here, as walls, unlike the seconds of ranks, are not the same everywhere
            return
        why = describe_causes(causes)
        message = (
            f"rank {straggler.rank} has been {straggler.slower:.0%} slower than the other ranks over {WINDOW} steps, "
            f"most of it in {straggler.phase}; without it a step would take {straggler.gain:.0%} less time; {why}"
        )
        details = {"step": step, **straggler._asdict(), "why": why, "causes": [cause.kind for cause in causes]}
        self.training.events.emit(Notice(message=message, kind="straggler", details=details))


def own_seconds() -> list[float]:
    """Return the seconds of this process in each phase that ranks are compared in, as `RankReport` has them."""
    local_heartbeat = heartbeat.find_own_heartbeat()
    if local_heartbeat is None:
        return [0.0] * len(_PHASES)
    *phases, _ = map(local_heartbeat.seconds_outside, _PHASES.values())
    return [*phases, local_heartbeat.stalled]
