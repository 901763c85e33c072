"""Simulations in forks of one process that has imported everything: many cases for the price of one start.

python -m tests.planning.simulation.cases FILE    reads the cases from FILE and writes what was found to it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT, environment

RECIPE = ROOT / "tests" / "planning" / "simulation" / "recipe.yaml"


@dataclass(frozen=True)
class Case:
    """A simulation of ``recipe`` on ``machine``."""

    machine: str
    overrides: tuple[str, ...] = ()
    recipe: str = str(RECIPE)
    force: bool = False


@dataclass
class Found:
    """``report``: a ``Simulation`` as plain values, or None if ``error`` was raised."""

    case: Case
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def peak(self) -> int:
        """The most bytes of tensors on the device."""
        return int(self.report["peak"])

    @property
    def planned(self) -> int:
        """The same as the plan has it."""
        return int(max(self.report["planned_memory"].values()))


def simulate_all(cases: Sequence[Case], directory: Path) -> list[Found]:
    """Simulate every case; one that fails does not keep the others from it."""
    file = directory / f"cases-{len(list(directory.iterdir()))}.json"
    asked = [[case.recipe, list(case.overrides), case.machine, case.force] for case in cases]
    file.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.planning.simulation.cases", str(file)]
    done = subprocess.run(command, env=environment(), cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        Found(case, **{kind: value}) for case, (kind, value) in zip(cases, json.loads(file.read_text()), strict=True)
    ]


def _main(file: Path) -> None:
    from trainwright.planning.simulation.start import load_simulated_device

    load_simulated_device()
    import torch._dynamo
    import transformers

    assert torch and transformers, "imported once, for all forks"
    found = []
    for recipe, overrides, machine, force in json.loads(file.read_text()):
        answer = file.with_suffix(".one")
        child = os.fork()
        if child == 0:
            _simulate(recipe, overrides, machine, force, answer)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(json.loads(answer.read_text()) if status == 0 else ["error", f"ended with status {status}"])
        answer.unlink(missing_ok=True)
    file.write_text(json.dumps(found))


def _simulate(recipe: str, overrides: list[str], machine: str, force: bool, answer: Path) -> None:
    from trainwright.planning.simulation.start import SimulationRequest, simulate

    try:
        report = simulate(SimulationRequest(Path(recipe), overrides, machine, force=force)).as_json()
        answer.write_text(json.dumps(["report", report]))
    except BaseException as error:
        traceback.print_exc()
        answer.write_text(json.dumps(["error", f"{type(error).__name__}: {error}"]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
