"""Few sizes of matrix products on CPUs.

oneDNN, which computes products in bf16 and fp16 on a CPU, generates code for every new shape, and torch and oneDNN
cache it: 2 to 3 ms and more than half a MiB each (measured with AMX). Rows of varied lengths would give each step new
shapes. Their numbers are therefore rounded up, by 3 % in the mean and at most a sixteenth. Padding comes after
everything else, nothing attends to it, and it is removed before losses are computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from trainwright.data.stream.batch import Batch
from trainwright.parallel.constants import padded_size


def needs_padding(like: torch.Tensor) -> bool:
    """Return whether products with tensors of the device and dtype of ``like`` are compiled for their shapes."""
    return like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.float16)


def padded_rows(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [N, ...] with rows of zeros after them if products with them need that."""
    extra = padded_size(len(values)) - len(values) if needs_padding(values) else 0
    return pad(values, (0, 0, 0, extra)) if extra else values


def padded_batch(batch: Batch) -> Batch:
    """Return the inputs of a batch with more columns; in a flat batch they are a sequence of their own."""
    width = batch.input_ids.shape[1]
    extra = padded_size(width) - width
    if not extra:
        return batch
    edges, mask = batch.boundaries, batch.attention_mask
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (0, extra)),
        position_ids=pad(batch.position_ids, (0, extra)),  # 0 is a valid position for every model
        boundaries=None if edges is None else torch.cat([edges, edges.new_tensor([width + extra])]),
        attention_mask=None if mask is None else pad(mask, (0, extra)),
        longest=max(batch.longest, extra),
    )
