"""``report.html``: one run on one page, which opens from a disk and needs no network; with where its time went."""

from __future__ import annotations

import html
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainwright.engine.event_reader import EventRecord, compared, reasons_of
from trainwright.errors import RequestError
from trainwright.observe.ledger import CATEGORIES, SHOWN_RANKS, TRAINING, RankLedger, read_ledger
from trainwright.observe.reports import charts
from trainwright.observe.reports.charts import (
    Specification,
    bar_chart,
    curve_charts,
    heat_chart,
    pair_chart,
    time_chart,
)
from trainwright.observe.reports.figures import SMOOTHING, RunFigures, is_number, mapping, thinned
from trainwright.recipe.yaml_text import values_by_key
from trainwright.run.run_directory import RECIPE, plan_of
from trainwright.utils import text
from trainwright.utils.paths import open_inside, write_file
from trainwright.utils.text import printable

# Nothing is loaded or sent. Vega compiles its expressions, which needs unsafe-eval.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"


def escaped(value: object) -> str:
    """Return text as HTML; characters that control terminals or the direction of text are shown, not used."""
    return html.escape(printable(str(value)))


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return labelled values as a list of boxes."""
    items = "".join(f'<li class="tile"><span>{escaped(k)}</span><b>{escaped(v)}</b></li>' for k, v in values)
    return f'<ul class="tiles">{items}</ul>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    text: Sequence[int] = (),
    numbers: Sequence[int] = (),
    names: Sequence[int] = (),
    warned: Sequence[int] = (),
) -> str:
    """Return a table.

    Args:
        text: columns of longer text, whose line breaks are kept.
        numbers: columns of numbers that are compared with each other: on one line, and one below the other.
        names: columns of names that may be very long: cut at the width of the column, and shown whole as a tooltip.
        warned: rows in the color of a warning.
    """
    kinds = dict.fromkeys(text, " class=text dir=auto") | dict.fromkeys(numbers, " class=number")
    kinds |= dict.fromkeys(names, " class=name")
    shown = "".join(
        f'<th scope="col"{kinds.get(column, "") if column in numbers else ""}>{escaped(name)}</th>'
        for column, name in enumerate(head)
    )
    lines = "".join(
        f"<tr{' class=warn' if number in warned else ''}>"
        + "".join(
            f"<td{kinds.get(column, '')}{_tooltip(cell) if column in names else ''}>{escaped(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{shown}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _tooltip(cell: object) -> str:
    return f' title="{escaped(cell)}"'


def prose(sentence: str) -> str:
    """Return a sentence as a paragraph, with what is between backticks as code."""
    inside = re.sub("`([^`]+)`", r"<code>\1</code>", escaped(sentence))
    return f"<p>{inside[:1].upper()}{inside[1:]}</p>"


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; "" if all parts are empty."""
    inside = "".join(parts)
    return f"<section><h2>{escaped(title)}</h2>{inside}</section>" if inside else ""


