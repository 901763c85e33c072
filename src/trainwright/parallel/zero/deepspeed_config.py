"""Check a user's DeepSpeed JSON against the recipe, and make DeepSpeed's configuration.

The recipe alone defines how a run trains; a file adds DeepSpeed's own tuning. Values that both define must agree,
`auto` takes the recipe's value, and keys without effect here are rejected rather than ignored. The keys and their
defaults are those of https://www.deepspeed.ai/docs/config-json/ as of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.parallel.zero.spec import BUCKET_ELEMENTS, count_sharded_parts
from trainwright.recipe.files import read_json
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.parallel import ParallelSection
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    import torch
    from torch import nn


AUTO = "auto"

# Passed on unchanged, with `auto` as DeepSpeed's default: tuning and logs, which do not change the training.
_PASSED = {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"}
_PASSED_SIZES = {
    *("allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "module_granularity_threshold", "reduce_bucket_size"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
    *("stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
    "sub_group_size",
}
_PASSED_SWITCHES = {
    *("allgather_partitions", "contiguous_gradients", "enable_sanity_checks", "ignore_unused_parameters"),
    *("log_trace_cache_warnings", "memory_efficient_linear", "overlap_comm", "parameter_alignment", "reduce_scatter"),
    *("round_robin_gradients", "stage3_allgather_sequential", "stage3_use_all_reduce_for_fetch_params"),
    "use_multi_rank_bucket_allreduce",
}
_PASSED_ZERO = _PASSED_SIZES | _PASSED_SWITCHES
_LARGEST = 2**63 - 1  # of a size: a signed integer of 64 bits
# Already true of every run, whatever their value: full weights are always exported, any optimizer is allowed.
_GRANTED = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
_GRANTED_ZERO = {
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",  # its name before DeepSpeed 0.6
    "gather_16bit_weights_on_model_save",
}
_OFFLOAD = {"offload_optimizer": "parallel.offload_optimizer", "offload_param": "parallel.offload_parameters"}
_OFFLOAD_KEYS = {"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"}
# Keys that only accept the value that is used anyway; others would change the gradients.
_FIXED: dict[str, Any] = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "communication_data_type": "fp32",
    "managed_gradient_accumulation": True,
}
# Keys with an equivalent in the recipe.
_ELSEWHERE = {
    "activation_checkpointing": "use train.activation_checkpointing",
    "checkpoint": "use the recipe's checkpoint section",
    "compile": "use train.compile",
    "tensorboard": "use logging.observers",
    "amp": "use train.mixed_precision",
    "torch_autocast": "use train.mixed_precision",
    "seed": "use train.seed",
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# What DeepSpeed uses for keys that a section which names a type leaves out, where the recipe's value may be another.
_WARMUP_DEFAULTS = {"warmup_num_steps": 1000, "warmup_type": "log"}
_SCHEDULER_DEFAULTS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP_DEFAULTS,
    "WarmupDecayLR": {**_WARMUP_DEFAULTS, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {**_WARMUP_DEFAULTS, "cos_min_ratio": 0.0001},
}
_OPTIMIZER_DEFAULTS = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}


def read_file(path: str) -> dict[str, Any]:
    """Return the JSON of ``parallel.deepspeed_config``. Raises RequestError if it is invalid."""
    try:
        content = read_json(expand_user_path(path), pairs=_refuse_duplicates)
    except RequestError as error:
        raise RequestError(f"parallel.deepspeed_config: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"parallel.deepspeed_config: {path} is not a JSON object")
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    if twice := sorted(key for key, count in counts.items() if count > 1):
        raise ValueError(f"{twice[0]} is set twice")
    return dict(pairs)


def check_file(recipe: RecipeSchema) -> None:
    """Check that the recipe's DeepSpeed file, if any, agrees with the resolved ``recipe``.

    Raises:
        RequestError: lists every key that contradicts the recipe or has no effect here.
    """
    _refuse(recipe, lambda content: [*_check_supported(content), *_check_contradictions(content, recipe)])


def check_keys(recipe: RecipeSchema) -> None:
    """Raise RequestError for keys of the recipe's DeepSpeed file that are invalid with any recipe."""
    _refuse(recipe, _check_supported)


def _refuse(recipe: RecipeSchema, problems_of: Callable[[dict[str, Any]], Iterable[str]]) -> None:
    file = recipe.parallel.deepspeed_config
    if file is not None and (problems := list(problems_of(read_file(file)))):
        raise RequestError("\n".join(f"{file}: {problem}" for problem in problems))


