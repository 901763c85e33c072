"""The Python API: each function is what the command of the same name calls. Import it as ``trainwright``."""

from __future__ import annotations

from trainwright.api.collecting import Collected, collect
from trainwright.api.doctor.explaining import Diagnosis, explain
from trainwright.api.doctor.machine import MachineReport, check_machine
from trainwright.api.evaluation import Evaluation, evaluate
from trainwright.api.generation import generate
from trainwright.api.merging import Merged, merge
from trainwright.api.planning import Plan, plan
from trainwright.api.publishing import Upload, export, push
from trainwright.api.recipe import Recipe
from trainwright.api.run import Run
from trainwright.api.studies.ablation import Ablation, ablate
from trainwright.api.studies.unlearning import unlearn_study
from trainwright.api.training import resume, train
from trainwright.api.verification import Comparison, verify

__all__ = [
    "Ablation",
    "Collected",
    "Comparison",
    "Diagnosis",
    "Evaluation",
    "MachineReport",
    "Merged",
    "Plan",
    "Recipe",
    "Run",
    "Upload",
    "ablate",
    "check_machine",
    "collect",
    "evaluate",
    "explain",
    "export",
    "generate",
    "merge",
    "plan",
    "push",
    "resume",
    "train",
    "unlearn_study",
    "verify",
]
