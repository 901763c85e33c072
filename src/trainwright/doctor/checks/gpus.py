"""Check the health of GPUs, as NVIDIA's management library and the kernel's log report it, and pinned memory."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckResult, Finding, Severity, read_answer
from trainwright.machine.counters import HARDWARE, HARDWARE_HEAT, HEAT, POWER_BRAKE, REASONS, read_clock_reasons
from trainwright.machine.links import Link
from trainwright.utils.text import format_bytes

_SECONDS = 10.0
_MOST_NVLINKS = 18
_HOT = 85  # degrees Celsius, near the limit of most cards
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)")
# What to do about reasons of a low clock.
_FIXES = {
    HARDWARE: "check the power supply and the cooling of the machine",
    HARDWARE_HEAT: "check the cooling of the machine",
    HEAT: "check the cooling of the machine",
    POWER_BRAKE: "check the power supply of the machine",
}
_REPLACE = "stop using the GPU (CUDA_VISIBLE_DEVICES), run the vendor's diagnosis (dcgmi diag -r 3), and replace it"
_RESET = "restart the machine or reset the GPU (nvidia-smi --gpu-reset); if it comes back, replace the GPU"
# Xids with their meaning (NVIDIA, "XID Errors"); others are named by number.
_XIDS = {
    13: "a program accessed memory it does not own",
    31: "a program accessed memory it does not own",
    43: "a program was stopped by the driver",
    45: "a program was terminated",
    48: "an uncorrectable memory error",
    61: "the GPU's firmware stopped",
    62: "the GPU's firmware stopped",
    63: "a row of memory was remapped",
    64: "a row of memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware failed",
}
_OF_PROGRAMS = (13, 31, 43, 45)


def check(context: CheckContext) -> CheckResult:
    """Read counters of errors, temperatures, clocks and other programs of each GPU."""
    try:
        import pynvml
    except ImportError as error:
        raise CannotCheck(f"the package nvidia-ml-py cannot be imported ({error}): pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise CannotCheck(f"NVIDIA's management library: {error}") from None
    facts: list[str] = []
    findings: list[Finding] = []
    try:
        facts.append(f"driver {pynvml.nvmlSystemGetDriverVersion()}")
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpu = _Gpu(f"GPU {index}", pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError as error:
                findings.append(Finding(Severity.BROKEN, f"GPU {index}: {error}", "no program can use it", _RESET))
                continue
            facts.append(_describe_gpu(gpu))
            for look in (_check_memory_errors, _check_clocks, _check_links, _check_slot, _check_other_programs):
                findings += look(gpu)
            if gpu.denied:
                facts.append(f"{gpu.name}: not checked, requires root: {', '.join(gpu.denied)}")
    finally:
        pynvml.nvmlShutdown()
    findings += _check_kernel_log(facts)
    return CheckResult(tuple(facts), tuple(findings))


class _Gpu:
    """A GPU as the library reports it. ``denied``: values that this user may not read."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.denied: list[str] = []
        self._handle = handle

    def ask(self, function: Callable[..., Any], *arguments: Any, what: str | None = None) -> Any:
        """Return a value of the library; None if this GPU or driver does not report it.

        Args:
            what: a name of the value, listed in ``denied`` if this user may not read it.
        """
        import pynvml

        try:
            return function(self._handle, *arguments)
        except pynvml.NVMLError_NoPermission:
            if what is not None and what not in self.denied:
                self.denied.append(what)
        except (pynvml.NVMLError, TypeError, ValueError):
            pass
        return None


def _describe_gpu(gpu: _Gpu) -> str:
    import pynvml

    heat = gpu.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    power = gpu.ask(pynvml.nvmlDeviceGetPowerUsage)
    clock = gpu.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
    highest = gpu.ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    parts = [f"{gpu.name}: {gpu.ask(pynvml.nvmlDeviceGetName)}"]
    parts += [] if heat is None else [f"{heat} °C"]
    parts += [] if power is None else [f"{power / 1000:.0f} W"]
    parts += [] if clock is None or highest is None else [f"{clock} of {highest} MHz"]
    return ", ".join(parts)


