"""The specs of `zero1`, `zero2` and `zero3`. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from trainwright.recipe.strategy_spec import Collective, Library, Limit, StrategySpec

# Elements that are gathered or reduced at a time: 64 MiB of fp32. DeepSpeed's default of 500 million needs 2 GB per
# buffer.
BUCKET_ELEMENTS = 2**24

DEEPSPEED = Library(
    module="deepspeed",
    title="DeepSpeed",
    versions=("0.19.",),
    install="pip install 'deepspeed==0.19.*'",
    users="zero1, zero2 and zero3",
    process_bytes=70 * 2**20,
)
_OPTIMIZER = frozenset({"master weights", "optimizer state", "gradients"})
_ELEMENTWISE = ("adamw", "ademamix", "sgd", "rmsprop", "adagrad", "lion", "schedule_free_adamw")
_UPDATED = Collective("all_gather", "parameters", "update")

ZERO1 = StrategySpec(
    summary="optimizer state is sharded (DeepSpeed)",
    implementation="trainwright.parallel.zero.zero:Zero",
    memory="trainwright.planning.memory.zero:ZeroMemory",
    shards=frozenset({"optimizer state"}),
    parameters_by="flat",
    collectives=(Collective("all_reduce", "gradients", "step"), _UPDATED),
    reads=("deepspeed_config",),
    offloads={"offload_optimizer": _OPTIMIZER},
    layouts=({}, {"offload_optimizer": True}),
    limits=(
        Limit(
            "optimizer.name",
            _ELEMENTWISE,
            "DeepSpeed shards the state flat, and {value} needs whole rows, blocks or matrices of a parameter; "
            f"use parallel.strategy ddp or fsdp, or one of {', '.join(_ELEMENTWISE)}",
            f"only {', '.join(_ELEMENTWISE)}: DeepSpeed shards states flat through rows and blocks",
        ),
        Limit(
            "optimizer.master_weights",
            (True,),
            "DeepSpeed keeps fp32 master weights; set it to true, or use parallel.strategy ddp or fsdp",
            "DeepSpeed keeps fp32 master weights",
        ),
    ),
    library=DEEPSPEED,
    changes_in_run=False,
    accelerate_type="DEEPSPEED",
)
ZERO2 = replace(
    ZERO1,
    summary="optimizer state and gradients are sharded (DeepSpeed)",
    shards=frozenset({"gradients", "optimizer state"}),
    collectives=(Collective("all_reduce", "gradients", "micro-batch"), _UPDATED),
)
ZERO3 = replace(
    ZERO1,
    summary="parameters, gradients and optimizer state are sharded (DeepSpeed)",
    shards=frozenset({"parameters", "gradients", "optimizer state"}),
    collectives=(Collective("all_gather", "parameters", "passes"), Collective("reduce_scatter", "gradients", "passes")),
    hooks_modules=True,
    offloads={"offload_optimizer": _OPTIMIZER, "offload_parameters": frozenset({"parameters"})},
    layouts=({}, {"offload_optimizer": True}, {"offload_parameters": True, "offload_optimizer": True}),
)


def count_sharded_parts(spec: StrategySpec) -> int:
    """Return DeepSpeed's stage: 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    return len(spec.shards)
