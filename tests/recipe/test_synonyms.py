"""A recipe with the names of other tools is answered with ours."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.recipe.conftest import SMALLEST
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.problems import find_meaning
from trainwright.recipe.schema import build_recipe_model
from trainwright.recipe.synonyms import SECTION_WORDS, SECTIONS, OwnKey, list_answers, look_up_key

NAMES = [(name, answer) for answer, names in list_answers().items() for name in names.split()]
Refusal = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.lr=1e-4", "did you mean learning_rate?"),
        ("lr=1e-4", "did you mean optimizer.learning_rate?"),
        ("train.per_device_train_batch_size=4", "did you mean micro_batch_size (rows per process)?"),
        ("train.gradient_checkpointing=true", "did you mean activation_checkpointing: full?"),
        ("gradient_checkpointing=true", "did you mean train.activation_checkpointing: full?"),
        ("train.bf16=true", "did you mean mixed_precision: bf16?"),
        ("train.num_train_epochs=3", "did you mean epochs?"),
        ("optimizer.warmup_ratio=0.1", "did you mean warmup_steps (below 1: a fraction of all steps)?"),
        ("data.max_seq_length=512", "did you mean max_length?"),
        ("sample_packing=true", "did you mean data.pack_length: 1024 (tokens per row)?"),
        ("model.lora_r=8", "did you mean model.adapter.rank?"),
        ("model.adapter.lora_alpha=8", "did you mean alpha?"),
        ("model.load_in_4bit=true", "did you mean model.adapter.quantization: nf4?"),
        ("model.model_name_or_path=x", "did you mean name?"),
        ("model.adapter.name=lora", "did you mean type?"),
        ("model.adapter.method=nf4", "did you mean quantization?"),
        ("model.adapter.name=unsloth", "did you mean optimizer.name?"),
        ("optimizer.algorithm=adamw", "did you mean name?"),
        ("optimizer.lr_policy=cosine", "did you mean schedule?"),
        ("output_dir=out", "did you mean logging.run_directory (such as runs/NAME; it must not exist)?"),
        ("checkpoint.save-steps=10", "did you mean every?"),
        ("deepspeed=zero.json", "did you mean parallel.deepspeed_config?"),
        ("optimizer.schedule=wsd", "; did you mean warmup_stable_decay?"),
        ("train.mixed_precision=bfloat16", "; did you mean bf16?"),
        ("train.activation_checkpointing=true", "; did you mean full?"),
        ("parallel.device=gpu", "; did you mean cuda?"),
        ("parallel.strategy=full_shard", "; did you mean fsdp?"),
        ("train_batch_size=8", "did you mean train.global_batch_size (per GPU: train.micro_batch_size)?"),
        ("tf_n_embd=64", "did you mean algorithm_distillation.model.n_embd?"),
        ("n_transit=80", "did you mean algorithm_distillation.context_length?"),
        ("gradient_checkpointing=false", "did you mean train.activation_checkpointing?"),
        ("trainer.args.learning_rate=1e-4", "did you mean optimizer.learning_rate?"),
        ("trainer.args={seed: 3}", "did you mean train.seed?"),
        ("training_args.save_steps=10", "did you mean checkpoint.every?"),
        ("optim={name: adamw}", "optim.name: unknown key; did you mean optimizer.name?"),
        ("lora_config={r: 8}", "did you mean model.adapter.rank?"),
        ("trainer.args.foo=1", ", step_policies, seed"),
        ("trainer=GradAscent", "set task: unlearn and unlearn.objective"),
        ("model=gpt2", "did you mean model.name=gpt2?"),
        ("experiment=unlearn/tofu", "the recipe file is what Hydra calls an experiment: trainwright train RECIPE"),
        ("logging.run_directory=runs/${task_name}", '"runs/${task_name}" is not replaced as in Hydra; write the value'),
        ("evaluate.prompts=['${oc.env:A}']", '"${oc.env:A}" is not replaced as in Hydra; write the value'),
        ("model.name=???", 'model.name: "???" is Hydra\'s word for a missing value; write the value'),
        ("+train.max_steps=3", "+ is Hydra's; leave it out: an override also sets keys that the recipe does not have"),
        (
            "~train.max_steps",
            "~ is Hydra's; remove the key from the recipe for its default, or set it to null where that is allowed",
        ),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(refusal: Refusal, override: str, meant: str) -> None:
    assert refusal("", override)[0].endswith(meant)


@pytest.mark.parametrize("value", ["none", "auto", "7", "[lora]"])
def test_a_value_that_is_no_word_of_one_key_only_suggests_none(refusal: Refusal, value: str) -> None:
    assert "model.adapter.method: unknown key; choose from type, " in refusal("", f"model.adapter.method={value}")[0]


@pytest.mark.parametrize(
    "written",
    [
        "num_workers: 4",
        "trainer: {args: {num_workers: 4}}",
        "train: {num_workers: 4}",
        "parallel:\n  num_workers: 4",
    ],
)
def test_an_answer_is_the_same_at_any_place_of_a_recipe(refusal: Refusal, written: str) -> None:
    (line,) = refusal(written)
    assert re.match(r"run.yaml:[45]: [a-z.]*num_workers: unknown key; leave it out: rows are tokenized once", line)


def test_a_sentence_with_dollars_is_no_placeholder(write: Callable[..., Path]) -> None:
    prompt = "What does ${name} do in a shell? Why ???"
    recipe = load_recipe(write(f"{SMALLEST}evaluate: {{prompts: ['{prompt}']}}"))
    assert recipe.evaluate.prompts == [prompt]


def test_every_answer_names_keys_of_the_schema() -> None:
    sections = "|".join(build_recipe_model().model_fields)
    keys = {answer.key for answer in list_answers() if isinstance(answer, OwnKey)} | set(SECTIONS.values())
    keys |= {f"{section}.{key}" for section, key in SECTION_WORDS.items()}
    for answer in list_answers():
        text = answer.note or "" if isinstance(answer, OwnKey) else answer
        keys |= set(re.findall(rf"\b(?:{sections})\.[a-z_]+", text))
    assert len(keys) > 60
    for key in keys:
        model: Any = build_recipe_model()
        for part in key.split("."):
            annotation = model.model_fields[part].annotation
            model = next((kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")), None)


def test_no_name_of_another_tool_is_a_key_at_its_place_or_has_two_answers() -> None:
    assert len(dict(NAMES)) == len(NAMES)
    for name, answer in NAMES:
        assert find_meaning(name) == answer, name


@pytest.mark.parametrize(
    "answer", [item for item in list_answers() if isinstance(item, OwnKey) and item.value], ids=str
)
def test_every_suggested_value_is_one_of_its_key(write: Callable[..., Path], answer: OwnKey) -> None:
    try:
        load_recipe(write(SMALLEST), [f"{answer.key}={answer.value}"])
    except ValueError as error:  # what else has to be set is another matter
        assert f"{answer.key}: expected" not in str(error)


def test_every_training_argument_has_an_answer() -> None:
    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments) if not field.name.startswith("_")]
    sections = [kind for field in build_recipe_model().model_fields.values() for kind in (field.annotation,)]
    ours = {key for kind in sections if hasattr(kind, "model_fields") for key in kind.model_fields}
    assert len(names) > 100
    assert [name for name in names if look_up_key(name) is None and name not in ours] == []
