"""Update each matrix on one rank and distribute the update.

The ranks are a grid: `shards` ranks hold the rows of one copy of a matrix, and there are `replicas` copies. Of a
replicated model each rank is a replica; of a sharded one, each group of ranks over which it is sharded. In each round a
matrix is gathered from the shards of one replica by the rank that owns it, updated there, scattered to the same shards,
and broadcast from these to the other replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from trainwright.parallel.matrix_owners import assign_matrices, count_rows, group_into_stacks


@dataclass(frozen=True)
class Ranks:
    """One dimension of the grid: this process is ``rank`` of ``size`` in ``group``; None: the default group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


_ALONE = Ranks()


class MatrixExchange:
    """Update matrices that every rank holds, or holds rows of, with the work divided over all ranks.

    Args:
        device: where updates are computed.
        shape: returns the shape of the full matrix of a parameter.
        shards: the ranks that share the rows of one copy, as FSDP2 does.
        replicas: the ranks that hold the same as this one.
    """

    def __init__(
        self,
        device: torch.device,
        shape: Callable[[nn.Parameter], torch.Size],
        *,
        shards: Ranks = _ALONE,
        replicas: Ranks = _ALONE,
    ) -> None:
        self.device = device
        self._shape = shape
        self._shards = shards
        self._replicas = replicas

    def __call__(
        self,
        parameters: Sequence[nn.Parameter],
        local: Callable[[list[nn.Parameter]], list[torch.Tensor]],
        update: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[list[nn.Parameter], list[torch.Tensor]]]:
        """Yield all parameters, some at a time, with this rank's rows of their updates, on the device.

        Every rank must iterate.

        Args:
            parameters: the same on every rank, in the same order.
            local: returns this rank's rows of the matrices from which the updates of parameters are computed.
            update: returns the updates, given full matrices of one shape [count, m, n] in ``dtype`` on the device; of
                the same shape and dtype.
            dtype: in which matrices and updates are exchanged.
        """
        shapes = tuple((height, width) for height, width in map(self._shape, parameters))
        ranks = self._shards.size * self._replicas.size
        for indices_by_rank in assign_matrices(shapes, ranks, on_gpu=self.device.type != "cpu"):
            parts = [[parameters[index] for index in indices] for indices in indices_by_rank]
            by_replica = [parts[begin : begin + self._shards.size] for begin in range(0, len(parts), self._shards.size)]
            matrices = by_replica[self._replicas.rank]
            updates = None
            if any(matrices):  # before the first broadcast, so that all ranks compute at the same time
                updates = self._compute_updates(
                    matrices, self._flatten_rows(local(list(chain(*matrices))), dtype), update
                )
            for replica, of_replica in enumerate(by_replica):
                if replica_parameters := list(chain(*of_replica)):
                    yield replica_parameters, self._distribute_updates(replica_parameters, replica, updates, dtype)

    def _flatten_rows(self, rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        flat = torch.empty(sum(part.numel() for part in rows), dtype=dtype, device=self.device)
        pieces = flat.split([part.numel() for part in rows])
        torch._foreach_copy_([piece.view_as(part) for piece, part in zip(pieces, rows, strict=True)], rows)
        return flat

    def _compute_updates(
        self, owned: list[list[nn.Parameter]], sent: torch.Tensor, update: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return this rank's rows of the updates of its replica's parameters in a row.

        Args:
            owned: the parameters that each of the replica's ranks updates.
            sent: this rank's rows of what their updates are computed from.
        """
        mine = owned[self._shards.rank]
        sizes = [[self._count_elements(parameter, rank) for parameter in mine] for rank in range(self._shards.size)]
        sent_sizes = [sum(of_rank) for of_rank in sizes]
        received_sizes = [sum(self._count_elements(p, self._shards.rank) for p in of_owner) for of_owner in owned]
        received_values = self._all_to_all(sent, received_sizes, sent_sizes)
        del sent
        pieces, shapes = received_values.split(list(chain(*sizes))), [self._shape(parameter) for parameter in mine]
        on_gpu = self.device.type != "cpu"
        for indices in group_into_stacks([(height, width) for height, width in shapes], on_gpu=on_gpu):
            matrices = received_values.new_empty((len(indices), *shapes[indices[0]]))
            parts = [pieces[index :: len(mine)] for index in indices]  # one of each rank
            for matrix, of_matrix in zip(matrices.flatten(1), parts, strict=True):
                torch.cat(of_matrix, out=matrix)
            for result, of_matrix in zip(update(matrices).flatten(1), parts, strict=True):
                torch._foreach_copy_(list(of_matrix), list(result.split([len(part) for part in of_matrix])))
        return self._all_to_all(received_values, sent_sizes, received_sizes)

    def _all_to_all(self, sent: torch.Tensor, sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        """Return what the shards send this rank, ``received_sizes``; ``sizes``: what it sends to each."""
        if self._shards.size == 1:
            return sent
        received_values = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received_values, sent, received_sizes, sizes, group=self._shards.group)
        return received_values

    def _distribute_updates(
        self, parameters: list[nn.Parameter], replica: int, own: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the updates that ``replica`` has computed; ``own``: those of this one."""
        sizes = [self._count_elements(parameter, self._shards.rank) for parameter in parameters]
        flat = own
        if replica != self._replicas.rank:
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        assert flat is not None
        if self._replicas.size > 1 and len(flat):
            dist.broadcast(flat, group_src=replica, group=self._replicas.group)
        parts = zip(parameters, flat.split(sizes), strict=True)
        return [part.view(-1, self._shape(parameter)[1]) for parameter, part in parts]

    def _count_elements(self, parameter: nn.Parameter, rank: int) -> int:
        """Return the number of elements of a matrix that a rank of the shards holds."""
        height, width = self._shape(parameter)
        return count_rows(height, self._shards.size, rank) * width