class Page:
    """A page with charts. ``add`` its parts in order, then ``render`` it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._charts: list[charts.Specification] = []

    def add(self, part: str) -> None:
        """Append a part."""
        self._parts.append(part)

    def charts(self, specifications: Sequence[charts.Specification]) -> str:
        """Return the places of charts, which are drawn when the page is opened."""
        places = []
        for specification in specifications:
            places.append(f'<div class="chart"><div id="chart-{len(self._charts)}"></div></div>')
            self._charts.append(specification)
        return f'<div class="charts">{"".join(places)}</div>' if places else ""

    def render(self) -> str:
        """Return the page. Raises RequestError if the script of charts is missing."""
        library = charts.script().replace("</script", "<\\/script")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escaped(self._title)}</title><style>{_own('page.css')}</style></head><body><main>{''.join(self._parts)}</main>"
            f'<script type="application/json" id="axes">{_json(charts.AXES)}</script>'
            f'<script type="application/json" id="charts">{_json(self._charts)}</script>'
            f"<script>{library}</script><script>{_own('page.js')}</script></body></html>\n"
        )


CURVE_MENU = (
    '<p class="no-print"><label for="axis">Horizontal axis: </label><select id="axis">'
    + "".join(f'<option value="{name}">{title}</option>' for name, title in charts.AXES.items())
    + '</select> <label for="smoothing">Smoothing: </label><select id="smoothing"><option value="">none</option>'
    + "".join(f'<option value="{charts.smoothing_field(weight)}">{weight}</option>' for weight in SMOOTHING)
    + '</select> <span class="soft hint">Scroll to zoom, drag to move, double-click to reset.</span></p>'
)


def _own(name: str) -> str:
    return (files("trainwright.observe.reports") / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return as_json(value).replace("<", "\\u003c")


def as_json(value: Any) -> str:
    """Return JSON with null for the numbers that JSON does not have, and text for what is none of its types."""
    return json.dumps(_plain(value), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TONES = {"finished": "good", "training": "good", "stopped": "warn", "failed": "bad", "ended": "bad"}
_SAMPLES = 8  # the newest ones of a prompt
_TIMELINE = 200
_BYTES = 2**20
# The keys that decide a result, in the order in which people ask for them.
_DECIDE = (
    *("model.name", "model.config.model_type", "model.implementation", "model.dropout"),
    *("model.adapter.type", "model.adapter.rank", "model.adapter.alpha", "model.adapter.quantization"),
    *("optimizer.name", "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps"),
    *("optimizer.weight_decay", "optimizer.max_grad_norm"),
    *("train.max_steps", "train.epochs", "train.max_tokens", "train.global_batch_size", "train.micro_batch_size"),
    *("train.mixed_precision", "data.max_length", "data.pack_length", "data.limit", "train.seed"),
)


def report_of(run: RunFigures) -> str:
    """Return the page of a run. Raises RequestError if the package with the script of charts is missing."""
    page = Page(f"{run.name} - Trainwright")
    ledger = read_ledger(run.directory, run.everything)
    page.add(_head(run))
    page.add(section("Result", _result(run)))
    page.add(section("Hyperparameters", _hyperparameters(run)))
    page.add(section("Data", _data(run)))
    page.add(section("Curves", CURVE_MENU, page.charts(curve_charts([run]))) if run.steps else "")
    page.add(section("Samples", *_samples(run)))
    page.add(section("Predicted and measured", *_predicted(run, page)))
    page.add(section("Where the time went", *where_time_went(run, ledger, page)))
    page.add(section("Profile", *_profiles(run)))
    page.add(section("Machine", *machines(ledger, page)))
    page.add(section("Time line", _timeline(run)))
    page.add(section("Choices", _choices(run)))
    page.add(section("Environment", _environment(run)))
    page.add(section("Recipe", *_recipe(run)))
    return page.render()


def _head(run: RunFigures) -> str:
    tone = _TONES.get(run.status, "warn")
    status = "was training when this page was written" if run.trains else run.status  # true whatever happens later
    about = ", ".join(part for part in (run.task, run.model, str(run.start.get("strategy", ""))) if part)
    remarks = read_remarks(run.directory)
    remarked = "".join(f"<p>{escaped(words)}</p>" for words in (", ".join(remarks.tags), remarks.note) if words)
    world = round(run.start.get("world_size", 0))
    on = f" on {text.plural(world, 'process', 'processes')}" if world else ""
    remarked += f"<p>{escaped(run.parent)}</p>" if run.parent else ""
    newer = f'<p class="warn">{escaped(run.newer)}</p>' if run.newer else ""
    problems = [*run.damage[:20], *filter(None, [run.recipe_problem])]
    damage = newer + "".join(f'<p class="bad">{escaped(each)}; shown without it</p>' for each in problems)
    return (
        f'<header><div class="head"><h1>{escaped(run.name)}</h1><span class="badge {tone}">{escaped(status)}</span>'
        f'</div><p class="soft">{escaped(about + on)}<br>written {time.strftime("%Y-%m-%d %H:%M:%S %Z")}</p>{remarked}'
        f"{damage}{tiles(_tiles(run))}</header>"
    )


def _tiles(run: RunFigures) -> Iterator[tuple[str, str]]:
    if not run.steps:
        return
    last = run.steps[-1]
    yield "Step", f"{run.step:,} of {int(run.start.get('max_steps', 0)):,}"
    yield "Training loss", text.metric(float(last["loss"]))
    if run.best is not None:
        yield f"Best validation loss (step {run.best[0]:,})", text.metric(run.best[1])
    if run.tokens_per_second is not None:
        yield "Speed", f"{text.count(run.tokens_per_second)} tokens/s"
    yield "Tokens", text.count(float(last.get("tokens", 0)))
    yield "Peak memory per process", text.size(max(float(event.get("memory_bytes", 0)) for event in run.steps))
    if resident := float(last.get("resident_bytes", 0)):
        yield "Resident memory at the last step", text.size(resident)
    if run.goodput is not None:
        yield "Goodput", f"{run.goodput:.0%}"
    yield "Time in steps", text.duration(sum(float(event["step_time"]) for event in run.steps))


def _result(run: RunFigures) -> str:
    """Return the metrics of the first and of the last evaluation."""
    if not run.evaluations:
        return ""
    first, last = run.evaluations[0], run.evaluations[-1]
    events = [first, last] if first["step"] < last["step"] else [last]
    head = [f"After step {event['step']:,}" if event["step"] else "Untrained" for event in events]
    rows = [(text.metric_name(metric), *(_metric(event, metric) for event in events)) for metric in last["metrics"]]
    return table(["Validation", *head], rows, numbers=range(1, 1 + len(events)))


def _metric(event: EventRecord, metric: str) -> str:
    value, interval = event["metrics"].get(metric, ""), mapping(event.get("intervals")).get(metric)
    shown = text.metric(value) if is_number(value) else str(value)
    return shown if not interval else "{} ({:.4g} to {:.4g})".format(shown, *interval)


def _hyperparameters(run: RunFigures) -> str:
    """Return what decides the result, of the recipe as it was resolved: what is set, by key."""
    values = {key: value for key, value in values_by_key(run.recipe) if value not in (None, "none", [], {})}
    task_keys = [key for key in values if run.task and key.startswith(f"{run.task}.")]
    rows: list[tuple[str, object]] = [(key, values[key]) for key in (*_DECIDE, *task_keys) if key in values]
    if (every := run.start.get("trainable_parameters")) and (of := run.start.get("parameters")):
        rows.insert(0, ("trainable parameters", f"{every:,.0f} of {of:,.0f}"))
    return table(["Key", "Value"], rows)


def _data(run: RunFigures) -> str:
    keys = {key: value for key, value in values_by_key(run.recipe) if key in ("data.train", "data.validation")}
    rows: list[tuple[str, object]] = [(key, value) for key, value in keys.items() if value is not None]
    sentences = run.start.get("data")
    for sentence in sentences if isinstance(sentences, list) else ():
        what, colon, words = str(sentence).partition(": ")
        rows.append((what, words) if colon else ("", what))
    return table(["", ""], rows, text=[1]) if rows else ""


def _samples(run: RunFigures) -> Iterator[str]:
    for prompt, events in run.samples.items():
        shown = events[-_SAMPLES:]
        more = f" (the last {_SAMPLES} of {len(events)})" if len(events) > _SAMPLES else ""
        body = table(
            ["Step", "Answer"], [(event["step"], event.get("text") or "(no text)") for event in shown], text=[1]
        )
        yield f'<details open><summary dir="auto">{escaped(prompt)}{more}</summary>{body}</details>'


def _predicted(run: RunFigures, page: Page) -> Iterator[str]:
    plan, measured = plan_of(run.directory), run.finish.get("measured", {})
    predicted = run.start.get("predicted", {})
    lines = list(compared(predicted, measured))
    if lines:
        outside = [number for number, line in enumerate(lines) if line.is_outside]
        yield table(["", "This run"], [(line.label.capitalize(), line.words) for line in lines], warned=outside)
        yield "".join(prose(f"{why}.") for why in reasons_of(predicted, measured))
    charts = []
    chosen = mapping(plan.get("chosen"))
    if phases := _largest(mapping(chosen.get("memory")).get("phases")):
        rows = [{"part": name, "kind": "plan", "value": value / _BYTES} for name, value in phases.items()]
        if run.steps:
            peak = max(float(event.get("memory_bytes", 0)) for event in run.steps) / _BYTES
            # On GPUs tensors are counted, without the memory of the driver and the libraries.
            part, of = ("all tensors", "tensors_bytes") if run.start.get("gpus") else ("whole process", "memory_bytes")
            rows.append({"part": part, "kind": "plan", "value": predicted.get(of, 0) / _BYTES})
            rows.append({"part": part, "kind": "measured", "value": peak})
        charts.append(pair_chart("Memory per process by phase", rows, "MiB"))
    if parts := _largest(mapping(chosen.get("time")).get("parts")):
        rows = [{"part": name, "kind": "plan", "value": value} for name, value in parts.items()]
        rows.append({"part": "whole step", "kind": "plan", "value": predicted.get("step_time", 0.0)})
        if "step_time" in measured:
            rows.append({"part": "whole step", "kind": "measured", "value": measured["step_time"]})
        charts.append(pair_chart("Step time by part", rows, "seconds"))
    yield page.charts(charts)


def _profiles(run: RunFigures) -> Iterator[str]:
    for event in run.profiles:
        steps = f"Steps {event.get('first')} to {event.get('step')}"
        yield f"<p>{escaped(steps)}: <code>{escaped(event.get('path'))}</code>, which ui.perfetto.dev opens.</p>"
        for snapshot in event.get("memory", ()):
            yield f"<p>Memory: <code>{escaped(snapshot)}</code>, which pytorch.org/memory_viz opens.</p>"
        rows = []
        for each in event.get("operators", ()):
            with suppress(KeyError, TypeError, ValueError):
                shown = f"{each['calls']:,}", text.span(each["seconds"]), f"{each['share']:.1%}"
                rows.append((_kernel(str(each["name"])), *shown))
        yield table(["Operator", "Calls", "Time, all ranks", "Share"], rows, numbers=[1, 2, 3], names=[0])


def _kernel(name: str) -> str:
    """Return the name of an operator or kernel without what torch's kernels begin with."""
    return re.sub(r"^void |\(anonymous namespace\)::|\bat::native::|\bc10::", "", name)


