"""The console output of a run: a banner, the progress, events in between, and the paths of all results."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TextIO

from trainwright.data.tokens.lengths import check_repetition
from trainwright.engine import event_reader
from trainwright.engine.event_reader import EarlierEvents, EventRecord
from trainwright.machine.usage import format_figures
from trainwright.models.supported import read_class_name
from trainwright.models.usage import choose_model_class, format_evaluation_command
from trainwright.run.observers.hooks import ObservedRun, build_sampler
from trainwright.run.observers.progress import Remaining, build_progress
from trainwright.run.process import find_console
from trainwright.utils import text
from trainwright.utils.activity import Ticker

_LINE_SECONDS = 5.0
# A log says that a step takes long only after this time: it has lines of other steps.
_LONG_STEP = 30.0
_LABEL = 14
# Reasons on a terminal too. A variable, because worker processes inherit it.
VERBOSE = "TRAINWRIGHT_VERBOSE"
_CHOICE = re.compile(r"(\w+\.[\w.]+ [^:;]+): .+")  # a key, its value, and why
_DETAILS = re.compile(r"tokens kept in .*|\w+: [\d,]+ tokens, .*")


def build_observer(run: ObservedRun, _: object) -> ConsoleObserver | None:
    """Return the observer that writes to the console of this process; None if it has none."""
    return None if (stream := find_console()) is None else ConsoleObserver(stream)


class ConsoleObserver:
    """Observer that writes to `stream`; if that is a terminal, with a progress bar, and without reasons."""

    def __init__(self, stream: TextIO, line_seconds: float = _LINE_SECONDS) -> None:
        self._stream = stream
        self._progress = build_progress(stream, line_seconds)
        self._remaining = Remaining({})
        self._what = ""
        self._fraction = ""
        self._ticker = Ticker(self._show_operation)
        self._past = EarlierEvents([], 0.0)
        self._resumed: int | None = None
        self._run = Path(".")
        self._first_metrics: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}
        self._last_step: EventRecord = {}
        self._predicted: dict[str, float] = {}
        self._told_write_error = False
        self._handlers = {
            "start": self._start,
            "step": self._step,
            "evaluate": self._evaluate,
            "generate": self._generate,
            "checkpoint": self._report_checkpoint,
            "profile": self._profile,
            "fault": self._report_fault,
            "notice": lambda event: self._write(f"note: {event['message']}"),
            "finish": self._finish,
        }

    def __call__(self, event: EventRecord) -> None:
        """Show an event."""
        if event["event"] == "progress":
            self._fraction = f", {event['done'] / event['total']:.0%}"
            return
        if "write_error" in event and not self._told_write_error:
            self._told_write_error = True
            self._write(f"note: events.jsonl cannot be written ({event['write_error']}); training continues")
        self._ticker.stop()
        self._remaining.see(event)
        handler = self._handlers.get(event["event"])
        if handler:
            handler(event)
        if event["event"] == "phase":
            self._begin(event["doing"] if event.get("step") is None else f"step {event['step']}: {event['doing']}")
        elif event["event"] == "finish":
            self._ticker.close()
        elif event.get("step") is not None and event["step"] < self._remaining.total:
            self._begin(f"step {event['step'] + 1}", None if self._progress.is_drawn else _LONG_STEP)

    def _begin(self, what: str, quiet_seconds: float | None = None) -> None:
        """Show ``what`` if there is no event for long."""
        self._what, self._fraction = what, ""
        self._ticker.begin(quiet_seconds)

    def _show_operation(self, seconds: float, for_log: bool) -> None:
        self._progress.show_operation(self._what, self._fraction, seconds, for_log)

    def close(self) -> None:
        """Remove the progress bar. A `finish` event does so too."""
        self._ticker.close()
        self._progress.close()

    def _write(self, lines: str = "") -> None:
        self._progress.write(lines)

    def _start(self, event: EventRecord) -> None:
        self._run = Path(event.get("run_directory", "."))
        self._predicted = event.get("predicted", {})
        self._resumed = event_reader.find_resumed_step(event)
        self._past = event_reader.read_earlier(self._run / "events.jsonl", event)
        for past in self._past.events:
            if past["event"] == "evaluate":
                self._measured(past["metrics"])
        self._remaining = Remaining(event, self._past.events)
        brief = self._progress.is_drawn and not os.environ.get(VERBOSE)
        for label, value in _build_banner(_shorten_start(event) if brief else event):
            self._write(f"{label:<{_LABEL}} {value}")
        self._write()
        samples = build_sampler(self._run, event["world_size"])
        self._progress.begin(self._resumed or 0, self._remaining, lambda: [*format_figures(samples()).values()])

    def _measured(self, metrics: dict[str, float]) -> None:
        self._first_metrics = self._first_metrics or metrics
        self._last_metrics = metrics

    def _step(self, event: EventRecord) -> None:
        self._last_step = event
        self._progress.step({**event, **self._compute_utilization(event)})

    def _compute_utilization(self, event: EventRecord) -> dict[str, float]:
        """Return the MFU, scaled from the plan's value at its predicted speed."""
        predicted_rate = self._predicted.get("tokens_per_second")
        if not predicted_rate or "mfu" not in self._predicted:
            return {}
        shares = {"mfu": self._predicted["mfu"] * event.get("tokens_per_second", 0.0) / predicted_rate}
        return {**shares, "nominal_peak": self._predicted.get("nominal_peak", 0.0)}

    def _evaluate(self, event: EventRecord) -> None:
        metrics = event["metrics"]
        self._measured(metrics)
        intervals = event.get("intervals", {})

        def between(name: str) -> str:
            return " ({} to {})".format(*map(text.format_metric, intervals[name])) if name in intervals else ""

        summary = "  ".join(
            f"{text.format_metric_name(name)} {text.format_metric(value)}{between(name)}"
            for name, value in metrics.items()
        )
        self._write(f"step {event['step']}: validation  {summary}")

    def _generate(self, event: EventRecord) -> None:
        self._write(f"step {event['step']}: sample")
        width = text.find_terminal_width(self._stream)
        self._write(text.wrap_block(event["prompt"], "  > ", width))
        self._write(text.wrap_block(event["text"], "    ", width))

    def _report_checkpoint(self, event: EventRecord) -> None:
        blocked_seconds = event.get("blocked_seconds", event["seconds"])
        slowed_seconds = event.get("slowed_seconds", 0.0)
        self._write(
            f"step {event['step']}: checkpoint {event['path']} in {event['seconds']:.1f} s"
            + (f", training waited {blocked_seconds:.1f} s" if blocked_seconds < event["seconds"] else "")
            + (f" and its steps took {slowed_seconds:.1f} s longer" if slowed_seconds >= 0.05 else "")
        )

    def _profile(self, event: EventRecord) -> None:
        self._write(f"steps {event['first']} to {event['step']}: profile {event['path']}, for https://ui.perfetto.dev")

    def _report_fault(self, event: EventRecord) -> None:
        rank = "" if event.get("rank") is None else f" on rank {event['rank']}"
        action = f"; {event['action']}" if event.get("action") else ""
        self._write(f"fault: {event['kind']}{rank}: {event['detail']}{action}")

    def _finish(self, event: EventRecord) -> None:
        self._progress.close()
        self._write()
        self._write(f"{event['status']} at step {event['step']} after {self._format_time_taken(event['seconds'])}")
        for name, last in self._last_metrics.items():
            if (first := self._first_metrics.get(name)) is not None and first != last:
                by = f"  ({change})" if (change := text.format_change(first, last)) else ""
                self._row(
                    text.format_metric_name(name), f"{text.format_metric(first)} -> {text.format_metric(last)}{by}"
                )
        measurements = event.get("measured", {})
        rows = list(event_reader.compare_with_plan(self._predicted, measurements))
        for row in rows:
            self._row(row.label, row.words, warns=row.is_outside)
        for number, why in enumerate(event_reader.explain_slow_steps(self._predicted, measurements)):
            self._row("" if number else "why", why)
        if resident := self._last_step.get("resident_bytes"):
            self._row("memory now", f"{text.format_bytes(resident)} resident in the largest process at the last step")
        memory = self._last_step.get("memory_bytes")
        if memory and not any(row.label == "memory" for row in rows):
            self._row("peak memory", f"{text.format_bytes(memory)} on the process with the highest peak")
        for label, value in self._list_places(event):
            self._row(label, value)

    def _format_time_taken(self, seconds: float) -> str:
        """Return the time of all launches of the run, and of this one if there were others."""
        if not self._past.seconds:
            return text.format_duration(seconds)
        since = f"since it was resumed at step {self._resumed}" if self._resumed else "since it was started again"
        return f"{text.format_duration(self._past.seconds + seconds)}, {text.format_duration(seconds)} of it {since}"

    def _list_places(self, event: EventRecord) -> list[tuple[str, str]]:
        rows = [("run", f"{self._run}/  (recipe.yaml, events.jsonl, logs/, checkpoints/)")]
        if event["status"] == "finished" and event.get("path"):
            model = event["path"]
            rows.append(("model", f"{model}/"))
            if (Path(model) / "agent.json").is_file():
                rows.append(("use it", format_evaluation_command(Path(model), str(self._run))))
            else:
                has_own_class = read_class_name(Path(model)) is not None
                trust = " --trust-code" if has_own_class else ""
                rows.append(("use it", f"trainwright generate {text.quote_word(self._run)}{trust}"))
                if (Path(model) / "config.json").is_file():
                    rows.append(("saved in", _describe_saved_model(Path(model))))
                if not has_own_class and not (Path(model) / "adapter_config.json").is_file():
                    rows.append(("in Python", f'{choose_model_class(Path(model))}.from_pretrained("{model}")'))
        if (self._run / "tensorboard").is_dir():
            rows.append(("curves", f"tensorboard --logdir {text.quote_word(self._run / 'tensorboard')}"))
        if (self._run / "report.html").is_file():
            rows.append(("report", str(self._run / "report.html")))
        return rows

    def _row(self, label: str, value: str, *, warns: bool = False) -> None:
        self._progress.write(f"  {label:<{_LABEL}} {value}", warns=warns)


