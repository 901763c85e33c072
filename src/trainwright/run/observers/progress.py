"""The progress of a run, and the time that remains: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from trainwright.engine.event_reader import EventRecord
from trainwright.utils import text
from trainwright.utils.activity import format_log_line
from trainwright.utils.text import say

if TYPE_CHECKING:
    from rich.progress import TaskID


_REDRAW_SECONDS = 0.1
_BAR = 24


def build_progress(stream: TextIO, seconds: float) -> Bar | Lines:
    """Return a bar if the stream supports it, else lines, one every ``seconds``."""
    return Bar(stream) if text.is_terminal(stream) else Lines(stream, seconds)


class Lines:
    """Progress for a log file or a pipe: the first step, the last one, and one every `seconds`."""

    is_drawn = False

    def __init__(self, stream: TextIO, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        self._last = float("-inf")
        self._remaining = Remaining({})

    def begin(self, done: int, remaining: Remaining, machine: Callable[[], list[str]] = list) -> None:
        """Start with ``done`` steps; a log has no figures of the machine."""
        self._remaining = remaining

    def step(self, event: EventRecord) -> None:
        """Print a line every few seconds."""
        step, total = event["step"], self._remaining.total
        remaining = self._remaining.after(step, event.get("step_time", 0.0))
        now = time.monotonic()
        if now - self._last < self._seconds and step != total:
            return
        self._last = now
        self.write(f"step {step}/{total}  {'  '.join(format_figures(event))}  {text.format_duration(remaining)} left")

    def show_operation(self, what: str, fraction: str, seconds: float, for_log: bool) -> None:
        """Print a long operation, less and less often."""
        if for_log:
            self.write(format_log_line(what, seconds, fraction))

    def write(self, line: str, *, warns: bool = False) -> None:
        """Print a line."""
        say(line, file=self._stream)

    def close(self) -> None:
        """Do nothing: there is nothing to remove."""
        pass


class Bar:
    """Progress bar for a terminal. Steps are drawn from the loop, at most ten times per second."""

    is_drawn = True

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._bar = BarColumn(bar_width=_BAR)
        self._progress = RichProgress(
            TextColumn("{task.fields[done]}", markup=False),
            self._bar,
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._done = 0
        self._drawn = 0.0
        self._drawn_before = False  # whether the bar was already drawn
        self._remaining = Remaining({})
        self._machine: Callable[[], list[str]] = list

    def begin(self, done: int, remaining: Remaining, machine: Callable[[], list[str]] = list) -> None:
        """Start the bar with ``done`` steps."""
        self._remaining, self._machine = remaining, machine
        self._task = self._progress.add_task("train", total=remaining.total, completed=done, done="", figures="")
        self._done = done
        self._show([])
        self._progress.start()

    def step(self, event: EventRecord) -> None:
        """Move the bar."""
        self._done = event["step"]
        remaining = self._remaining.after(self._done, event.get("step_time", 0.0))
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_SECONDS or self._done == self._remaining.total:
            self._drawn = now
            loss, *other_figures = format_figures(event)
            mfu = [other_figures.pop()] if "mfu" in event else []  # long, and for wide terminals
            self._show([loss, f"{text.format_duration(remaining)} left", *other_figures, *self._machine(), *mfu])

    def show_operation(self, what: str, fraction: str, seconds: float, for_log: bool) -> None:
        """Show a long operation, with its seconds."""
        ending = f" … {text.format_duration(seconds)}{fraction}"
        if self._task is None:
            text.draw(what, self._stream, ending)
            self._drawn_before = True
        else:
            what = what.removeprefix(f"step {self._done}: ")  # it is shown before the bar
            room = text.find_terminal_width(self._stream, 80) - len(f"step {self._done}/{self._remaining.total}") - 2
            self._show([what[: max(0, room - len(ending))] + ending])

    def _show(self, figures: list[str]) -> None:
        """Show as many figures as fit, in order, and a bar in the remaining width."""
        if self._task is None:
            return
        self._console.width = width = text.find_terminal_width(self._stream, 80)
        count = f"step {self._done}/{self._remaining.total}"
        columns_left = width - len(count) - 2
        line = ""
        for figure in figures:
            longer = f"{line}  {figure}" if line else figure
            if len(longer) > columns_left:
                break
            line = longer
        self._bar.bar_width = max(0, min(_BAR, columns_left - len(line)))
        self._progress.update(
            self._task, completed=self._done, done=count, figures=text.replace_unencodable(line, self._stream)
        )
        self._progress.refresh()

    def write(self, line: str, *, warns: bool = False) -> None:
        """Print a line above the bar."""
        if self._drawn_before:
            text.draw("", self._stream)
            self._drawn_before = False
        wrapped_line = text.wrap_lines(text.escape_controls(line), text.find_terminal_width(self._stream, 80))
        self._console.print(
            text.replace_unencodable(wrapped_line, self._stream), soft_wrap=True, style="yellow" if warns else None
        )

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def format_figures(event: EventRecord) -> list[str]:
    """Return loss, speed and, if known, bits per byte and MFU of a step event."""
    texts = [f"loss {text.format_metric(event['loss'])}"]
    if "bits_per_byte" in event.get("metrics", {}):
        texts.append(f"{text.format_metric(event['metrics']['bits_per_byte'])} bits/byte")
    texts.append(f"{text.format_count(event.get('tokens_per_second', 0.0))} tokens/s")
    if "mfu" in event:
        peak = "the datasheet's peak" if event.get("nominal_peak") else "the measured peak"
        texts.append(f"MFU {event['mfu']:.0%} of {peak}")
    return texts


# The events of one evaluation round: the evaluation and the samples after it.
_ROUND_OF = {"evaluate": "evaluation", "generate": "evaluation", "checkpoint": "checkpoint"}


class Remaining:
    """Estimate the seconds left, from the durations of steps, evaluations with samples, and checkpoints so far.

    The final export is assumed to take as long as a checkpoint. What has not happened yet counts as zero.

    Args:
        start: the number of steps, and the intervals of evaluation and checkpoints, if known.
        past: the earlier launches of the run.
    """

    def __init__(self, start: EventRecord, past: Sequence[EventRecord] = ()) -> None:
        self.total: int = start.get("max_steps") or 0
        self._every = {"evaluation": start.get("evaluate_every"), "checkpoint": start.get("checkpoint_every")}
        self._seconds = {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._count = {"step": 0, "evaluation": 0, "checkpoint": 0}
        for event in past:
            if event["event"] in ("evaluate", "checkpoint"):
                self._add(_ROUND_OF[event["event"]], event.get("seconds", 0.0))
        self._first: int | None = None
        self._saved = 0
        self._round: object = None
        self._last = time.monotonic()

    def see(self, event: EventRecord) -> None:
        """Attribute the time since the previous event to this one. Call for every event as it happens."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        kind, step = event["event"], event.get("step")
        if kind == "step":
            if self._first is None:  # slower than the rest, and not representative
                self._first = step
            else:
                self._add("step", seconds)
        elif kind in _ROUND_OF:
            # In a round of several events, the first one increases the count and all add their time.
            self._add(_ROUND_OF[kind], seconds, count=(_ROUND_OF[kind], step) != self._round)
            self._round = _ROUND_OF[kind], step
            self._saved += kind == "checkpoint"

    def after(self, step: int, step_time: float) -> float:
        """Return the estimate right after ``step``. ``step_time`` is used until two steps have been seen."""
        step_seconds = self._mean("step") if self._count["step"] else step_time
        evaluations = self._count_to_come("evaluation", step)
        checkpoints = max(self._count_to_come("checkpoint", step), self._estimate_by_rate(step)) + 1  # plus the export
        return (
            (self.total - step) * step_seconds
            + evaluations * self._mean("evaluation")
            + checkpoints * self._mean("checkpoint")
        )

    def _count_to_come(self, kind: str, step: int) -> int:
        """Return the number of rounds due after ``step``, including that of ``step`` itself and the one at the end."""
        every = self._every[kind]
        if not isinstance(every, int) or every < 1:
            return 1
        due = self.total // every - (step - 1) // every
        return due + (self.total % every != 0)

    def _estimate_by_rate(self, step: int) -> float:
        """Return the number of checkpoints to come at the rate so far: by time, or for being the best."""
        steps = step - self._first + 1 if self._first is not None else 0
        return self._saved / steps * (self.total - step) if steps > 0 else 0.0

    def _add(self, kind: str, seconds: float, *, count: bool = True) -> None:
        self._seconds[kind] += seconds
        self._count[kind] += count

    def _mean(self, kind: str) -> float:
        return self._seconds[kind] / self._count[kind] if self._count[kind] else 0.0


_LINE_SECONDS = 5.0


class Counting:
    """Count up to ``total`` under ``label`` on ``stream``; nothing is shown before the first one is done.

    Args:
        unit: what is counted.
    """

    def __init__(self, stream: TextIO, label: str, total: int, unit: str = "rows") -> None:
        self._unit = unit
        self._stream = stream
        self._label = label
        self._total = total
        self._done = 0
        self._started_at = time.monotonic()
        self._shown = float("-inf")

    def __call__(self, count: int) -> None:
        """Add ``count``."""
        if not self._done:
            self._started_at = time.monotonic()
        self._done = min(self._total, self._done + count)
        now, terminal = time.monotonic(), text.is_terminal(self._stream)
        finished = self._done == self._total
        if not finished and now - self._shown < (_REDRAW_SECONDS if terminal else _LINE_SECONDS):
            return
        self._shown = now
        count_text = f": {self._done:,}/{self._total:,} {self._unit}"
        if not terminal:
            say(f"{self._label}{count_text}", file=self._stream)
            return
        remaining = (now - self._started_at) / self._done * (self._total - self._done)
        label, ending = ("", "") if finished else (self._label, f"{count_text}  {text.format_duration(remaining)} left")
        text.draw(label, self._stream, ending)
