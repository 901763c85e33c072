"""Corrections of predictions from this machine's own runs. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.machine.measured.own_runs import Correction, OwnRuns
from trainwright.planning.errors import Errors, interval_of
from trainwright.planning.workload import Choice, Workload


@dataclass(frozen=True)
class Corrections:
    """Corrections of one workload. ``basis``: the source of uncorrected predictions."""

    runs: OwnRuns
    model: str
    basis: str

    def of(self, choice: Choice) -> Correction:
        """Return the correction for a choice."""
        return self.runs.correction(self.model, way_of(choice), self.basis)

    def errors(self) -> Errors | None:
        """Return the errors of corrected plans of such runs on this machine; None if there were too few."""
        known = [run for run in self.runs.runs if (run.model, run.basis) == (self.model, self.basis)]
        expected = [self.runs.correction(self.model, run.way, self.basis).seconds for run in known]
        speed = interval_of(factor / run.seconds for factor, run in zip(expected, known, strict=True))
        memory = interval_of(run.memory for run in known if run.memory)
        return None if speed is None or memory is None else Errors(memory, speed, ("runs on this machine",))


def corrections_of(runs: OwnRuns, workload: Workload, basis: str) -> Corrections:
    """Return the corrections of a workload by this machine's own runs."""
    return Corrections(runs, model_of(workload), basis)


def model_of(workload: Workload) -> str:
    """Return a key for runs whose prediction errors are related: family, size, adapter, length of rows and TF32."""
    a = workload.architecture
    adapter = "full" if workload.adapter is None else workload.adapter.kind
    parts = (a.family, f"2^{round(math.log2(max(1, a.parameters().total)))}", adapter, workload.quantisation)
    rows = f"2^{round(math.log2(workload.row_tokens))}", "packed" if workload.packed else "padded"
    return " ".join((*parts, *rows, workload.optimizer, *(["tf32"] if workload.tf32 else [])))


def way_of(choice: Choice) -> str:
    """Return a key for how a workload is run."""
    compiled = "compiled" if choice.compile else "eager"
    recompute = str(choice.activation_checkpointing)
    threads = "" if choice.threads is None else f"x{choice.threads}"
    processes = f"{choice.num_processes}{threads}"
    return f"{choice.strategy} {choice.mixed_precision} {processes} {compiled} {recompute}"
