"""Find the modules of a model that are sharded as units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainwright.errors import RequestError


def find_units(module: nn.Module, blocks: Sequence[nn.Module], wrap: Sequence[str] | str) -> list[nn.Module]:
    """Return the units of ``module``, inner ones first; all other parameters belong to the module itself.

    Args:
        wrap: class names of the units, or "auto" for ``blocks``.

    Raises:
        RequestError: the model lacks a class, or its parameters are used outside of it.
    """
    possible = _possible(module)
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


def _possible(module: nn.Module) -> list[nn.Module]:
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
