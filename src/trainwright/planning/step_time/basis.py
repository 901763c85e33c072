"""What a plan's times go by on a machine: its calibration, what is measured in a few seconds, or datasheets.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainwright.machine.detect import Machine
from trainwright.machine.measured.calibration import Calibration, current_calibration
from trainwright.machine.measured.own_runs import OwnRuns, own_runs
from trainwright.machine.measured.quick import Shapes, measured
from trainwright.planning.operations import block_kinds, block_weights
from trainwright.planning.workload import Workload


@dataclass(frozen=True)
class Basis:
    """``said``: that something was measured for it now. ``trouble``: why there is neither. ``runs``: what runs of this
    machine took, which predictions are corrected by."""

    calibration: Calibration | None = None
    measurement: Calibration | None = None
    said: str | None = None
    trouble: str | None = None
    runs: OwnRuns = OwnRuns()  # noqa: RUF009

    @property
    def kind(self) -> str:
        """What predictions go by before they are corrected."""
        if self.calibration is not None:
            return "calibration"
        return "datasheet" if self.measurement is None else "measurement"


def basis_of(machine: Machine, workload: Workload, doing: Callable[[str], None] = lambda text: None) -> Basis:
    """Return what plans of ``workload`` on ``machine`` go by, measured now where it is at hand and never was.

    Args:
        doing: told what takes a few seconds, before it is done.
    """
    calibration, runs = current_calibration(machine), own_runs(machine)
    if calibration is not None and not calibration.is_disturbed:
        return Basis(calibration, runs=runs)
    found = measured(machine, shapes_of(workload), doing)
    return Basis(None, found.found, found.said, found.trouble, runs)


def shapes_of(workload: Workload) -> Shapes:
    """Return the model's matrices, those that most is computed with first, and the length of its documents."""
    a = workload.architecture
    done: dict[tuple[int, int], int] = {}
    for kind in block_kinds(a):
        for weight in block_weights(a, kind, 4, True).parameters.values():
            if weight.k > 1:
                size = weight.n, weight.k
                done[size] = done.get(size, 0) + weight.n * weight.k
    widths = sorted(done, key=lambda size: -done[size])
    return Shapes(tuple(widths) or ((a.hidden, a.hidden),), max(1, round(workload.document)))
