"""The groups of an optimizer's parameters: weight decay on matrices only, and rates by pattern, by layer and of LoRA.

A group's ``rate`` is the part of the schedule's learning rate that it has; `parallel.strategy.set_learning_rate` sets
it under every strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from trainwright.errors import RequestError
from trainwright.recipe.schema import OptimizerSection

# Blocks are numbered in the names of their parameters, and so are experts, after them.
_BLOCK = re.compile(r"\.(\d+)\.")
_MODULE = "model."  # the module around the model (models/causal_lm.py)


class _GroupRates(NamedTuple):
    """What differs between groups."""

    weight_decay: float
    rate: float
    kind: bool


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    section: OptimizerSection,
    kind: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,
) -> list[dict[str, Any]]:
    """Return the parameters in groups, each with ``weight_decay``, ``rate`` and ``kind``; those of a kind are first.

    Args:
        kind: parameters that differ in it are in different groups.

    Raises:
        RequestError: a pattern matches no parameter that is trained.
    """
    parameters = list(named)
    names = [name.removeprefix(_MODULE) for name, _ in parameters]
    _check(section, names)
    depth = 1 + max((block for block in map(_block, names) if block is not None), default=-1)
    groups: dict[_GroupRates, list[nn.Parameter]] = {}
    for (full, parameter), name in zip(parameters, names, strict=True):
        decay = section.weight_decay if parameter.dim() >= 2 else 0.0
        rate = _of_layer(section, name, depth)
        if section.loraplus_ratio is not None and ".lora_B." in name:
            rate *= section.loraplus_ratio
        for group in section.groups:
            if re.fullmatch(group.pattern, name):
                decay = decay if group.weight_decay is None else group.weight_decay
                rate = rate if group.learning_rate is None else group.learning_rate / section.learning_rate
        groups.setdefault(_GroupRates(decay, rate, kind(full, parameter)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: not item[0].kind)
    return [{"params": members, **setting._asdict()} for setting, members in ordered]


def _of_layer(section: OptimizerSection, name: str, depth: int) -> float:
    """Return the layer-wise part of the rate: 1 after the blocks, and ``layer_decay`` less with every block before."""
    if section.layer_decay is None or not depth:
        return 1.0
    block = _block(name)
    if block is None:
        block = -1 if "embed" in name or name.rpartition(".")[0].rpartition(".")[2] in ("wte", "wpe") else depth
    return float(section.layer_decay ** (depth - block))


def _block(name: str) -> int | None:
    match = _BLOCK.search(name)
    return None if match is None else int(match[1])


def _check(section: OptimizerSection, names: list[str]) -> None:
    for index, group in enumerate(section.groups):
        if not any(re.fullmatch(group.pattern, name) for name in names):
            raise RequestError(
                f"optimizer.groups.{index}.pattern: {group.pattern} matches none of the {len(names)} names of trained "
                f"parameters, such as {names[len(names) // 2]}"
            )
    if section.loraplus_ratio is not None and not any(".lora_B." in name for name in names):
        raise RequestError("optimizer.loraplus_ratio: has no effect without LoRA; remove it, or set model.adapter")
