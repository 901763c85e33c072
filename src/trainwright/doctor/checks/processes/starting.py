"""Prepare the process of ``trainwright doctor`` to start two workers, as ``train`` does."""

from __future__ import annotations

from trainwright.doctor.checks.check import CheckContext
from trainwright.run.limits import check_limits
from trainwright.run.process import preload_libraries, prepare_environment

PROCESSES = 2


def ready(context: CheckContext) -> str:
    """Raise limits, divide the cores and import what workers need; return the device type of the workers.

    Raises:
        MachineError: a limit is too low.
    """
    check_limits(PROCESSES, PROCESSES)
    prepare_environment(context.machine.cpu_cores, PROCESSES)
    preload_libraries()
    return two_devices(context)


def two_devices(context: CheckContext) -> str:
    """Return "cuda" if there is a GPU for each of the two workers, otherwise "cpu"."""
    return "cuda" if len(context.machine.gpus) >= PROCESSES else "cpu"
