"""The Python API: each function is what the command of the same name calls. Import it as ``trainwright``."""

from __future__ import annotations

from trainwright.api.evaluation import Evaluation, evaluate
from trainwright.api.generation import generate
from trainwright.api.merging import Merged, merge
from trainwright.api.planning import Plan, plan
from trainwright.api.recipe import Recipe
from trainwright.api.run import Run
from trainwright.api.training import resume, train
from trainwright.api.verification import Comparison, verify

__all__ = [
    "Comparison",
    "Evaluation",
    "Merged",
    "Plan",
    "Recipe",
    "Run",
    "evaluate",
    "generate",
    "merge",
    "plan",
    "resume",
    "train",
    "verify",
]
