"""Report the collectives of a worker to its heartbeat, also those of libraries, by name, tensor and line."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.utils import heartbeat

# Name and position of the tensor in a call; ranks must agree on the tensor's shape, except where it is None.
_SAME_SHAPE = {
    "all_reduce": ("tensor", 0),
    "broadcast": ("tensor", 0),
    "reduce": ("tensor", 0),
    "all_gather_into_tensor": ("input_tensor", 1),
    "all_gather_single": ("input_tensor", 1),
    "reduce_scatter_single": ("input", 1),
    "reduce_scatter_tensor": ("input", 1),
}
_OTHERS = (
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
)
# What torch gives as a group to the ranks outside of it, whose calls return at once.
_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
_TORCH = os.path.dirname(torch.__file__)
_OURS = str(Path(__file__).parent / "world.py")
# By file, and by file and line: code objects are slow to look up.
_skipped: dict[str, bool] = {}
_lines: dict[tuple[str, int], str] = {}


def report_collectives() -> None:
    """Replace the collectives of torch.distributed by functions that report and call them."""
    for name in (*_SAME_SHAPE, *_OTHERS):
        function = getattr(dist, name)
        if not hasattr(function, "reports_to_heartbeat"):
            setattr(dist, name, _reporting(function, name))


def _reporting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    argument, position = _SAME_SHAPE.get(name, (None, 0))
    names = list(inspect.signature(function).parameters)
    group_position = names.index("group") if "group" in names else sys.maxsize  # a library's own takes anything

    @functools.wraps(function)
    def collective(*arguments: Any, **keywords: Any) -> Any:
        own = heartbeat.own()
        group = arguments[group_position] if len(arguments) > group_position else keywords.get("group")
        if own is None or group == _NO_MEMBER:
            return function(*arguments, **keywords)
        tensor = "" if argument is None else _described(keywords.get(argument, arguments[position : position + 1]))
        counted = group is None or group.size() == dist.get_world_size()
        own.enter(name, tensor, _line(), counted=counted, same_shape=argument is not None)
        try:
            return function(*arguments, **keywords)
        finally:
            own.leave()

    collective.reports_to_heartbeat = True  # type: ignore[attr-defined]
    return collective


def _described(argument: Any) -> str:
    tensor = argument[0] if isinstance(argument, tuple) and argument else argument
    if not isinstance(tensor, torch.Tensor):
        return ""
    return _type_and_shape(tensor.dtype, tensor.shape)


@functools.lru_cache(4096)
def _type_and_shape(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _line() -> str:
    """Return the file and line that call the collective, outside torch and our own wrappers of it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    key = frame.f_code.co_filename, frame.f_lineno
    line = _lines.get(key)
    if line is None:
        line = _lines[key] = f"{key[0]}:{key[1]}"
    return line


def _is_skipped(file: str) -> bool:
    skipped = _skipped.get(file)
    if skipped is None:
        skipped = _skipped[file] = file.startswith((_TORCH, _OURS))
    return skipped
