"""Combine a recipe with an Accelerate file: the file overrides the recipe, the command line overrides both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.compatibility.accelerate.machine import refuse_count_of_one_machine, require
from trainwright.compatibility.accelerate.translation import Translation, as_yaml, missing_rendezvous, read_translation
from trainwright.errors import RequestError
from trainwright.machine.detect import detect
from trainwright.recipe.loading import read_merged
from trainwright.recipe.yaml_text import Tree

# Keys that only apply to the strategy that the file names.
_OF_THE_STRATEGY = (
    "parallel.replicate_size",
    "parallel.reshard_after_forward",
    "parallel.offload_parameters",
    "parallel.offload_optimizer",
    "parallel.wrap",
    "parallel.deepspeed_config",
)


@dataclass(frozen=True)
class Joined:
    """Overrides for load_recipe, the file's first and then the user's own; and notes on overridden values."""

    overrides: list[str]
    reasons: tuple[str, ...]


def find_translation(
    file: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> Translation:
    """Return the translation of a file, with the command line's numbers in place of its own, checked for this
    machine.

    ``overrides`` may contain words other than section.key=value, such as the recipe's name. GPUs that the file excludes
    are hidden from this process and its children (CUDA_VISIBLE_DEVICES), so call this before the machine is inspected.

    Raises:
        RequestError: the file cannot be read or is not supported, does not say where its machines meet, or counts the
            processes of one machine only.
        MachineError: this machine lacks the GPUs or the library asked for; the message says what would run here.
    """
    translation = read_translation(file).with_machines(nodes, node_rank, rendezvous)
    processes = _last(overrides, "parallel.num_processes")
    if processes is not None:
        translation = replace(translation, processes=int(processes) if processes.isdigit() else None)
    translation.refuse_problems()
    if (error := missing_rendezvous(translation)) is not None:
        raise error
    machine = detect()
    if processes is None:
        refuse_count_of_one_machine(translation, machine)
    require(translation, machine)
    os.environ.update(translation.device_environment())
    return translation


def join(
    translation: Translation, recipe: Path | Tree | None, overrides: Sequence[str], *, resumed: bool = False
) -> Joined:
    """Apply the settings of a file over the recipe at ``recipe`` and under the user's ``overrides``.

    The file sets a key that the recipe leaves to auto or to its default; another value is overridden, with a note. The
    strategy is not: if recipe and file name different ones, RequestError names both. The recipe of a ``resumed`` run
    has every key, so there the strategy is overridden, too.
    """
    translation.refuse_problems()
    explicit = {override.partition("=")[0].strip() for override in overrides}
    reasons = [
        f"{key}: the command line's value, not {translation.settings[key].origin}"
        for key in translation.settings
        if key in explicit
    ]
    dropped = set(explicit)
    if "parallel.strategy" in explicit and _last(overrides, "parallel.strategy") != translation.strategy:
        dropped |= set(_OF_THE_STRATEGY)
    written = Tree() if recipe is None else read_merged(recipe, ())
    for key, setting in translation.settings.items():
        there = _written(written, key)
        if key in dropped or there in (None, "auto", setting.value):
            continue
        where = f"{written.origins.get(tuple(key.split('.')), recipe)}: {key} is {as_yaml(there)}"
        if key == "parallel.strategy" and not resumed:
            raise RequestError(
                f"{where}, but {setting.origin} means {setting.value}; remove one of the two, or set {key}=… on the "
                "command line"
            )
        if not resumed:
            reasons.append(f"{where}, replaced by {as_yaml(setting.value)}: {setting.origin}")
    remaining = replace(translation, settings={k: v for k, v in translation.settings.items() if k not in dropped})
    return Joined([*remaining.to_overrides(), *overrides], tuple(reasons))


def _last(overrides: Sequence[str], key: str) -> str | None:
    values = [override.partition("=")[2].strip() for override in overrides if override.partition("=")[0] == key]
    return values[-1] if values else None


def _written(tree: Tree, key: str) -> object:
    section, name = key.split(".")
    values = tree.values.get(section)
    return values.get(name) if isinstance(values, dict) else None
