"""DeepSpeed's flat fp32 partitions, mapped to parameters by name.

ZeRO-1 and ZeRO-2 concatenate the parameters of a group and cut the result into one partition per rank; ZeRO-3 cuts
every parameter into one chunk per rank. In both cases a rank holds a range of the elements of each parameter, within a
flat tensor that the optimizer updates. Other modules need not know the layouts of DeepSpeed's optimizers (0.19:
stage_1_and_2.py, bf16_optimizer.py, stage3.py).

Under ZeRO a rank's part of a parameter starts and ends in the middle of a row. Every row is assigned to the rank that
holds its first element, so that a checkpoint can be read by any strategy on any number of ranks; only the parts of
divided rows are exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from trainwright.parallel.layout import Shard


@dataclass(frozen=True)
class ParameterPiece:
    """The part of one parameter that this rank updates.

    Attributes:
        shape: of the full parameter.
        ranges: for every rank, the elements ``[begin, end)`` of the flattened parameter that it updates.
        begin: start of this rank's range of ``size`` elements.
        group: index of its flat partition, in which it starts at element ``position``.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    begin: int
    size: int
    group: int
    position: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the range as a view of a flat tensor with the partition's layout."""
        return flat.narrow(0, self.position, self.size)


class Partitions(Protocol):
    """The sharded state of one of DeepSpeed's optimizers."""

    def pieces(self, names: dict[nn.Parameter, str], rank: int, size: int) -> dict[str, ParameterPiece]:
        """Return this rank's piece of every trainable parameter, by name."""

    def masters(self) -> list[torch.Tensor]:
        """Return the flat fp32 partitions that the optimizer updates."""

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of the last backward pass's reduced gradients; changes in place affect the step."""

    def gradient_parts(self) -> int:
        """Return the number of ranks over which a reduced gradient is sharded."""

    def take_optimizer_step(self) -> None:
        """Take a step of the inner optimizer over the partitions, with their gradients."""

    def refresh(self) -> None:
        """Copy the changed master weights to the computing parameters."""

    def clear_gradients(self) -> None:
        """Drop gradients, including those that DeepSpeed keeps for parameters that the next step does not reach."""


def build_partitions(optimizer: Any) -> Partitions:
    """Return the partitions of the optimizer made by ``deepspeed.initialize``; ZeRO-1 in bf16 has its own class."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _Stage3(optimizer)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return _Bf16Stage1(optimizer)
    return _Stage1And2(optimizer)


class _Stage1And2:
    """The parameters of each group concatenated, with one partition per rank."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _groups(self) -> Iterator[list[tuple[nn.Parameter, int]]]:
        """Yield the parameters of each group with their offsets in it."""
        groups = self._optimizer.round_robin_bit16_groups
        for parameters, offsets in zip(groups, self._optimizer.round_robin_bit16_offsets, strict=True):
            yield list(zip(parameters, offsets, strict=True))

    def masters(self) -> list[torch.Tensor]:
        return list(self._optimizer.single_partition_of_fp32_groups)

    def pieces(self, names: dict[nn.Parameter, str], rank: int, size: int) -> dict[str, ParameterPiece]:
        pieces = {}
        for group, (members, master) in enumerate(zip(self._groups(), self.masters(), strict=True)):
            share = master.numel()
            for parameter, offset in members:
                total = parameter.numel()
                edges = [min(max(r * share - offset, 0), total) for r in range(size + 1)]
                begin, end = edges[rank], edges[rank + 1]
                position = offset + begin - rank * share if end > begin else 0
                ranges = tuple(itertools.pairwise(edges))
                shape = tuple(parameter.shape)
                pieces[names[parameter]] = ParameterPiece(shape, ranges, begin, end - begin, group, position)
        return pieces

    def gradients(self) -> Iterator[torch.Tensor]:
        if self._optimizer.cpu_offload:
            # Copies to pinned memory may not be done yet; DeepSpeed only waits for them in its own step.
            self._optimizer._wait_for_offload_copies()
            yield from (master.grad for master in self.masters() if master.grad is not None)
            return
        for group in self._optimizer.averaged_gradients.values():
            # Use the flat buffer of a group if it has one; its views would be many small operations.
            flat = getattr(group, "flat_partition", None)
            yield from (group or ()) if flat is None else (flat,)

    def gradient_parts(self) -> int:
        return _count_ranks(self._optimizer) if self._optimizer.partition_gradients else 1

    def take_optimizer_step(self) -> None:
        self._optimizer.optimizer.step()

    def refresh(self) -> None:
        self._optimizer.update_lp_params()

    def clear_gradients(self) -> None:
        optimizer = self._optimizer
        optimizer.zero_grad()
        optimizer.micro_step_id = -1  # as before the first backward pass; otherwise gradients would be added to these
        if optimizer.cpu_offload:
            # Parameters that are not reached would keep the gradient of the last step.
            for master in self.masters():
                if master.grad is not None:
                    master.grad.zero_()
            optimizer.reset_cpu_buffers()
            return
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None


