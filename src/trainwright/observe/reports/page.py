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

from trainwright.engine.event_reader import EventRecord, compare_with_plan, explain_slow_steps
from trainwright.errors import RequestError
from trainwright.observe.ledger import CATEGORIES, SHOWN_RANKS, TRAINING, RankLedger, read_ledger
from trainwright.observe.reports import charts
from trainwright.observe.reports.charts import (
    Specification,
    build_bar_chart,
    build_curve_charts,
    build_heat_chart,
    build_pair_chart,
    build_time_chart,
)
from trainwright.observe.reports.figures import SMOOTHING, RunFigures, is_number, thin_points, to_mapping
from trainwright.recipe.yaml_text import iterate_values
from trainwright.run.run_directory import RECIPE, read_plan
from trainwright.utils import text
from trainwright.utils.paths import open_inside, write_file
from trainwright.utils.text import escape_controls

# Nothing is loaded or sent. Vega compiles its expressions, which needs unsafe-eval.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"


def to_html(value: object) -> str:
    """Return text as HTML; characters that control terminals or the direction of text are shown, not used."""
    return html.escape(escape_controls(str(value)))


def format_tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return labelled values as a list of boxes."""
    items = "".join(f'<li class="tile"><span>{to_html(k)}</span><b>{to_html(v)}</b></li>' for k, v in values)
    return f'<ul class="tiles">{items}</ul>'


def format_html_table(
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
    heads = "".join(
        f'<th scope="col"{kinds.get(column, "") if column in numbers else ""}>{to_html(name)}</th>'
        for column, name in enumerate(head)
    )
    lines = "".join(
        f"<tr{' class=warn' if number in warned else ''}>"
        + "".join(
            f"<td{kinds.get(column, '')}{_format_tooltip(cell) if column in names else ''}>{to_html(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _format_tooltip(cell: object) -> str:
    return f' title="{to_html(cell)}"'


def format_prose(sentence: str) -> str:
    """Return a sentence as a paragraph, with what is between backticks as code."""
    inside = re.sub("`([^`]+)`", r"<code>\1</code>", to_html(sentence))
    return f"<p>{inside[:1].upper()}{inside[1:]}</p>"


def format_section(title: str, *parts: str) -> str:
    """Return a section with a heading; "" if all parts are empty."""
    inside = "".join(parts)
    return f"<section><h2>{to_html(title)}</h2>{inside}</section>" if inside else ""


class Page:
    """A page with charts. ``add`` its parts in order, then ``render`` it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._charts: list[charts.Specification] = []

    def add(self, part: str) -> None:
        """Append a part."""
        self._parts.append(part)

    def add_charts(self, specifications: Sequence[charts.Specification]) -> str:
        """Return the places of charts, which are drawn when the page is opened."""
        containers = []
        for specification in specifications:
            containers.append(f'<div class="chart"><div id="chart-{len(self._charts)}"></div></div>')
            self._charts.append(specification)
        return f'<div class="charts">{"".join(containers)}</div>' if containers else ""

    def render(self) -> str:
        """Return the page. Raises RequestError if the script of charts is missing."""
        library = charts.read_script().replace("</script", "<\\/script")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{to_html(self._title)}</title><style>{_read_own_file('page.css')}</style></head><body><main>{''.join(self._parts)}</main>"
            f'<script type="application/json" id="axes">{_format_json(charts.AXES)}</script>'
            f'<script type="application/json" id="charts">{_format_json(self._charts)}</script>'
            f"<script>{library}</script><script>{_read_own_file('page.js')}</script></body></html>\n"
        )


CURVE_MENU = (
    '<p class="no-print"><label for="axis">Horizontal axis: </label><select id="axis">'
    + "".join(f'<option value="{name}">{title}</option>' for name, title in charts.AXES.items())
    + '</select> <label for="smoothing">Smoothing: </label><select id="smoothing"><option value="">none</option>'
    + "".join(f'<option value="{charts.name_smoothing_field(weight)}">{weight}</option>' for weight in SMOOTHING)
    + '</select> <span class="soft hint">Scroll to zoom, drag to move, double-click to reset.</span></p>'
)


def _read_own_file(name: str) -> str:
    return (files("trainwright.observe.reports") / name).read_text(encoding="utf-8")


def _format_json(value: Any) -> str:
    return to_json(value).replace("<", "\\u003c")


