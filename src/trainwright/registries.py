"""What a recipe can name, one line each: the built-in ones, to which installed packages add by entry points."""

from __future__ import annotations

from typing import Any

from trainwright.extensions import Registry

# A recipe.task_spec.TaskSpec each, in a module that imports no torch.
TASKS: Registry[Any] = Registry(
    "trainwright.tasks",
    {
        "sft": "trainwright.tasks.sft.spec:SPEC",
        "dpo": "trainwright.tasks.dpo.spec:SPEC",
        "pretrain": "trainwright.tasks.pretrain.spec:SPEC",
        "unlearn": "trainwright.tasks.unlearn.spec:SPEC",
        "algorithm_distillation": "trainwright.tasks.algorithm_distillation.spec:SPEC",
    },
    kind="task",
    required=("name", "summary", "module", "section", "check", "fill", "rows", "needs"),
)
