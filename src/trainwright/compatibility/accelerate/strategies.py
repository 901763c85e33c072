"""Translate what an Accelerate file says of a sharding strategy: its `deepspeed_config` and its `fsdp_config`.

`deepspeed_config`, inline or in a JSON file, becomes zero1, zero2 or zero3. Both versions of `fsdp_config` become
`parallel.strategy: fsdp`: torch's FSDP2, which shards parameter by parameter and computes the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.compatibility.accelerate.reading import AccelerateConfig, ConfigSection, Draft, read_json
from trainwright.errors import RequestError
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.utils.paths import expand_user_path

_DEVICES = ("NONE", "CPU", "NVME")
_DEFAULT_STAGE = 2  # Accelerate's default, if neither the file nor a JSON file sets it
_EACH = "start the hosts to use with --hosts or --hostfile over ssh, or the command once on each machine, as with srun"
_OFFLOADED = {"optimizer": "parallel.offload_optimizer", "param": "parallel.offload_parameters"}
_DEEPSPEED_NOTES = {
    "zero3_init_flag": "with zero3, weights are always loaded shard by shard",
    "zero3_save_16bit_model": "final/ is always one full model",
    "deepspeed_moe_layer_cls_names": "experts are sharded like all other layers",
    "deepspeed_hostfile": "pass the file to the command, which starts its hosts: train RECIPE --hostfile FILE",
    "deepspeed_inclusion_filter": _EACH,
    "deepspeed_exclusion_filter": _EACH,
    "enable_msamp": "not supported",
    "msamp_opt_level": "not supported",
    "offload_optimizer_nvme_path": "for offload to nvme only",
    "offload_param_nvme_path": "for offload to nvme only",
}
DEEPSPEED_KEYS = (
    "deepspeed_config_file",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "deepspeed_multinode_launcher",
    *_DEEPSPEED_NOTES,
)


def interpret_deepspeed(part: ConfigSection, draft: Draft) -> None:
    """Add the settings of ``part``, and of the JSON file that it names."""
    source = part.source
    stage = part.count("zero_stage")
    origin = part.place("zero_stage")
    if stage is not None and stage > 3:
        part.wrong("zero_stage", "0, 1, 2 or 3")
        stage = None
    name = part.text("deepspeed_config_file")
    if name is not None and name.lower() != "none":
        _read_json_file(name, part.place("deepspeed_config_file"), draft, source)
    elif stage is None:
        stage, origin = _DEFAULT_STAGE, f"{source.place('distributed_type')}: DEEPSPEED without a zero_stage"
    if stage is not None:
        draft.set("parallel.strategy", _choose_strategy(stage), origin)
    _read_offload(part, draft)
    _read_steps(part, draft)
    launcher = part.text("deepspeed_multinode_launcher")
    if launcher is not None and launcher.lower() != "standard":
        draft.note("deepspeed_multinode_launcher", _EACH)
    for key, reason in _DEEPSPEED_NOTES.items():
        if key in part and source.stated and str(part.raw(key)).lower() not in ("none", "false"):
            draft.note(key, reason)
        part.raw(key)
    for text in part.unknown(DEEPSPEED_KEYS, {}):
        draft.problem(text, for_script=True)


def _choose_strategy(stage: int) -> str:
    return f"zero{stage}" if stage else "ddp"


def _read_offload(part: ConfigSection, draft: Draft) -> None:
    for name, recipe_key in _OFFLOADED.items():
        key = f"offload_{name}_device"
        device = part.choice(key, _DEVICES)
        if device == "NVME":
            draft.problem(f"{part.place(key)}: only offload to the host's memory is supported; set it to cpu")
        elif device == "CPU" or (device == "NONE" and part.source.stated):
            draft.set(recipe_key, device == "CPU", part.place(key))
    strategy = draft.settings.get("parallel.strategy")
    offload = draft.settings.get("parallel.offload_parameters")
    if strategy is None or offload is None or not offload.value:
        return
    if "offload_parameters" not in look_up_strategy(strategy.value).keys:
        draft.problem(f"{offload.origin} contradicts {strategy.origin}: only ZeRO stage 3 offloads parameters")


def _read_steps(part: ConfigSection, draft: Draft) -> None:
    if part.text("gradient_accumulation_steps") not in (None, "auto"):
        steps = part.count("gradient_accumulation_steps", least=1)
        if steps is not None:
            origin = part.place("gradient_accumulation_steps")
            draft.set("train.gradient_accumulation_steps", steps, origin)
    if part.text("gradient_clipping") not in (None, "auto", "none"):
        norm = part.decimal("gradient_clipping")
        if norm is not None:
            draft.set("optimizer.max_grad_norm", norm or None, part.place("gradient_clipping"))


def find_json(name: str, source: AccelerateConfig) -> Path | None:
    """Return the DeepSpeed file: relative to the working directory, as in Accelerate, or to the Accelerate file."""
    path = expand_user_path(name)
    candidates = [path] if source.directory is None else [path, source.directory / path]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _read_json_file(name: str, origin: str, draft: Draft, source: AccelerateConfig) -> None:
    path = find_json(name, source)
    if path is None:
        also = "" if source.directory in (None, Path()) else f" nor in {source.directory}"
        draft.problem(f"{origin}: no such file{also}", for_script=True)
        return
    try:
        values = read_json(path)
    except RequestError as error:
        draft.problem(str(error), for_script=True)
        return
    draft.set("parallel.deepspeed_config", str(path), origin)
    zero = values.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        draft.problem(f"{path}: zero_optimization.stage: expected 0, 1, 2 or 3, not {stage}")
        return
    draft.set("parallel.strategy", _choose_strategy(stage), f"{path}: zero_optimization.stage: {stage}")
    if stage == 0:
        draft.problem(
            f"{path}: zero_optimization.stage 0 is ddp, which has no DeepSpeed file; remove it from {source.name} and "
            "set distributed_type to MULTI_GPU"
        )
    for name, recipe_key in _OFFLOADED.items():
        key = f"offload_{name}"
        _read_json_offload(path, key, zero.get(key), recipe_key, draft)
    for key, recipe_key in (
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps"),
        ("train_batch_size", "train.global_batch_size"),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("gradient_clipping", "optimizer.max_grad_norm"),
    ):
        value = values.get(key, "auto")
        if isinstance(value, int | float) and not isinstance(value, bool):
            norm = value or None if key == "gradient_clipping" else value
            draft.set(recipe_key, norm, f"{path}: {key}: {value}")
    _read_json_precision(path, values, draft)


def _read_json_offload(path: Path, key: str, value: Any, recipe_key: str, draft: Draft) -> None:
    device = str(value.get("device", "none")).lower() if isinstance(value, dict) else "none"
    origin = f"{path}: zero_optimization.{key}.device: {device}"
    if device == "nvme":
        draft.problem(f"{origin}: only offload to the host's memory is supported; set it to cpu")
    elif device == "cpu":
        draft.set(recipe_key, True, origin)


def _read_json_precision(path: Path, values: dict[str, Any], draft: Draft) -> None:
    for name in ("bf16", "fp16"):
        part = values.get(name)
        if isinstance(part, dict) and part.get("enabled") is True:
            draft.set("train.mixed_precision", name, f"{path}: {name}.enabled: true")


SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_STATE_DICTS = {
    "FULL_STATE_DICT": "checkpoints are always sharded; final/ is one full model",
    "LOCAL_STATE_DICT": "as with SHARDED_STATE_DICT: checkpoints are sharded and load with any number of processes",
    "SHARDED_STATE_DICT": "followed: each process writes its shards of a checkpoint; final/ is one full model",
}
_ALWAYS_PRE = "FSDP2 always does BACKWARD_PRE, with which one more block is gathered at a time"
_BACKWARD_PREFETCH = {
    "BACKWARD_PRE": "followed: the next block is gathered before the gradients of a block are computed",
    "BACKWARD_POST": f"not followed: {_ALWAYS_PRE}",
    "NO_PREFETCH": f"not followed: {_ALWAYS_PRE}",
}
_FORWARD_PREFETCH = {
    False: "followed: a block is gathered when the CPU reaches it, which is ahead of a GPU",
    True: "not followed: a block is gathered when the CPU reaches it, ahead of a GPU, and not one block before",
}

_BUILT_IN = "always the case with FSDP2"
_SHARDS = "each process always reads its own shards; newly initialized or renamed weights come from rank 0"
_FSDP_NOTES = {
    "fsdp_use_orig_params": _BUILT_IN,
    "fsdp_sync_module_states": _SHARDS,
    "fsdp_cpu_ram_efficient_loading": _SHARDS,
    "fsdp_limit_all_gathers": _BUILT_IN,
}
FSDP_KEYS = (
    "fsdp_version",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
    "fsdp_ignored_modules",
    "fsdp_backward_prefetch",
    "fsdp_backward_prefetch_policy",
    "fsdp_forward_prefetch",
    "fsdp_state_dict_type",
    "fsdp_min_num_params",
    *_FSDP_NOTES,
)


def interpret_fsdp(part: ConfigSection, draft: Draft, nodes: int) -> None:
    """Add the settings of ``part``."""
    _read_layout(part, draft, nodes)
    _read_wrap(part, draft)
    if (offload := part.flag("fsdp_offload_params")) is not None and (offload or part.source.stated):
        draft.set("parallel.offload_parameters", offload, part.place("fsdp_offload_params"))
    _read_activations(part, draft)
    if "fsdp_ignored_modules" in part:
        draft.problem(f"{part.place('fsdp_ignored_modules')}: all parameters are sharded; remove it")
    part.raw("fsdp_ignored_modules")
    _read_loading_and_gathering(part, draft)
    for key, reason in _FSDP_NOTES.items():
        if key in part:
            _note(part, draft, key, reason)
        part.raw(key)
    for text in part.unknown(FSDP_KEYS, {}):
        draft.problem(text, for_script=True)


def _read_layout(part: ConfigSection, draft: Draft, nodes: int) -> None:
    version = part.count("fsdp_version", least=1) or 1
    if version > 2:
        part.wrong("fsdp_version", "1 or 2")
    sharding, origin = _read_sharding(part)
    reshard = _read_reshard(part)
    if sharding == "NO_SHARD":
        draft.set("parallel.strategy", "ddp", origin)
        draft.note("fsdp_sharding_strategy", "NO_SHARD keeps the full model in every process, which is ddp")
        return
    draft.set("parallel.strategy", "fsdp", part.source.place("distributed_type") + ": distributed_type: FSDP")
    if sharding is not None:
        draft.set("parallel.reshard_after_forward", _RESHARDS[sharding], origin)
    if reshard is not None:
        draft.set("parallel.reshard_after_forward", reshard, part.place("fsdp_reshard_after_forward"))
    if sharding is not None and sharding.startswith("HYBRID"):
        draft.set("parallel.replicate_size", nodes, f"{origin} (one replica a machine)")
        if nodes == 1:
            draft.note("fsdp_sharding_strategy", "HYBRID shards within a machine; on one machine that is FULL_SHARD")


def _read_sharding(part: ConfigSection) -> tuple[str | None, str]:
    """Return the sharding strategy, which version 1's wizard writes as fsdp_reshard_after_forward."""
    strategy = part.choice("fsdp_sharding_strategy", SHARDING)
    reshard_strategy = (part.text("fsdp_reshard_after_forward") or "").upper()
    if reshard_strategy in SHARDING and (strategy is None or not part.source.stated):
        return reshard_strategy, part.place("fsdp_reshard_after_forward")
    if not part.source.stated and strategy == "FULL_SHARD":  # Accelerate's default, in version 2 too
        return None, ""
    return strategy, part.place("fsdp_sharding_strategy")


