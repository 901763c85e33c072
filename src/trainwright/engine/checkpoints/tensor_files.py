"""safetensors files written tensor by tensor with their checksum, and read slice by slice.

Why not `safetensors.torch.save_file` or `torch.distributed.checkpoint`: both hold a second copy of all tensors in
memory while they write, and the latter stores its index as a pickle. Any safetensors reader reads these files
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trainwright.engine.checkpoints.directories import write_synced

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write ``tensors`` to ``path``, sync it to disk, and compare what is there.

    Returns:
        The file's size in bytes and its SHA-256.

    Raises:
        OSError: the disk is full or not writable, or has other bytes; a partial file may remain.
    """
    return write_synced(path, _parts(tensors))


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield head(tensors)
    for tensor in tensors.values():
        yield tensor_bytes(tensor)


def head(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return what a file has before the bytes of its tensors, which follow one another."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, copied if it is on a device or not contiguous."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data