def _timeline(run: RunFigures) -> str:
    if not run.timeline:
        return ""
    start = run.everything[0]["time"]
    shown = run.timeline[-_TIMELINE:]
    rows = [(text.duration(e["time"] - start), e.get("step", ""), e["event"], _words(e)) for e in shown]
    more = f"<p class=soft>The last {_TIMELINE} of {len(run.timeline)}.</p>" if len(run.timeline) > _TIMELINE else ""
    return more + table(["After", "Step", "Event", ""], rows, text=[3])


def _words(event: EventRecord) -> str:
    kind = event["event"]
    if kind == "start":
        resumed = event.get("resumed_from")
        how = "started" if resumed is None else f"resumed from {resumed}"
        parent = mapping(event.get("parent"))
        if resumed is not None and resumed == parent.get("step"):
            how = f"started from step {resumed} of {parent.get('run')}"
        return f"{how}: {event.get('strategy')} on {event.get('world_size')}, {event.get('mixed_precision')}"
    if kind == "checkpoint":
        return (
            f"written in {event.get('seconds', 0.0):.1f} s, training waited {event.get('blocked_seconds', 0.0):.1f} s"
            f" and its steps took {event.get('slowed_seconds', 0.0):.1f} s longer"
        )
    if kind == "fault":
        return f"{event.get('kind')} on rank {event.get('rank')}: {event.get('detail')} ({event.get('action')})"
    if kind == "rewind":
        return f"back to step {event.get('resumed_from')}, without the batches of steps {event.get('left_out')}"
    if kind == "finish":
        return str(event.get("status"))
    return str(event.get("detail") or event.get("message") or "")