class _Bf16Stage1(_Stage1And2):
    """ZeRO-1 with bf16 parameters: the same layout under other names."""

    def _groups(self) -> Iterator[list[tuple[nn.Parameter, int]]]:
        for parameters in self._optimizer.bf16_groups:
            offset, members = 0, []
            for parameter in parameters:
                members.append((parameter, offset))
                offset += parameter.numel()
            yield members

    def masters(self) -> list[torch.Tensor]:
        return list(self._optimizer.fp32_groups_flat_partition)

    def gradients(self) -> Iterator[torch.Tensor]:
        yield from self._optimizer.fp32_groups_gradient_flat_partition

    def gradient_parts(self) -> int:
        return 1

    def clear_gradients(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads()


class _Stage3:
    """One chunk of every parameter per rank."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        # Share masters and computing weights in fp32, where DeepSpeed 0.19 makes copies.
        for master, working in zip(self.masters(), optimizer.fp16_partitioned_groups_flat, strict=True):
            if working is not None and (master.dtype, master.device) == (working.dtype, working.device):
                master.data = working.data

    def masters(self) -> list[torch.Tensor]:
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def pieces(self, names: dict[nn.Parameter, str], rank: int, size: int) -> dict[str, ParameterPiece]:
        pieces = {}
        for group in self._optimizer.fp16_groups:
            for parameter in group:
                index, position, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                shape, ranges = tuple(parameter.ds_shape), split_into_chunks(parameter.ds_numel, size)
                begin, end = ranges[rank]
                pieces[names[parameter]] = ParameterPiece(shape, ranges, begin, end - begin, index, position)
        return pieces

    def gradients(self) -> Iterator[torch.Tensor]:
        if self._optimizer.offload_optimizer:
            yield from (master.grad for master in self.masters() if master.grad is not None)
        else:
            # One buffer holds the views in `averaged_gradients`.
            yield self._optimizer.grad_partitions_flat_buffer

    def gradient_parts(self) -> int:
        return _count_ranks(self._optimizer)

    def take_optimizer_step(self) -> None:
        self._optimizer._set_fp32_optimizer_param_groups()
        self._optimizer.optimizer.step()
        self._optimizer._clear_fp32_optimizer_param_groups()

    def refresh(self) -> None:
        self._optimizer._partition_all_parameters()
        for group in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def clear_gradients(self) -> None:
        optimizer = self._optimizer
        optimizer.zero_grad()
        # A parameter that the next step does not reach would be updated with this step's gradient.
        optimizer.grad_partitions_flat_buffer.zero_()
        if optimizer.offload_optimizer:
            for master in self.masters():
                if master.grad is not None:
                    master.grad.zero_()
            optimizer.reset_cpu_buffers()


def _count_ranks(optimizer: Any) -> int:
    return dist.get_world_size(optimizer.dp_process_group)


def split_into_chunks(total: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return ZeRO-3's chunks of a parameter of ``total`` elements: equal, with padding at the end."""
    chunk = -(-total // size)
    return tuple((min(r * chunk, total), min((r + 1) * chunk, total)) for r in range(size))


def build_row_blocks(
    pieces: Mapping[str, tuple[ParameterPiece, torch.Tensor]], rank: int, size: int
) -> dict[str, Shard]:
    """Return this rank's rows of every tensor. Every rank must call this.

    Args:
        pieces: by name, in the same order on every rank; each piece with its elements (1-D, all of one dtype).
    """
    heads = {name: _count_head_elements(piece) for name, (piece, _) in pieces.items()}
    received_heads = _exchange(pieces, heads, rank, size)
    shards = {}
    for name, (piece, local) in pieces.items():
        if not piece.shape:
            if piece.size:
                shards[name] = Shard(local.reshape(()), (), ())
            continue
        begin, end = _find_owned_rows(piece, rank)
        rows = local[heads[name][rank] :]
        missing = (end - begin) * _count_row_elements(piece) - rows.numel()
        if missing > 0:
            rows = torch.cat([rows, *_collect_following(received_heads, name, rank, missing)])
        shards[name] = Shard(rows.reshape(end - begin, *piece.shape[1:]), piece.shape, _build_offset(piece, begin))
    return shards


def build_covering_rows(piece: ParameterPiece, dtype: torch.dtype) -> tuple[Shard, slice]:
    """Return an empty block of the rows that a piece overlaps, and the piece's slice of the flattened block."""
    width = _count_row_elements(piece)
    first, last = piece.begin // width, -(-(piece.begin + piece.size) // width)
    shape = (last - first, *piece.shape[1:]) if piece.shape else ()
    block = torch.empty(shape, dtype=dtype, device="meta")
    begin = piece.begin - first * width
    return Shard(block, piece.shape, _build_offset(piece, first)), slice(begin, begin + piece.size)


def _count_row_elements(piece: ParameterPiece) -> int:
    return max(1, math.prod(piece.shape[1:]))


def _build_offset(piece: ParameterPiece, row: int) -> tuple[int, ...]:
    return (row, *(0 for _ in piece.shape[1:])) if piece.shape else ()


def _find_owned_rows(piece: ParameterPiece, rank: int) -> tuple[int, int]:
    """Return the rows whose first element is in a rank's range."""
    width = _count_row_elements(piece)
    begin, end = piece.ranges[rank]
    return (-(-begin // width), -(-end // width)) if end > begin else (0, 0)


def _count_head_elements(piece: ParameterPiece) -> list[int]:
    """Return, for every rank, the elements at the start of its range whose row starts before it."""
    width = _count_row_elements(piece)
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
    local_heads = some.new_zeros(max(lengths))
    parts = [local[: heads[name][rank]] for name, (_, local) in pieces.items()]
    local_heads[: lengths[rank]] = torch.cat(parts)
    everyone = local_heads.new_empty(size * len(local_heads))
    dist.all_gather_single(everyone, local_heads)
    received_heads = {}
    for r, row in enumerate(everyone.view(size, -1)):
        position = 0
        for name in pieces:
            received_heads[name, r] = row[position : position + heads[name][r]]
            position += heads[name][r]
    return received_heads


def _collect_following(received: _Received, name: str, rank: int, missing: int) -> list[torch.Tensor]:
    """Return the rest of this rank's last row, from the following ranks that hold it."""
    parts = []
    while missing > 0:
        rank += 1
        part = received[name, rank][:missing]
        parts.append(part)
        missing -= part.numel()
    return parts
