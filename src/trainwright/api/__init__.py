"""The Python API: each function is what the command of its name calls. Import it as ``trainwright``."""

from __future__ import annotations

from trainwright.api.planning import Plan, plan
from trainwright.api.recipe import Recipe
from trainwright.api.run import Run
from trainwright.api.training import resume, train

__all__ = ["Plan", "Recipe", "Run", "plan", "resume", "train"]
