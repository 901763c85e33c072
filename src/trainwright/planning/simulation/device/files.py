"""Files of tensors without values: their headers and sizes, with holes in place of the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_MOST_HASHED = 2**30  # bytes; larger files are not read back by a run
_PART = bytes(2**20)


def install() -> None:
    """Have checkpoints and exports write such files."""
    import safetensors.torch

    from trainwright.engine.checkpoints import checkpoint, writer

    def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
        return _write(path, {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})

    def save_file(tensors: Mapping[str, torch.Tensor], file: Path, metadata: Any = None) -> None:
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError(f"safetensors writes contiguous tensors of the host, and {name} is not one")
        _write(Path(file), tensors)

    for module in (writer, checkpoint):
        module.write_tensors = write_tensors  # type: ignore[attr-defined]
    safetensors.torch.save_file = save_file  # type: ignore[assignment]


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    from trainwright.engine.checkpoints.writer import _NAMES

    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = (len(text) + -len(text) % 8).to_bytes(8, "little") + text + b" " * (-len(text) % 8)
    digest = hashlib.sha256(text)
    with path.open("wb") as file:
        file.write(text)
        file.truncate(len(text) + end)
    if end <= _MOST_HASHED:
        for begin in range(0, end, len(_PART)):
            digest.update(_PART[: end - begin])
    return len(text) + end, digest.hexdigest()
