"""The values of auto where there is no planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainwright.errors import RequestError
from trainwright.machine.machine import Gpu, Machine
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.resolve import choose_values, fill_auto_values

GIB = 2**30
CPU = Machine("here", "Some CPU", 4, 64 * GIB, ())
GPUS = replace(CPU, gpus=(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0)),) * 4)
OLD = replace(CPU, gpus=(Gpu("Tesla T4", 16 * GIB, (7, 5)),))


def recipe(train: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **data: Any) -> RecipeSchema:
    return RecipeSchema.model_validate(
        {
            "task": "sft",
            "model": {"name": "HuggingFaceTB/SmolLM2-1.7B"},
            "data": {"train": "pydoc", "max_length": 1024, **data},
            "train": {"global_batch_size": 16, **(train or {})},
            "parallel": parallel or {},
        }
    )


def resolved(machine: Machine, of: RecipeSchema, nodes: int = 1) -> RecipeSchema:
    return fill_auto_values(of, choose_values(of, machine, nodes).values, machine.device)


@pytest.mark.parametrize(
    ("machine", "nodes", "strategy", "processes", "precision", "rows"),
    [
        (CPU, 1, "ddp", 2, "no", 8),
        (replace(CPU, cpu_cores=1), 1, "single", 1, "no", 8),
        (GPUS, 1, "ddp", 4, "bf16", 4),
        (GPUS, 2, "ddp", 8, "bf16", 2),
        (OLD, 1, "single", 1, "no", 8),
    ],
)
def test_devices_set_the_processes_and_the_precision(
    machine: Machine, nodes: int, strategy: str, processes: int, precision: str, rows: int
) -> None:
    found = resolved(machine, recipe(), nodes)
    assert (found.parallel.strategy, found.parallel.num_processes) == (strategy, processes)
    assert (found.train.mixed_precision, found.train.micro_batch_size) == (precision, rows)
    assert (found.train.activation_checkpointing, found.train.compile) == ("none", False)


def test_a_micro_batch_has_at_most_a_usual_number_of_tokens_and_the_steps_that_the_recipe_sets() -> None:
    assert resolved(CPU, recipe(max_length=4096)).train.micro_batch_size == 2
    assert resolved(CPU, recipe(max_length=100_000)).train.micro_batch_size == 1
    assert resolved(CPU, recipe(pack_length=1024)).train.micro_batch_size == 1
    assert resolved(CPU, recipe({"gradient_accumulation_steps": 4})).train.micro_batch_size == 2
    with pytest.raises(RequestError, match=r"gradient_accumulation_steps: no micro-batch size gives 7 on 2 processes"):
        choose_values(recipe({"gradient_accumulation_steps": 7}), CPU, 1)


def test_what_the_recipe_sets_is_kept_and_only_the_rest_has_a_reason() -> None:
    asked = recipe(
        {"micro_batch_size": 1, "compile": True}, {"strategy": "fsdp", "num_processes": {"min": 2, "max": 3}}
    )
    plan = choose_values(asked, CPU, 1)
    found = fill_auto_values(asked, plan.values, "cpu")
    assert (found.parallel.strategy, found.parallel.num_processes) == ("fsdp", 3)
    assert found.train.micro_batch_size == 1 and found.train.compile is True
    assert [reason.partition(" ")[0] for reason in plan.reasons] == [
        "train.mixed_precision",
        "train.activation_checkpointing",
        "parallel.num_processes",
    ]