def _check_supported(content: dict[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        if is_harmless(key, value):
            continue
        if key in _ELSEWHERE:
            yield f"{key}: has no effect here; {_ELSEWHERE[key]}"
        elif key in _FIXED:
            if value not in (AUTO, _FIXED[key]):
                yield f"{key}: {value} is not supported; gradients are summed in fp32. Remove it"
        elif key in _SECTIONS:
            if not isinstance(value, dict) and value != AUTO:
                yield f"{key}: must be an object"
        elif key not in {*_BATCH, "gradient_clipping"} | _PASSED | _GRANTED:
            yield f"{key}: is not supported here; remove it"
    section = content.get("zero_optimization")
    for key, value in section.items() if isinstance(section, dict) else ():
        if is_harmless(f"zero_optimization.{key}", value):
            continue
        if key in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
            yield f"zero_optimization.{key}: is DeepSpeed's old name; use {' or '.join(_OFFLOAD.values())}"
        elif key not in {"stage", *_OFFLOAD} | _PASSED_ZERO | _GRANTED_ZERO:
            yield f"zero_optimization.{key}: is not supported here; remove it"


def _check_contradictions(content: dict[str, Any], recipe: RecipeSchema) -> Iterator[str]:
    for key, value in content.items():
        if is_harmless(key, value):
            continue
        if key in _SECTIONS and isinstance(value, dict):
            yield from _SECTIONS[key](value, recipe)
        elif key in _BATCH or key == "gradient_clipping":
            ours, recipe_value = _look_up_scalar(key, recipe)
            if key == "gradient_accumulation_steps" and value == 1 and recipe_value is None:
                continue  # DeepSpeed's default, which sets nothing here: the packs of a step give the number
            yield from _check_agreement(key, value, ours, recipe_value)


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _look_up_scalar(key: str, recipe: RecipeSchema) -> tuple[str, Any]:
    """Return the recipe's key for one of DeepSpeed's, and its value; None if it differs from step to step."""
    train = recipe.train
    if key == "train_batch_size":
        return "train.global_batch_size", train.global_batch_size if train.batch_unit != "tokens" else None
    if key == "gradient_clipping":
        return "optimizer.max_grad_norm", recipe.optimizer.max_grad_norm or 0.0
    if key == "train_micro_batch_size_per_gpu":
        return "train.micro_batch_size", train.micro_batch_size if train.micro_batch_size != AUTO else None
    return "train.gradient_accumulation_steps", _count_passes(recipe)


def _count_passes(recipe: RecipeSchema) -> int | None:
    """Return the micro-batches per process and step; None if that depends on how examples fill packs."""
    train, processes = recipe.train, recipe.parallel.processes
    if isinstance(train.gradient_accumulation_steps, int):
        return train.gradient_accumulation_steps
    varies = recipe.data.pack_length is not None or train.batch_unit == "tokens"
    if not varies and isinstance(train.micro_batch_size, int) and isinstance(processes, int):
        return math.ceil(math.ceil(train.global_batch_size / train.micro_batch_size) / processes)
    return None


def _check_agreement(key: str, value: Any, ours: str, expected: Any) -> Iterator[str]:
    if value == AUTO:
        return
    if expected is None:
        yield f"{key}: {value}, but {ours} is auto and depends on the batch; set it to auto here too"
    elif not _is_equal(value, expected):
        yield f"{key}: {value} contradicts {ours} {expected}; set it to auto here, or change one of them"


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, (tuple, list)):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_is_equal(item, expected_item) for item, expected_item in zip(value, expected, strict=True))
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        return math.isclose(value, expected, rel_tol=1e-9)
    return bool(value == expected)


