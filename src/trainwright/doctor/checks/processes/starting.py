"""Prepare the process of ``trainwright doctor`` to start two workers, as ``train`` does."""

from __future__ import annotations

from trainwright.doctor.checks.check import Surroundings
from trainwright.launch.limits import check_limits
from trainwright.launch.process import limit_threads, preload_libraries

PROCESSES = 2


def ready(surroundings: Surroundings) -> str:
    """Raise limits, share the cores, and import what workers need; return the type of the devices of the workers.

    Raises:
        MachineError: a limit is too low.
    """
    check_limits(PROCESSES, PROCESSES)
    limit_threads(surroundings.machine.cpu_cores, PROCESSES)
    preload_libraries()
    return two_devices(surroundings)


def two_devices(surroundings: Surroundings) -> str:
    """Return "cuda" if there is a GPU for each of the two workers, otherwise "cpu"."""
    return "cuda" if len(surroundings.machine.gpus) >= PROCESSES else "cpu"