def to_json(value: Any) -> str:
    """Return JSON with null for the numbers that JSON does not have, and text for what is none of its types."""
    return json.dumps(_convert_plain(value), default=str)


def _convert_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _convert_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_plain(item) for item in value]
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


def build_report(run: RunFigures) -> str:
    """Return the page of a run. Raises RequestError if the package with the script of charts is missing."""
    page = Page(f"{run.name} - Trainwright")
    ledger = read_ledger(run.directory, run.everything)
    page.add(_format_head(run))
    page.add(format_section("Result", _format_result(run)))
    page.add(format_section("Hyperparameters", _format_hyperparameters(run)))
    page.add(format_section("Data", _format_data(run)))
    page.add(format_section("Curves", CURVE_MENU, page.add_charts(build_curve_charts([run]))) if run.steps else "")
    page.add(format_section("Samples", *_format_samples(run)))
    page.add(format_section("Predicted and measured", *_format_predictions(run, page)))
    page.add(format_section("Where the time went", *format_time_use(run, ledger, page)))
    page.add(format_section("Profile", *_format_profiles(run)))
    page.add(format_section("Machine", *format_machines(ledger, page)))
    page.add(format_section("Time line", _format_timeline(run)))
    page.add(format_section("Choices", _format_choices(run)))
    page.add(format_section("Environment", _format_environment(run)))
    page.add(format_section("Recipe", *_format_recipe(run)))
    return page.render()


def _format_head(run: RunFigures) -> str:
    tone = _TONES.get(run.status, "warn")
    status = "was training when this page was written" if run.trains else run.status  # true whatever happens later
    about = ", ".join(part for part in (run.task, run.model, str(run.start.get("strategy", ""))) if part)
    remarks = read_remarks(run.directory)
    remark = "".join(f"<p>{to_html(words)}</p>" for words in (", ".join(remarks.tags), remarks.note) if words)
    world = round(run.start.get("world_size", 0))
    on = f" on {text.format_plural(world, 'process', 'processes')}" if world else ""
    remark += f"<p>{to_html(run.parent)}</p>" if run.parent else ""
    newer = f'<p class="warn">{to_html(run.newer)}</p>' if run.newer else ""
    problems = [*run.damage[:20], *filter(None, [run.recipe_problem])]
    damage = newer + "".join(f'<p class="bad">{to_html(problem)}; shown without it</p>' for problem in problems)
    return (
        f'<header><div class="head"><h1>{to_html(run.name)}</h1><span class="badge {tone}">{to_html(status)}</span>'
        f'</div><p class="soft">{to_html(about + on)}<br>written {time.strftime("%Y-%m-%d %H:%M:%S %Z")}</p>{remark}'
        f"{damage}{format_tiles(_iterate_tiles(run))}</header>"
    )


def _iterate_tiles(run: RunFigures) -> Iterator[tuple[str, str]]:
    if not run.steps:
        return
    last = run.steps[-1]
    yield "Step", f"{run.step:,} of {int(run.start.get('max_steps', 0)):,}"
    yield "Training loss", text.format_metric(float(last["loss"]))
    if run.best is not None:
        yield f"Best validation loss (step {run.best[0]:,})", text.format_metric(run.best[1])
    if run.tokens_per_second is not None:
        yield "Speed", f"{text.format_count(run.tokens_per_second)} tokens/s"
    yield "Tokens", text.format_count(float(last.get("tokens", 0)))
    yield "Peak memory per process", text.format_bytes(max(float(event.get("memory_bytes", 0)) for event in run.steps))
    if resident := float(last.get("resident_bytes", 0)):
        yield "Resident memory at the last step", text.format_bytes(resident)
    if run.goodput is not None:
        yield "Goodput", f"{run.goodput:.0%}"
    yield "Time in steps", text.format_duration(sum(float(event["step_time"]) for event in run.steps))


def _format_result(run: RunFigures) -> str:
    """Return the metrics of the first and of the last evaluation."""
    if not run.evaluations:
        return ""
    first, last = run.evaluations[0], run.evaluations[-1]
    events = [first, last] if first["step"] < last["step"] else [last]
    head = [f"After step {event['step']:,}" if event["step"] else "Untrained" for event in events]
    rows = [
        (text.format_metric_name(metric), *(_format_metric(event, metric) for event in events))
        for metric in last["metrics"]
    ]
    return format_html_table(["Validation", *head], rows, numbers=range(1, 1 + len(events)))


