"""Keys that have another name since the last version: the old one is read for one more version, with a notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from trainwright.recipe.observer_spec import names_as_settings
from trainwright.recipe.yaml_text import Tree
from trainwright.utils.text import say


def _same(value: Any) -> Any:
    return value


def _address(value: Any) -> Any:
    return False if value is None else {"address": value}


# By old key: the new one, and what the value becomes.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "logging.tensorboard": ("logging.observers.tensorboard", _same),
    "logging.report": ("logging.observers.report", _same),
    "logging.prometheus": ("logging.observers.prometheus", _address),
    "unlearn.trainable": ("model.trainable", _same),
    "model.adapter.quantisation": ("model.adapter.quantization", _same),
    "model.adapter.double_quantisation": ("model.adapter.double_quantization", _same),
    "model.adapter.rank_stabilised": ("model.adapter.rank_stabilized", _same),
}


def rename_keys(tree: Tree, *, silently: bool = False) -> None:
    """Give old keys of a tree that was just read their new names.

    Args:
        silently: without the notice: the tree is of a run of the last version.
    """
    for old_key, (new_key, changed) in _RENAMED.items():
        old, new = tuple(old_key.split(".")), tuple(new_key.split("."))
        parent: Any = tree.values
        for key in old[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or old[-1] not in parent:
            continue
        target: Any = tree.values
        for key in new[:-1]:
            target[key] = target = names_as_settings(target.get(key) or {})
        if not isinstance(target, dict):
            continue  # of a type that the key cannot have
        target[new[-1]] = changed(parent.pop(old[-1]))
        for path in [path for path in tree.origins if path[: len(old)] == old]:
            tree.origins[(*new, *path[len(old) :])] = tree.origins.pop(path)
        if not silently:
            origin = tree.origins.get(new)
            _notice(f"note: {'' if origin is None else f'{origin}: '}{old_key} is now {new_key}")


@cache  # once for each file and key
def _notice(line: str) -> None:
    say(f"{line}; the old key will not be read by the next version", file=sys.stderr)
