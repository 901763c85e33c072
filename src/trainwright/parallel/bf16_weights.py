"""Weights that are kept in bf16 alone, without fp32 masters, and updated with stochastic rounding.

An update much smaller than a weight is lost when the sum is rounded to the nearest bf16. Rounded up with the
probability of the part that is cut off, the sum is kept on average (Gupta et al., arXiv 1502.02551; Zamirai et al.,
arXiv 2010.06192; as torchao's ``bf16_stochastic_round``).

The random bits are a hash of the seed, the step, the parameter's name and the position in the whole parameter. They are
the same however parameters are divided, and there is no generator whose state a checkpoint would have to hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from trainwright.parallel.constants import CACHED_ELEMENTS, step_elements

_ROUNDED_ON_GPU = 2**22  # elements that are rounded at a time


class Bf16Part(NamedTuple):
    """A rank's part of a parameter. ``begin``: its first element in the whole; ``full``: elements of that."""

    weight: torch.Tensor
    begin: int
    full: int


class Bf16Weights:
    """Weights in bf16 with fp32 masters that exist only while an optimizer updates them, a part of the model at a time.

    Attributes:
        masters: the parameters that the optimizer updates, by name. Outside of ``expand`` and ``round`` they have the
            shape of a weight, and no memory.
        step: the number of the next update; the engine sets it.
    """

    def __init__(self, seed: int, parts: Mapping[str, Bf16Part]) -> None:
        self.step = 0
        self._seed, self._parts = seed, parts
        self.masters = {name: nn.Parameter(_drop_memory(part.weight)) for name, part in parts.items()}

    def together(self, ranks: int = 1) -> Iterator[list[str]]:
        """Yield names of parameters that are updated together, the same on all of the ``ranks`` that divide each."""
        device = next((part.weight.device.type for part in self._parts.values()), "cpu")
        sizes = {name: -(-part.full // ranks) for name, part in self._parts.items()}
        yield from split_by_size(sizes, step_elements(device != "cpu"))

    def expand(self, names: Iterable[str]) -> None:
        """Give the masters of these weights their values in fp32."""
        for name in names:
            self.masters[name].data = self._parts[name].weight.float()

    def round(self, names: Iterable[str]) -> None:
        """Round the masters of these weights to the weights, and free them."""
        for name in names:
            master, (weight, begin, _) = self.masters[name], self._parts[name]
            round_stochastically(weight, master.detach(), _compute_key(self._seed, self.step, name), begin)
            master.data = _drop_memory(weight)


def split_by_size(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yield the names in order, in parts whose ``sizes`` sum to at most ``limit``, or that have one name."""
    part: list[str] = []
    elements = 0
    for name, size in sizes.items():
        if part and elements + size > limit:
            yield part
            part, elements = [], 0
        part.append(name)
        elements += size
    if part:
        yield part


def round_stochastically(weight: torch.Tensor, master: torch.Tensor, key: tuple[int, int], begin: int = 0) -> None:
    """Write a contiguous fp32 tensor to a bf16 tensor of its shape, each element up or down by the bits of ``key``.

    Args:
        begin: the position of the first element, on which its bits depend.
    """
    size = CACHED_ELEMENTS if weight.device.type == "cpu" else _ROUNDED_ON_GPU
    pieces = zip(master.view(-1).split(size), weight.view(-1).split(size), strict=True)
    for number, (part, weight_part) in enumerate(pieces):
        # The upper half of an fp32 number is the bf16 number toward zero of it; a sum of its lower half and 16 random
        # bits carries into the upper half with the probability of the lower half.
        total = part.view(torch.int32) + _generate_bits(key, begin + number * size, len(part), part.device)
        weight_part.view(torch.int16).copy_(total.add_(2**15).view(torch.int16)[1::2])
        weight_part.masked_fill_(part.isnan(), torch.nan)  # some of which a carry makes a number


def _drop_memory(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), device=weight.device).expand(weight.shape)


def _compute_key(seed: int, step: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _generate_bits(key: tuple[int, int], begin: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` numbers of -2^15 to 2^15 - 1, of the positions from ``begin`` on.

    Two positions share 32 bits: those of a counter, mixed by the function ``lowbias32`` of Chris Wellons'
    hash-prospector, into which the second half of the key is added between its products.
    """
    first = begin // 2
    bits = torch.arange((begin + count + 1) // 2 - first, dtype=torch.int32, device=device)
    _mix(bits.add_(_wrap_int32(first + key[0])), 16)
    _mix(bits.mul_(_wrap_int32(0x7FEB352D)).add_(_wrap_int32(key[1])), 15)
    _mix(bits.mul_(_wrap_int32(0x846CA68B)), 16)
    return bits.view(torch.int16)[begin % 2 : begin % 2 + count]


def _mix(bits: torch.Tensor, shift: int) -> None:
    bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1))  # a shift that copies no sign


def _wrap_int32(value: int) -> int:
    """Return the number of int32 with the lower 32 bits of ``value``."""
    return (value + 2**31) % 2**32 - 2**31