def _choices(run: RunFigures) -> str:
    reasons = run.start.get("reasons", ())
    rows = [(key, why) for key, _, why in (reason.partition(": ") for reason in reasons)]
    return table(["Choice", "Reason"], rows, text=[1]) if rows else ""


def _environment(run: RunFigures) -> str:
    start = run.start
    rows: list[tuple[str, object]] = [
        ("Device", start.get("device", "")),
        ("Processes", f"{start.get('world_size', '')} on {', '.join(start.get('nodes', []))}"),
        ("Launcher", start.get("launcher", "")),
        ("Job", start.get("job") or ""),
        ("Threads per process", start.get("threads", "")),
        ("Attention", "; ".join(start.get("attention", ()))),
        ("Directory", run.directory.absolute()),
        *((name, version) for name, version in start.get("versions", {}).items()),
    ]
    return table(["", ""], [row for row in rows if row[1]]) if start else ""


def _recipe(run: RunFigures) -> Iterator[str]:
    if not run.recipe:  # it cannot be read
        return
    with open_inside(run.directory, RECIPE) as file:
        recipe = file.read().decode()
    yield "<p>To reproduce the run in a new directory, save this as <code>recipe.yaml</code>:</p>"
    yield "<pre>trainwright train recipe.yaml logging.run_directory=auto</pre>"
    yield f'<pre tabindex="0">{escaped(recipe)}</pre>'


