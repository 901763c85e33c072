"""A user's DeepSpeed JSON: what agrees with the recipe runs, and everything else is named."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import ON_ROWS, TINY, Runs, column, difference
from tests.support.training import Case, train
from trainwright.errors import MachineError, RequestError
from trainwright.models.quantization import NF4, QuantizedLinear
from trainwright.parallel.zero.deepspeed_config import DEFAULTS, build_settings, read_file
from trainwright.parallel.zero.deepspeed_config import check_file as check
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.strategy_spec import check_library

OFFLOADED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
            "cos_min_ratio": "auto",
        },
    },
}
OFFLOADING = ("parallel.strategy=zero3", "parallel.offload_optimizer=true", "parallel.offload_parameters=true")


def recipe(directory: Path, content: Any, *overrides: str) -> RecipeSchema:
    file = directory / "deepspeed.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    fixed = ("parallel.num_processes=2", "data.pack_length=null", f"parallel.deepspeed_config={file}")
    return load_recipe(TINY, [*fixed, "parallel.strategy=zero2", *overrides])


def problems(directory: Path, content: Any, *overrides: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        check(recipe(directory, content, *overrides))
    file = str(directory / "deepspeed.json")
    return [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]


def test_a_file_full_of_autos_agrees_with_any_recipe(tmp_path: Path) -> None:
    check(recipe(tmp_path, OFFLOADED, *OFFLOADING))
    check(recipe(tmp_path, {"zero_optimization": {"stage": 2}, "fp16": {"enabled": False, "loss_scale": 0}}))
    check(load_recipe(TINY, []))


def test_a_file_that_says_what_the_recipe_says_agrees(tmp_path: Path) -> None:
    content = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 100,
    }
    check(recipe(tmp_path, content, "train.mixed_precision=bf16"))


@pytest.mark.parametrize(
    ("section", "missing"),
    [
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 30, "warmup_num_steps": 8}}},
            [
                "scheduler.params.warmup_type: is missing, and DeepSpeed's default log contradicts "
                "optimizer.warmup_steps, whose warm-up is linear; set it to linear here",
                "scheduler.params.warmup_max_lr: is missing, and DeepSpeed's default 0.001 contradicts "
                "optimizer.learning_rate 0.002; set it to auto, or to the value of optimizer.learning_rate, here",
            ],
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_type": "linear"}}},
            [
                "scheduler.params.warmup_num_steps: is missing, and DeepSpeed's default 1000 contradicts "
                "optimizer.warmup_steps 8; set it to auto, or to the value of optimizer.warmup_steps, here"
            ],
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
            [
                "optimizer.params.weight_decay: is missing, and DeepSpeed's default 0.01 contradicts "
                "optimizer.weight_decay 0.0; set it to auto, or to the value of optimizer.weight_decay, here"
            ],
        ),
    ],
)
def test_deepspeeds_defaults_for_keys_left_out_count(
    tmp_path: Path, section: dict[str, Any], missing: list[str]
) -> None:
    ours = ("optimizer.schedule=linear", "optimizer.warmup_steps=8", "optimizer.learning_rate=0.002")
    assert problems(tmp_path, section, *ours, "optimizer.weight_decay=0") == missing


def test_a_warm_up_of_no_steps_has_any_shape(tmp_path: Path) -> None:
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    check(recipe(tmp_path, section, "optimizer.schedule=constant", "optimizer.warmup_steps=0"))


def test_one_accumulation_step_says_nothing_about_packs(tmp_path: Path) -> None:
    packed = ("data.pack_length=512", "train.micro_batch_size=2")
    check(recipe(tmp_path, {"gradient_accumulation_steps": 1}, *packed))
    assert problems(tmp_path, {"gradient_accumulation_steps": 3}, *packed)


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": {"stage": 2, "cpu_offload": False, "cpu_offload_param": False}},
        {"zero_optimization": {"cpu_offload_use_pin_memory": False, "elastic_checkpoint": False}},
        {"zero_optimization": {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "mics_shard_size": -1}},
        {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True, "load_from_fp32_weights": True}},
        {"fp16": {"enabled": False, "auto_cast": False, "consecutive_hysteresis": False}},
        {"bf16": {"enabled": False, "immediate_grad_update": True}},
        {"flops_profiler": {"enabled": False, "profile_step": 1}, "wandb": {"enabled": False}, "amp": {}},
        {"communication_data_type": None, "data_types": {"grad_accum_dtype": None}, "sparse_gradients": False},
        {"optimizer": {"params": {"bias_correction": True, "amsgrad": False}}},
    ],
)
def test_unsupported_keys_at_deepspeeds_own_defaults_are_read(tmp_path: Path, content: dict[str, Any]) -> None:
    check(recipe(tmp_path, content))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_what_passes_as_a_default_is_deepspeeds_default() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = "zero_optimization."
    ours = {key.removeprefix(section): value for key, value in DEFAULTS.items() if key.startswith(section)}
    fields = {name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    deprecated = {name: False for name in ours if name.startswith("cpu_offload")}  # their default says: not given
    known = {name: fields[name] for name in ours if not name.startswith("mics_")}  # those are of another class
    assert known | deprecated == {name: ours[name] for name in known}


@pytest.mark.parametrize(
    ("content", "key", "ours"),
    [
        ({"train_batch_size": 16}, "train_batch_size", "train.global_batch_size 8"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu", "train.micro_batch_size 2"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps", "train.gradient_accumulation_steps 2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping", "optimizer.max_grad_norm 1.0"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "optimizer.name adamw"),
        ({"optimizer": {"params": {"lr": 1e-4}}}, "optimizer.params.lr", "optimizer.learning_rate 0.001"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "optimizer.params.betas", "optimizer.betas"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode", "AdamW is used"),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "scheduler.type",
            "optimizer.schedule cosine; set optimizer.schedule to constant",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type", "OneCycle is not supported"),
        ({"scheduler": {"params": {"total_num_steps": 7}}}, "scheduler.params.total_num_steps", "train.max_steps 30"),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "train.mixed_precision is no"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "train.mixed_precision is no"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "parallel.strategy zero2"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device",
            "parallel.offload_optimizer false",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "nvme is not supported",
        ),
        ({"zero_optimization": {"cpu_offload_param": True}}, "zero_optimization.cpu_offload_param", "old name"),
        ({"zero_optimization": {"cpu_offload": 0}}, "zero_optimization.cpu_offload", "old name"),
        ({"wandb": {"enabled": True}}, "wandb", "not supported"),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload", "parallel.offload_optimizer"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size", "remove"),
        ({"communication_data_type": "bf16"}, "communication_data_type", "fp32"),
        ({"prescale_gradients": True}, "prescale_gradients", "summed"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "fp32"),
        ({"activation_checkpointing": {}}, "activation_checkpointing", "train.activation_checkpointing"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler", "not supported"),
        ({"train_batch_sise": 8}, "train_batch_sise", "not supported"),
        ({"zero_optimization": 2}, "zero_optimization", "must be an object"),
    ],
)
def test_what_contradicts_the_recipe_is_refused_by_both_keys(
    tmp_path: Path, content: dict[str, Any], key: str, ours: str
) -> None:
    (problem,) = problems(tmp_path, content)
    assert problem.startswith(f"{key}: ")
    assert ours in problem


@pytest.mark.parametrize("size", ["1e999", "-5", "0.5", '"many"', "true", "NaN", "9" * 4000])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    content = f'{{"zero_optimization": {{"reduce_bucket_size": {size}, "overlap_comm": "yes"}}}}'
    bucket, overlap = problems(tmp_path, content)
    assert bucket.startswith("zero_optimization.reduce_bucket_size: ") and bucket.endswith("from 0 to 2^63 - 1")
    assert overlap == "zero_optimization.overlap_comm: yes is neither true nor false"


def test_sizes_in_exponents_and_absent_switches_are_read(tmp_path: Path) -> None:
    check(recipe(tmp_path, '{"zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": null}}'))


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, {**OFFLOADED, "train_batch_size": 5, "wandb": {"enabled": True}})
    assert {line.split(": ")[0] for line in found} == {
        "train_batch_size",
        "wandb",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }


def test_a_number_that_depends_on_the_packs_cannot_be_fixed(tmp_path: Path) -> None:
    packed = "data.pack_length=256"
    assert "set it to auto" in problems(tmp_path, {"gradient_accumulation_steps": 2}, packed)[0]
    check(recipe(tmp_path, {"gradient_accumulation_steps": "auto"}, packed))


def test_no_clipping_is_zero_there(tmp_path: Path) -> None:
    check(recipe(tmp_path, {"gradient_clipping": 0}, "optimizer.max_grad_norm=null"))
    problems(tmp_path, {"gradient_clipping": 1.0}, "optimizer.max_grad_norm=null")


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"a": 1,}', ":1:"), ('{"a": 1, "a": 2}', "a is set twice"), ("[1]", "not a JSON object")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str, words: str) -> None:
    (problem,) = problems(tmp_path, content)
    assert str(tmp_path / "deepspeed.json") in problem and words in problem
    with pytest.raises(RequestError, match=r"deepspeed_config: nowhere\.json: no such file"):
        read_file("nowhere.json")


def test_sizes_follow_from_the_model_and_a_file_overrides_them(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    parallel = recipe(tmp_path, OFFLOADED, *OFFLOADING).parallel
    zero = build_settings(parallel, torch.bfloat16, module)["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["stage3_param_persistence_threshold"] == 32
    assert zero["reduce_bucket_size"] == sum(p.numel() for p in module.parameters())
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert zero["overlap_comm"] is True
    small = recipe(tmp_path, {"zero_optimization": {"reduce_bucket_size": 100}}).parallel
    config = build_settings(small, torch.float32, module)
    assert config["zero_optimization"]["reduce_bucket_size"] == 100
    assert config["gradient_clipping"] == 0.0


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_bits_of_a_quantized_matrix_are_cut_and_counted_as_what_they_become(
    tmp_path: Path, dtype: torch.dtype, width: int
) -> None:
    """Its bits are flat, as a vector is, which stays whole on every rank."""
    module = nn.Sequential(QuantizedLinear(torch.randn(64, 128), None, NF4), nn.LayerNorm(32))
    zero = build_settings(recipe(tmp_path, OFFLOADED, *OFFLOADING).parallel, dtype, module)["zero_optimization"]
    assert zero["stage3_param_persistence_threshold"] == 32
    assert zero["reduce_bucket_size"] == 64 * 128 // 2 // width + 2 * 32


def test_without_deepspeed_the_line_that_installs_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MachineError, match=r"pip install 'deepspeed==0\.19\.\*'"):
        check_library("zero2")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.2")
    with pytest.raises(MachineError, match=r"0\.17\.2 is not supported"):
        check_library("zero2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_run_with_a_file_is_the_run_without(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(OFFLOADED))
    few = (ON_ROWS, "train.max_steps=6", "data.validation=8")
    one = runs.trained(*few, "parallel.strategy=single")
    run = runs.trained(*few, "parallel.num_processes=2", f"parallel.deepspeed_config={file}", *OFFLOADING)
    assert difference(column(run, "loss"), column(one, "loss")) < 1e-5
    assert difference(column(run, "grad_norm"), column(one, "grad_norm")) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_tuning_changes_nothing_but_the_speed(runs: Runs, tmp_path: Path) -> None:
    tuning = {
        # Less than the largest parameter has.
        "reduce_bucket_size": 3000,
        "allgather_bucket_size": 3000,
        "stage3_prefetch_bucket_size": 3000,
        "stage3_max_live_parameters": 1000,
        "stage3_max_reuse_distance": 1000,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 5000,
        "overlap_comm": True,
        # Another order of the parameters in the partitions, and gaps between them.
        "round_robin_gradients": True,
        "parameter_alignment": True,
    }
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": tuning}))
    few = ("train.max_steps=6", "train.micro_batch_size=1", "data.validation=8")
    one = train(runs, {"single": Case((*few, "parallel.strategy=single"))}, 1)["single"]
    stages = ("zero1", "zero2", "zero3")
    tuned = {
        stage: Case((*few, f"parallel.strategy={stage}", f"parallel.deepspeed_config={file}"), 3, str(tmp_path / stage))
        for stage in stages
    }
    begun = train(runs, tuned, 2)
    plain = {stage: Case((*few, "parallel.strategy=ddp"), None, str(tmp_path / stage)) for stage in stages}
    continued = train(runs, plain, 2)
    for stage, name in itertools.product(stages, ("loss", "grad_norm")):
        assert difference(begun[stage].column(name) + continued[stage].column(name), one.column(name)) < 1e-5


def test_a_contradiction_ends_the_run_with_2(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    overrides = ("parallel.strategy=zero2", "parallel.num_processes=2", f"parallel.deepspeed_config={file}")
    ended = runs.train(*overrides).wait()
    assert ended.code == 2
    assert "zero_optimization.stage: 1 contradicts parallel.strategy zero2" in ended.stdout + ended.stderr
