"""Write safetensors files, with the operating system's errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
