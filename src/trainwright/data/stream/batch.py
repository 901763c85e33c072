"""Collate the examples of a micro-batch into tensors.

A packed micro-batch is one flat row of concatenated sequences without padding; ``boundaries`` holds their offsets, and
sequences do not attend to each other. Otherwise it is padded, with an attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.stream.stream import MicroBatch
from trainwright.data.tokens.dataset import TokenDataset

Pair = tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.bool_]]]
PackedArrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One micro-batch as tensors, with T tokens flat or B x L padded, S sequences and N targets."""

    input_ids: torch.Tensor  # int64 [1, T] or [B, L]
    position_ids: torch.Tensor  # int64, as input_ids; from 0 in every sequence
    lengths: tuple[int, ...]  # [S], tokens of each sequence
    boundaries: torch.Tensor | None  # int32 [S + 1], flat batches only; always on the host, which never waits for it
    attention_mask: torch.Tensor | None  # bool [B, L], padded batches only
    target_index: torch.Tensor  # int64 [N], flattened positions that predict the targets
    targets: torch.Tensor  # int64 [N]
    longest: int  # tokens of the longest sequence
    tokens: int  # excluding padding
    weight: float  # of this micro-batch; 0 for a zero-weight pass
    examples: tuple[int, ...]
    sequences: tuple[int, ...]  # [S], dataset indices; those of an example are adjacent, in its order
    roles: tuple[int, ...]  # [S]
    target_counts: tuple[int, ...]  # [S]; targets are in the order of the sequences

    def sum_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of ``values`` [N] over the targets of each sequence [S], in float64 and in a fixed order."""
        return torch.stack([part.sum() for part in values.double().split(self.target_counts)])

    def spread_lengths(self) -> torch.Tensor:
        """Return the length of the sequence of every token, int64 [1, T] or [B, 1], on the host."""
        lengths = torch.tensor(self.lengths)
        if self.boundaries is None:
            return lengths[:, None]
        padding = self.input_ids.shape[1] - sum(self.lengths)
        return torch.cat([lengths.repeat_interleave(lengths), lengths.new_full((padding,), max(1, padding))])[None]

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on ``device``, except for its boundaries."""
        tensors: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor) and field.name != "boundaries":
                tensors[field.name] = copy_to_device(value, device)
        return replace(self, **tensors)


def collate(dataset: TokenDataset, micro: MicroBatch, *, packed: bool, pad_token_id: int) -> Batch:
    """Collate the sequences of a micro-batch into tensors.

    Packed, all rows become one row [1, T] of sequences one after another. Instead of labels with -100, the batch has
    the positions and the ids of its targets.
    """
    sequences = [sequence for example in micro.examples for sequence in dataset.sequences(example)]
    pairs = [dataset.sequence(sequence) for sequence in sequences]
    lengths = [len(tokens) for tokens, _ in pairs]
    layout = build_flat_layout(pairs, lengths) if packed else build_padded_layout(pairs, lengths, pad_token_id)
    input_ids, position_ids, flags, mask = layout
    # A token is predicted at the position before it; the first token of a sequence is never predicted.
    target_positions = np.flatnonzero(flags.reshape(-1) & (position_ids.reshape(-1) > 0))
    boundaries = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)) if packed else None
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        lengths=tuple(lengths),
        boundaries=boundaries,
        attention_mask=None if mask is None else torch.from_numpy(mask),
        target_index=torch.from_numpy(target_positions - 1),
        targets=torch.from_numpy(input_ids.reshape(-1)[target_positions]),
        longest=max(lengths),
        tokens=sum(lengths),
        weight=micro.weight,
        examples=micro.examples,
        sequences=tuple(sequences),
        roles=tuple(map(dataset.role, sequences)),
        target_counts=tuple(map(dataset.sequence_targets, sequences)),
    )


def collate_examples(dataset: TokenDataset, examples: Sequence[int], *, packed: bool) -> Batch:
    """Collate any examples of a dataset as one micro-batch, each in a row of its own."""
    tokens, targets = sum(map(dataset.length, examples)), sum(map(dataset.target_count, examples))
    micro = MicroBatch(0, tuple((index,) for index in examples), tokens, targets, float(targets))
    return collate(dataset, micro, packed=packed, pad_token_id=0)


def build_flat_layout(pairs: list[Pair], lengths: list[int]) -> PackedArrays:
    """Concatenate sequences; return tokens, positions and targets [1, T], and no mask."""
    input_ids = np.concatenate([tokens for tokens, _ in pairs]).astype(np.int64)[None]
    position_ids = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])[None]
    flags = np.concatenate([targets for _, targets in pairs])[None]
    return input_ids, position_ids, flags, None


def build_padded_layout(pairs: list[Pair], lengths: list[int], pad_token_id: int) -> PackedArrays:
    """Pad sequences to one length; return tokens, positions, targets and mask [B, L]."""
    shape = (len(pairs), max(lengths))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    position_ids = np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape).copy()
    flags, mask = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    for row, (tokens, targets) in enumerate(pairs):
        input_ids[row, : len(tokens)] = tokens
        flags[row, : len(tokens)] = targets
        mask[row, : len(tokens)] = True
    return input_ids, position_ids, flags, mask


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on ``device``, copied there from pinned memory, so that the host does not wait."""
    return tensor if tensor.device.type == device.type else tensor.pin_memory().to(device, non_blocking=True)
