"""The sequences of a pack, whose edges the host knows, so that it never waits for a GPU to read them.

The edges are computed with the batch and moved to the device once in a forward pass; what else a kernel needs of them,
such as blocks of allowed pairs, is computed from the host's copy and shared by all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


_BLOCK = 128  # tokens; the default of flex_attention


class Sequences:
    """The sequences of a pack.

    Args:
        edges: int32 [D + 1] on the host: where each sequence begins, and the number of tokens.
        longest: tokens of the longest sequence.
        device: of the queries.
    """

    def __init__(self, edges: torch.Tensor, longest: int, device: torch.device) -> None:
        assert edges.device.type == "cpu"
        self._host = edges
        self.longest = longest
        self.boundaries = _move_to_device(edges, device)  # the same on ``device``
        self._chunked: dict[tuple[str, int | None], Any] = {}

    @cached_property
    def edges(self) -> list[int]:
        """Where each sequence begins, and the number of tokens."""
        return self._host.tolist()

    def in_chunks(self, size: int) -> Sequences:
        """Return the sequences with a cut after every ``size`` tokens of each."""
        key = ("chunks", size)
        if key not in self._chunked:
            cut = [position for begin, end in itertools.pairwise(self.edges) for position in range(begin, end, size)]
            chunks = torch.tensor([*cut, self.edges[-1]], dtype=torch.int32)
            self._chunked[key] = Sequences(chunks, min(size, self.longest), self.boundaries.device)
        return self._chunked[key]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the allowed pairs of tokens for flex_attention; a token attends to at most ``window`` tokens."""
        key = ("blocks", window)
        if key not in self._chunked:
            self._chunked[key] = _build_block_mask(self.edges, window, self.boundaries.device)
        return self._chunked[key]


def _build_block_mask(edges: Sequence[int], window: int | None, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    first = find_first_allowed(edges, window)
    table = _move_to_device(torch.from_numpy(first), device)

    def allowed(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= table[query])

    partly, fully = (_order_blocks(blocks, device) for blocks in find_allowed_blocks(first))
    return BlockMask.from_kv_blocks(*partly, *fully, _BLOCK, allowed, (len(first), len(first)))


def find_first_allowed(edges: Sequence[int], window: int | None) -> np.ndarray[Any, Any]:
    """Return the first token to which each token of a pack attends [T], int32; the last one is itself."""
    first = np.repeat(edges[:-1], np.diff(edges))
    if window is not None:
        first = np.maximum(first, np.arange(len(first)) - window + 1)
    return first.astype(np.int32)


def find_allowed_blocks(first: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return which blocks of keys are partly and which fully allowed to each block of queries, bool [n, n] each.

    ``first`` never falls, so that the first and the last query of a block limit the others.
    """
    begins = np.arange(0, len(first), _BLOCK)
    ends = np.minimum(begins + _BLOCK, len(first)) - 1
    row, column = np.arange(len(begins))[:, None], np.arange(len(begins))[None]
    some = (column >= first[begins][:, None] // _BLOCK) & (column <= row)
    fully = (column * _BLOCK >= first[ends][:, None]) & (column < row)
    return some & ~fully, fully


def _order_blocks(blocks: np.ndarray[Any, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of set blocks in each row [1, 1, n], and their indices, the set ones first [1, 1, n, n]."""
    counts = blocks.sum(1, dtype=np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return _move_to_device(torch.from_numpy(counts)[None, None], device), _move_to_device(
        torch.from_numpy(indices)[None, None], device
    )


def _move_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a GPU without waiting for it; on a CPU, the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Call(NamedTuple):
    """Queries [1, H, T, D], keys [1, Hkv, T, D] and values [1, Hkv, T, V] of a pack, and how they attend.

    ``boundaries``: of the sequences, on the device. ``longest``: tokens of the longest. ``window``: tokens that a query
    attends to, itself included; None: all before it in its sequence. ``sinks``: [H].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    boundaries: torch.Tensor
    longest: int
    scale: float
    window: int | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is causal attention and nothing else."""
        return not self.dropout and self.softcap is None and self.sinks is None and self.window is None

    @property
    def grouped(self) -> bool:
        """Whether several heads of queries share one of keys and values."""
        return self.query.shape[1] != self.key.shape[1]

    def padded(self, size: int, value_size: int) -> Call:
        """Return the call with heads padded by zeros to these widths, which changes no score; see ``Call.cut``."""
        if (size, value_size) == (self.query.shape[-1], self.value.shape[-1]):
            return self
        query, key, value = _pad_width(self.query, size), _pad_width(self.key, size), _pad_width(self.value, value_size)
        return self._replace(query=query, key=key, value=value)

    def cut(self, output: torch.Tensor) -> torch.Tensor:
        """Return the output [1, T, H, D] of a padded call as wide as the values of this one."""
        width = self.value.shape[-1]
        return output if output.shape[-1] == width else output[..., :width]

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [T, H, D], as variable-length kernels take them."""
        # Not x[0]: the gradient of indexing is a zero tensor with the rest copied into it.
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (self.query, self.key, self.value))
        return query, key, value


def _pad_width(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
