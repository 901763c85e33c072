"""What a safetensors file says it holds, checked before anything else reads the file.

The library checks names, types, shapes and offsets, and takes no header over 100 MB
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import stat
from pathlib import Path

_INCOMPLETE = "incomplete metadata"  # what the library says where header and size of the file do not agree


class DamagedFile(ValueError):
    """Not a safetensors file, or not a whole one. The message says why and does not name the file."""


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in ``file``, by name.

    Raises:
        DamagedFile: no regular file, no valid header, or a header that does not fit the size of the file.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    found = file.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for somebody to write to it
        raise DamagedFile("it is not a regular file")
    try:
        with safe_open(file, framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        if _INCOMPLETE in str(error):
            raise DamagedFile(f"it is truncated, or longer than its header says ({found.st_size:,} bytes)") from error
        raise DamagedFile(str(error)) from error
