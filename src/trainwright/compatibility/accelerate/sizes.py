"""The `parallelism_config` of an Accelerate file: the number of processes of each kind of parallelism.

Accelerate requires the product of the sizes to be the number of processes, and a missing size is 1; if all are 1 they
say nothing (parallelism_config.py of its 1.15 release).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.compatibility.accelerate.values import ConfigSection, Draft
from trainwright.recipe.strategy_spec import spec_of

PREFIX = "parallelism_config_"
_DATA = ("dp_replicate_size", "dp_shard_size")
_OTHERS = {"tp_size": "tensor parallelism", "cp_size": "context parallelism", "sp_size": "sequence parallelism"}
_HOW = ("cp_backend", "cp_comm_strategy", "cp_handler", "tp_handler", "sp_handler")
_HOW_SEQUENCE = ("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
KEYS = tuple(PREFIX + name for name in (*_DATA, *_OTHERS, *_HOW, *_HOW_SEQUENCE))


@dataclass(frozen=True)
class ParallelismSizes:
    """``replicas`` of the model, each over ``shards`` processes; ``origin``: the keys that set them."""

    replicas: int
    shards: int
    origin: str

    @property
    def processes(self) -> int:
        """Return the number of processes, the product of the sizes."""
        return self.replicas * self.shards


def read_sizes(part: ConfigSection, draft: Draft) -> ParallelismSizes | None:
    """Return the sizes of data parallelism; None if the part sets none. Other kinds are reported to ``draft``."""
    sizes = {name: part.count(PREFIX + name, least=1) for name in (*_DATA, *_OTHERS)}
    for name, kind in _OTHERS.items():
        if (sizes[name] or 1) > 1:
            draft.problem(f"{part.place(PREFIX + name)}: {kind} is not supported; set it to 1")
    for name in (*_HOW, *_HOW_SEQUENCE):
        if PREFIX + name in part and part.source.stated:
            draft.note(PREFIX + name, "for context, tensor and sequence parallelism only")
        part.raw(PREFIX + name)
    for text in part.unknown(KEYS, {}):
        draft.problem(text, for_script=True)
    replicas, shards = (sizes[name] or 1 for name in _DATA)
    if replicas * shards == 1:
        return None
    names = [name for name in _DATA if PREFIX + name in part]
    return ParallelismSizes(replicas, shards, " and ".join(part.place(PREFIX + name) for name in names))


def apply_sizes(sizes: ParallelismSizes, strategy: str, processes: int, origin: str, draft: Draft) -> None:
    """Apply ``sizes`` to a strategy on ``processes`` processes; ``origin`` is the file's statement of their number.

    Sizes that do not fit are added to the draft's problems.
    """
    spec = spec_of(strategy)
    if sizes.processes != processes:
        is_divisible = processes // sizes.replicas * sizes.replicas == processes
        fix = f"set dp_shard_size: {processes // sizes.replicas}" if is_divisible else "change one of them"
        draft.problem(
            f"{sizes.origin}: dp_replicate_size {sizes.replicas} x dp_shard_size {sizes.shards} needs "
            f"{sizes.processes} processes, but {origin}; {fix}"
        )
    elif "replicate_size" in spec.keys and sizes.shards == 1:
        draft.problem(
            f"{sizes.origin}: {sizes.replicas} replicas on the same number of processes do not shard anything, which "
            "is ddp; set distributed_type: MULTI_GPU (on a CPU MULTI_CPU), or fewer replicas and a dp_shard_size"
        )
    elif "replicate_size" in spec.keys:
        draft.set("parallel.replicate_size", sizes.replicas, sizes.origin)
    elif spec.shards:
        draft.problem(f"{sizes.origin}: ZeRO shards over all processes; these sizes are for distributed_type: FSDP")
    elif sizes.shards > 1:
        draft.problem(f"{sizes.origin}: {strategy} has the full model in every process; use FSDP to shard it")
