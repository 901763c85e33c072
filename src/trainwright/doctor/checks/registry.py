"""All checks, in the order in which they run: those that need no torch first, those that start processes last."""

from __future__ import annotations

from trainwright.doctor.checks.check import Check
from trainwright.errors import RequestError

_TORCH = ("packages", "torch")
_START = (*_TORCH, "limits", "shared-memory")  # no process can be started without these
_TOGETHER = (*_START, "links")

CHECKS: tuple[Check, ...] = (
    Check("packages", "compatible versions", "software.packages:check"),
    Check("torch", "torch, the driver and devices", "software.torch_build:check"),
    Check("compilers", "compilers", "software.compilers:check"),
    Check("limits", "limits of the user", "system.limits:check"),
    Check("shared-memory", "/dev/shm", "system.shared_memory:check"),
    Check("control-groups", "control groups", "system.control_groups:check"),
    Check("cores", "clocks and throttling of the cores", "system.cores:check"),
    Check("disks", "disks", "system.disks:check"),
    Check("ports", "ports", "network.ports:check"),
    Check("interfaces", "interfaces and the name of this machine", "network.interfaces:check"),
    Check("nccl", "variables of NCCL, Gloo and torch", "network.nccl:check"),
    Check("gpus", "health of the GPUs", "gpus.health:check", needs_gpu=True),
    Check("kernels", "kernels against fp32 on the CPU", "software.kernels:check", _TORCH),
    Check("offload", "pinned memory", "gpus.offload:check", _TORCH, needs_gpu=True),
    Check("links", "link between two processes", "processes.links:check", _START),
    Check("out-of-memory", "out of memory on one rank", "processes.faults:out_of_memory", _TOGETHER),
    Check("killed-rank", "a rank is killed", "processes.faults:killed_rank", _TOGETHER),
    Check("strategies", "two ranks of every strategy", "processes.strategies:check", _TOGETHER),
)


def checks_named(names: tuple[str, ...]) -> tuple[Check, ...]:
    """Return the checks with these names in the order of the table; all without any name.

    Raises:
        RequestError: a name is unknown.
    """
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"{unknown[0]}: no such check; choose from {', '.join(known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)
