"""What adapters change: frozen weights, few gradients, and inputs that are kept for the small matrices.

What PEFT's layers save: the input of every adapted product, once for products that read the same, and the narrow
result between the two matrices. A quantised matrix is expanded for the time of its product. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from trainwright.planning.architecture import Architecture
from trainwright.planning.operations import BlockKind, Pass, Passes, Setting, block_kinds, block_weights, passes
from trainwright.planning.step_time import ADAPTED, adapter_parameters
from trainwright.planning.workload import Adapter, Choice, Workload

_FP32 = 4
# Bytes a parameter (arXiv 2305.14314: 64 numbers share a scale, 256 scales share one; and one scale a row).
_STORED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}


def adapted_passes(setting: Setting, recompute: str | int, workload: Workload) -> Passes:
    """The passes of a frozen model with an adapter; ``setting`` is that of the frozen model."""
    assert workload.adapter is not None
    return _adapted(setting, recompute, workload.adapter, workload.quantisation != "none")


def adapter_numel(a: Architecture, adapter: Adapter) -> int:
    """Numbers that are trained."""
    return sum(adapter_parameters(a, kind, adapter) for kind in block_kinds(a))


def adapter_base(workload: Workload, choice: Choice, width: int) -> dict[str, int]:
    """What stays from step to step for the adapter, by what it is."""
    assert workload.adapter is not None
    numel = adapter_numel(workload.architecture, workload.adapter)
    sharded = -(-numel // choice.shards)
    own = sharded if choice.strategy != "single" and choice.strategy != "ddp" else numel
    whole = numel if choice.strategy in ("single", "ddp", "zero1", "zero2") else sharded
    masters = own * _FP32 if width < _FP32 else 0
    return {
        "adapter weights": whole * width + masters,
        "optimizer state": own * _FP32 * workload.optimizer_slots,
        "gradients": whole * (_FP32 if choice.gradient_accumulation_steps > 1 else width),
    }


def saved_by_quantising(workload: Workload, choice: Choice, width: int) -> int:
    """Bytes that a quantised base is smaller by."""
    if workload.quantisation == "none":
        return 0
    a = workload.architecture
    numel = sum(_quantised_numel(a, kind) for kind in block_kinds(a))
    parts = choice.shards if choice.strategy in ("fsdp", "zero3") else 1
    return int(numel * (width - _STORED[workload.quantisation])) // parts


@lru_cache(maxsize=64)
def _adapted(setting: Setting, recompute: str | int, adapter: Adapter, quantised: bool) -> Passes:
    plain = passes(setting, recompute)
    a = setting.architecture
    made: dict[tuple[int, BlockKind], Pass] = {}
    blocks = []
    for block, kind in zip(plain.blocks, block_kinds(a), strict=True):
        key = (id(block), kind)
        if key not in made:
            made[key] = _with_adapter(block, setting, kind, adapter, quantised)
        blocks.append(made[key])
    return replace(plain, blocks=tuple(blocks))


def _with_adapter(block: Pass, setting: Setting, kind: BlockKind, adapter: Adapter, quantised: bool) -> Pass:
    a, targets = setting.architecture, set(adapter.targets)
    tokens, width = setting.batch.tokens, setting.width
    inputs = a.hidden * bool(targets & {"query", "key", "value"})
    inputs += a.hidden * bool(targets & {"gate", "up"})
    inputs += a.intermediate * ("down" in targets)
    weights = block_weights(a, kind, width, False).parameters
    matrices = [w for name, w in weights.items() if w.k > 1 and ADAPTED.get(name, frozenset()) & targets]
    narrow = adapter.rank * len(matrices)
    wide = sum(w.n for w in matrices) if adapter.kind == "dora" else 0
    extra = tokens * width * (inputs + narrow + 2 * wide)
    if adapter.dropout:
        extra += tokens * (width + 1) * sum(w.k for w in matrices)
    largest = max((w.n * w.k for w in weights.values()), default=0) * width
    expanded = largest * quantised + 3 * largest * (adapter.kind == "dora")
    keeps = block.kept > tokens * a.hidden * width  # recomputed blocks keep their input at most
    return replace(
        block,
        kept=block.kept + extra * keeps,
        forward_peak=block.forward_peak + extra + expanded,
        backward_peak=block.backward_peak + extra + expanded,
        evaluation_peak=block.evaluation_peak + expanded,
    )


def _quantised_numel(a: Architecture, kind: BlockKind) -> int:
    weights = block_weights(a, kind, _FP32, False).parameters
    return sum(w.n * w.k for name, w in weights.items() if w.k > 1 and name in ADAPTED)
