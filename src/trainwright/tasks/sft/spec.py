"""The specification of supervised fine-tuning for recipes and plans."""

from __future__ import annotations

from trainwright.recipe.task_spec import TaskSpec

SPEC = TaskSpec(
    name="sft",
    summary="supervised fine-tuning on conversations or text",
    module="trainwright.tasks.sft.task",
    rows=lambda recipe, key: "examples",
    also_called=("finetune", "finetuning", "instruct", "supervised"),
)
