"""Write a run's events to TensorBoard's own files."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.engine.event_reader import EventRecord, find_resumed_step

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainwright.run.observers.hooks import ObservedRun

_STEP_SCALARS = (
    *("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_time", "memory_bytes"),
    "resident_bytes",
)
_FLUSH_SECONDS = 10

Values = dict[str, float]


def build_observer(run: ObservedRun, _: object) -> TensorBoardObserver:
    """Return an observer that writes to the directory that ``trainwright tensorboard`` reads."""
    return TensorBoardObserver(run.directory / "tensorboard")


class TensorBoardObserver:
    """Observer that writes TensorBoard files in a thread, which also imports TensorBoard, so that no step waits for
    it.

    The thread starts after the first step, so as not to slow down the imports that the step needs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: queue.SimpleQueue[EventRecord | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._purge_step = 0
        self._closed = False

    def __call__(self, event: EventRecord) -> None:
        """Write the curves of an event."""
        if self._closed:
            return
        if event["event"] == "start":
            last_step = find_resumed_step(event)
            # A launch that ended before its first checkpoint is repeated from the start.
            self._purge_step = 0 if last_step is None else last_step + 1
        self._events.put(event)
        if event["event"] == "step" and self._thread is None:
            self._start()
        if event["event"] == "finish":
            self.close()

    def close(self) -> None:
        """Write what is pending and wait for it."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self._start()
        self._events.put(None)
        assert self._thread is not None
        self._thread.join()

    def _start(self) -> None:
        # A daemon thread: a run that fails without closing must be able to end.
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._directory), purge_step=self._purge_step, flush_secs=_FLUSH_SECONDS)
        while (event := self._events.get()) is not None:
            write_event(writer, event)
        writer.close()


def write_event(writer: SummaryWriter, event: EventRecord) -> None:
    """Write the scalars and texts of one event; other events write nothing."""
    for name, value in extract_values(event).items():
        writer.add_scalar(name, value, event["step"])
    if event["event"] == "generate":
        # TensorBoard renders Markdown; indented text is shown literally.
        body = "\n".join(f"    {line}" for line in str(event["text"]).splitlines())
        writer.add_text(f"generate/{event['prompt'][:60]}", body, event["step"])


def extract_values(event: EventRecord) -> Values:
    """Return the figures of an event by name: ``train/NAME`` of a step, ``evaluate/NAME`` of an evaluation."""
    kinds = {"step": "train", "evaluate": "evaluate"}
    if event["event"] not in kinds:
        return {}
    values = {name: event.get(name) for name in _STEP_SCALARS} | (event.get("metrics") or {})
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {f"{kinds[event['event']]}/{name}": value for name, value in numbers.items()}
