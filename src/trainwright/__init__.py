"""Trainwright: from a recipe to a finished and checked training run.

    import trainwright as tw

    run = tw.train("recipe.yaml", "train.max_steps=100", progress=True)

Heavy libraries are imported only when they are used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    # Before anything that Windows lacks is imported: this module comes first whatever is started.
    sys.stderr.write(
        "Trainwright does not run on Windows itself: install it in WSL (run `wsl --install`) or in a Linux container\n"
    )
    sys.exit(3)

if TYPE_CHECKING:
    from trainwright.api.agents import Collected, collect
    from trainwright.api.evaluation import Evaluation, evaluate
    from trainwright.api.generation import generate
    from trainwright.api.publishing import Merged, Upload, export, merge, push
    from trainwright.api.recipe import Recipe
    from trainwright.api.run import Run, checkpoint, stop
    from trainwright.api.training import resume, train
    from trainwright.api.unlearning import alternates, unlearn_study
    from trainwright.clusters.operations import RunState, Submission, jobs, submit
    from trainwright.doctor.operations import Diagnosis, MachineReport, check_machine, explain, verify
    from trainwright.doctor.verify import Comparison
    from trainwright.errors import MachineError, RequestError, Stopped, TrainingError, TrainwrightError
    from trainwright.faults.drills.operations import Drill, drill
    from trainwright.observe.ablation import Ablation, ablate
    from trainwright.observe.report import report
    from trainwright.observe.reports.comparing import RunsCompared, compare
    from trainwright.observe.runs import RunSummary, runs
    from trainwright.planning.requests import Plan, plan, simulate
    from trainwright.planning.simulation.report import Simulation
    from trainwright.recipe.extensions import extension

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
    "extension",
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
# The names of each module, which is imported when one of them is first used.
_MODULES = {
    "trainwright.api.agents": ("Collected", "collect"),
    "trainwright.api.evaluation": ("Evaluation", "evaluate"),
    "trainwright.api.generation": ("generate",),
    "trainwright.api.publishing": ("Merged", "Upload", "export", "merge", "push"),
    "trainwright.api.recipe": ("Recipe",),
    "trainwright.api.run": ("Run", "checkpoint", "stop"),
    "trainwright.api.training": ("resume", "train"),
    "trainwright.api.unlearning": ("alternates", "unlearn_study"),
    "trainwright.clusters.operations": ("RunState", "Submission", "jobs", "submit"),
    "trainwright.doctor.operations": ("Diagnosis", "MachineReport", "check_machine", "explain", "verify"),
    "trainwright.doctor.verify": ("Comparison",),
    "trainwright.errors": ("MachineError", "RequestError", "Stopped", "TrainingError", "TrainwrightError"),
    "trainwright.faults.drills.operations": ("Drill", "drill"),
    "trainwright.observe.ablation": ("Ablation", "ablate"),
    "trainwright.observe.runs": ("RunSummary", "runs"),
    "trainwright.observe.report": ("report",),
    "trainwright.observe.reports.comparing": ("RunsCompared", "compare"),
    "trainwright.planning.requests": ("Plan", "plan", "simulate"),
    "trainwright.planning.simulation.report": ("Simulation",),
    "trainwright.recipe.extensions": ("extension",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(module), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
