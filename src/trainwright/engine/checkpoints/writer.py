"""A rank's side of the process that writes its checkpoints."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from trainwright.engine.checkpoints.tensor_files import head, tensor_bytes

_PIECE = 64 * 2**20
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; from trainwright.engine.checkpoints.writer_process import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


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
    """A process that writes files from a copy of tensors in memory that it shares with this one.

    The copy is not mapped into this process and not part of its resident memory. It stays for the next checkpoint: a
    file in memory is allocated once.

    Raises:
        OSError: the process cannot be started.

    Attributes:
        usable: false once the process has ended, or there was no memory for a copy.
    """

    def __init__(self) -> None:
        self.usable = True
        self.copied = threading.Event()
        self.copied.set()
        self._lock = threading.Lock()
        self._memory = _memory()
        command = [sys.executable, "-I", "-c", _START, str(self._memory), str(os.getpid()), *sys.path]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[self._memory]
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def allocate(self, size: int) -> None:
        """Begin to allocate memory for the copy of ``size`` bytes; copying needs no allocation then."""
        if size and hasattr(os, "posix_fallocate"):
            memory = self._memory
            BackgroundTask(lambda: os.posix_fallocate(memory, 0, size))

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], changing: Set[int]) -> BackgroundTask:
        """Begin to copy tensors and then to write them to ``path``; the outcome is ``{"size": …, "sha256": …}``.

        They must not change before ``copied`` is set, except those whose addresses are in ``changing``: these are
        copied before this returns.
        """
        offsets, end = [], 0
        for tensor in tensors.values():
            offsets.append((end, tensor.detach()))
            end += tensor.numel() * tensor.element_size()
        begin, self.copied = head(tensors), threading.Event()
        try:
            for offset, tensor in offsets:
                if tensor.data_ptr() in changing:
                    self._copy(offset, tensor)
        except OSError:
            self.close()
            raise
        later = [(offset, tensor) for offset, tensor in offsets if tensor.data_ptr() not in changing]
        device = next((tensor.device for _, tensor in later if tensor.device.type == "cuda"), None)
        # What the device has been asked to compute comes first.
        event = None if device is None else torch.cuda.current_stream(device).record_event()

        def work() -> dict[str, Any]:
            try:
                if device is None:
                    self._copy_all(later)
                else:
                    with torch.cuda.stream(torch.cuda.Stream(device)) as stream:
                        stream.wait_event(event)
                        self._copy_all(later)
            except OSError:
                self.usable = False
                raise
            finally:
                later.clear()  # the tensors may be released
                offsets.clear()
                self.copied.set()
            return self.ask(job="part", path=str(path), head=base64.b64encode(begin).decode(), size=end)

        return BackgroundTask(work)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer of the process. Raises OSError if the process could not do it, or has ended."""
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except (OSError, ValueError):  # a closed pipe
                line = ""
            if not line.endswith("\n"):
                self.usable = False
                raise OSError(f"the process that writes checkpoints ended ({_ending(self._process.wait())})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process after what it does now, and free the copy."""
        self.usable = False
        with self._lock:
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._process.communicate()
                os.close(self._memory)

    def _copy_all(self, tensors: list[tuple[int, torch.Tensor]]) -> None:
        for offset, tensor in tensors:
            self._copy(offset, tensor)

    def _copy(self, offset: int, tensor: torch.Tensor) -> None:
        flat = tensor.contiguous().reshape(-1)
        step = _PIECE // flat.element_size()
        for begin in range(0, flat.numel(), step):
            data = tensor_bytes(flat[begin : begin + step])
            while data:
                count = os.pwrite(self._memory, data, offset)
                data, offset = data[count:], offset + count


def _memory() -> int:
    """Return the descriptor of a file in memory; of a temporary file where there are none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
