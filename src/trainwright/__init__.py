"""Trainwright: from a recipe to a finished and checked training run.

    import trainwright as tw

    run = tw.train("recipe.yaml", "train.max_steps=100", progress=True)

Heavy libraries are imported only when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.api import (
        Comparison,
        Evaluation,
        Merged,
        Plan,
        Recipe,
        Run,
        evaluate,
        generate,
        merge,
        plan,
        resume,
        train,
        verify,
    )
    from trainwright.errors import MachineError, RequestError, Stopped, TrainingError, TrainwrightError

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Evaluation",
    "MachineError",
    "Merged",
    "Plan",
    "Recipe",
    "RequestError",
    "Run",
    "Stopped",
    "TrainingError",
    "TrainwrightError",
    "evaluate",
    "generate",
    "merge",
    "plan",
    "resume",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "trainwright.errors" if name.endswith(("Error", "Stopped")) else "trainwright.api"
    return globals().setdefault(name, getattr(import_module(module), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