def _format_metric(event: EventRecord, metric: str) -> str:
    value, interval = event["metrics"].get(metric, ""), to_mapping(event.get("intervals")).get(metric)
    value_text = text.format_metric(value) if is_number(value) else str(value)
    return value_text if not interval else "{} ({:.4g} to {:.4g})".format(value_text, *interval)


def _format_hyperparameters(run: RunFigures) -> str:
    """Return what decides the result, of the recipe as it was resolved: what is set, by key."""
    values = {key: value for key, value in iterate_values(run.recipe) if value not in (None, "none", [], {})}
    task_keys = [key for key in values if run.task and key.startswith(f"{run.task}.")]
    rows: list[tuple[str, object]] = [(key, values[key]) for key in (*_DECIDE, *task_keys) if key in values]
    if (every := run.start.get("trainable_parameters")) and (of := run.start.get("parameters")):
        rows.insert(0, ("trainable parameters", f"{every:,.0f} of {of:,.0f}"))
    return format_html_table(["Key", "Value"], rows)


def _format_data(run: RunFigures) -> str:
    keys = {key: value for key, value in iterate_values(run.recipe) if key in ("data.train", "data.validation")}
    rows: list[tuple[str, object]] = [(key, value) for key, value in keys.items() if value is not None]
    sentences = run.start.get("data")
    for sentence in sentences if isinstance(sentences, list) else ():
        subject, colon, words = str(sentence).partition(": ")
        rows.append((subject, words) if colon else ("", subject))
    return format_html_table(["", ""], rows, text=[1]) if rows else ""


def _format_samples(run: RunFigures) -> Iterator[str]:
    for prompt, events in run.samples.items():
        last_events = events[-_SAMPLES:]
        more = f" (the last {_SAMPLES} of {len(events)})" if len(events) > _SAMPLES else ""
        rows = [(event["step"], event.get("text") or "(no text)") for event in last_events]
        body = format_html_table(["Step", "Answer"], rows, text=[1])
        yield f'<details open><summary dir="auto">{to_html(prompt)}{more}</summary>{body}</details>'


def _format_predictions(run: RunFigures, page: Page) -> Iterator[str]:
    plan, measurements = read_plan(run.directory), run.finish.get("measured", {})
    prediction = run.start.get("predicted", {})
    lines = list(compare_with_plan(prediction, measurements))
    if lines:
        outside = [number for number, line in enumerate(lines) if line.is_outside]
        yield format_html_table(
            ["", "This run"], [(line.label.capitalize(), line.words) for line in lines], warned=outside
        )
        yield "".join(format_prose(f"{why}.") for why in explain_slow_steps(prediction, measurements))
    charts = []
    candidate = to_mapping(plan.get("chosen"))
    if phases := _select_largest(to_mapping(candidate.get("memory")).get("phases")):
        rows = [{"part": name, "kind": "plan", "value": value / _BYTES} for name, value in phases.items()]
        if run.steps:
            peak = max(float(event.get("memory_bytes", 0)) for event in run.steps) / _BYTES
            # On GPUs tensors are counted, without the memory of the driver and the libraries.
            part, of = ("all tensors", "tensors_bytes") if run.start.get("gpus") else ("whole process", "memory_bytes")
            rows.append({"part": part, "kind": "plan", "value": prediction.get(of, 0) / _BYTES})
            rows.append({"part": part, "kind": "measured", "value": peak})
        charts.append(build_pair_chart("Memory per process by phase", rows, "MiB"))
    if parts := _select_largest(to_mapping(candidate.get("time")).get("parts")):
        rows = [{"part": name, "kind": "plan", "value": value} for name, value in parts.items()]
        rows.append({"part": "whole step", "kind": "plan", "value": prediction.get("step_time", 0.0)})
        if "step_time" in measurements:
            rows.append({"part": "whole step", "kind": "measured", "value": measurements["step_time"]})
        charts.append(build_pair_chart("Step time by part", rows, "seconds"))
    yield page.add_charts(charts)


