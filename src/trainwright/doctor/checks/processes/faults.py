"""Check that a fault on one of two ranks is reported at once with its rank, and that no process is left over."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.doctor.checks.processes.starting import PROCESSES, ready
from trainwright.utils.text import span

if TYPE_CHECKING:
    from trainwright.run.shutdown.failure import Failure

_SECONDS = 30.0
_FAULTY = 1  # the rank that fails
_HEADROOM, _ASKED = 2**28, 2**32  # bytes that rank 1 may still allocate, and that it asks for


def out_of_memory(context: CheckContext) -> CheckResult:
    """Make one rank run out of memory: on a CPU by a limit, on a GPU by requesting more than it has."""
    return _provoked(context, "out of memory on one rank", _run_out, _is_out_of_memory)


def killed_rank(context: CheckContext) -> CheckResult:
    """Kill one rank, as the kernel or a scheduler would."""
    return _provoked(context, "a rank that is killed", _die, _is_killed)


def _provoked(
    context: CheckContext, what: str, fault: Callable[[], None], is_named: Callable[[Failure], bool]
) -> CheckResult:
    device = ready(context)
    from trainwright.doctor.checks.processes.watching import watched
    from trainwright.run.shutdown.failure import Failure
    from trainwright.run.supervisor import run_workers

    logs = context.work / fault.__name__
    started = time.monotonic()
    with watched(what, _SECONDS, context.end):
        entry = functools.partial(_entry, device, fault, logs)
        ended = run_workers(entry, processes=PROCESSES, logs=logs, stopping=context.stopping)
    failed_at = float((logs / "failed-at").read_text(encoding="ascii")) if (logs / "failed-at").exists() else started
    took = time.monotonic() - failed_at
    message = ended.message if isinstance(ended, Failure) else "the launch ended without an error"
    findings = []
    if not isinstance(ended, Failure) or not is_named(ended):
        findings.append(_not_named(what, message))
    if survivors := [child.pid for child in multiprocessing.active_children()]:
        findings.append(_remaining(what, survivors))
    return CheckResult((f"reported after {span(took)}: {_in_short(message)}",), tuple(findings))


def _in_short(message: str) -> str:
    """Return the rank and its error, without the traceback and the advice."""
    first, *more = message.splitlines()
    error = next((line for line in more if "Error" in line.partition(":")[0]), "")
    return f"{first.partition(':')[0]}{': ' if error else ''}{error[:120]}"


def _is_out_of_memory(failure: Failure) -> bool:
    return failure.ran_out is not None and failure.ran_out.rank == _FAULTY


def _is_killed(failure: Failure) -> bool:
    return failure.message.startswith(f"rank {_FAULTY} was killed")


def _entry(device: str, fault: Callable[[], None], logs: Path) -> int:
    """Run in each of the two workers; the second one fails while the first waits in a collective."""
    from trainwright.errors import EXIT_FINISHED
    from trainwright.parallel.world import join, leave

    world = join(device)
    world.barrier()
    if world.rank == _FAULTY:
        (logs / "failed-at").write_text(repr(time.monotonic()), encoding="ascii")
        fault()
    world.barrier()
    leave()
    return EXIT_FINISHED


def _run_out() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
        return
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _HEADROOM, resource.RLIM_INFINITY))
    torch.empty(_ASKED, dtype=torch.uint8).fill_(1)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _not_named(what: str, message: str) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what} is not reported as rank {_FAULTY}: {message.splitlines()[0]}",
        "the cause of a failed run must be searched for in the logs of all ranks",
        "in a container, run an init process (docker run --init) and allow signals between processes; report it with "
        "the output of --json",
    )


def _remaining(what: str, survivors: list[int | None]) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what}: process {', '.join(map(str, survivors))} is left over",
        "it keeps its memory, its GPU and its ports",
        "kill it; in a container, run an init process (docker run --init)",
    )
