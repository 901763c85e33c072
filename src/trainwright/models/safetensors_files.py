"""Write safetensors files, with the operating system's errors, and check a file's header before its tensors are read.

The library checks names, types, shapes and offsets, and rejects headers over 100 MB
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_INCOMPLETE = "incomplete metadata"  # the library's message if header and file size do not agree


def write_weights(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write contiguous CPU tensors to a safetensors file that transformers loads.

    Raises:
        OSError: the disk is full or cannot be written; converted from the library's own error, which has the system's
            error number only in its text.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, {"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


class DamagedFile(ValueError):
    """Not a safetensors file, or an incomplete one. The message has the reason without the file name."""


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in ``file``, by name.

    Raises:
        DamagedFile: it is not a regular file, or its header is invalid or does not fit the size of the file.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    status = file.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise DamagedFile("it is not a regular file")
    try:
        with safe_open(file, framework="numpy") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except SafetensorError as error:
        if _INCOMPLETE in str(error):
            raise DamagedFile(f"it is truncated, or longer than its header says ({status.st_size:,} bytes)") from error
        raise DamagedFile(str(error)) from error


def count_stored_elements(file: Path) -> dict[str, int]:
    """Return how many elements ``file`` has of each data type, such as BF16."""
    from safetensors import safe_open

    counts: dict[str, int] = {}
    with safe_open(file, framework="numpy") as reader:
        for name in reader.keys():  # noqa: SIM118 (not a mapping)
            tensor = reader.get_slice(name)
            counts[tensor.get_dtype()] = counts.get(tensor.get_dtype(), 0) + math.prod(tensor.get_shape())
    return counts