def _check_memory_errors(gpu: _Gpu) -> Iterator[Finding]:
    import pynvml

    def errors(counter: int) -> int | None:
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        count: int | None = gpu.ask(pynvml.nvmlDeviceGetTotalEccErrors, kind, counter, what="ECC errors")
        return count

    since_start = errors(pynvml.NVML_VOLATILE_ECC)
    if since_start:
        what = f"{gpu.name}: {since_start} uncorrectable memory errors (ECC) since the driver was loaded"
        why = "results may be wrong, and kernels that read this memory fail"
        yield Finding(Severity.BROKEN, what, why, _RESET)
    elif ever := errors(pynvml.NVML_AGGREGATE_ECC):
        what = f"{gpu.name}: {ever} uncorrectable memory errors (ECC) in its lifetime, none since the driver was loaded"
        why = "the pages or rows with errors were replaced"
        fix = "watch whether the number grows: nvidia-smi -q -d ECC"
        yield Finding(Severity.NOTE, what, why, fix)
    remapped_rows = gpu.ask(pynvml.nvmlDeviceGetRemappedRows, what="remapped rows")
    if remapped_rows is not None:
        _, _, is_pending, has_failed = remapped_rows
        if has_failed:
            why = "the GPU has no spare rows left to replace faulty memory"
            yield Finding(Severity.BROKEN, f"{gpu.name}: a row of its memory could not be remapped", why, _REPLACE)
        elif is_pending:
            why = "faulty memory is replaced by spare rows only when the GPU is reset"
            yield Finding(Severity.WARNING, f"{gpu.name}: a row of its memory has to be remapped", why, _RESET)
    if gpu.ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, what="retired pages"):
        why = "faulty pages are retired only after a restart"
        yield Finding(Severity.WARNING, f"{gpu.name}: pages of its memory have to be retired", why, _RESET)


def _check_clocks(gpu: _Gpu) -> Iterator[Finding]:
    import pynvml

    bits = gpu.ask(functools.partial(read_clock_reasons, pynvml), what="throttling") or 0
    for bit, fix in _FIXES.items():
        if bits & bit:
            problem = f"{gpu.name}: throttled by {REASONS[bit]}"
            yield Finding(Severity.WARNING, problem, "all ranks wait for the slowest GPU", fix)
    heat = gpu.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    if heat is not None and heat >= _HOT:
        why = "near its limit the driver lowers the clock"
        yield Finding(Severity.WARNING, f"{gpu.name}: {heat} °C", why, "check the cooling of the machine")


def _check_links(gpu: _Gpu) -> Iterator[Finding]:
    import pynvml

    kinds = {
        "replays": pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
        "recoveries": pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        "CRC errors": pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    }
    states = [gpu.ask(pynvml.nvmlDeviceGetNvLinkState, link) for link in range(_MOST_NVLINKS)]
    active = [link for link, state in enumerate(states) if state == pynvml.NVML_FEATURE_ENABLED]
    down = [link for link, state in enumerate(states) if state == pynvml.NVML_FEATURE_DISABLED]
    if active and down:
        yield Finding(
            Severity.WARNING,
            f"{gpu.name}: NVLinks {', '.join(map(str, down))} are down, {len(active)} are up",
            "GPUs exchange with less bandwidth",
            "nvidia-smi nvlink --status; restart Fabric Manager (systemctl restart nvidia-fabricmanager), then the "
            "machine",
        )
    for kind, code in kinds.items():
        counts = {
            link: gpu.ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, code, what="NVLink errors") for link in active
        }
        bad = {link: count for link, count in counts.items() if count}
        if bad:
            text = ", ".join(f"{count} on link {link}" for link, count in bad.items())
            yield Finding(
                Severity.WARNING,
                f"{gpu.name}: NVLink errors, {kind}: {text}",
                "data is sent again, and if the link gets worse, runs fail with Xid 74",
                "nvidia-smi nvlink --errorcounters shows whether they grow; then reseat or replace the GPU or the "
                "switch",
            )


def _check_slot(gpu: _Gpu) -> Iterator[Finding]:
    import pynvml

    lanes = gpu.ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth)
    available = gpu.ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth)
    if lanes and available and lanes < available:  # the generation is lowered while the GPU is idle, the width is not
        what = f"{gpu.name}: its slot uses {lanes} of {available} PCIe lanes"
        why = "copies to and from the host are slower"
        fix = "reseat the card, or move it to a slot with all lanes"
        yield Finding(Severity.WARNING, what, why, fix)


def _check_other_programs(gpu: _Gpu) -> Iterator[Finding]:
    import pynvml

    for process in gpu.ask(pynvml.nvmlDeviceGetComputeRunningProcesses, what="other programs") or ():
        usage = format_bytes(process.usedGpuMemory) if process.usedGpuMemory else "some memory"
        what = f"{gpu.name}: process {process.pid} uses {usage}"
        why = "plans assume that a run has the GPU alone"
        fix = f"`ps -fp {process.pid}`; end it if it is left over from a run"
        yield Finding(Severity.WARNING, what, why, fix)


