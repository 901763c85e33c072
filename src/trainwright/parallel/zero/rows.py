"""Convert ranges of flattened tensors to blocks of full rows, the format of checkpoints.

Under ZeRO a rank's part of a parameter starts and ends in the middle of a row. Every row is assigned to the rank that
holds its first element, so that a checkpoint can be read by any strategy on any number of ranks; only the parts of
divided rows are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from trainwright.parallel.shards import Shard
from trainwright.parallel.zero.partitions import ParameterPiece


def row_blocks(pieces: Mapping[str, tuple[ParameterPiece, torch.Tensor]], rank: int, size: int) -> dict[str, Shard]:
    """Return this rank's rows of every tensor. Every rank must call this.

    Args:
        pieces: by name, in the same order on every rank; each piece with its elements (1-D, all of one dtype).
    """
    heads = {name: _heads(piece) for name, (piece, _) in pieces.items()}
    received = _exchange(pieces, heads, rank, size)
    shards = {}
    for name, (piece, local) in pieces.items():
        if not piece.shape:
            if piece.size:
                shards[name] = Shard(local.reshape(()), (), ())
            continue
        begin, end = _owned_rows(piece, rank)
        rows = local[heads[name][rank] :]
        missing = (end - begin) * _width(piece) - rows.numel()
        if missing > 0:
            rows = torch.cat([rows, *_following(received, name, rank, missing)])
        shards[name] = Shard(rows.reshape(end - begin, *piece.shape[1:]), piece.shape, _offset(piece, begin))
    return shards


def covering_rows(piece: ParameterPiece, dtype: torch.dtype) -> tuple[Shard, slice]:
    """Return an empty block of the rows that a piece overlaps, and the piece's slice of the flattened block."""
    width = _width(piece)
    first, last = piece.begin // width, -(-(piece.begin + piece.size) // width)
    shape = (last - first, *piece.shape[1:]) if piece.shape else ()
    block = torch.empty(shape, dtype=dtype, device="meta")
    begin = piece.begin - first * width
    return Shard(block, piece.shape, _offset(piece, first)), slice(begin, begin + piece.size)


def _width(piece: ParameterPiece) -> int:
    return max(1, math.prod(piece.shape[1:]))


def _offset(piece: ParameterPiece, row: int) -> tuple[int, ...]:
    return (row, *(0 for _ in piece.shape[1:])) if piece.shape else ()


def _owned_rows(piece: ParameterPiece, rank: int) -> tuple[int, int]:
    """Return the rows whose first element is in a rank's range."""
    width = _width(piece)
    begin, end = piece.ranges[rank]
    return (-(-begin // width), -(-end // width)) if end > begin else (0, 0)


def _heads(piece: ParameterPiece) -> list[int]:
    """Return, for every rank, the elements at the start of its range whose row starts before it."""
    width = _width(piece)
    return [min(-(-begin // width) * width, end) - begin if end > begin else 0 for begin, end in piece.ranges]


_Received = dict[tuple[str, int], torch.Tensor]


def _exchange(
    pieces: Mapping[str, tuple[ParameterPiece, torch.Tensor]], heads: Mapping[str, list[int]], rank: int, size: int
) -> _Received:
    """Return the heads of all tensors from all ranks, by name and rank."""
    lengths = [sum(heads[name][r] for name in pieces) for r in range(size)]
    if not any(lengths):
        return {}
    some = next(iter(pieces.values()))[1]
    own = some.new_zeros(max(lengths))
    parts = [local[: heads[name][rank]] for name, (_, local) in pieces.items()]
    own[: lengths[rank]] = torch.cat(parts)
    everyone = own.new_empty(size * len(own))
    dist.all_gather_single(everyone, own)
    received = {}
    for r, row in enumerate(everyone.view(size, -1)):
        position = 0
        for name in pieces:
            received[name, r] = row[position : position + heads[name][r]]
            position += heads[name][r]
    return received


def _following(received: _Received, name: str, rank: int, missing: int) -> list[torch.Tensor]:
    """Return the rest of this rank's last row, from the following ranks that hold it."""
    parts = []
    while missing > 0:
        rank += 1
        part = received[name, rank][:missing]
        parts.append(part)
        missing -= part.numel()
    return parts
