"""How a strategy holds a model, as its live objects show it, and how it should by the recipe.

A strategy fills a ``Layout`` from what it built, never from what it was asked for, so that the two can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from trainwright.recipe.schema import ParallelSection
from trainwright.recipe.strategy_spec import spec_of

# Padding to equal parts may add elements; the nearest other number of copies is a third away or more.
_PADDING = 0.15


@dataclass(frozen=True)
class Layout:
    """One rank's view. The first four are of the largest trainable parameter, the counts of all trainable ones."""

    parameter: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: str  # as `placement` words it
    forward_dtype: str  # of the weights in the forward pass; several with a + between
    master_dtype: str  # of what the optimizer updates
    parameter_device: str  # type of the device this rank's part rests on
    optimizer_device: str  # and of the one the masters are updated on
    elements: int
    held: int  # of these on this rank, while nothing is gathered
    updated: int  # of these by this rank's optimizer
    gradient_parts: int  # an exchanged gradient is spread over so many ranks
    gradient_ranks: int  # and is the sum of so many

    def line(self) -> str:
        """Return the layout in one line."""
        precision = self.forward_dtype
        if self.master_dtype != precision:
            precision += f" (masters {self.master_dtype})"
        whole, part = (" x ".join(map(str, shape)) for shape in (self.shape, self.local_shape))
        shown = whole if part == whole else f"{part} of {whole}"
        return (
            f"{self.parameter} {self.placement} ({shown}), {precision}; of {self.elements:,} elements this rank holds "
            f"{_share(self.held, self.elements)} and updates {_share(self.updated, self.elements)}"
        )


@dataclass(frozen=True)
class Planned:
    """What the recipe says of the fields of that name in every rank's ``Layout``."""

    placement: str
    forward_dtype: str
    master_dtype: str
    parameter_device: str
    optimizer_device: str
    gradient_parts: int
    gradient_ranks: int
    held_copies: int  # of every parameter, over all ranks
    updated_copies: int


def planned_layout(parallel: ParallelSection, dtype: torch.dtype, device: str) -> Planned:
    """Return the layout of a resolved recipe.

    Args:
        dtype: what the forward pass computes in.
        device: type of the device the ranks compute on.
    """
    ranks = parallel.num_processes
    assert isinstance(ranks, int), "a resolved recipe has no auto left"
    spec = spec_of(parallel.strategy)
    shards = ranks // parallel.replicate_size
    parts, gradient_parts, optimizer_parts = (
        shards if part in spec.shards else 1 for part in ("parameters", "gradients", "optimizer state")
    )
    offloaded = spec.offloaded(parallel)
    return Planned(
        placement=placement(spec.parameters_by if spec.shards_parameters else "whole", parts, ranks // parts),
        forward_dtype=dtype_name([dtype]),
        master_dtype="float32",
        parameter_device="cpu" if "parameters" in offloaded else device,
        optimizer_device="cpu" if "optimizer state" in offloaded else device,
        gradient_parts=gradient_parts,
        gradient_ranks=ranks,
        held_copies=ranks // parts,
        updated_copies=ranks // optimizer_parts,
    )


def placement(kind: str, parts: int, copies: int) -> str:
    """Where a parameter lies, in words. ``kind``: whole, rows (split along the first dimension), flat (elements)."""
    where = "whole" if kind == "whole" else f"{kind} over {parts} rank{'s' * (parts > 1)}"
    return where if copies == 1 else f"{where}, {copies} copies"


def tensor_placement(tensor: DTensor) -> str:
    """Where a DTensor lies: by the placements and the mesh that it carries."""
    parts = copies = 1
    kind = "whole"
    for size, place in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(place, Replicate):
            copies *= size
        else:
            parts *= size
            kind = "rows" if place.is_shard(0) else str(place)
    return placement(kind, parts, copies)


def dtype_name(dtypes: Iterable[torch.dtype]) -> str:
    """``float32``, or several names with a + between."""
    return "+".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def copies_held(layouts: Sequence[Layout], counts: Iterable[int], planned: int) -> int | float:
    """How many copies of all elements the ranks have together; padding is taken for none where that is the plan."""
    copies = sum(counts) / max(1, layouts[0].elements)
    near = math.isclose(copies, planned, rel_tol=_PADDING) and copies > planned * 0.99
    return planned if near else round(copies, 3)


def _share(part: int, whole: int) -> str:
    return "all" if part == whole else f"{part / max(1, whole):.1%}"
