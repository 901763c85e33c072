"""The inputs of one layer's attention over a pack."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


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
        query, key, value = _padded(self.query, size), _padded(self.key, size), _padded(self.value, value_size)
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


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