def _format_profiles(run: RunFigures) -> Iterator[str]:
    for event in run.profiles:
        steps = f"Steps {event.get('first')} to {event.get('step')}"
        yield f"<p>{to_html(steps)}: <code>{to_html(event.get('path'))}</code>, which ui.perfetto.dev opens.</p>"
        for snapshot in event.get("memory", ()):
            yield f"<p>Memory: <code>{to_html(snapshot)}</code>, which pytorch.org/memory_viz opens.</p>"
        rows = []
        for operator in event.get("operators", ()):
            with suppress(KeyError, TypeError, ValueError):
                cells = f"{operator['calls']:,}", text.format_seconds(operator["seconds"]), f"{operator['share']:.1%}"
                rows.append((_shorten_kernel_name(str(operator["name"])), *cells))
        yield format_html_table(["Operator", "Calls", "Time, all ranks", "Share"], rows, numbers=[1, 2, 3], names=[0])


def _shorten_kernel_name(name: str) -> str:
    """Return the name of an operator or kernel without what torch's kernels begin with."""
    return re.sub(r"^void |\(anonymous namespace\)::|\bat::native::|\bc10::", "", name)


def _format_timeline(run: RunFigures) -> str:
    if not run.timeline:
        return ""
    start = run.everything[0]["time"]
    last_events = run.timeline[-_TIMELINE:]
    rows = [
        (text.format_duration(e["time"] - start), e.get("step", ""), e["event"], _describe_event(e))
        for e in last_events
    ]
    more = f"<p class=soft>The last {_TIMELINE} of {len(run.timeline)}.</p>" if len(run.timeline) > _TIMELINE else ""
    return more + format_html_table(["After", "Step", "Event", ""], rows, text=[3])


def _describe_event(event: EventRecord) -> str:
    kind = event["event"]
    if kind == "start":
        resume_step = event.get("resumed_from")
        how = "started" if resume_step is None else f"resumed from {resume_step}"
        parent = to_mapping(event.get("parent"))
        if resume_step is not None and resume_step == parent.get("step"):
            how = f"started from step {resume_step} of {parent.get('run')}"
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


def _format_choices(run: RunFigures) -> str:
    reasons = run.start.get("reasons", ())
    rows = [(key, why) for key, _, why in (reason.partition(": ") for reason in reasons)]
    return format_html_table(["Choice", "Reason"], rows, text=[1]) if rows else ""


def _format_environment(run: RunFigures) -> str:
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
    return format_html_table(["", ""], [row for row in rows if row[1]]) if start else ""


def _format_recipe(run: RunFigures) -> Iterator[str]:
    if not run.recipe:  # it cannot be read
        return
    with open_inside(run.directory, RECIPE) as file:
        recipe = file.read().decode()
    yield "<p>To reproduce the run in a new directory, save this as <code>recipe.yaml</code>:</p>"
    yield "<pre>trainwright train recipe.yaml logging.run_directory=auto</pre>"
    yield f'<pre tabindex="0">{to_html(recipe)}</pre>'


def _select_largest(parts: Any) -> dict[str, float]:
    """Return the parts that are at least a hundredth of their sum."""
    figures = {name: value for name, value in to_mapping(parts).items() if is_number(value)}
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


def format_time_use(run: RunFigures, ledger: Sequence[RankLedger], page: Page) -> Iterator[str]:
    """Yield a table and a chart of the seconds of every rank by category."""
    if not ledger:
        yield from _format_event_seconds(run, page)
        return
    share = sum(rank.trained * rank.wall for rank in ledger) / max(sum(rank.wall for rank in ledger), 1e-9)
    yield f"<p>{share:.1%} of the time of all ranks was used for {', '.join(TRAINING[:-1])} and {TRAINING[-1]}.</p>"
    categories = [name for name in CATEGORIES if any(name in rank.seconds for rank in ledger)]
    heads = [f"Rank {rank.rank}" for rank in ledger] if len(ledger) <= SHOWN_RANKS else ["Mean", "Least", "Most"]
    rows = [_format_category(name, ledger) for name in categories]
    yield format_html_table(["Seconds", *heads], rows, numbers=range(1, len(heads) + 1))
    shares = [
        {"rank": rank.rank, "part": name, "share": rank.seconds.get(name, 0.0) / max(rank.wall, 1e-9)}
        for rank in ledger
        for name in categories
    ]
    yield page.add_charts([build_heat_chart("Share of the time of each rank", shares)])


def _format_category(name: str, ledger: Sequence[RankLedger]) -> tuple[str, ...]:
    """Return a row of the table: the seconds of every rank, or a summary of many."""
    values = [rank.seconds.get(name, 0.0) for rank in ledger]
    columns = values if len(values) <= SHOWN_RANKS else [statistics.fmean(values), min(values), max(values)]
    # All in one unit, as ranks are compared.
    return (name.capitalize(), *(f"{value:,.{1 if value >= 10 else 2}f}" if value else "" for value in columns))


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