def _read_reshard(part: ConfigSection) -> bool | None:
    text = part.text("fsdp_reshard_after_forward")
    if text is None:
        return None
    if text.upper() in SHARDING:
        return _RESHARDS.get(text.upper())
    reshard = part.flag("fsdp_reshard_after_forward")
    return None if reshard and not part.source.stated else reshard


def _read_wrap(part: ConfigSection, draft: Draft) -> None:
    policy = part.choice("fsdp_auto_wrap_policy", ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    classes = part.names("fsdp_transformer_layer_cls_to_wrap")
    if classes and policy in (None, "TRANSFORMER_BASED_WRAP"):
        draft.set("parallel.wrap", classes, part.place("fsdp_transformer_layer_cls_to_wrap"))
    elif classes:
        draft.note("fsdp_transformer_layer_cls_to_wrap", f"ignored with {policy}")
    size = part.count("fsdp_min_num_params")
    if policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
        draft.note("fsdp_auto_wrap_policy", f"{policy} is not followed: each of the model's blocks is a unit")
    if size is not None:
        reason = "for SIZE_BASED_WRAP only"
        if policy == "SIZE_BASED_WRAP":
            reason = f"a block is a unit with less and with more than {size:,} parameters; parallel.wrap names others"
        _note(part, draft, "fsdp_min_num_params", reason)


def _read_loading_and_gathering(part: ConfigSection, draft: Draft) -> None:
    """Add what becomes of the settings with which FSDP2 or a checkpoint may do something else."""
    if (state := part.choice("fsdp_state_dict_type", [*_STATE_DICTS])) is not None:
        _note(part, draft, "fsdp_state_dict_type", _STATE_DICTS[state])
    for key in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"):  # the second: of older versions
        if (order := part.choice(key, [*_BACKWARD_PREFETCH])) is not None:
            _note(part, draft, key, _BACKWARD_PREFETCH[order])
    if (ahead := part.flag("fsdp_forward_prefetch")) is not None:
        _note(part, draft, "fsdp_forward_prefetch", _FORWARD_PREFETCH[ahead])


def _note(part: ConfigSection, draft: Draft, key: str, reason: str) -> None:
    if part.source.stated:
        draft.note(key, reason)


def _read_activations(part: ConfigSection, draft: Draft) -> None:
    recompute = part.flag("fsdp_activation_checkpointing")
    offload = part.flag("fsdp_activation_checkpointing_offload")
    if recompute is not None and (recompute or part.source.stated):
        value = "full" if recompute else "none"
        draft.set("train.activation_checkpointing", value, part.place("fsdp_activation_checkpointing"))
    if offload:
        draft.set("train.activation_offload", True, part.place("fsdp_activation_checkpointing_offload"))
