"""Translate the `fsdp_config` of an Accelerate file, version 1 or 2, to `parallel.strategy: fsdp`.

Both versions become torch's FSDP2, which shards parameter by parameter and computes the same.
"""

from __future__ import annotations

from trainwright.launch.accelerate.values import ConfigSection, Draft

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")

_BUILT_IN = "always the case with FSDP2"
_SHARDS = "each process always reads its own shards; newly initialized or renamed weights come from rank 0"
_PREFETCH = "FSDP2 prefetches the next block automatically"
_NOTES = {
    "fsdp_use_orig_params": _BUILT_IN,
    "fsdp_sync_module_states": _SHARDS,
    "fsdp_cpu_ram_efficient_loading": _SHARDS,
    "fsdp_backward_prefetch": _PREFETCH,
    "fsdp_backward_prefetch_policy": _PREFETCH,
    "fsdp_forward_prefetch": _PREFETCH,
    "fsdp_limit_all_gathers": _BUILT_IN,
    "fsdp_state_dict_type": "checkpoints are always sharded, and final/ is always one full model",
    "fsdp_min_num_params": "for SIZE_BASED_WRAP only",
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
    part.choice("fsdp_state_dict_type", _STATE_DICTS)
    for key, reason in _NOTES.items():
        if key in part and part.source.stated:
            draft.note(key, reason)
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
    if policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
        draft.note("fsdp_auto_wrap_policy", f"{policy} is not supported: each of the model's blocks is a unit")


def _activations(part: ConfigSection, draft: Draft) -> None:
    recompute = part.flag("fsdp_activation_checkpointing")
    offload = part.flag("fsdp_activation_checkpointing_offload")
    if recompute is not None and (recompute or part.source.stated):
        value = "full" if recompute else "none"
        draft.set("train.activation_checkpointing", value, part.place("fsdp_activation_checkpointing"))
    if offload:
        draft.set("train.activation_offload", True, part.place("fsdp_activation_checkpointing_offload"))