def iterate_machine_curves(ledger: Sequence[RankLedger], limit: int = _CURVE_POINTS) -> Iterator[MachineCurves]:
    """Yield every measure that the samples of the first ranks have, with at most ``limit`` points of a rank."""
    start = min((rank.lines[0].started for rank in ledger), default=0.0)
    for name, (title, unit, scale) in _MEASURES.items():
        points = {}
        for rank in ledger[:SHOWN_RANKS]:
            values = ((index, _read_measure(line.system, name)) for index, line in enumerate(rank.lines))
            few_points = thin_points([(index, value * scale) for index, value in values if value is not None], limit)
            points[rank.rank] = [(rank.lines[index].time - start, value) for index, value in few_points]
        least = _NOTABLE.get(name, 0.0) * scale
        if any(value >= least for of_rank in points.values() for _, value in of_rank):
            yield MachineCurves(title, unit, name in _NOTABLE, points)


def format_machines(ledger: Sequence[RankLedger], page: Page) -> Iterator[str]:
    """Yield charts of what the machines of the first ranks did."""
    charts: dict[bool, list[Specification]] = {True: [], False: []}
    for curves in iterate_machine_curves(ledger):
        rows = [
            {"after": after, "value": value, "run": f"rank {rank}"}
            for rank, points in curves.points.items()
            for after, value in points
        ]
        charts[curves.is_notable].append(build_time_chart(curves.title, curves.unit, rows))
    yield from _format_clock_limits(ledger)
    yield page.add_charts(charts[True])
    if usual := charts[False]:
        summary = text.format_plural(len(usual), "more chart")
        yield f"<details><summary>{summary}</summary>{page.add_charts(usual)}</details>"


def _format_clock_limits(ledger: Sequence[RankLedger]) -> Iterator[str]:
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
        yield format_html_table(["", "Because of", "Share of the samples"], rows[:_MAX_CLOCK_LIMITS])


def _read_measure(system: Mapping[str, Any], name: str) -> float | None:
    """Return a measure of a sample; ``name`` may have a group before a point."""
    group, _, key = name.rpartition(".")
    inside = system.get(group) if group else system
    value = inside.get(key) if isinstance(inside, Mapping) else None
    return float(value) if is_number(value) else None


def _format_event_seconds(run: RunFigures, page: Page) -> Iterator[str]:
    seconds = sum_seconds_by_kind(run)
    if seconds:
        total = sum(seconds.values())
        rows = [
            (kind.capitalize(), text.format_seconds(value), f"{value / total:.1%}") for kind, value in seconds.items()
        ]
        yield format_html_table(["", "Time", "Share"], rows)
        yield page.add_charts([build_bar_chart("Seconds since the run began", seconds, "seconds")])


def sum_seconds_by_kind(run: RunFigures) -> dict[str, float]:
    """Return the seconds since the run began by what they were used for; only kinds that took any.

    ``steps`` are those that count; ``repeated`` were done again after a fault; ``paused`` is between launches;
    ``other`` is start-up, generation, and what has no event.
    """
    events = run.everything
    if not events:
        return {}
    by_kind = dict.fromkeys(("steps", "repeated", "evaluation", "checkpoints", "paused", "other"), 0.0)
    by_kind["steps"] = _sum_field(run.steps, "step_time")
    all_steps = [event for event in events if event["event"] == "step"]
    by_kind["repeated"] = _sum_field(all_steps, "step_time") - by_kind["steps"]
    for event in events:
        if event["event"] in _SECONDS_OF_EVENTS:
            kind, field = _SECONDS_OF_EVENTS[event["event"]]
            by_kind[kind] += float(event.get(field, 0.0))
        slowed_seconds = float(event.get("slowed_seconds", 0.0))  # of a checkpoint, in steps beside it
        by_kind["checkpoints"] += slowed_seconds
        by_kind["steps"] -= slowed_seconds
    for before, event in pairwise(events):
        if event["event"] == "start":
            by_kind["paused"] += max(0.0, event["time"] - before["time"])
    spent = events[-1]["time"] - events[0]["time"]
    by_kind["other"] = spent - sum(by_kind.values())
    return {kind: seconds for kind, seconds in by_kind.items() if seconds > 0.005}


def _sum_field(events: Sequence[EventRecord], field: str) -> float:
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