def _check_kernel_log(facts: list[str]) -> Iterator[Finding]:
    """Yield the driver's error messages (Xid), which only root may read on most systems."""
    try:
        result = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        facts.append(f"Xid errors not checked: dmesg: {error}")
        return
    if result.returncode:
        facts.append("Xid errors not checked: only root may read the kernel's log (sudo dmesg | grep Xid)")
        return
    yield from _check_xids(result.stdout)


def _check_xids(log: str) -> Iterator[Finding]:
    counts = Counter((match[1], int(match[2])) for match in _XID.finditer(log))
    for (address, number), count in counts.items():
        meaning = _XIDS.get(number, "see NVIDIA's list of Xid errors")
        often = f", {count} times" if count > 1 else ""
        of_program = number in _OF_PROGRAMS
        yield Finding(
            Severity.NOTE if of_program else Severity.WARNING,
            f"the driver reported Xid {number} for the GPU at {address}{often}: {meaning}",
            "an error of a program that ran" if of_program else "an error of the GPU, its memory or its links",
            "nothing, if that program is known; else run it under compute-sanitizer" if of_program else _RESET,
        )


_BYTES = 2**28
_COPIES = 8
_LOW = 0.5  # of the slot's rate; protocols take a fifth of it


def check_offload(context: CheckContext) -> CheckResult:
    """Copy to the first GPU and back in a separate process."""
    values = read_answer(functools.partial(_measure, context.machine.device), "pinned memory", context)
    return judge_transfers(values, context.machine.gpus[0].host_link)


def judge_transfers(values: Mapping[str, float], link: Link | None) -> CheckResult:
    """Compare measured bytes per second with those of the slot."""
    datasheet = "" if link is None else f" ({link.describe()} by its datasheet)"
    facts = (f"to the GPU {values['to'] / 1e9:.1f} GB/s, from it {values['from'] / 1e9:.1f} GB/s{datasheet}",)
    findings = []
    if values["wrong"]:
        why = "offloaded parameters, optimizer states and activations would be wrong"
        fix = "test the memory of the machine and the slot of the card; do not offload until then"
        what = f"{values['wrong']} of {_COPIES} copies through pinned memory returned with errors"
        findings.append(Finding(Severity.BROKEN, what, why, fix))
    slowest = min(values["to"], values["from"])
    if link is not None and slowest < _LOW * link.bandwidth:
        findings.append(
            Finding(
                Severity.WARNING,
                f"copies through pinned memory have {slowest / link.bandwidth:.0%} of the slot's rate",
                "steps with offloading wait for these copies",
                "check the lanes and generation of the slot (nvidia-smi -q -d PCIE), and bind the process to the "
                "cores of the GPU's NUMA node (nvidia-smi topo -m; numactl)",
            )
        )
    return CheckResult(facts, tuple(findings))


def _measure(device_type: str, answer: Path) -> None:
    import torch

    from trainwright.doctor.calibrate_cases import prepare_host_copy

    device = torch.device(device_type, 0)
    figures: dict[str, float] = {"wrong": _count_wrong_copies(device)}
    for direction in ("to", "from"):
        run = prepare_host_copy(direction, _BYTES, device)
        run()
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        begin.record()
        for _ in range(_COPIES):
            run()
        end.record()
        torch.accelerator.synchronize()
        figures[direction] = _COPIES * _BYTES / (begin.elapsed_time(end) / 1e3)
    answer.write_text(json.dumps(figures), encoding="utf-8")


def _count_wrong_copies(device: object) -> int:
    """Return how many of several copies, to the GPU and back while it computes, differ from what was sent."""
    import torch

    sent = torch.randint(0, 256, (_BYTES // 8,), dtype=torch.uint8).pin_memory()
    busy = torch.randn(2048, 2048, device=device)  # type: ignore[call-overload]
    wrong = 0
    for _ in range(_COPIES):
        device_copy = sent.to(device, non_blocking=True)  # type: ignore[call-overload]
        busy = busy @ busy / 2048
        back = torch.empty_like(sent, pin_memory=True)
        back.copy_(device_copy, non_blocking=True)
        torch.accelerator.synchronize()
        wrong += int(not torch.equal(sent, back))
    return wrong
