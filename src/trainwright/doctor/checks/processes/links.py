"""Check that sums over two processes are correct, and compare the speed of their link with the datasheet."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.doctor.checks.processes.starting import ready

_SECONDS = 30.0
_BYTES = {"cpu": 2**24, "cuda": 2**28}
_ROUNDS = 5
_LOW = 0.3  # of the link's rate


def check(context: CheckContext) -> CheckResult:
    """Sum tensors over two processes."""
    device = ready(context)
    from trainwright.doctor.checks.processes.watching import watched
    from trainwright.errors import TrainwrightError
    from trainwright.run.supervisor import launch

    logs, answer = context.work / "links", context.work / "links.json"
    try:
        with watched("two processes that sum tensors", _SECONDS, context.end):
            entry = functools.partial(_entry, device, answer)
            launch(entry, processes=2, logs=logs, stopping=context.stopping)
    except TrainwrightError as error:
        return CheckResult((), (_failed(str(error)),))
    return _judged(json.loads(answer.read_text(encoding="utf-8")), context, device)


def _entry(device: str, answer: Path) -> int:
    import torch
    import torch.distributed as dist

    from trainwright.doctor.undisturbed import Stopwatch, least
    from trainwright.errors import EXIT_FINISHED
    from trainwright.parallel.world import join, leave

    world = join(device)
    tensor = torch.full((_BYTES[world.device.type] // 4,), float(world.rank + 1), device=world.device)
    clock = Stopwatch()

    def add() -> None:
        dist.all_reduce(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    add()
    is_right = bool((tensor == 3.0).all())
    tensor.zero_()
    clock.start()
    times = []
    for _ in range(_ROUNDS):
        world.barrier()
        times.append(clock.time(add))
    rows = world.gather_floats([least(times).seconds, float(is_right)])
    if world.is_main:
        figures = {"seconds": max(row[0] for row in rows), "wrong": [r for r, row in enumerate(rows) if not row[1]]}
        answer.write_text(json.dumps(figures), encoding="utf-8")
    leave()
    return EXIT_FINISHED


def _judged(values: dict[str, Any], context: CheckContext, device: str) -> CheckResult:
    # Of two processes each sends the whole tensor once, half in reducing and half in gathering.
    rate = _BYTES[device] / values["seconds"]
    link = context.machine.gpus[0].link if device == "cuda" else None
    reference = (
        f", {link.describe()} by the datasheet" if link is not None else " through the memory of this machine (Gloo)"
    )
    facts = (f"{rate / 1e9:.2f} GB/s each way{reference}",)
    findings = []
    if values["wrong"]:
        what = f"the sum of two processes is wrong on rank {', '.join(map(str, values['wrong']))}"
        why = "gradients would be wrong, without an error"
        fix = "turn off direct access between GPUs (NCCL_P2P_DISABLE=1) and run this again: if it is right then, turn "
        fix += "off the IOMMU or ACS of the machine"
        findings.append(Finding(Severity.BROKEN, what, why, fix))
    if link is not None and rate < _LOW * link.bandwidth:
        what = f"the link between two GPUs has {rate / link.bandwidth:.0%} of its rate"
        why = "collectives take several times as long"
        fix = "`nvidia-smi topo -m` and `nvidia-smi nvlink --status`; look at `trainwright doctor nccl`; on virtual "
        fix += "machines, ACS or the IOMMU may prevent direct access"
        findings.append(Finding(Severity.WARNING, what, why, fix))
    return CheckResult(facts, tuple(findings))


def _failed(message: str) -> Finding:
    from trainwright.doctor.diagnosis.explain import explain

    cause = explain(message).cause
    first, *_ = (line for line in reversed(message.splitlines()) if line.strip() and not line.startswith("log:"))
    return Finding(
        Severity.BROKEN,
        f"two processes cannot sum tensors: {first.strip()}",
        cause.error.cause if cause is not None else "runs on more than one process will fail in the same way",
        "; ".join(cause.error.fixes)
        if cause is not None
        else "see the whole message with `trainwright doctor links --json`",
    )
