"""How far a run is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TextIO

from trainwright import text
from trainwright.observe.reader import Event
from trainwright.text import say

if TYPE_CHECKING:
    from rich.progress import TaskID

_REDRAW_SECONDS = 0.1


class Progress(Protocol):
    """Shows steps; `write` prints a line without disturbing what is shown."""

    def begin(self, done: int, total: int) -> None: ...

    def step(self, event: Event) -> None: ...

    def write(self, line: str) -> None: ...

    def close(self) -> None: ...


class Remaining:
    """Seconds left, from the wall time of the steps so far, evaluations and checkpoints included."""

    def __init__(self, done: int, total: int) -> None:
        self.total = total
        self._first: tuple[int, float] | None = None
        self._done = done

    def after(self, step: int, step_time: float) -> float:
        """The estimate once `step` is done. `step_time` stands in until two steps have been seen: the first
        one is slower than the rest and not what is to be expected.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
            return (self.total - step) * step_time
        first, since = self._first
        return (self.total - step) * (now - since) / (step - first) if step > first else 0.0


class Lines:
    """For a log file or a pipe: the first step, the last one, and one every `seconds`."""

    def __init__(self, stream: TextIO, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        self._last = float("-inf")
        self._remaining = Remaining(0, 0)

    def begin(self, done: int, total: int) -> None:
        self._remaining = Remaining(done, total)

    def step(self, event: Event) -> None:
        step, total = event["step"], self._remaining.total
        left = self._remaining.after(step, event.get("step_time", 0.0))
        now = time.monotonic()
        if now - self._last < self._seconds and step != total:
            return
        self._last = now
        self.write(f"step {step}/{total}  {figures(event)}  {text.duration(left)} left")

    def write(self, line: str) -> None:
        say(line, file=self._stream)

    def close(self) -> None:
        pass


class Bar:
    """For a terminal. Drawn from the loop, at most ten times a second, rather than by a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._progress = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._drawn = 0.0
        self._remaining = Remaining(0, 0)

    def begin(self, done: int, total: int) -> None:
        self._remaining = Remaining(done, total)
        self._task = self._progress.add_task("train", total=total, completed=done, figures="")
        self._progress.start()

    def step(self, event: Event) -> None:
        if self._task is None:
            return
        step = event["step"]
        left = self._remaining.after(step, event.get("step_time", 0.0))
        shown = f"{figures(event)}  {text.duration(left)} left"
        self._progress.update(self._task, completed=step, figures=shown)
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_SECONDS or step == self._remaining.total:
            self._drawn = now
            self._progress.refresh()

    def write(self, line: str) -> None:
        self._console.print(text.printable(line), soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def figures(event: Event) -> str:
    """Loss, speed and, where they are known, bits per byte and the use of the peak rate of a step event."""
    shown = [f"loss {text.metric(event['loss'])}"]
    if "bits_per_byte" in event.get("metrics", {}):
        shown.append(f"{text.metric(event['metrics']['bits_per_byte'])} bits/byte")
    shown.append(f"{text.count(event.get('tokens_per_second', 0.0))} tokens/s")
    if "mfu" in event:
        shown.append(f"MFU {event['mfu']:.0%}")
    return "  ".join(shown)
