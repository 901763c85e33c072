"""Translate the `fsdp_config` of an Accelerate file, version 1 or 2, to `parallel.strategy: fsdp`.

Both versions become torch's FSDP2, which shards parameter by parameter and computes the same.
"""

from __future__ import annotations

from trainwright.compatibility.accelerate.values import ConfigSection, Draft

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
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
_NOTES = {
    "fsdp_use_orig_params": _BUILT_IN,
    "fsdp_sync_module_states": _SHARDS,
    "fsdp_cpu_ram_efficient_loading": _SHARDS,
    "fsdp_limit_all_gathers": _BUILT_IN,
}
KEYS = (
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
    *_NOTES,
)


def interpret(part: ConfigSection, draft: Draft, nodes: int) -> None:
    """Add the settings of ``part``."""
    _layout(part, draft, nodes)
    _wrap(part, draft)
    if (offload := part.flag("fsdp_offload_params")) is not None and (offload or part.source.stated):
        draft.set("parallel.offload_parameters", offload, part.place("fsdp_offload_params"))
    _activations(part, draft)
    if "fsdp_ignored_modules" in part:
        draft.problem(f"{part.place('fsdp_ignored_modules')}: all parameters are sharded; remove it")
    part.raw("fsdp_ignored_modules")
    _loading_and_gathering(part, draft)
    for key, reason in _NOTES.items():
        if key in part:
            _note(part, draft, key, reason)
        part.raw(key)
    for text in part.unknown(KEYS, {}):
        draft.problem(text, for_script=True)


def _layout(part: ConfigSection, draft: Draft, nodes: int) -> None:
    version = part.count("fsdp_version", least=1) or 1
    if version > 2:
        part.wrong("fsdp_version", "1 or 2")
    sharding, origin = _sharding(part)
    reshard = _reshard(part)
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


def _sharding(part: ConfigSection) -> tuple[str | None, str]:
    """Return the sharding strategy, which version 1's wizard writes as fsdp_reshard_after_forward."""
    stated = part.choice("fsdp_sharding_strategy", SHARDING)
    other = (part.text("fsdp_reshard_after_forward") or "").upper()
    if other in SHARDING and (stated is None or not part.source.stated):
        return other, part.place("fsdp_reshard_after_forward")
    if not part.source.stated and stated == "FULL_SHARD":  # Accelerate's default, in version 2 too
        return None, ""
    return stated, part.place("fsdp_sharding_strategy")


def _reshard(part: ConfigSection) -> bool | None:
    text = part.text("fsdp_reshard_after_forward")
    if text is None:
        return None
    if text.upper() in SHARDING:
        return _RESHARDS.get(text.upper())
    reshard = part.flag("fsdp_reshard_after_forward")
    return None if reshard and not part.source.stated else reshard


def _wrap(part: ConfigSection, draft: Draft) -> None:
    policy = part.choice("fsdp_auto_wrap_policy", _WRAP_POLICIES)
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


def _loading_and_gathering(part: ConfigSection, draft: Draft) -> None:
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


def _activations(part: ConfigSection, draft: Draft) -> None:
    recompute = part.flag("fsdp_activation_checkpointing")
    offload = part.flag("fsdp_activation_checkpointing_offload")
    if recompute is not None and (recompute or part.source.stated):
        value = "full" if recompute else "none"
        draft.set("train.activation_checkpointing", value, part.place("fsdp_activation_checkpointing"))
    if offload:
        draft.set("train.activation_offload", True, part.place("fsdp_activation_checkpointing_offload"))
