"""Record steps with torch.profiler on every rank, and merge the traces into one file (``train.profile``).

The file is in the format of Chrome's traces, which ui.perfetto.dev opens (Google, "Trace Event Format"): each rank is a
process of it, with a track of its phases above its threads and its GPU.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.events import Notice, Profile
from trainwright.engine.policies.base import StepPolicy, TrainingContext
from trainwright.errors import RequestError
from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import Use

DIRECTORY = "profile"
_OPERATORS = 20
_PHASE = "phase: "
_MEMORY_EVENTS = 100_000
# Numbers of processes and threads in a merged trace: those of a rank begin at its number times this.
_OF_RANK = 10_000


class Operator(NamedTuple):
    """Calls of an operator, and the seconds in it without those of the operators that it calls."""

    name: str
    calls: int
    seconds: float


class Profiling(StepPolicy):
    """Record the steps of ``train.profile`` in ``run``.

    Raises:
        RequestError: the run has fewer steps.
    """

    def __init__(self, run: Path, training: TrainingContext) -> None:
        super().__init__(training)
        profile_section, steps = training.recipe.train.profile, len(training.task.stream)
        assert profile_section is not None, "the recipe has it"
        self._first, self._last = profile_section.steps
        if self._last > steps:
            raise RequestError(f"train.profile.steps: ends at step {self._last}, and the run has {steps}; lower it")
        self._directory = run / DIRECTORY
        self._recording: _Recording | None = None
        self._began = 0

    def before(self, step: int, batch: GlobalBatch, gradients: object) -> None:
        """Begin, if the run is resumed among the steps, or they are its first ones."""
        if self._first <= step <= self._last and self._recording is None:
            self._begin(step)

    def after(self, step: int) -> None:
        """Begin before the first step, which then has its data in the trace, or write the trace after the last."""
        if self._recording is None and step + 1 == self._first:
            self._begin(self._first)
        elif self._recording is not None and step >= self._last:
            recording, self._recording = self._recording, None
            heartbeat.begin_phase("profile writing", step)
            self._write(recording, step)

    def _begin(self, step: int) -> None:
        heartbeat.begin_phase("profile", step)
        self._began = step
        self._recording = _Recording(self.training.world.device)

    def _write(self, recording: _Recording, step: int) -> None:
        """Write the trace of every rank, and on rank 0 the merged one. A full disk ends nothing."""
        world, name = self.training.world, f"steps-{self._began}-{step}"
        local_trace = self._directory / f"{name}.rank-{world.rank}.json"
        memory = self._directory / f"{name}.memory-rank-{world.rank}.pickle"
        recording.stop()
        error, operators, has_memory = "", recording.operators(), False
        try:
            self._directory.mkdir(exist_ok=True)
            recording.write(local_trace)
            has_memory = recording.write_memory(memory)
        except (OSError, RuntimeError) as exception:
            error = f"rank {world.rank}: {exception}"
        ranks = world.gather((error, operators, str(memory) if has_memory else None), Operator)
        if not world.is_main:
            return
        error, target = next((why for why, _, _ in ranks if why), ""), self._directory / f"{name}.json.gz"
        try:
            if not error:
                merge([self._directory / f"{name}.rank-{rank}.json" for rank in range(world.size)], target)
        except (OSError, ValueError) as exception:
            error = str(exception)
        if error:
            message = f"train.profile: the trace of steps {self._began} to {step} could not be written: {error}"
            self.training.events.emit(Notice(message=message))
            return
        rows = _select_slowest([operators for _, operators, _ in ranks])
        snapshots = [Path(path) for _, _, path in ranks if path is not None]
        self.training.events.emit(Profile(first=self._began, step=step, path=target, operators=rows, memory=snapshots))


class _Recording:
    """The recording of this process, from now until ``stop``."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type != "cpu"
        self._has_memory = device.type == "cuda"  # torch records no history of the memory of other devices
        self._device = device
        activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, device.type.upper())] if self._on_gpu else [])]
        self._profile = profile(activities=activities, acc_events=True)
        self._phase: record_function | None = None
        if self._has_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile.start()
        self._own = heartbeat.find_own_heartbeat()
        if self._own is not None:
            self._own.changed = self._mark

    def _mark(self, use: Use, step: int, micro_batch: int) -> None:
        self._end_phase()
        inside = f", step {step}" if step >= 0 else ""
        inside += f", micro-batch {micro_batch}" if micro_batch >= 0 else ""
        self._phase = record_function(f"{_PHASE}{'exchange in ' if use.waiting else ''}{use.phase}{inside}")
        self._phase.__enter__()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def stop(self) -> None:
        if self._own is not None:
            self._own.changed = None
        self._end_phase()
        if self._on_gpu:
            torch.accelerator.synchronize(self._device)
        self._profile.stop()

    def operators(self) -> list[Operator]:
        """Return the operators, on a GPU the kernels, without our phases."""
        operators = []
        for average in self._profile.key_averages():
            # An operator of the host has the device's time of its kernels, which are there themselves.
            if self._on_gpu and average.device_type == DeviceType.CPU:
                continue
            microseconds = average.self_device_time_total if self._on_gpu else average.self_cpu_time_total
            if (
                microseconds > 0
                and not average.is_user_annotation
                and not average.key.startswith((_PHASE, "ProfilerStep"))
            ):
                operators.append(Operator(average.key, average.count, microseconds / 1e6))
        return operators

    def write(self, path: Path) -> None:
        """Write the trace. Raises OSError, RuntimeError."""
        self._profile.export_chrome_trace(str(path))

    def write_memory(self, path: Path) -> bool:
        """Write the snapshot of the GPU's memory, if there is one, in the format of pytorch.org/memory_viz."""
        if not self._has_memory:
            return False
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return True


