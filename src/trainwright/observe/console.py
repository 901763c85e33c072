"""What the user of a run sees: a banner, the progress, what happened in between, and where everything is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from trainwright import text
from trainwright.observe.progress import Bar, Lines, Progress
from trainwright.observe.reader import Event, resumed_step

_LINE_SECONDS = 5.0
_LABEL = 14


class ConsoleObserver:
    """An observer of events that writes to `stream`, with a progress bar where that is a terminal."""

    def __init__(self, stream: TextIO, line_seconds: float = _LINE_SECONDS) -> None:
        self._progress: Progress = Bar(stream) if stream.isatty() else Lines(stream, line_seconds)
        self._width = shutil.get_terminal_size().columns if stream.isatty() else 100
        self._run = Path(".")
        self._first_metrics: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}
        self._last_step: Event = {}
        self._predicted: dict[str, float] = {}
        self._told_write_error = False
        self._handlers = {
            "start": self._start,
            "step": self._step,
            "evaluate": self._evaluate,
            "generate": self._generate,
            "checkpoint": self._checkpoint,
            "fault": self._fault,
            "notice": lambda event: self._write(f"note: {event['message']}"),
            "finish": self._finish,
        }

    def __call__(self, event: Event) -> None:
        if "write_error" in event and not self._told_write_error:
            self._told_write_error = True
            self._write(f"note: events.jsonl cannot be written ({event['write_error']}); training goes on")
        handler = self._handlers.get(event["event"])
        if handler:
            handler(event)

    def close(self) -> None:
        """Take the progress bar away. A `finish` event does so too."""
        self._progress.close()

    def _write(self, lines: str = "") -> None:
        self._progress.write(lines)

    def _start(self, event: Event) -> None:
        self._run = Path(event.get("run_directory", "."))
        self._predicted = event.get("predicted", {})
        for label, value in _banner(event):
            self._write(f"{label:<{_LABEL}} {value}")
        self._write()
        self._progress.begin(resumed_step(event) or 0, event.get("max_steps") or 0)

    def _step(self, event: Event) -> None:
        self._last_step = event
        self._progress.step({**event, **self._utilisation(event)})

    def _utilisation(self, event: Event) -> dict[str, float]:
        """Model FLOPs over the peak rate: the plan knows it at the speed that it expects."""
        expected = self._predicted.get("tokens_per_second")
        if not expected or "mfu" not in self._predicted:
            return {}
        return {"mfu": self._predicted["mfu"] * event.get("tokens_per_second", 0.0) / expected}

    def _evaluate(self, event: Event) -> None:
        metrics = event["metrics"]
        self._first_metrics = self._first_metrics or metrics
        self._last_metrics = metrics
        shown = "  ".join(f"{name.replace('_', ' ')} {text.metric(value)}" for name, value in metrics.items())
        self._write(f"step {event['step']}: validation  {shown}")

    def _generate(self, event: Event) -> None:
        self._write(f"step {event['step']}: sample")
        self._write(text.block(event["prompt"], "  > ", self._width))
        self._write(text.block(event["text"], "    ", self._width))

    def _checkpoint(self, event: Event) -> None:
        blocked = event.get("blocked_seconds", event["seconds"])
        self._write(
            f"step {event['step']}: checkpoint {event['path']} in {event['seconds']:.1f} s"
            + (f", training waited {blocked:.1f} s" if blocked < event["seconds"] else "")
        )

    def _fault(self, event: Event) -> None:
        rank = "" if event.get("rank") is None else f" on rank {event['rank']}"
        action = f"; {event['action']}" if event.get("action") else ""
        self._write(f"fault: {event['kind']}{rank}: {event['detail']}{action}")

    def _finish(self, event: Event) -> None:
        self._progress.close()
        self._write()
        self._write(f"{event['status']} at step {event['step']} after {text.duration(event['seconds'])}")
        for name, last in self._last_metrics.items():
            if (first := self._first_metrics.get(name)) is not None and first != last:
                change = f"  ({(last - first) / first:+.1%})" if first else ""
                self._row(f"{name.replace('_', ' ')}", f"{text.metric(first)} -> {text.metric(last)}{change}")
        compared = list(_compared(self._predicted, event.get("measured", {})))
        for label, value in compared:
            self._row(label, value)
        memory = self._last_step.get("memory_bytes")
        if memory and not any(label == "memory" for label, _ in compared):
            self._row("peak memory", f"{text.size(memory)} on the fullest process")
        for label, value in self._places(event):
            self._row(label, value)

    def _places(self, event: Event) -> list[tuple[str, str]]:
        rows = [("run", f"{self._run}/  (recipe.yaml, events.jsonl, logs/, checkpoints/)")]
        if event["status"] == "finished" and event.get("path"):
            model = event["path"]
            rows.append(("model", f"{model}/"))
            if (Path(model) / "adapter_config.json").is_file():
                rows.append(("use it", f"trainwright generate {self._run}"))
            elif (Path(model) / "agent.json").is_file():
                rows.append(("use it", f"trainwright eval {self._run}"))
            else:
                rows.append(("use it", f'AutoModelForCausalLM.from_pretrained("{model}")'))
        if (self._run / "tensorboard").is_dir():
            rows.append(("curves", f"tensorboard --logdir {self._run / 'tensorboard'}"))
        return rows

    def _row(self, label: str, value: str) -> None:
        self._write(f"  {label:<{_LABEL}} {value}")


def _compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """What the plan expected beside what was measured, of all that both have."""
    # A GPU's measured peak is of tensors, without what its libraries take.
    memory = "tensors_bytes" if "tensors_bytes" in predicted and "tensors_bytes" in measured else "memory_bytes"
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("memory", memory, text.size),
        ("step time", "step_time", lambda seconds: f"{seconds:.3g} s"),
        ("speed", "tokens_per_second", lambda rate: f"{text.count(rate)} tokens/s"),
    )
    for label, name, words in shown:
        if name in measured and predicted.get(name):
            expected, found = predicted[name], measured[name]
            off = f"{(found - expected) / expected:+.0%}".replace("%", " %")
            yield label, f"{words(expected)} predicted, {words(found)} measured ({off})"


def _banner(event: Event) -> list[tuple[str, str]]:
    """Label and value of every line; what the event does not have is left out."""
    rows = [("task", str(event["task"]))]
    if "run_directory" in event:
        resumed = resumed_step(event)
        rows.append(("run", f"{event['run_directory']}" + (f", resumed at step {resumed}" if resumed else "")))
    if "weights" in event:
        rows.append(("model", str(event["weights"])))
    rows.append(("parameters", _parameters(event)))
    rows.append(("processes", _processes(event)))
    rows.append(("precision", str(event["mixed_precision"]).replace("no", "fp32")))
    rows.append(("batch", _batch(event)))
    rows += [("data" if i == 0 else "", line) for i, line in enumerate(event.get("data", []))]
    if event.get("epoch_tokens"):
        rows.append(("epoch", f"{text.count(event['epoch_tokens'])} tokens"))
    if event.get("max_steps"):
        rows.append(("steps", f"{event['max_steps']:,}"))
    rows += [("chosen" if i == 0 else "", line) for i, line in enumerate(event.get("reasons", []))]
    return rows


def _parameters(event: Event) -> str:
    total, trained = event["parameters"], event["trainable_parameters"]
    if total == trained:
        return f"{text.count(total)}, all trained"
    return f"{text.count(total)}, {text.count(trained)} trained ({trained / total:.2%})"


def _processes(event: Event) -> str:
    threads = f", {event['threads']} threads each" if event.get("threads") else ""
    return f"{event['world_size']} on {event['device']}, strategy {event['strategy']}{threads}"


def _batch(event: Event) -> str:
    return (
        f"{event['global_batch_size']} examples a step: micro-batches of {event['micro_batch_size']}, "
        f"accumulated {event['gradient_accumulation_steps']} times"
    )
