"""The operations of a model's passes, from its architecture alone: one list from which memory and time are predicted.

``passes(setting, recompute)`` returns the parts of a model, each run once forward and backward: the kernels it
launches, with their matrix sizes and bytes, and its saved and working memory. See ``passes.Pass``, ``launches.Kernel``
and ``shapes.BatchShape``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.operations.launches import Kernel
from trainwright.planning.operations.passes import (
    Pass,
    PassSettings,
    Recompute,
    block_pass,
    embedding_pass,
    head_pass,
)
from trainwright.planning.operations.shapes import BatchShape, BlockKind, Device
from trainwright.planning.operations.weights import ModelWeights, block_weights, end_weights

__all__ = [
    "BatchShape",
    "BlockKind",
    "Device",
    "Kernel",
    "ModelPasses",
    "ModelWeights",
    "Pass",
    "PassSettings",
    "block_kinds",
    "block_pass",
    "block_weights",
    "embedding_pass",
    "end_weights",
    "head_pass",
    "passes",
]


@dataclass(frozen=True)
class ModelPasses:
    """The parts of a model. ``blocks``: in order; equal ones are the same object."""

    embedding: Pass
    blocks: tuple[Pass, ...]
    head: Pass


def passes(setting: PassSettings, recompute: str | int = "none") -> ModelPasses:
    """Return the parts of a model in training, recomputed according to the recipe's train.activation_checkpointing."""
    return _passes(setting, recompute)


_PARTLY: dict[str | int, Recompute] = {"selective": "selective", "compiled": "compiled"}


@lru_cache(maxsize=128)
def _passes(setting: PassSettings, recompute: str | int) -> ModelPasses:
    every = recompute if isinstance(recompute, int) else 1
    blocks = []
    for number, kind in enumerate(block_kinds(setting.architecture), start=1):
        again: Recompute = "none"
        if recompute != "none" and number % every == 0:
            again = _PARTLY.get(recompute, "full")
        blocks.append(block_pass(setting, kind, again, input_wants=setting.trainable or number > 1))
    return ModelPasses(embedding_pass(setting), tuple(blocks), head_pass(setting))


@lru_cache(maxsize=128)
def block_kinds(a: Architecture) -> tuple[BlockKind, ...]:
    """Return the kinds of ``a``'s blocks in order; if only their number is known they are spread evenly."""
    kinds = []
    for block in range(a.layers):
        rotated = _distributed_evenly(block, a.rotary_layers, a.layers)
        among = a.layers - a.rotary_layers if 0 < a.rotary_layers < a.layers else a.layers
        windowed = (among == a.layers or not rotated) and _distributed_evenly(block, a.windowed_layers, among)
        after = a.layers - a.first_dense
        sparse = block >= a.first_dense and _distributed_evenly(block - a.first_dense, a.sparse_layers, after)
        linear = a.linear_layers > 0 and _distributed_evenly(block, a.linear_layers, a.layers)
        kinds.append(BlockKind(windowed and not linear, rotated, sparse, linear))
    return tuple(kinds)


def _distributed_evenly(block: int, some: int, among: int) -> bool:
    """Return whether ``block`` is one of ``some``, with every ``among / (among - some)``-th left out."""
    others = among - some
    return not others or (block + 1) * others // among == block * others // among