def _check_optimizer(section: dict[str, Any], recipe: RecipeSchema) -> Iterator[str]:
    ours = recipe.optimizer
    recipe_values = {
        "lr": ("optimizer.learning_rate", ours.learning_rate),
        "betas": ("optimizer.betas", ours.betas),
        "eps": ("optimizer.eps", ours.eps),
        "weight_decay": ("optimizer.weight_decay", ours.weight_decay),
        "torch_adam": ("optimizer.name: torch's AdamW is used,", True),
        "adam_w_mode": ("optimizer.name: AdamW is used,", True),
    }
    kind = section.get("type", AUTO)
    # DeepSpeed's Adam uses AdamW's weight decay unless adam_w_mode disables it.
    if kind != AUTO and str(kind).lower() not in ("adam", "adamw"):
        yield f"optimizer.type: {kind} contradicts optimizer.name {ours.name}"
    elif kind != AUTO:
        torch_adam = _select_parameters(section).get("torch_adam") is True
        defaults = {**_OPTIMIZER_DEFAULTS, **({"weight_decay": 0.01} if torch_adam else {})}
        yield from _check_left_out("optimizer", section, defaults, recipe_values)
    yield from _check_section_keys("optimizer", section, {"type", "params"})
    for key, value in _select_parameters(section).items():
        if key in recipe_values:
            yield from _check_agreement(f"optimizer.params.{key}", value, *recipe_values[key])
        elif not is_harmless(f"optimizer.params.{key}", value):
            yield f"optimizer.params.{key}: is not supported here; remove it"


def _check_scheduler(section: dict[str, Any], recipe: RecipeSchema) -> Iterator[str]:
    ours = recipe.optimizer
    kind = section.get("type", AUTO)
    if kind != AUTO and _SCHEDULES.get(kind) != ours.schedule:
        yield (
            f"scheduler.type: {kind} contradicts optimizer.schedule {ours.schedule}; set optimizer.schedule to "
            f"{_SCHEDULES[kind]}"
            if kind in _SCHEDULES
            else f"scheduler.type: {kind} is not supported; remove the section and use optimizer.schedule"
        )
    yield from _check_section_keys("scheduler", section, {"type", "params"})
    warmup = ours.warmup_steps
    recipe_values = {
        "warmup_max_lr": ("optimizer.learning_rate", ours.learning_rate),
        "warmup_min_lr": ("optimizer.warmup_steps, whose warm-up begins at", 0.0),
        "warmup_num_steps": ("optimizer.warmup_steps", warmup if isinstance(warmup, int) else None),
        "total_num_steps": ("train.max_steps", recipe.train.max_steps),
        "warmup_type": ("optimizer.warmup_steps, whose warm-up is", "linear"),
        "cos_min_ratio": ("optimizer.final_learning_rate_ratio", ours.final_learning_rate_ratio),
        "warmup_min_ratio": ("optimizer.warmup_steps, whose warm-up begins at", 0.0),
    }
    if not warmup and _select_parameters(section).get("warmup_num_steps") in (AUTO, 0):
        del recipe_values["warmup_type"]  # there is no warm-up
    if _SCHEDULES.get(kind) == ours.schedule:
        yield from _check_left_out("scheduler", section, _SCHEDULER_DEFAULTS[kind], recipe_values)
    for key, value in _select_parameters(section).items():
        if key in recipe_values:
            yield from _check_agreement(f"scheduler.params.{key}", value, *recipe_values[key])
        elif key == "warmup_type":
            continue
        elif not is_harmless(f"scheduler.params.{key}", value):
            yield f"scheduler.params.{key}: is not supported here; remove it"


def _check_left_out(
    name: str, section: dict[str, Any], defaults: dict[str, Any], expected: dict[str, tuple[str, Any]]
) -> Iterator[str]:
    """Yield the keys for which DeepSpeed would use a default that contradicts the recipe."""
    for key, default in defaults.items():
        if key in _select_parameters(section) or key not in expected:
            continue
        ours, value = expected[key]
        if value is None or not _is_equal(default, value):
            fix = "linear" if key == "warmup_type" else f"auto, or to the value of {ours.partition(',')[0]},"
            yield (
                f"{name}.params.{key}: is missing, and DeepSpeed's default {default} contradicts {ours} "
                f"{'(a fraction of the steps)' if value is None else value}; set it to {fix} here"
            )


def _select_parameters(section: dict[str, Any]) -> dict[str, Any]:
    parameters = section.get("params", {})
    return parameters if isinstance(parameters, dict) else {}


def _check_section_keys(name: str, section: dict[str, Any], known: set[str]) -> Iterator[str]:
    for key in (key for key, value in section.items() if key not in known and not is_harmless(f"{name}.{key}", value)):
        yield f"{name}.{key}: is not supported here; remove it"