def _describe_saved_model(model: Path) -> str:
    """Return the precision and the size of a model's files, and how to choose another one."""
    dtype = str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("dtype"))
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    precision = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
    return f"{precision}, {text.format_bytes(size)} (model.save_dtype)"


def _shorten_start(event: EventRecord) -> EventRecord:
    """Return a start event without what only explains it."""
    reasons = event.get("reasons", [])
    choices = [choice[1] for reason in reasons if (choice := _CHOICE.fullmatch(reason))]
    remarks = [reason for reason in reasons if not _CHOICE.fullmatch(reason)]
    return {
        **event,
        "attention": [line.partition(" (")[0] for line in event.get("attention", [])],
        "data": [line for line in event.get("data", []) if not _DETAILS.fullmatch(line)],
        "reasons": [*([f"{', '.join(choices)} (--verbose says why)"] if choices else []), *remarks],
    }


def _build_banner(event: EventRecord) -> list[tuple[str, str]]:
    """Return label and value of every line; missing fields of the event are left out."""
    rows = [("task", str(event["task"]))]
    if "run_directory" in event:
        last_step = event_reader.find_resumed_step(event)
        rows.append(("run", f"{event['run_directory']}" + (f", resumed at step {last_step}" if last_step else "")))
    if "weights" in event:
        rows.append(("model", str(event["weights"])))
    rows.append(("parameters", _format_parameters(event)))
    rows.append(("processes", _format_processes(event)))
    rows.append(("precision", event_reader.describe_precision(event)))
    rows += [("attention" if i == 0 else "", line) for i, line in enumerate(event.get("attention", []))]
    rows.append(("batch", _format_batch(event)))
    rows += [("data" if i == 0 else "", line) for i, line in enumerate(event.get("data", []))]
    if event.get("epoch_tokens"):
        rows.append(("epoch", f"{text.format_count(event['epoch_tokens'])} tokens"))
    examples = event["global_batch_size"] if event.get("batch_unit", "examples") == "examples" else 0
    if "epoch_examples" in event and (remark := check_repetition(examples, event["epoch_examples"])):
        rows.append(("", remark))
    if event.get("max_steps"):
        finished = (event_reader.find_resumed_step(event) or 0) >= event["max_steps"]
        why = ", which the run has already trained; a higher train.max_steps trains it further" if finished else ""
        rows.append(("steps", f"{event['max_steps']:,}{why}"))
    rows += [("chosen" if i == 0 else "", line) for i, line in enumerate(event.get("reasons", []))]
    return rows


