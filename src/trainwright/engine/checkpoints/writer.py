"""Write tensors to safetensors files with their checksum: one by one, or by a thread from a copy in memory.

Why not `safetensors.torch.save_file` or `torch.distributed.checkpoint`: both hold a second copy of all tensors in
memory while they write, and the latter stores its index as a pickle. Any safetensors reader reads these files
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from trainwright.engine.checkpoints.manifest import PIECE, write_synced

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
    return write_synced(path, chain([_build_header(tensors)], map(_view_tensor_bytes, tensors.values())))


def _build_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return what a file has before the bytes of its tensors, which follow one another."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _view_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, copied if it is on a device or not contiguous."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


_COPIED_PIECE = 64 * 2**20
_NICENESS = 10


class BackgroundTask:
    """Work of a thread. ``outcome`` is its result, or why it failed; only valid when ``done``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self._work = work
        # A daemon: an error of the run must not wait for a slow disk.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except OSError as error:
            self.outcome = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")

    @property
    def done(self) -> bool:
        """Whether the work has ended."""
        return not self._thread.is_alive()

    def wait(self) -> Any:
        """Return the outcome once the work has ended."""
        self._thread.join()
        return self.outcome


class Writer:
    """Writes files from a copy of tensors in a file in memory.

    The copy is not mapped, so it is not part of the resident memory of the process. It stays for the next checkpoint: a
    file in memory is allocated once.

    Raises:
        OSError: there is no file in memory.

    Attributes:
        usable: false once there was no memory for a copy.
    """

    def __init__(self) -> None:
        self.usable = True
        self.copied = threading.Event()
        self.copied.set()
        self._memory = _open_memory_file()
        self._allocation: BackgroundTask | None = None

    def allocate(self, size: int) -> None:
        """Begin to allocate memory for the copy of ``size`` bytes; copying needs no allocation then."""
        if size and hasattr(os, "posix_fallocate"):
            self._allocation = BackgroundTask(lambda: os.posix_fallocate(self._memory, 0, size))

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], changing: Set[int]) -> BackgroundTask:
        """Begin to copy tensors and then to write them to ``path``; the outcome: its size and SHA-256.

        They must not change before ``copied`` is set, except those whose addresses are in ``changing``: these are
        copied before this returns.
        """
        offsets, end = [], 0
        for tensor in tensors.values():
            offsets.append((end, tensor.detach()))
            end += tensor.numel() * tensor.element_size()
        begin, self.copied = _build_header(tensors), threading.Event()
        try:
            self._copy((offset, tensor) for offset, tensor in offsets if tensor.data_ptr() in changing)
        except OSError:
            self.copied.set()
            raise
        later = [(offset, tensor) for offset, tensor in offsets if tensor.data_ptr() not in changing]
        device = next((tensor.device for _, tensor in later if tensor.device.type != "cpu"), None)
        # What the device has been asked to compute comes first.
        event = None if device is None else torch.accelerator.current_stream(device).record_event()

        def work() -> tuple[int, str]:
            try:
                if device is None:
                    self._copy(later)
                else:
                    with torch.Stream(device) as stream:
                        assert event is not None
                        stream.wait_event(event)
                        self._copy(later)
            finally:
                later.clear()  # the tensors may be released
                offsets.clear()
                self.copied.set()
            if sys.platform == "linux":  # where threads have priorities of their own, those of the training go first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            return write_synced(path, self._pieces(begin, end))

        return BackgroundTask(work)

    def close(self) -> None:
        """Free the copy."""
        if self._allocation is not None:
            self._allocation.wait()
        os.close(self._memory)

    def _copy(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
        try:
            for offset, tensor in tensors:
                flat = tensor.contiguous().reshape(-1)
                step = _COPIED_PIECE // flat.element_size()
                for begin in range(0, flat.numel(), step):
                    data = _view_tensor_bytes(flat[begin : begin + step])
                    while data:
                        count = os.pwrite(self._memory, data, offset)
                        data, offset = data[count:], offset + count
        except OSError:
            self.usable = False
            raise

    def _pieces(self, begin: bytes, size: int) -> Iterator[bytes | memoryview]:
        """Yield what a file begins with, and then the copy."""
        offset, buffer = 0, memoryview(bytearray(PIECE))
        yield begin
        while offset < size:
            count = os.preadv(self._memory, [buffer[: size - offset]], offset)
            yield buffer[:count]
            offset += count


def _open_memory_file() -> int:
    """Return the descriptor of a file in memory; of a temporary file where there are none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
