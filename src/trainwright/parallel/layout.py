"""How a strategy holds a model, read from its live objects, and how it should according to the recipe.

A strategy fills a ``ModelLayout`` from what it built, not from its settings, so that the two can be compared. A
``Shard`` is the part of a tensor that one rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from trainwright.errors import RequestError
from trainwright.recipe.sections.parallel import ParallelSection
from trainwright.recipe.strategy_spec import look_up_strategy

# Padding to equal parts may add elements; any other number of copies differs by a third or more.
_PADDING = 0.15


@dataclass(frozen=True)
class ModelLayout:
    """One rank's view. The first four fields describe the largest trainable parameter, the counts all of them."""

    parameter: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: str  # as formatted by `describe_placement`
    forward_dtype: str  # of the weights in the forward pass; several joined by +
    master_dtype: str  # of the weights that are kept from step to step
    parameter_device: str  # device type of this rank's part
    optimizer_device: str  # device type on which masters are updated
    elements: int
    held: int  # elements on this rank while nothing is gathered
    updated: int  # elements that this rank's optimizer updates
    gradient_parts: int  # number of ranks that share an exchanged gradient
    gradient_ranks: int  # number of ranks it is summed over

    def line(self) -> str:
        """Return the layout in one line."""
        precision = self.forward_dtype
        if self.master_dtype != precision:
            precision += f" (masters {self.master_dtype})"
        full, part = (" x ".join(map(str, shape)) for shape in (self.shape, self.local_shape))
        sizes = full if part == full else f"{part} of {full}"
        return (
            f"{self.parameter} {self.placement} ({sizes}), {precision}; of {self.elements:,} elements this rank holds "
            f"{_share(self.held, self.elements)} and updates {_share(self.updated, self.elements)}"
        )


@dataclass(frozen=True)
class PlannedLayout:
    """Values of the fields of the same names in every rank's ``ModelLayout``, according to the recipe."""

    placement: str
    forward_dtype: str
    master_dtype: str
    parameter_device: str
    optimizer_device: str
    gradient_parts: int
    gradient_ranks: int
    held_copies: int  # copies of every parameter, over all ranks
    updated_copies: int


def build_planned_layout(
    parallel: ParallelSection, dtype: torch.dtype, device: str, *, master_weights: bool = True
) -> PlannedLayout:
    """Return the layout of a resolved recipe.

    Args:
        dtype: dtype of the forward pass.
        device: device type of the ranks.
    """
    ranks = parallel.processes
    assert isinstance(ranks, int), "a resolved recipe has no auto left"
    spec = look_up_strategy(parallel.strategy)
    shards = ranks // parallel.replicate_size
    parts, gradient_parts, optimizer_parts = (
        shards if part in spec.shards else 1 for part in ("parameters", "gradients", "optimizer state")
    )
    offloaded_parts = spec.offloaded(parallel)
    return PlannedLayout(
        placement=describe_placement(spec.parameters_by if spec.shards_parameters else "whole", parts, ranks // parts),
        forward_dtype=format_dtype_names([dtype]),
        master_dtype="float32" if master_weights else format_dtype_names([dtype]),
        parameter_device="cpu" if "parameters" in offloaded_parts else device,
        optimizer_device="cpu" if "optimizer state" in offloaded_parts else device,
        gradient_parts=gradient_parts,
        gradient_ranks=ranks,
        held_copies=ranks // parts,
        updated_copies=ranks // optimizer_parts,
    )


def describe_placement(kind: str, parts: int, copies: int) -> str:
    """Return a description of a parameter's placement.

    ``kind``: whole, rows (split along the first dimension) or flat (elements).
    """
    description = "whole" if kind == "whole" else f"{kind} over {parts} rank{'s' * (parts > 1)}"
    return description if copies == 1 else f"{description}, {copies} copies"


def describe_tensor_placement(tensor: DTensor) -> str:
    """Return a description of a DTensor's placement, from its placements and mesh."""
    parts = copies = 1
    kind = "whole"
    for size, dim_placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(dim_placement, Replicate):
            copies *= size
        else:
            parts *= size
            kind = "rows" if dim_placement.is_shard(0) else str(dim_placement)
    return describe_placement(kind, parts, copies)


def format_dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of a dtype, such as ``float32``, or several joined by +."""
    return "+".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def count_copies(layouts: Sequence[ModelLayout], counts: Iterable[int], planned: int) -> int | float:
    """Return the number of copies of all elements on the ranks; ``planned`` if the difference is only padding."""
    copies = sum(counts) / max(1, layouts[0].elements)
    near = math.isclose(copies, planned, rel_tol=_PADDING) and copies > planned * 0.99
    return planned if near else round(copies, 3)


def _share(part: int, total: int) -> str:
    return "all" if part == total else f"{part / max(1, total):.1%}"


def find_units(module: nn.Module, blocks: Sequence[nn.Module], wrap: Sequence[str] | str) -> list[nn.Module]:
    """Return the units of ``module``, inner ones first; all other parameters belong to the module itself.

    Args:
        wrap: class names of the units, or "auto" for ``blocks``.

    Raises:
        RequestError: the model lacks a class, or its parameters are used outside of it.
    """
    possible = _find_possible_units(module)
    if isinstance(wrap, str):
        assert wrap == "auto"
        return [unit for unit in possible if any(unit is block for block in blocks)]
    names = {type(unit).__name__ for unit in possible}
    present = {type(unit).__name__ for unit in module.modules()}
    for name in wrap:
        if name not in names:
            reason = "has its weights used from outside of it" if name in present else "is not in the model"
            raise RequestError(f"parallel.wrap: {name} {reason}; what can be wrapped is {', '.join(sorted(names))}")
    return [unit for unit in possible if type(unit).__name__ in wrap]


def _find_possible_units(module: nn.Module) -> list[nn.Module]:
    """Return the modules below ``module`` whose parameters are only used within them, inner ones first.

    A unit's parameters only exist while it runs. Parameters tied to another module's are also needed elsewhere, like
    the weight of a model's head, which the loss uses without calling the head.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for holder in module.modules():
        for parameter in holder.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(holder)
        head: nn.Module | None = getattr(holder, "get_output_embeddings", lambda: None)()
        for parameter in head.parameters() if head is not None else ():
            holders.setdefault(parameter, set()).add(module)
    possible = []
    for unit in reversed(list(module.modules())[1:]):
        parameters = list(unit.parameters())
        inside = set(unit.modules())
        is_container = isinstance(unit, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if parameters and not is_container and all(holders[p] <= inside for p in parameters):
            possible.append(unit)
    return possible


@dataclass(frozen=True)
class Shard:
    """The block ``local`` of a tensor of shape ``shape``, starting at ``offset``.

    ``replicas`` is the number of ranks that hold the same block, and ``replica`` the index of this one; a checkpoint
    writes each block once.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int = 0
    replicas: int = 1

    @classmethod
    def full(cls, tensor: torch.Tensor, replica: int = 0, replicas: int = 1) -> Shard:
        """Return a tensor that this rank holds in full."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), replica, replicas)


def iterate_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers that a checkpoint holds, by name."""
    persistent = set(module.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)
