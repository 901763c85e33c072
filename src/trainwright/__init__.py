"""Trainwright: from a recipe to a finished and checked training run.

    import trainwright as tw

    run = tw.train("recipe.yaml", "train.max_steps=100", progress=True)

Heavy libraries are imported only when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.api import (
        Ablation,
        Collected,
        Comparison,
        Diagnosis,
        Evaluation,
        MachineReport,
        Merged,
        Plan,
        Recipe,
        Run,
        Upload,
        ablate,
        check_machine,
        collect,
        evaluate,
        explain,
        export,
        generate,
        merge,
        plan,
        push,
        resume,
        train,
        unlearn_study,
        verify,
    )
    from trainwright.errors import MachineError, RequestError, Stopped, TrainingError, TrainwrightError

__version__ = "0.1.0"
__all__ = [
    "Ablation",
    "Collected",
    "Comparison",
    "Diagnosis",
    "Evaluation",
    "MachineError",
    "MachineReport",
    "Merged",
    "Plan",
    "Recipe",
    "RequestError",
    "Run",
    "Stopped",
    "TrainingError",
    "TrainwrightError",
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "trainwright.errors" if name.endswith(("Error", "Stopped")) else "trainwright.api"
    return globals().setdefault(name, getattr(import_module(module), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
