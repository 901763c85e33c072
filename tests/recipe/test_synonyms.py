"""A recipe with the names of other tools is answered with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from trainwright.recipe.schema import recipe_model
from trainwright.recipe.synonyms import _keys

Refusal = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.lr=1e-4", "did you mean learning_rate?"),
        ("lr=1e-4", "did you mean optimizer.learning_rate?"),
        ("train.per_device_train_batch_size=4", "did you mean micro_batch_size?"),
        ("train.gradient_checkpointing=true", "did you mean activation_checkpointing: full?"),
        ("gradient_checkpointing=true", "did you mean train.activation_checkpointing: full?"),
        ("train.bf16=true", "did you mean mixed_precision: bf16?"),
        ("train.num_train_epochs=3", "did you mean epochs?"),
        ("optimizer.warmup_ratio=0.1", "did you mean warmup_steps (below 1: a fraction of all steps)?"),
        ("data.max_seq_length=512", "did you mean max_length?"),
        ("sample_packing=true", "did you mean data.pack_length (tokens per row)?"),
        ("model.lora_r=8", "did you mean model.adapter.rank?"),
        ("model.adapter.lora_alpha=8", "did you mean alpha?"),
        ("model.load_in_4bit=true", "did you mean model.adapter.quantisation: nf4?"),
        ("model.model_name_or_path=x", "did you mean name?"),
        ("model.adapter.name=lora", "did you mean type?"),
        ("model.adapter.method=nf4", "did you mean quantisation?"),
        ("model.adapter.name=unsloth", "did you mean optimizer.name?"),
        ("optimizer.algorithm=adamw", "did you mean name?"),
        ("optimizer.lr_policy=cosine", "did you mean schedule?"),
        ("output_dir=out", "did you mean logging.run_directory?"),
        ("checkpoint.save-steps=10", "did you mean every?"),
        ("deepspeed=zero.json", "did you mean parallel.deepspeed_config?"),
        ("optimizer.schedule=wsd", "; did you mean warmup_stable_decay?"),
        ("train.mixed_precision=bfloat16", "; did you mean bf16?"),
        ("train.activation_checkpointing=true", "; did you mean full?"),
        ("parallel.device=gpu", "; did you mean cuda?"),
        ("parallel.strategy=full_shard", "; did you mean fsdp?"),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(refusal: Refusal, override: str, meant: str) -> None:
    assert refusal("", override)[0].endswith(meant)


@pytest.mark.parametrize("value", ["none", "auto", "7", "[lora]"])
def test_a_value_that_is_no_word_of_one_key_only_suggests_none(refusal: Refusal, value: str) -> None:
    assert "model.adapter.method: unknown key; choose from type, " in refusal("", f"model.adapter.method={value}")[0]


def test_every_name_of_other_tools_leads_to_a_key_of_the_schema() -> None:
    for ours in _keys():
        model: Any = recipe_model()
        for part in ours.key.split("."):
            kinds = (model.model_fields[part].annotation, *get_args(model.model_fields[part].annotation))
            model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