def _build_precision_check(name: str) -> Callable[[dict[str, Any], RecipeSchema], Iterator[str]]:
    def problems(section: dict[str, Any], recipe: RecipeSchema) -> Iterator[str]:
        ours = recipe.train.mixed_precision
        enabled = section.get("enabled", False)
        if enabled != AUTO and bool(enabled) != (ours == name):
            state = "enabled" if enabled else "not enabled"
            yield f"{name}.enabled: {name} is {state}, but train.mixed_precision is {ours}; set it to auto here"
        # The engine does its own dynamic loss scaling; without enabled fp16 these settings have no effect.
        scaling = {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}
        for key in section.keys() - {"enabled"}:
            if is_harmless(f"{name}.{key}", section[key]):
                continue
            if key not in scaling or (ours == "fp16" and key == "loss_scale" and section[key] not in (0, AUTO)):
                yield f"{name}.{key}: is not supported here; remove it"

    return problems


def _check_data_types(section: dict[str, Any], recipe: RecipeSchema) -> Iterator[str]:
    for key, value in section.items():
        summed = key == "grad_accum_dtype" and value in (AUTO, "fp32", "float32")
        if not summed and not is_harmless(f"data_types.{key}", value):
            yield f"data_types.{key}: {value} is not supported; gradients are summed in fp32. Remove it"


def _zero(section: dict[str, Any], recipe: RecipeSchema) -> Iterator[str]:
    strategy = recipe.parallel.strategy
    stage = section.get("stage", AUTO)
    if str(stage) not in (AUTO, str(count_sharded_parts(look_up_strategy(strategy)))):
        yield f"zero_optimization.stage: {stage} contradicts parallel.strategy {strategy}"
    for key, value in section.items():
        if key in _OFFLOAD and not is_harmless(f"zero_optimization.{key}", value):
            yield from _offload(key, value, recipe)
        elif key in _PASSED_SIZES and value != AUTO and not _is_size(value):
            yield f"zero_optimization.{key}: {str(value)[:40]} is not a whole number from 0 to 2^63 - 1"
        elif key in _PASSED_SWITCHES and value not in (AUTO, None) and not isinstance(value, bool):
            yield f"zero_optimization.{key}: {str(value)[:40]} is neither true nor false"