def _format_parameters(event: EventRecord) -> str:
    total, trainable_count = event["parameters"], event["trainable_parameters"]
    if total == trainable_count:
        return f"{text.format_count(total)}, all trained"
    return f"{text.format_count(total)}, {text.format_count(trainable_count)} trained ({trainable_count / total:.2%})"


def _format_processes(event: EventRecord) -> str:
    threads = f", {text.format_plural(event['threads'], 'thread')} each" if event.get("threads") else ""
    return f"{event['world_size']} on {event['device']}, strategy {event['strategy']}{threads}"


def _format_batch(event: EventRecord) -> str:
    examples = text.format_plural(event["global_batch_size"], event.get("batch_unit", "examples").removesuffix("s"))
    steps, requested_steps = event["gradient_accumulation_steps"], event.get("accumulation_asked")
    accumulation = "not accumulated" if steps == 1 else f"accumulated {steps} times"
    if event.get("batch_varies"):  # varies in examples, or in the packs that they fill
        accumulation += " in the first step"
    if requested_steps is not None and requested_steps != steps:
        accumulation += f"; train.gradient_accumulation_steps is {requested_steps}, but the batch has too few packs"
    rows = text.format_plural(event["micro_batch_size"], "pack" if event.get("packed") else "row")
    scope = " per process" if event["world_size"] > 1 else ""
    return f"{examples} per step: micro-batches of {rows}{scope}, {accumulation}"
