"""The registry of kinds of faults: a function each, and its cases."""

from __future__ import annotations

import fnmatch
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from trainwright.recipe.strategy_spec import look_up_strategy

if TYPE_CHECKING:
    from trainwright.faults.drills.trial_environment import Scene

# Strategy and number of processes.
Spread = tuple[str, int]


class Worlds(Enum):
    """Which strategies and numbers of processes a kind applies to."""

    ONE = "the smallest"
    ANY = "all"
    SEVERAL = "those of several processes"
    COPIES = "those of several processes, each with all weights and their optimizer state"

    def select_spreads(self, spreads: Sequence[Spread]) -> tuple[Spread, ...]:
        """Return those of the spreads."""
        if self is Worlds.ONE:
            return (min(spreads, key=lambda spread: spread[1]),)
        matching = tuple(spread for spread in spreads if self is Worlds.ANY or spread[1] > 1)
        if self is not Worlds.COPIES:
            return matching
        return tuple(spread for spread in matching if not look_up_strategy(spread[0]).shards)


ANY, SEVERAL, COPIES = Worlds.ANY, Worlds.SEVERAL, Worlds.COPIES


@dataclass(frozen=True)
class FaultCase:
    """One way to try a kind. ``variant`` is empty where the kind has no variants."""

    spread: Spread
    phase: str = ""
    variant: str = ""

    def __str__(self) -> str:
        strategy, processes = self.spread
        text = ", ".join(part for part in (f"{strategy} on {processes}", self.phase, self.variant) if part)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        inject: puts the fault into a run and sees what becomes of it; raises one of the verdicts of invariants.py.
        spreads: what it is tried on.
        share: how many of a campaign's trials are of this kind, beside the others.
        seconds: how long one trial may take before it is ended and broken.
        needs: why it cannot be tried on this machine, or None.
    """

    name: str
    inject: Callable[[Scene], None]
    spreads: Worlds | tuple[Spread, ...]
    phases: tuple[str, ...]
    variants: tuple[str, ...]
    share: float
    seconds: float
    needs: Callable[[], str | None]

    def list_cases(self, spreads: Sequence[Spread], phases: Collection[str]) -> tuple[FaultCase, ...]:
        """Return every case on these spreads, in a run that has these phases."""
        selected_spreads = self.spreads.select_spreads(spreads) if isinstance(self.spreads, Worlds) else self.spreads
        moments = [phase for phase in self.phases if not phase or phase in phases]
        return tuple(FaultCase(*parts) for parts in itertools.product(selected_spreads, moments, self.variants))


KINDS: dict[str, FaultKind] = {}


def register_fault(
    name: str,
    *,
    spreads: Worlds | Sequence[Spread] = Worlds.ONE,
    phases: Sequence[str] = ("",),
    variants: Iterable[str] = ("",),
    share: float = 1.0,
    seconds: float = 420.0,
    needs: Callable[[], str | None] = lambda: None,
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Register the decorated function as a kind, for every combination of the arguments."""
    fault_spreads = spreads if isinstance(spreads, Worlds) else tuple(spreads)

    def register(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        assert name not in KINDS, name
        KINDS[name] = FaultKind(name, function, fault_spreads, tuple(phases), tuple(variants), share, seconds, needs)
        return function

    return register


@dataclass(frozen=True)
class DrillTrial:
    """One trial of a campaign; it does not depend on how many others there are."""

    kind: str
    ordinal: int
    seed: int
    case: FaultCase

    @property
    def name(self) -> str:
        """Return the name, unique among the trials of a seed."""
        return f"{self.kind}/{self.ordinal}"

    @property
    def key(self) -> str:
        """Return what identifies it among the verdicts of all campaigns."""
        return f"{self.seed}:{self.name}:{self.case}"


def select_kinds(patterns: Sequence[str]) -> dict[str, FaultKind]:
    """Return the kinds that one of these shell patterns matches; all without patterns."""
    if not patterns:
        return dict(KINDS)
    return {name: kind for name, kind in KINDS.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


def schedule_trials(seed: int, trials: int, cases: Mapping[str, Sequence[FaultCase]]) -> list[DrillTrial]:
    """Distribute ``trials`` over the kinds by their shares, at least one each, in an order drawn by the seed.

    Args:
        cases: of each kind; one without any is left out.
    """
    kinds = [KINDS[name] for name, cases_of_kind in cases.items() if cases_of_kind]
    total = sum(kind.share for kind in kinds)
    exact = {kind.name: trials * kind.share / total for kind in kinds}
    counts = {name: max(1, int(share)) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: exact[name] - counts[name], reverse=True)
    for name in itertools.islice(itertools.cycle(by_rest), max(0, trials - sum(counts.values()))):
        counts[name] += 1
    drawn_trials = [
        DrillTrial(name, ordinal, seed, draw_case(seed, name, cases[name], ordinal))
        for name, count in counts.items()
        for ordinal in range(count)
    ]
    random.Random(seed).shuffle(drawn_trials)
    # Each kind once before any twice, so that an interrupted campaign has tried them all.
    drawn_trials.sort(key=lambda trial: trial.ordinal > 0)
    return drawn_trials[:trials]


def draw_case(seed: int, kind: str, cases: Sequence[FaultCase], ordinal: int) -> FaultCase:
    """Return the case of a kind's trial ``ordinal`` (from 0): all in an order drawn by the seed, then again."""
    order = list(cases)
    random.Random(f"{seed}/{kind}/{ordinal // len(order)}").shuffle(order)
    return order[ordinal % len(order)]


def move_trials(
    trials: Sequence[DrillTrial], refused: Collection[Spread], cases: Mapping[str, Sequence[FaultCase]]
) -> list[DrillTrial]:
    """Return the trials, with another case drawn by the seed for those on a spread that the recipe cannot be trained
    with. Where a kind has no other case, its trials stay as they are.

    Args:
        cases: of the kinds of such trials.
    """

    def other(trial: DrillTrial) -> DrillTrial:
        # The smallest of numbers drawn for each case: it stays when more spreads are refused, unless it is on them.
        possible = [case for case in cases[trial.kind] if case.spread not in refused]
        numbers = {case: random.Random(f"{trial.seed}/{trial.name}/{case}").random() for case in possible}
        return replace(trial, case=min(numbers, key=numbers.__getitem__, default=trial.case))

    return [other(trial) if trial.case.spread in refused else trial for trial in trials]
