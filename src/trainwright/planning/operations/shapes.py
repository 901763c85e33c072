"""The shapes of a pass over a model, and its device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trainwright.models.attention.kernels import ASSUMED, CPU, AttentionKernel, AttentionNeeds, Dtype, Platform, choose
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.trace.batch import BatchShape

__all__ = ["BatchShape", "BlockKind", "Device", "Heads"]


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention.

    ``window``: number of tokens that a query attends to, including itself. ``value``: width of a head's values, if not
    ``size``. ``sinks``: each head has a score that belongs to no value. ``broadcast``: torch broadcasts one head of
    keys to all queries, which its fused kernels do not support.
    """

    queries: int
    keys: int
    size: int
    window: int | None = None
    softcap: bool = False
    dropout: float = 0.0
    value: int = 0
    sinks: bool = False
    broadcast: bool = False

    @classmethod
    def of(cls, a: Architecture, *, windowed: bool) -> Heads:
        """Return the attention of a block of ``a``."""
        return cls(
            a.heads,
            a.key_value_heads,
            a.head_dim,
            a.window if windowed else None,
            a.attention_softcap is not None,
            a.attention_dropout,
            a.latent.value if a.latent is not None else 0,
            a.sinks,
            a.family == "falcon" and a.key_value_heads == 1,
        )

    @property
    def value_size(self) -> int:
        """The width of a head's values."""
        return self.value or self.size

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.queries // self.keys

    def kernel(self, device: Device, width: int, batch: BatchShape) -> AttentionKernel:
        """Return the kernel that computes this attention in a dtype of ``width`` bytes."""
        return choose(self.needs(device, width, batch), device.limits).kernel

    def needs(self, device: Device, width: int, batch: BatchShape) -> AttentionNeeds:
        """Return what a kernel has to compute for this attention in a dtype of ``width`` bytes."""
        return AttentionNeeds(
            self.size,
            self.value_size,
            device.dtype(width),
            packed=batch.packed,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout > 0,
            window=self.window is not None and self.window < batch.longest,
            deterministic=device.deterministic,
        )


@dataclass(frozen=True)
class Device:
    """The device that runs the kernels.

    ``threads``: threads per process on a CPU. ``platform``: a GPU's kind and software. ``half``: the dtype of two bytes
    that it computes in. ``deterministic``: it uses deterministic kernels only. ``attention``:
    of the recipe's model, on a CPU; a GPU's platform has it.
    """

    kind: Literal["cpu", "cuda"]
    threads: int = 1
    platform: Platform = ASSUMED
    half: Literal["bf16", "fp16"] = "bf16"
    deterministic: bool = False
    attention: str = "auto"

    def dtype(self, width: int) -> Dtype:
        """Return the dtype of ``width`` bytes."""
        return "fp32" if width == 4 else self.half

    @property
    def fuses(self) -> bool:
        """Whether torch's SDPA has a fused kernel here for the dtype of two bytes."""
        has_bf16 = self.platform.vendor != "NVIDIA" or self.platform.capability >= (8, 0)
        return not self.is_gpu or self.half == "fp16" or has_bf16

    @property
    def limits(self) -> Platform:
        """What limits the choice of attention kernels."""
        return self.platform if self.is_gpu else replace(CPU, attention=self.attention)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == "cuda"


@dataclass(frozen=True)
class BlockKind:
    """The differences between blocks of one model.

    ``windowed``: attention is limited to a window. ``rotated``: queries and keys have rotary positions. ``sparse``: its
    MLP has experts. ``linear``: it has a delta net instead of attention.
    """

    windowed: bool
    rotated: bool
    sparse: bool
    linear: bool = False
