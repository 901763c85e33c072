"""Measure within about two seconds the rates that decide a plan, in a separate process that returns JSON.

Run by ``trainwright.machine.measured.quick``, which writes the request to standard input and reads the samples from
standard output. On a CPU there is one process per core; some of them run the cases in turns, alone or at once.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.doctor.block import Sizes, backward, blocks_of, packed_attention
from trainwright.doctor.calibrate_cases import (
    DTYPES,
    PRECISIONS,
    CalibrationCase,
    Run,
    loss_of,
    optimizer_of,
    products_of,
    traffic_of,
    unequal_lengths,
)
from trainwright.doctor.calibrate_fits import curve_of
from trainwright.doctor.undisturbed import Stopwatch, Timed, least
from trainwright.machine.measured.calibration import Calibration, ProcessRates, as_json
from trainwright.models.linear_losses import linear_cross_entropy  # noqa: F401  (imported once for all)
from trainwright.parallel.openmp import limit_spinning
from trainwright.run.process import die_with_parent, keep_freed_memory
from trainwright.run.shutdown.stop import START_METHOD

_TIMEOUT = 10.0  # seconds that a process waits for another
_LEAST_SECONDS = 0.7  # minimum time of measuring, regardless of imports
_AFTERWARDS = 0.5  # seconds for collectives and curves at the end
_OPERATIONS = {"cpu": 5e8, "cuda": 2e11}  # FLOPs of the largest product
_FEWEST, _MOST = {"cpu": 16, "cuda": 512}, {"cpu": 512, "cuda": 8192}  # tokens of a product
_ELEMENTS = {"cpu": (2**18, 2**22), "cuda": (2**22, 2**26)}
_UPDATED = {"cpu": 2**23, "cuda": 2**26}
_ATTENTION = {"cpu": (512, 4, 64), "cuda": (16384, 16, 128)}  # tokens, heads, head size
_LOGITS = {"cpu": 2**19, "cuda": 2**26}
_CALLS, _SLOT = 4, 0.004  # per round: at most this many calls, in at most this many seconds
_MOST_ROUNDS = 8
_LONG_TO_BUILD = 0.003  # seconds from which inputs are kept for the next round
_LEAST_CASES = 12  # products of one matrix in two precisions, measured regardless of the time
_MESSAGES = (2**14, 2**22)  # bytes that are reduced over processes
_SUMS = 5
_LAUNCHES, _CHAINS = 20, 5  # kernels in a chain, each launched by the host; chains, the fastest of which counts
_CACHE, _LEAST_CACHE = 2**27, 2**24  # bytes; larger than the caches of a processor and of a core


class ProcessSetting(NamedTuple):
    """A number of processes at once, and their threads."""

    processes: int
    threads: int


def main() -> None:
    """Measure what standard input requests, and write it as the JSON of a calibration."""
    request = json.load(sys.stdin)
    keep_freed_memory()  # as in training
    limit_spinning()
    torch.manual_seed(0)
    imported = time.monotonic() - request["begun"]
    end = time.monotonic() + max(_LEAST_SECONDS, request["seconds"] - _AFTERWARDS - imported)
    measurements = _on_gpu(request, end) if request["device"] == "cuda" else _on_cores(request, end)
    settings = tuple(_setting(one, request["before"]) for one in measurements["settings"])
    parts = {"imports": imported, "measuring": time.monotonic() - request["begun"] - imported}
    measured = datetime.now().astimezone().isoformat(timespec="seconds")
    disturbance = max(measurements["disturbed"], 0.0)
    calibration = Calibration(request["machine"], measured, request["versions"], settings, parts, disturbance)
    json.dump(as_json(calibration), sys.stdout)


def _setting(measurements: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> ProcessRates:
    """Return the setting, including earlier measurements of products of other shapes."""
    processes_and_threads = measurements["processes"], measurements["threads"]
    rows: dict[str, dict[tuple[float, ...], dict[str, Any]]] = {}
    rows_before = [
        row for one in before if (one["processes"], one["threads"]) == processes_and_threads for row in one["samples"]
    ]
    for row in [*rows_before, *measurements["samples"]]:
        sample = {"sizes": row["sizes"], "seconds": row["seconds"], "held_out": False}
        rows.setdefault(row["curve"], {})[tuple(row["sizes"])] = sample
    curves = {name: curve_of(name, list(samples.values())) for name, samples in rows.items()}
    return ProcessRates(*processes_and_threads, curves, launch=measurements["launch"])


def settings_of(cores: int) -> tuple[ProcessSetting, ...]:
    """Return the settings to measure on ``cores`` cores, the most important first in case time runs out.

    They are one process with one, all and two threads; as many processes as cores; and two processes that share the
    cores.
    """
    some = (
        ProcessSetting(1, 1),
        ProcessSetting(1, cores),
        ProcessSetting(cores, 1),
        ProcessSetting(min(2, cores), max(1, cores // 2)),
        ProcessSetting(1, min(2, cores)),
    )
    return tuple(dict.fromkeys(some))


def _cases(request: Mapping[str, Any], device: torch.device) -> list[CalibrationCase]:
    """Return the cases of every setting, the most important first in case time runs out.

    They are the model's own products, and one or two sizes of the other operations of a step.
    """
    kind = device.type
    cases: list[CalibrationCase] = []
    for wide, narrow in request["widths"]:
        for precision in PRECISIONS[kind]:
            tokens = _OPERATIONS[kind] / (2 * wide * narrow)
            tokens = 2 ** int(math.log2(min(_MOST[kind], max(_FEWEST[kind], tokens))))
            for few in (tokens, max(_FEWEST[kind], tokens // 4)):
                cases += products_of((few, wide, narrow), precision, device)
        if request["block"] and (wide, narrow) == tuple(request["widths"][0]):
            cases += [case for name in ("fp32", "bf16") for case in blocks_of(Sizes(*request["block"]), name)]
    small, large = _ELEMENTS[kind]
    for precision in ("fp32", "bf16"):
        cases += [traffic_of(precision, kind_, small, device) for kind_ in ("copy", "elementwise", "reduction")]
        cases += _attention_cases(precision, request["length"], device)
        cases.append(loss_of(precision, _LOGITS[kind], device))
    cases += [traffic_of("fp32", "copy", large, device), optimizer_of(_UPDATED[kind], device)]
    unique = {(case.curve, case.sizes): case for case in cases}
    return list(unique.values())


def _attention_cases(precision: str, length: int, device: torch.device) -> list[CalibrationCase]:
    """Return both directions by torch's own operators: those of training require importing torch's compiler."""
    tokens, heads, channels = _ATTENTION[device.type]
    count = max(1, tokens // length)
    lengths = unequal_lengths(count, length)
    amount = sum(lengths) * heads * channels

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if device.type == "cpu":
            return packed_attention(query, key, value, lengths)
        query, key, value = (x.unflatten(2, (count, -1))[0].transpose(0, 1) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def build(direction: str) -> Run:
        shape = 1, sum(lengths), heads, channels  # the order in memory in which projections return it
        dtype = DTYPES[precision]
        inputs = tuple(torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(3))
        if direction == "forward":
            return lambda: attention(*inputs)
        output = attention(*(x.requires_grad_() for x in inputs))
        return lambda: backward(output, inputs)

    return [
        CalibrationCase(f"attention/{precision}/{direction}", (length,), False, partial(build, direction), amount)
        for direction in ("forward", "backward")
    ]


def _on_gpu(request: Mapping[str, Any], end: float) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    cases = _cases(request, device)
    times: list[list[float]] = [[] for _ in cases]
    for number in range(_MOST_ROUNDS):
        for case, seconds in zip(cases, times, strict=True):
            if number and time.monotonic() > end:
                break
            try:
                run = case.build()
                run()
                seconds.append(min(_gpu_seconds(run) for _ in range(2)))
            except RuntimeError:  # a precision that this GPU does not support
                continue
    rows = [_row(case, min(seconds)) for case, seconds in zip(cases, times, strict=True) if seconds]
    setting = {"processes": 1, "threads": None, "launch": _launch_seconds(device), "samples": rows}
    return {"settings": [setting], "disturbed": 0.0}


def _gpu_seconds(run: Run) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(_CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS


def _on_cores(request: Mapping[str, Any], end: float) -> dict[str, Any]:
    context: Any = multiprocessing.get_context(START_METHOD)
    settings = settings_of(request["cores"])
    # The last process at a barrier continues at once; the others are woken.
    barriers = {setting: context.Barrier(setting.processes) for setting in settings}
    late = context.Value("b", 0, lock=False)
    pipes = []
    with tempfile.TemporaryDirectory(prefix="trainwright-measure-") as directory:
        for rank in range(max(setting.processes for setting in settings)):
            ours, theirs = context.Pipe(duplex=False)
            member = _Member(rank, request, settings, barriers, late, end, Path(directory))
            process = context.Process(target=member.run, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
        results = [pipe.recv() for pipe in pipes]  # EOFError if one has failed; its message is on standard error
    return _together(request, settings, results)


class _Member:
    """One of the measuring processes."""

    def __init__(
        self,
        rank: int,
        request: Mapping[str, Any],
        settings: Sequence[ProcessSetting],
        barriers: Mapping[ProcessSetting, Any],
        late: Any,
        end: float,
        directory: Path,
    ) -> None:
        self.rank, self.request, self.settings, self.end, self.directory = rank, request, settings, end, directory
        self.barriers, self.late, self.parent = barriers, late, os.getpid()
        self.clock = Stopwatch()
        self.kept: dict[int, Run] = {}

    def run(self, pipe: Any) -> None:
        """Measure everything, and send the times through ``pipe``."""
        die_with_parent(self.parent)  # which is killed if a measurement takes too long
        cases = _cases(self.request, torch.device("cpu"))
        # Evicts other tensors from the caches. Created here, because threads do not survive a fork.
        share = 1 if self.rank == 0 else self.request["cores"]  # only rank 0 computes alone
        self.other = torch.ones(max(_CACHE // share, _LEAST_CACHE) // 4)
        mine = [setting for setting in self.settings if self.rank < setting.processes]
        times: dict[ProcessSetting, list[list[Timed]]] = {setting: [[] for _ in cases] for setting in mine}
        launches: dict[ProcessSetting, list[float]] = {setting: [] for setting in mine}
        warm: set[tuple[int, int]] = set()
        for number in range(_MOST_ROUNDS):
            for setting in mine:
                least_cases = _LEAST_CASES if number == 0 and setting == self.settings[0] else 0
                if self._wait_for_others(setting, optional=not least_cases):
                    self._round(setting, cases, times[setting], warm, least_cases)
                    launches[setting].append(_launch_seconds(torch.device("cpu")))
            if self.late.value:
                break
        sums = self._sums()
        pipe.send({"times": times, "launch": launches, "sums": sums})
        pipe.close()
        sys.stdout.flush()
        os._exit(0)  # thread pools may not be joinable

    def _is_late(self) -> bool:
        """Return whether time is up, as rank 0 decides; then no process waits for others."""
        if self.rank == 0 and not self.late.value and time.monotonic() > self.end:
            self.late.value = 1
            for barrier in self.barriers.values():
                barrier.abort()
        return bool(self.late.value)

    def _wait_for_others(self, setting: ProcessSetting, optional: bool) -> bool:
        """Wait for the other processes of a setting; return False if time is up."""
        if optional and self._is_late():
            return False
        try:
            self.barriers[setting].wait(_TIMEOUT)
        except threading.BrokenBarrierError:
            if not self.late.value:
                raise
            return False
        return True

    def _round(
        self,
        setting: ProcessSetting,
        cases: Sequence[CalibrationCase],
        times: list[list[Timed]],
        warm: set[tuple[int, int]],
        fewest: int,
    ) -> None:
        """Run all cases once; if time is up, only the first ``fewest``."""
        torch.set_num_threads(setting.threads)
        for index, case in enumerate(cases):
            if index >= fewest and self._is_late():
                return
            if case.cold and setting != ProcessSetting(1, self.request["cores"]):
                continue  # the factors of a step depend little on how the cores are shared
            if (
                setting.processes == 1
                and len(times[index]) == 1
                and not (case.cold or times[index][0].is_disturbed or fewest)
            ):
                times[index].append(times[index][0])  # the second round only repeats disturbed cases, and blocks
                continue
            started = time.monotonic()
            run = self.kept.get(index) or case.build()
            if time.monotonic() - started > _LONG_TO_BUILD:
                self.kept[index] = run
            if (index, setting.threads) not in warm:
                run()  # kernels are created on first use
                warm.add((index, setting.threads))
                self.clock.start()
            until = time.monotonic() + _SLOT
            # Time a block at least twice: it is a single sample.
            timed = [self._time(case, run) for _ in range(2 if case.cold else 1)]
            while len(timed) < _CALLS and time.monotonic() < until:
                timed.append(self._time(case, run))
            times[index].append(least(timed))

    def _time(self, case: CalibrationCase, run: Run) -> Timed:
        if case.cold:
            self.other.mul_(1.0)
        return self.clock.time(run)

    def _sums(self) -> dict[ProcessSetting, dict[int, float]]:
        """Return the seconds of all-reducing tensors over the processes of each setting with several."""
        several = [setting for setting in self.settings if setting.processes > 1]
        if not several:
            return {}
        most_processes = max(setting.processes for setting in several)
        store = dist.FileStore(str(self.directory / "store"), most_processes)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=most_processes)
        sums: dict[ProcessSetting, dict[int, float]] = {}
        for setting in several:
            group = dist.new_group(list(range(setting.processes)))
            if self.rank >= setting.processes:
                continue
            torch.set_num_threads(setting.threads)
            sums[setting] = {}
            for size in _MESSAGES:
                tensor = torch.zeros(size // 4)
                took = [self.clock.time(lambda: dist.all_reduce(tensor, group=group)) for _ in range(_SUMS)]  # noqa: B023
                sums[setting][size] = min(one.seconds for one in took[1:])
        return sums


def _launch_seconds(device: torch.device) -> float:
    """Return the host seconds for launching one small kernel, forward or backward."""
    x, scale = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    times = []
    for _ in range(_CHAINS):
        started = time.perf_counter()
        y = x
        for _ in range(_LAUNCHES):
            y = y * scale
        backward(y, (x,))
        times.append((time.perf_counter() - started) / (2 * _LAUNCHES))
    return min(times)


def _together(
    request: Mapping[str, Any], settings: Sequence[ProcessSetting], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Combine the results of all processes for each setting: the mean over them of each one's minimum.

    Cases for which there was not enough time are omitted.
    """
    cases, rates = _cases(request, torch.device("cpu")), []
    best: list[Timed] = []
    for setting in settings:
        members = results[: setting.processes]
        if not all(member["launch"][setting] and all(member["times"][setting][:_LEAST_CASES]) for member in members):
            continue
        rows = []
        for index, case in enumerate(cases):
            if not all(member["times"][setting][index] for member in members):
                continue
            timed = [least(member["times"][setting][index]) for member in members]
            best += timed
            row = _row(case, statistics.mean(one.seconds for one in timed))
            rows.append({**row, "disturbed": any(one.is_disturbed for one in timed)})
        for size in _MESSAGES if setting.processes > 1 else ():
            seconds = statistics.mean(member["sums"][setting][size] for member in members)
            rows.append({"curve": "collective/all_reduce", "sizes": [size], "seconds": seconds})
        launch = statistics.mean(min(member["launch"][setting]) for member in members)
        undisturbed = _without_disturbed(rows)
        rates.append(
            {"processes": setting.processes, "threads": setting.threads, "launch": launch, "samples": undisturbed}
        )
    if not rates:
        sys.exit("the first matrix products did not finish in time: other programs use the cores")
    return {"settings": rates, "disturbed": sum(one.is_disturbed for one in best) / len(best)}


def _without_disturbed(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the undisturbed rows of each curve, or all if none is undisturbed."""
    clean = {row["curve"] for row in rows if not row.get("disturbed")}
    return [row for row in rows if not row.get("disturbed") or row["curve"] not in clean]


def _row(case: CalibrationCase, seconds: float) -> dict[str, Any]:
    return {"curve": case.curve, "sizes": list(case.sizes), "seconds": seconds / case.amount}


if __name__ == "__main__":
    main()
