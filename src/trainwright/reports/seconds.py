"""Where the time of a run went, and what its machines did, from its ledger; without one, from its events."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trainwright import text
from trainwright.observe.ledger import CATEGORIES, SHOWN_RANKS, TRAINING, RankLedger
from trainwright.observe.reader import EventRecord
from trainwright.reports.charts import Specification, bar_chart, heat_chart, time_chart
from trainwright.reports.figures import RunFigures, is_number, thinned
from trainwright.reports.html import Page, table

_POINTS = 400
_MOST_ROWS = 50
# Measures of the ledger's samples: title, unit, and what the values are multiplied by.
_MEASURES = {
    "cpu": ("Cores used by each process", "cores", 1.0),
    "host_cpu": ("Use of all cores of the machine", "%", 100.0),
    "other_cores": ("Cores used by other programs", "cores", 1.0),
    "waited": ("Waiting for a core", "% of the time", 100.0),
    "throttled": ("Stopped by a limit on CPU time", "% of the periods", 100.0),
    "stolen": ("Taken by the host of this virtual machine", "% of the cores' time", 100.0),
    "disk": ("Waiting for disks", "% of the time", 100.0),
    "read": ("Read from disks", "MiB/s", 2.0**-20),
    "written": ("Written to disks", "MiB/s", 2.0**-20),
    "memory": ("Memory of each process", "GiB", 2.0**-30),
    "faults": ("Pages read because they were not in memory", "per second", 1.0),
    "swap_in": ("Read from swap, whole machine", "MiB/s", 2.0**-20),
    "pressure_memory": ("Time in which a process of the machine waited for memory", "%", 100.0),
    "clock": ("Clock of the processors", "MHz", 1.0),
    "temperature": ("Temperature of the processors", "°C", 1.0),
    "heat": ("Slowed down by heat", "% of the time", 100.0),
    "gpu.used": ("Use of each GPU", "%", 100.0),
    "gpu.memory": ("Memory of each GPU", "GiB", 2.0**-30),
    "gpu.power": ("Power of each GPU", "W", 1.0),
    "gpu.clock": ("Clock of each GPU", "MHz", 1.0),
    "gpu.temperature": ("Temperature of each GPU", "°C", 1.0),
}
# Those that are drawn only if they reach this, as most machines have nothing of them. The others are folded.
_NOTABLE = {
    **{"other_cores": 0.1, "waited": 0.05, "throttled": 0.01, "stolen": 0.01, "disk": 0.05, "faults": 10.0},
    **{"swap_in": 2.0**16, "pressure_memory": 0.01, "heat": 0.01, "read": 2.0**20, "written": 2.0**20},
}
# What an event's own seconds belong to.
_TAKES = {"evaluate": ("evaluation", "seconds"), "checkpoint": ("checkpoints", "blocked_seconds")}


def where_time_went(run: RunFigures, ledger: Sequence[RankLedger], page: Page) -> Iterator[str]:
    """Yield a table and a chart of the seconds of every rank by category."""
    if not ledger:
        yield from _from_events(run, page)
        return
    trained = sum(rank.trained * rank.wall for rank in ledger) / max(sum(rank.wall for rank in ledger), 1e-9)
    yield f"<p>{trained:.1%} of the time of all ranks was used for {', '.join(TRAINING[:-1])} and {TRAINING[-1]}.</p>"
    categories = [name for name in CATEGORIES if any(name in rank.seconds for rank in ledger)]
    heads = [f"Rank {rank.rank}" for rank in ledger] if len(ledger) <= SHOWN_RANKS else ["Mean", "Least", "Most"]
    yield table(
        ["Seconds", *heads], [_of_category(name, ledger) for name in categories], numbers=range(1, len(heads) + 1)
    )
    shares = [
        {"rank": rank.rank, "part": name, "share": rank.seconds.get(name, 0.0) / max(rank.wall, 1e-9)}
        for rank in ledger
        for name in categories
    ]
    yield page.charts([heat_chart("Share of the time of each rank", shares)])


def _of_category(name: str, ledger: Sequence[RankLedger]) -> tuple[str, ...]:
    """Return a row of the table: the seconds of every rank, or a summary of many."""
    values = [rank.seconds.get(name, 0.0) for rank in ledger]
    shown = values if len(values) <= SHOWN_RANKS else [statistics.fmean(values), min(values), max(values)]
    # All in one unit, as ranks are compared.
    return (name.capitalize(), *(f"{value:,.{1 if value >= 10 else 2}f}" if value else "" for value in shown))


@dataclass(frozen=True)
class MachineCurves:
    """A measure of what the machines of the first ranks did.

    Attributes:
        is_notable: something shows in it that most machines have nothing of. The others are folded on a page.
        points: by rank the seconds since the run began, and the values.
    """

    title: str
    unit: str
    is_notable: bool
    points: Mapping[int, Sequence[tuple[float, float]]]


def machine_curves(ledger: Sequence[RankLedger], most: int = _POINTS) -> Iterator[MachineCurves]:
    """Yield every measure that the samples of the first ranks have, with at most ``most`` points of a rank."""
    begun = min((rank.lines[0].started for rank in ledger), default=0.0)
    for name, (title, unit, scale) in _MEASURES.items():
        points = {}
        for rank in ledger[:SHOWN_RANKS]:
            values = ((index, _measure(line.system, name)) for index, line in enumerate(rank.lines))
            shown = thinned([(index, value * scale) for index, value in values if value is not None], most)
            points[rank.rank] = [(rank.lines[index].time - begun, value) for index, value in shown]
        least = _NOTABLE.get(name, 0.0) * scale
        if any(value >= least for of_rank in points.values() for _, value in of_rank):
            yield MachineCurves(title, unit, name in _NOTABLE, points)


def machines(ledger: Sequence[RankLedger], page: Page) -> Iterator[str]:
    """Yield charts of what the machines of the first ranks did."""
    charts: dict[bool, list[Specification]] = {True: [], False: []}
    for curves in machine_curves(ledger):
        rows = [
            {"after": after, "value": value, "run": f"rank {rank}"}
            for rank, points in curves.points.items()
            for after, value in points
        ]
        charts[curves.is_notable].append(time_chart(curves.title, curves.unit, rows))
    yield from _limited(ledger)
    yield page.charts(charts[True])
    if usual := charts[False]:
        yield f"<details><summary>{text.plural(len(usual), 'more chart')}</summary>{page.charts(usual)}</details>"


def _limited(ledger: Sequence[RankLedger]) -> Iterator[str]:
    """Yield a table of what lowered the clocks of GPUs, with the share of the samples."""
    rows = []
    for rank in ledger:
        samples = [gpu.get("limited") for line in rank.lines if isinstance(gpu := line.system.get("gpu"), dict)]
        known = [words for words in samples if isinstance(words, list)]
        counts = Counter(str(word) for words in known for word in words)
        for word, count in counts.most_common():
            rows.append((f"Rank {rank.rank}", word, f"{count / len(known):.0%}"))
    if rows:
        yield "<h3>What lowered the clocks of GPUs</h3>"
        yield table(["", "Because of", "Share of the samples"], rows[:_MOST_ROWS])


def _measure(system: Mapping[str, Any], name: str) -> float | None:
    """Return a measure of a sample; ``name`` may have a group before a point."""
    group, _, key = name.rpartition(".")
    inside = system.get(group) if group else system
    value = inside.get(key) if isinstance(inside, Mapping) else None
    return float(value) if is_number(value) else None


def _from_events(run: RunFigures, page: Page) -> Iterator[str]:
    found = seconds_by_kind(run)
    if found:
        whole = sum(found.values())
        rows = [(kind.capitalize(), text.span(value), f"{value / whole:.1%}") for kind, value in found.items()]
        yield table(["", "Time", "Share"], rows)
        yield page.charts([bar_chart("Seconds since the run began", found, "seconds")])


def seconds_by_kind(run: RunFigures) -> dict[str, float]:
    """Return the seconds since the run began by what they were used for; only kinds that took any.

    ``steps`` are those that count; ``repeated`` were done again after a fault; ``paused`` is between launches;
    ``other`` is start-up, generation, and what has no event.
    """
    events = run.everything
    if not events:
        return {}
    found = dict.fromkeys(("steps", "repeated", "evaluation", "checkpoints", "paused", "other"), 0.0)
    found["steps"] = _sum(run.steps, "step_time")
    found["repeated"] = _sum([event for event in events if event["event"] == "step"], "step_time") - found["steps"]
    for event in events:
        if event["event"] in _TAKES:
            kind, field = _TAKES[event["event"]]
            found[kind] += float(event.get(field, 0.0))
        slowed = float(event.get("slowed_seconds", 0.0))  # of a checkpoint, in steps beside it
        found["checkpoints"] += slowed
        found["steps"] -= slowed
    for before, event in pairwise(events):
        if event["event"] == "start":
            found["paused"] += max(0.0, event["time"] - before["time"])
    spent = events[-1]["time"] - events[0]["time"]
    found["other"] = spent - sum(found.values())
    return {kind: seconds for kind, seconds in found.items() if seconds > 0.005}


def _sum(events: Sequence[EventRecord], field: str) -> float:
    return sum(float(event.get(field, 0.0)) for event in events)
