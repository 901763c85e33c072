"""Select the sequences of a batch, and their targets, by their roles."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from trainwright.data.stream.batch import Batch
from trainwright.transfer import on_device


def places(batch: Batch, roles: Collection[int], skip: int = 0) -> torch.Tensor:
    """Return indices of targets, int64 [n]: those of sequences with one of ``roles``, without each one's first
    ``skip``.
    """
    found, begin = [np.zeros(0, np.int64)], 0
    for role, count in zip(batch.roles, batch.target_counts, strict=True):
        if role in roles:
            found.append(np.arange(begin + min(skip, count), begin + count))
        begin += count
    return on_device(torch.from_numpy(np.concatenate(found)), batch.targets.device)


def only(batch: Batch, roles: Collection[int]) -> Batch:
    """Return the batch with only the sequences that have one of ``roles``; there must be at least one."""
    kept = [place for place, role in enumerate(batch.roles) if role in roles]
    if len(kept) == len(batch.roles):
        return batch
    chosen = places(batch, roles)
    part = replace(
        batch,
        targets=batch.targets.index_select(0, chosen),
        target_index=batch.target_index.index_select(0, chosen),
        sequences=tuple(batch.sequences[place] for place in kept),
        lengths=tuple(batch.lengths[place] for place in kept),
        roles=tuple(batch.roles[place] for place in kept),
        target_counts=tuple(batch.target_counts[place] for place in kept),
    )
    return _lines(part, kept) if batch.boundaries is None else _stretches(part, kept)


def _lines(part: Batch, kept: list[int]) -> Batch:
    """Select rows of a padded batch."""
    lines = on_device(torch.tensor(kept), part.targets.device)
    assert part.attention_mask is not None
    width = part.input_ids.shape[1]
    return replace(
        part,
        input_ids=part.input_ids.index_select(0, lines),
        position_ids=part.position_ids.index_select(0, lines),
        attention_mask=part.attention_mask.index_select(0, lines),
        target_index=_moved(part, [(new - old) * width for new, old in enumerate(kept)]),
        tokens=sum(part.lengths),
    )


def _stretches(part: Batch, kept: list[int]) -> Batch:
    """Select sequences of a flat batch."""
    assert part.boundaries is not None
    edges = list(pairwise(part.boundaries.tolist()))
    begins = np.cumsum([0, *part.lengths])
    cut = on_device(torch.from_numpy(np.concatenate([np.arange(*edges[place]) for place in kept])), part.targets.device)
    return replace(
        part,
        input_ids=part.input_ids.index_select(1, cut),
        position_ids=part.position_ids.index_select(1, cut),
        boundaries=torch.from_numpy(begins.astype(np.int32)),
        target_index=_moved(part, [int(new) - edges[old][0] for new, old in zip(begins, kept, strict=False)]),
        longest=max(part.lengths),
        tokens=int(begins[-1]),
    )


def _moved(part: Batch, by: list[int]) -> torch.Tensor:
    shifts = np.repeat(np.asarray(by, dtype=np.int64), part.target_counts)
    return part.target_index + on_device(torch.from_numpy(shifts), part.target_index.device)