def _is_size(value: Any) -> bool:
    """Return whether JSON's ``value`` is a size; 5e8 is one, too."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LARGEST and value == int(value)


def _offload(key: str, value: Any, recipe: RecipeSchema) -> Iterator[str]:
    offloaded = getattr(recipe.parallel, _OFFLOAD[key].split(".")[1])
    if value is None or value == AUTO:
        return
    if not isinstance(value, dict):
        yield f"zero_optimization.{key}: must be an object"
        return
    device = value.get("device", "none")
    if device not in ("cpu", "none", None, AUTO):
        yield f"zero_optimization.{key}.device: {device} is not supported; cpu or none"
    elif device != AUTO and offloaded != (device == "cpu"):
        yield f"zero_optimization.{key}.device: {device} contradicts {_OFFLOAD[key]} {str(offloaded).lower()}"
    yield from _check_section_keys(f"zero_optimization.{key}", value, _OFFLOAD_KEYS)


_SECTIONS: dict[str, Callable[[dict[str, Any], RecipeSchema], Iterator[str]]] = {
    "optimizer": _check_optimizer,
    "scheduler": _check_scheduler,
    "bf16": _build_precision_check("bf16"),
    "bfloat16": _build_precision_check("bf16"),
    "fp16": _build_precision_check("fp16"),
    "zero_optimization": _zero,
    "data_types": _check_data_types,
}


def build_settings(parallel: ParallelSection, dtype: torch.dtype, module: nn.Module) -> dict[str, Any]:
    """Return the configuration for ``deepspeed.initialize``: the user's tuning, and the engine's requirements.

    Args:
        module: the unsharded module; `auto` sizes depend on its parameters.
    """
    import torch

    content = {} if parallel.deepspeed_config is None else read_file(parallel.deepspeed_config)
    section = content.get("zero_optimization", {})
    section = section if isinstance(section, dict) else {}
    stage = count_sharded_parts(look_up_strategy(parallel.strategy))
    config: dict[str, Any] = {key: content[key] for key in _PASSED if content.get(key, AUTO) != AUTO}
    config |= {
        # The engine controls where a step ends and divides the loss itself; these only have to be consistent.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # off; DeepSpeed's default is 1.0
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16, "loss_scale": 1.0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            **_choose_sizes(module, stage, dtype),
            **{key: section[key] for key in _PASSED_ZERO & section.keys() if section[key] != AUTO},
            **_offload_settings(parallel, section),
            "stage": stage,
        },
    }
    if stage < 3:
        config["gradient_allreduce_op"] = "sum"
        # The engine already has the norm. ZeRO-1 in bf16 and offloading require their own.
        own_norm = parallel.offload_optimizer or (stage == 1 and dtype == torch.bfloat16)
        config["zero_optimization"]["compute_grad_norm"] = own_norm
    return config


def _choose_sizes(module: nn.Module, stage: int, dtype: torch.dtype) -> dict[str, Any]:
    # The bits of a quantized matrix, flat, become as many elements of the dtype as have their bytes.
    bits = sum(p.nbytes for p in module.parameters() if not p.is_floating_point()) // dtype.itemsize
    float_parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    bucket = max(2, min(BUCKET_ELEMENTS, bits + sum(parameter.numel() for parameter in float_parameters)))
    sizes: dict[str, Any] = {"reduce_bucket_size": bucket}
    if stage == 3:
        vectors = [parameter.numel() for parameter in float_parameters if parameter.dim() == 1]
        sizes |= {
            "stage3_prefetch_bucket_size": bucket,
            # Norms and biases stay in full on every rank: little memory, which saves many small gathers.
            "stage3_param_persistence_threshold": max(vectors, default=0),
            "memory_efficient_linear": False,  # replaces torch's linear for the whole process
        }
    else:
        sizes["allgather_bucket_size"] = bucket + bucket % 2
    return sizes


def _offload_settings(parallel: ParallelSection, section: dict[str, Any]) -> dict[str, Any]:
    """Return the offload settings: the recipe decides what is offloaded, the file how."""
    offload = {}
    offload_flags = {"offload_optimizer": parallel.offload_optimizer, "offload_param": parallel.offload_parameters}
    for key in (key for key, enabled in offload_flags.items() if enabled):
        values = section.get(key)
        values = {k: v for k, v in values.items() if v != AUTO} if isinstance(values, dict) else {}
        offload[key] = {**values, "device": "cpu"}
    return offload


# With dots for keys inside a section.
DEFAULTS: dict[str, Any] = {
    "communication_data_type": None,
    "data_types.grad_accum_dtype": None,
    "dataloader_drop_last": False,
    "disable_allgather": False,
    "disable_python_gc": False,
    "fp32_allreduce": False,
    "legacy_fusion": False,
    "load_universal_checkpoint": False,
    "seq_parallel_communication_data_type": "fp32",
    "sparse_attention": None,
    "sparse_gradients": False,
    "use_data_before_expert_parallelism": False,
    "vocabulary_size": None,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "bf16.check_grad_overflow": False,
    "bf16.immediate_grad_update": True,
    "fp16.auto_cast": False,
    "fp16.consecutive_hysteresis": False,
    "fp16.fp16_master_weights_and_grads": False,
    "optimizer.legacy_fusion": False,
    "optimizer.params.amsgrad": False,
    "optimizer.params.bias_correction": True,
    "optimizer.params.max_grad_norm": 0,
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_param": False,
    "zero_optimization.cpu_offload_use_pin_memory": False,
    "zero_optimization.elastic_checkpoint": False,
    "zero_optimization.legacy_stage1": False,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.mics_hierarchical_params_gather": False,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.override_module_apply": True,
    "zero_optimization.pipeline_loading_checkpoint": False,
    "zero_optimization.save_muon_momentum_buffer_in_memory": False,
    "zero_optimization.use_all_reduce_for_fetch_params": False,
    "zero_optimization.zenflow": None,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.zero_quantized_weights": False,
}
# Sections of DeepSpeed that have no effect while `enabled` is false, the default.
_OPTIONAL = {
    *("amp", "autotuning", "comet", "comms_logger", "csv_monitor", "curriculum_learning", "data_efficiency"),
    *("eigenvalue", "elasticity", "flops_profiler", "hybrid_engine", "progressive_layer_drop", "quantize_training"),
    *("tensorboard", "torch_autocast", "wandb", "weight_quantization"),
}


def is_harmless(key: str, value: Any) -> bool:
    """Return whether a value equals DeepSpeed's default. ``key``: with dots inside a section."""
    if key in DEFAULTS:
        return type(value) is type(DEFAULTS[key]) and value == DEFAULTS[key]
    return key in _OPTIONAL and isinstance(value, dict) and value.get("enabled", False) is False
