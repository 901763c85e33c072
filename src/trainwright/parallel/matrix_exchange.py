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

from trainwright.parallel.matrix_owners import assign, rows_of


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
        local: Callable[[nn.Parameter], torch.Tensor],
        update: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield every parameter with this rank's rows of its update, on the device. Every rank must iterate.

        Args:
            parameters: the same on every rank, in the same order.
            local: returns this rank's rows of the matrix from which a parameter's update is computed.
            update: returns the update, given the full matrix in ``dtype`` on the device; of the same shape and dtype.
            dtype: in which matrices and updates are exchanged.
        """

        def rows(parameter: nn.Parameter) -> torch.Tensor:
            return local(parameter).to(self.device, dtype)

        shapes = tuple((height, width) for height, width in map(self._shape, parameters))
        for indices_by_rank in assign(shapes, self._shards.size * self._replicas.size):
            owned = [[parameters[index] for index in indices] for indices in indices_by_rank]
            by_replica = [owned[begin : begin + self._shards.size] for begin in range(0, len(owned), self._shards.size)]
            here = by_replica[self._replicas.rank]
            # Before the first broadcast, so that all ranks compute at the same time.
            own = self._updated(here, rows, update) if any(here) else None
            for replica, of_replica in enumerate(by_replica):
                if those := list(chain(*of_replica)):
                    yield from self._distributed(those, replica, own, dtype)

    def _updated(
        self,
        owned: list[list[nn.Parameter]],
        rows: Callable[[nn.Parameter], torch.Tensor],
        update: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return this rank's rows of the updates of its replica's parameters in a row.

        ``owned``: the parameters that each of the replica's ranks updates.
        """
        mine, group = owned[self._shards.rank], self._shards.group
        if self._shards.size == 1:
            return torch.cat([update(rows(parameter)).reshape(-1) for parameter in mine])
        ranks = range(self._shards.size)
        sizes = [[self._elements(parameter, rank) for parameter in mine] for rank in ranks]
        sent_sizes = [sum(of_rank) for of_rank in sizes]
        received_sizes = [sum(self._elements(p, self._shards.rank) for p in of_owner) for of_owner in owned]
        sent = torch.cat([rows(parameter).reshape(-1) for parameter in chain(*owned)])
        received = sent.new_empty(sum(sent_sizes))
        dist.all_to_all_single(received, sent, sent_sizes, received_sizes, group=group)
        del sent
        pieces = received.split(list(chain(*sizes)))
        for index, parameter in enumerate(mine):
            parts = pieces[index :: len(mine)]  # one of each rank
            full = update(torch.cat(parts).view(self._shape(parameter))).reshape(-1)
            for part, result in zip(parts, full.split([len(part) for part in parts]), strict=True):
                part.copy_(result)
        back = received.new_empty(sum(received_sizes))
        dist.all_to_all_single(back, received, received_sizes, sent_sizes, group=group)
        return back

    def _distributed(
        self, parameters: list[nn.Parameter], replica: int, own: torch.Tensor | None, dtype: torch.dtype
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the updates that ``replica`` has computed; ``own``: those of this one."""
        sizes = [self._elements(parameter, self._shards.rank) for parameter in parameters]
        flat = own
        if replica != self._replicas.rank:
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        assert flat is not None
        if self._replicas.size > 1 and len(flat):
            dist.broadcast(flat, group_src=replica, group=self._replicas.group)
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            yield parameter, part.view(-1, self._shape(parameter)[1])

    def _elements(self, parameter: nn.Parameter, rank: int) -> int:
        """Return the number of elements of a matrix that a rank of the shards holds."""
        height, width = self._shape(parameter)
        return rows_of(height, self._shards.size, rank) * width