def _largest(parts: Any) -> dict[str, float]:
    """Return the parts that are at least a hundredth of their sum."""
    figures = {name: value for name, value in mapping(parts).items() if is_number(value)}
    total = sum(figures.values())
    return {name: value for name, value in figures.items() if total and value >= 0.01 * total}


_CURVE_POINTS = 400
_MAX_CLOCK_LIMITS = 50
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
_SECONDS_OF_EVENTS = {"evaluate": ("evaluation", "seconds"), "checkpoint": ("checkpoints", "blocked_seconds")}


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


def machine_curves(ledger: Sequence[RankLedger], limit: int = _CURVE_POINTS) -> Iterator[MachineCurves]:
    """Yield every measure that the samples of the first ranks have, with at most ``limit`` points of a rank."""
    start = min((rank.lines[0].started for rank in ledger), default=0.0)
    for name, (title, unit, scale) in _MEASURES.items():
        points = {}
        for rank in ledger[:SHOWN_RANKS]:
            values = ((index, _measure(line.system, name)) for index, line in enumerate(rank.lines))
            shown = thinned([(index, value * scale) for index, value in values if value is not None], limit)
            points[rank.rank] = [(rank.lines[index].time - start, value) for index, value in shown]
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
    yield from _clock_limits(ledger)
    yield page.charts(charts[True])
    if usual := charts[False]:
        yield f"<details><summary>{text.plural(len(usual), 'more chart')}</summary>{page.charts(usual)}</details>"


def _clock_limits(ledger: Sequence[RankLedger]) -> Iterator[str]:
    """Yield a table of what lowered the clocks of GPUs, with the share of the samples."""
    rows = []
    for rank in ledger:
        samples = [gpu.get("limited") for line in rank.lines if isinstance(gpu := line.system.get("gpu"), dict)]
        limits = [words for words in samples if isinstance(words, list)]
        counts = Counter(str(word) for words in limits for word in words)
        for word, count in counts.most_common():
            rows.append((f"Rank {rank.rank}", word, f"{count / len(limits):.0%}"))
    if rows:
        yield "<h3>What lowered the clocks of GPUs</h3>"
        yield table(["", "Because of", "Share of the samples"], rows[:_MAX_CLOCK_LIMITS])


