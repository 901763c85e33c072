"""What other tools promise for a case: `accelerate estimate-memory` and DeepSpeed's estimators, called as they are."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from support.plan_cases import Case
from trainwright.models.load import load_config
from trainwright.recipe.sections.model import ModelSection


def estimates(case: Case) -> dict[str, int]:
    """Bytes of a process by tool, of those that have something to say about the case."""
    return {**_accelerate(case), **_deepspeed(case)}


def _accelerate(case: Case) -> dict[str, int]:
    """The peak that its table has under "Training using Adam"; it knows of no strategy, batch or adapter."""
    if find_spec("accelerate") is None:
        return {}
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(_empty(case))
    usage = estimate_training_usage(total, "float32" if case.precision == "no" else "bfloat16")
    return {"accelerate": max(usage.values())}


def _deepspeed(case: Case) -> dict[str, int]:
    """For the stages that it has an estimator for, without offloading."""
    if case.strategy not in ("zero2", "zero3"):
        return {}
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model = _empty(case)
    if case.strategy == "zero2":
        total = sum(parameter.numel() for parameter in model.parameters())
        needs = estimate_zero2_model_states_mem_needs(total, case.processes, 1, cpu_offload=False)
        return {"deepspeed": int(needs[1])}
    total, largest = sum(parameter.numel() for parameter in model.parameters()), model_to_params(model)[1]
    needs = estimate_zero3_model_states_mem_needs(
        total, largest, case.processes, 1, cpu_offload=False, cpu_offload_params=False
    )
    return {"deepspeed": int(needs[1])}


def _empty(case: Case) -> Any:
    """The model without memory, as accelerate makes it of a repository's config.json."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = load_config(ModelSection.model_validate(case.model))
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)
