"""The source of a plan's times: a calibration, a quick measurement, or datasheets.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, current_calibration
from trainwright.machine.measured.contention import other_cores
from trainwright.machine.measured.own_runs import OwnRuns, own_runs
from trainwright.machine.measured.quick import Shapes, for_block, measured
from trainwright.planning.operations import block_kinds, block_weights
from trainwright.planning.workload import Workload

_LOAD_SECONDS, _SMALL_LOAD = 0.1, 0.3  # for which the load is measured; cores


@dataclass(frozen=True)
class Basis:
    """The source of a plan's times.

    ``measurement``: with the block alone that is nearest to the model's; beside a calibration, which has none of this
    size, only its block counts. ``message``: message about a measurement made now. ``trouble``: why there is no
    measurement. ``runs``: this machine's own runs, which correct predictions. ``load``: what other programs that use
    the cores now cost, which the times do not include.
    """

    calibration: Calibration | None = None
    measurement: Calibration | None = None
    message: str | None = None
    trouble: str | None = None
    runs: OwnRuns = OwnRuns()  # noqa: RUF009
    load: str | None = None

    @property
    def kind(self) -> str:
        """The source of uncorrected predictions."""
        if self.calibration is not None:
            return "calibration"
        return "datasheet" if self.measurement is None else "measurement"


def basis_of(machine: Machine, workload: Workload, doing: Callable[[str], None] = lambda text: None) -> Basis:
    """Return the source of times for plans of ``workload`` on ``machine``, measured now if it is present and
    unmeasured.

    Args:
        doing: called with a message before an operation that takes a few seconds.
    """
    basis = _basis_of(machine, workload, doing)
    if machine.device != "cpu" or machine.described_by is not None or not machine.is_here:
        return basis
    load = _load(machine.cpu_cores)
    return replace(basis, load=load, message="\n".join(filter(None, (basis.message, load))) or None)


def _load(cores: int) -> str | None:
    """Return what the programs that use the cores of this machine now cost; None if it is little."""
    others = other_cores(_LOAD_SECONDS)
    if others < _SMALL_LOAD:
        return None
    # A thread shares its core with another program, and all others wait for it.
    slower = 1 + max(min(others, 1.0), others / cores)
    return (
        f"the plan assumes that all {cores} cores are free; other programs use {others:.1f} of them now, with which a "
        f"step takes about {slower:.1f} times as long"
    )


def _basis_of(machine: Machine, workload: Workload, doing: Callable[[str], None]) -> Basis:
    calibration, runs = current_calibration(machine), own_runs(machine)
    calibrated = calibration is not None and not calibration.is_disturbed
    if calibrated and machine.device != "cpu":
        return Basis(calibration, runs=runs)
    shapes = shapes_of(workload)
    found = measured(machine, shapes, doing)
    measurement = None if found.found is None else for_block(found.found, shapes.bounded(machine.device).block)
    if calibrated:
        measurement = None if measurement is None or measurement.is_disturbed else measurement
        return Basis(calibration, measurement, found.message, runs=runs)
    return Basis(None, measurement, found.message, found.trouble, runs)


def shapes_of(workload: Workload) -> Shapes:
    """Return the model's matrix sizes (those with the most computation first), its block, and its sequences' length."""
    a = workload.architecture
    done: dict[tuple[int, int], int] = {}
    for kind in block_kinds(a):
        for weight in block_weights(a, kind, 4, True).parameters.values():
            if weight.k > 1:
                size = weight.n, weight.k
                done[size] = done.get(size, 0) + weight.n * weight.k
    widths = sorted(done, key=lambda size: -done[size])
    inner = a.intermediate or a.shared_intermediate or a.expert_intermediate
    block = (a.hidden, inner, a.heads, a.key_value_heads, a.head_dim) if inner else None
    return Shapes(tuple(widths) or ((a.hidden, a.hidden),), max(1, round(workload.mean_length)), block)