def _measure(system: Mapping[str, Any], name: str) -> float | None:
    """Return a measure of a sample; ``name`` may have a group before a point."""
    group, _, key = name.rpartition(".")
    inside = system.get(group) if group else system
    value = inside.get(key) if isinstance(inside, Mapping) else None
    return float(value) if is_number(value) else None


def _from_events(run: RunFigures, page: Page) -> Iterator[str]:
    seconds = seconds_by_kind(run)
    if seconds:
        total = sum(seconds.values())
        rows = [(kind.capitalize(), text.span(value), f"{value / total:.1%}") for kind, value in seconds.items()]
        yield table(["", "Time", "Share"], rows)
        yield page.charts([bar_chart("Seconds since the run began", seconds, "seconds")])


def seconds_by_kind(run: RunFigures) -> dict[str, float]:
    """Return the seconds since the run began by what they were used for; only kinds that took any.

    ``steps`` are those that count; ``repeated`` were done again after a fault; ``paused`` is between launches;
    ``other`` is start-up, generation, and what has no event.
    """
    events = run.everything
    if not events:
        return {}
    by_kind = dict.fromkeys(("steps", "repeated", "evaluation", "checkpoints", "paused", "other"), 0.0)
    by_kind["steps"] = _sum(run.steps, "step_time")
    by_kind["repeated"] = _sum([event for event in events if event["event"] == "step"], "step_time") - by_kind["steps"]
    for event in events:
        if event["event"] in _SECONDS_OF_EVENTS:
            kind, field = _SECONDS_OF_EVENTS[event["event"]]
            by_kind[kind] += float(event.get(field, 0.0))
        slowed = float(event.get("slowed_seconds", 0.0))  # of a checkpoint, in steps beside it
        by_kind["checkpoints"] += slowed
        by_kind["steps"] -= slowed
    for before, event in pairwise(events):
        if event["event"] == "start":
            by_kind["paused"] += max(0.0, event["time"] - before["time"])
    spent = events[-1]["time"] - events[0]["time"]
    by_kind["other"] = spent - sum(by_kind.values())
    return {kind: seconds for kind, seconds in by_kind.items() if seconds > 0.005}


def _sum(events: Sequence[EventRecord], field: str) -> float:
    return sum(float(event.get(field, 0.0)) for event in events)


REMARKS = "remarks.json"
_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 20, 40, 10_000
_MOST_BYTES = 2**17


@dataclass(frozen=True)
class RunRemarks:
    """Raises RequestError for more or longer ones than a table can show."""

    tags: list[str] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.tags, list) or not all(isinstance(tag, str) for tag in self.tags):
            raise RequestError("tags: expected a list of texts")
        if len(self.tags) > _MOST_TAGS or any(not 0 < len(tag) <= _LONGEST_TAG for tag in self.tags):
            raise RequestError(f"tags: at most {_MOST_TAGS}, of 1 to {_LONGEST_TAG} characters each")
        if not isinstance(self.note, str) or len(self.note) > _LONGEST_NOTE:
            raise RequestError(f"note: expected a text of at most {_LONGEST_NOTE:,} characters")


def read_remarks(run: Path) -> RunRemarks:
    """Return the remarks of a run that may be anybody's; empty ones if there is no such file or it is damaged."""
    try:
        with open_inside(run, REMARKS) as file:
            content = json.loads(file.read(_MOST_BYTES))
        return RunRemarks(content.get("tags", []), content.get("note", ""))
    except (OSError, ValueError, RecursionError, AttributeError, RequestError):
        return RunRemarks()


def write_remarks(run: Path, remarks: RunRemarks) -> None:
    """Write the remarks of a run. Raises OSError."""
    write_file(run / REMARKS, json.dumps(asdict(remarks), indent=2, ensure_ascii=False) + "\n")
