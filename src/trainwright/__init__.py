"""Trainwright: from a recipe to a finished and checked training run.

    import trainwright as tw

    run = tw.train("recipe.yaml", "train.max_steps=100", progress=True)

Heavy libraries are imported only when they are used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    # Before anything that Windows lacks is imported: this module comes first whatever is started.
    sys.stderr.write(
        "Trainwright does not run on Windows itself: install it in WSL (run `wsl --install`) or in a Linux container\n"
    )
    sys.exit(3)

if TYPE_CHECKING:
    from trainwright.api.agents import Collected, collect
    from trainwright.api.alternates import alternates
    from trainwright.api.evaluation import Evaluation, evaluate
    from trainwright.api.generation import generate
    from trainwright.api.publishing import Merged, Upload, export, merge, push
    from trainwright.api.recipe import Recipe
    from trainwright.api.run import Run
    from trainwright.api.stopping import checkpoint, stop
    from trainwright.api.training import resume, train
    from trainwright.api.unlearning import unlearn_study
    from trainwright.clusters.operations import RunState, Submission, jobs, submit
    from trainwright.doctor.operations import Comparison, Diagnosis, MachineReport, check_machine, explain, verify
    from trainwright.errors import MachineError, RequestError, Stopped, TrainingError, TrainwrightError
    from trainwright.faults.drills.operations import Drill, drill
    from trainwright.observe.operations.ablation import Ablation, ablate
    from trainwright.observe.operations.comparing import RunsCompared, compare
    from trainwright.observe.operations.reporting import report
    from trainwright.observe.operations.runs import RunSummary, runs
    from trainwright.planning.requests import Plan, plan, simulate
    from trainwright.planning.simulation.report import Simulation

__version__ = "0.1.0"
__all__ = [
    "Ablation",
    "Collected",
    "Comparison",
    "Diagnosis",
    "Drill",
    "Evaluation",
    "MachineError",
    "MachineReport",
    "Merged",
    "Plan",
    "Recipe",
    "RequestError",
    "Run",
    "RunState",
    "RunSummary",
    "RunsCompared",
    "Simulation",
    "Stopped",
    "Submission",
    "TrainingError",
    "TrainwrightError",
    "Upload",
    "ablate",
    "alternates",
    "check_machine",
    "checkpoint",
    "collect",
    "compare",
    "drill",
    "evaluate",
    "explain",
    "export",
    "generate",
    "jobs",
    "merge",
    "plan",
    "push",
    "report",
    "resume",
    "runs",
    "simulate",
    "stop",
    "submit",
    "train",
    "unlearn_study",
    "verify",
]
# The module of each, imported when it is first used.
_MODULES = {
    "Ablation": "api.ablation",
    "Collected": "api.agents",
    "Comparison": "api.doctor",
    "Diagnosis": "api.doctor",
    "Drill": "api.drilling",
    "Evaluation": "api.evaluation",
    "MachineError": "errors",
    "MachineReport": "api.doctor",
    "Merged": "api.publishing",
    "Plan": "api.planning",
    "Recipe": "api.recipe",
    "RequestError": "errors",
    "Run": "api.run",
    "RunState": "api.clusters",
    "RunSummary": "api.runs",
    "RunsCompared": "api.comparing",
    "Simulation": "simulation.report",
    "Stopped": "errors",
    "Submission": "api.clusters",
    "TrainingError": "errors",
    "TrainwrightError": "errors",
    "Upload": "api.publishing",
    "ablate": "api.ablation",
    "alternates": "api.alternates",
    "check_machine": "api.doctor",
    "collect": "api.agents",
    "compare": "api.comparing",
    "drill": "api.drilling",
    "evaluate": "api.evaluation",
    "explain": "api.doctor",
    "export": "api.publishing",
    "generate": "api.generation",
    "jobs": "api.clusters",
    "merge": "api.publishing",
    "plan": "api.planning",
    "push": "api.publishing",
    "report": "api.reporting",
    "resume": "api.training",
    "runs": "api.runs",
    "simulate": "api.planning",
    "checkpoint": "api.stopping",
    "stop": "api.stopping",
    "submit": "api.clusters",
    "train": "api.training",
    "unlearn_study": "api.unlearning",
    "verify": "api.doctor",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(f"{__name__}.{_MODULES[name]}"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
