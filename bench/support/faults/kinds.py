"""The registry of kinds of faults: a function each, and the cases that it is tried in."""

from __future__ import annotations

import fnmatch
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.faults.scene import Scene

# Strategy and number of processes.
Spread = tuple[str, int]
SINGLE: Spread = ("single", 1)
SEVERAL: tuple[Spread, ...] = (("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3))
ANY: tuple[Spread, ...] = (SINGLE, SINGLE, *SEVERAL)
WITH_ZERO: tuple[Spread, ...] = (*SEVERAL, ("zero2", 2), ("zero3", 2))


@dataclass(frozen=True)
class Case:
    """One way to try a kind. `variant` is empty where the kind has no variants."""

    spread: Spread
    phase: str = ""
    variant: str = ""

    def __str__(self) -> str:
        strategy, processes = self.spread
        text = ", ".join(part for part in (f"{strategy} on {processes}", self.phase, self.variant) if part)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        inject: puts the fault into a run and sees what becomes of it; raises one of the verdicts of scene.py.
        share: how many of a campaign's trials are of this kind, beside the others.
        seconds: how long one trial may take before it is ended and broken.
        needs: why it cannot be tried on this machine, or None.
    """

    name: str
    inject: Callable[[Scene], None]
    cases: tuple[Case, ...]
    share: float
    seconds: float
    needs: Callable[[], str | None]

    def case(self, seed: int, ordinal: int) -> Case:
        """The case of the kind's trial `ordinal` (from 0): all of them in an order drawn by the seed, then again."""
        order = list(self.cases)
        random.Random(f"{seed}/{self.name}/{ordinal // len(order)}").shuffle(order)
        return order[ordinal % len(order)]


KINDS: dict[str, Kind] = {}


def fault(
    name: str,
    *,
    spreads: Sequence[Spread] = (SINGLE,),
    phases: Sequence[str] = ("",),
    variants: Iterable[str] = ("",),
    share: float = 1.0,
    seconds: float = 420.0,
    needs: Callable[[], str | None] = lambda: None,
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Register the decorated function as a kind, to be tried in every combination of the rest."""
    cases = tuple(Case(*parts) for parts in itertools.product(spreads, phases, variants))

    def register(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        assert name not in KINDS, name
        KINDS[name] = Kind(name, function, cases, share, seconds, needs)
        return function

    return register


@dataclass(frozen=True)
class Trial:
    """One trial of a campaign; its identity does not depend on how many others there are."""

    kind: str
    ordinal: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.ordinal}"

    @property
    def case(self) -> Case:
        return KINDS[self.kind].case(self.seed, self.ordinal)


def schedule(seed: int, trials: int, patterns: Sequence[str] = ()) -> list[Trial]:
    """Deal `trials` to the kinds by their shares, at least one each, in an order drawn by the seed.

    Args:
        patterns: keep only kinds that one of these shell patterns matches, and their trials as they are.
    """
    total = sum(kind.share for kind in KINDS.values())
    exact = {name: trials * kind.share / total for name, kind in KINDS.items()}
    counts = {name: max(1, int(share)) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: exact[name] - counts[name], reverse=True)
    for name in itertools.islice(itertools.cycle(by_rest), max(0, trials - sum(counts.values()))):
        counts[name] += 1
    drawn = [Trial(name, n, seed) for name, count in counts.items() for n in range(count)]
    random.Random(seed).shuffle(drawn)
    drawn = drawn[:trials]
    if not patterns:
        return drawn
    return [t for t in drawn if any(fnmatch.fnmatch(t.kind, pattern) for pattern in patterns)]