def _select_slowest(ranks: Sequence[Sequence[Operator]]) -> list[dict[str, Any]]:
    """Return the operators that took most time over all ranks."""
    sums: dict[str, Operator] = {}
    for operator in itertools.chain.from_iterable(ranks):
        before = sums.get(operator.name, Operator(operator.name, 0, 0.0))
        seconds = before.seconds + operator.seconds
        sums[operator.name] = Operator(operator.name, before.calls + operator.calls, seconds)
    total = sum(operator.seconds for operator in sums.values())
    slowest = sorted(sums.values(), key=lambda operator: -operator.seconds)[:_OPERATORS]
    return [{**operator._asdict(), "share": operator.seconds / total} for operator in slowest]


def merge(traces: Sequence[Path], merged: Path) -> None:
    """Merge the traces of ranks, in their order, into one compressed file, and remove them.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a trace is damaged.
    """
    unfinished_file = merged.with_name(f".{merged.name}")
    base = None
    with gzip.open(unfinished_file, "wt", encoding="utf-8", compresslevel=4) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for rank, path in enumerate(traces):
            trace = json.loads(path.read_text(encoding="utf-8"))
            # Every trace counts from a time of its own, in nanoseconds since the epoch.
            start = int(trace.get("baseTimeNanoseconds", 0))
            base = start if base is None else base
            for event in _iterate_rank_events(trace["traceEvents"], rank, (start - base) / 1000):
                file.write(separator + json.dumps(event))
                separator = ",\n"
            heartbeat.note_progress()
        file.write("\n]}\n")
    unfinished_file.replace(merged)
    for path in traces:
        with suppress(OSError):
            path.unlink()


def _iterate_rank_events(events: Iterable[dict[str, Any]], rank: int, shift: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank's trace as those of one process of the merged one; ``shift``: microseconds."""
    process = rank * _OF_RANK
    numbers: dict[tuple[str, str], int] = {}  # of tracks: by process and thread in the trace of the rank
    names: dict[tuple[str, str], str] = {}
    yield _build_name_event("process_name", process, 0, f"rank {rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": rank}}
    phases = process  # the first thread of the process
    yield _build_name_event("thread_name", process, phases, "phases")
    for event in events:
        kind, name = event.get("ph"), str(event.get("name", ""))
        if kind == "M":
            if name == "thread_name":
                names[str(event.get("pid")), str(event.get("tid"))] = str(event["args"]["name"])
            continue
        shifted_event = {**event, "name": name.removeprefix(_PHASE), "pid": process}
        if "ts" in event:
            shifted_event["ts"] = float(event["ts"]) + shift
        if name.startswith(_PHASE) and event.get("cat") == "user_annotation":
            yield {**shifted_event, "tid": phases, "args": {}}
            continue
        if "id" in event:  # arrows between tracks
            shifted_event["id"] = f"{rank}.{event['id']}"
        track = str(event.get("pid")), str(event.get("tid"))
        yield {**shifted_event, "tid": numbers.setdefault(track, process + 1 + len(numbers))}
    for track, number in numbers.items():
        yield _build_name_event("thread_name", process, number, names.get(track, " ".join(track)))


def _build_name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
