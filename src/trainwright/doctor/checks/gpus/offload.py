"""Check pinned memory, which offloading uses: its speed, and that copies are correct."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity, answer_of
from trainwright.machine.links import Link

_BYTES = 2**28
_COPIES = 8
_LOW = 0.5  # of the slot's rate; protocols take a fifth of it


def check(context: CheckContext) -> CheckResult:
    """Copy to the first GPU and back in a separate process."""
    values = answer_of(_measure, "pinned memory", context)
    return judged(values, context.machine.gpus[0].host_link)


def judged(values: Mapping[str, float], link: Link | None) -> CheckResult:
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


def _measure(answer: Path) -> None:
    import torch

    from trainwright.doctor.calibrate_cases import host_copy

    device = torch.device("cuda", 0)
    figures: dict[str, float] = {"wrong": _wrong_copies(device)}
    for direction in ("to", "from"):
        run = host_copy(direction, _BYTES, device)
        run()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_COPIES):
            run()
        end.record()
        torch.cuda.synchronize()
        figures[direction] = _COPIES * _BYTES / (begin.elapsed_time(end) / 1e3)
    answer.write_text(json.dumps(figures), encoding="utf-8")


def _wrong_copies(device: object) -> int:
    """Return how many of several copies, to the GPU and back while it computes, differ from what was sent."""
    import torch

    sent = torch.randint(0, 256, (_BYTES // 8,), dtype=torch.uint8).pin_memory()
    busy = torch.randn(2048, 2048, device=device)  # type: ignore[call-overload]
    wrong = 0
    for _ in range(_COPIES):
        there = sent.to(device, non_blocking=True)  # type: ignore[call-overload]
        busy = busy @ busy / 2048
        back = torch.empty_like(sent, pin_memory=True)
        back.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        wrong += int(not torch.equal(sent, back))
    return wrong
