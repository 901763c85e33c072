"""Published runs beside their plans, by class and by run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.published import Compared, compare
from tests.support.published_figures import CLASSES, Half, class_of, figures

HALVES: tuple[Half, Half] = ("mend", "check")
HEADER = (
    *("class", "runs", "speeds", "median", "memories", "median", "left out"),
    *("ran", "refused", "out of memory", "accepted", "close", "?"),
)
_MEASURED = ("tokens_per_second_per_device", "memory_gib")


@dataclass(frozen=True)
class Summary:
    """Of some runs: errors as parts of what was measured, in order; ``refused`` of those that ``ran``, ``accepted`` of
    those that ran out of memory; ``close``: of neither is said which; ``unplanned``: cannot be planned. ``left_out``:
    speeds and memories that were measured but say something else than what is predicted (tests/support/published.py).
    """

    runs: int
    speed: tuple[float, ...]
    memory: tuple[float, ...]
    left_out: int
    ran: int
    refused: int
    ran_out: int
    accepted: int
    close: int
    unplanned: int

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "speeds": len(self.speed),
            "median_error_of_speed": median(self.speed),
            "memories": len(self.memory),
            "median_error_of_memory": median(self.memory),
            "left_out": self.left_out,
            "ran": self.ran,
            "refused": self.refused,
            "ran_out_of_memory": self.ran_out,
            "accepted": self.accepted,
            "close": self.close,
            "cannot_be_planned": self.unplanned,
        }

    def row(self, name: str) -> tuple[str, ...]:
        """Under ``HEADER``."""
        speed, memory = (_percent(median(found)) for found in (self.speed, self.memory))
        counts = (self.left_out, self.ran, self.refused, self.ran_out, self.accepted, self.close, self.unplanned)
        return (name, f"{self.runs}", f"{len(self.speed)}", speed, f"{len(self.memory)}", memory, *map(str, counts))


def compared(half: Half) -> list[Compared]:
    return [compare(figure) for figure in figures(half)]


def summarize(found: Iterable[Compared]) -> Summary:
    found = list(found)
    planned = [one for one in found if one.missing is None and one.other is None]
    ran = [one for one in planned if one.figure["outcome"] == "ran"]
    speed, memory = errors(one.speed for one in planned), errors(one.memory for one in planned)
    measured = sum(key in one.figure["measured"] for one in found for key in _MEASURED)
    return Summary(
        runs=len(found),
        speed=speed,
        memory=memory,
        left_out=measured - len(speed) - len(memory),
        ran=len(ran),
        refused=sum(one.is_refused for one in ran),
        ran_out=len(planned) - len(ran),
        accepted=sum(one.is_accepted for one in planned),
        close=sum(one.verdict == "close" for one in planned),
        unplanned=sum(one.missing is not None for one in found),
    )


def by_class(found: Sequence[Compared]) -> dict[str, Summary]:
    """Every class that there is, then all."""
    names = [class_of(one.figure) for one in found]
    groups = {name: [one for one, of in zip(found, names, strict=True) if of == name] for name in CLASSES}
    return {**{name: summarize(group) for name, group in groups.items() if group}, "all": summarize(found)}


def errors(values: Iterable[float | None]) -> tuple[float, ...]:
    """How far predicted over measured is from 1, the least first."""
    return tuple(sorted(abs(value - 1) for value in values if value is not None))


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def print_runs() -> None:
    """Each run of the half that is mended on; the other half is looked at as a whole only."""
    found = compared("mend")
    print(f"{'run':<58}{'tokens/s':>10}{'measured':>10}{'error':>8}{'GiB':>8}{'measured':>10}{'error':>8}  verdict")
    for one in found:
        print(_line(one))
    for name, summary in by_class(found).items():
        print(f"{name}: {summary.as_json()}")
    print("\nsources:")
    for title, url in dict.fromkeys((one.figure["source"]["title"], one.figure["source"]["url"]) for one in found):
        print(f"  {title}: {url}")


def _line(one: Compared) -> str:
    measured = one.figure["measured"]
    if (why := one.missing or one.other) is not None:
        return f"{one.figure['id']:<58}  {why}"
    wrong = " (it ran)" if one.is_refused else " (out of memory)" if one.is_accepted else ""
    return (
        f"{one.figure['id']:<58}{one.tokens_per_second:>10,.0f}"
        f"{measured.get('tokens_per_second_per_device') or '-':>10}{_signed(one.speed):>8}{one.memory_gib:>8.1f}"
        f"{measured.get('memory_gib') or '-':>10}{_signed(one.memory):>8}  {one.verdict}{wrong}"
    )


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value - 1:+.0%}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
