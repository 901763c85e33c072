"""Serve the curves of runs to a browser, alone or while a command runs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainwright.errors import MachineError, RequestError
from trainwright.run.program import run_program, started
from trainwright.utils.text import say

_HOST = "127.0.0.1"
_END_SECONDS = 5.0


def serve(directory: Path, command: Sequence[str] | None, port: int) -> int:
    """Show the runs in ``directory`` until ``command``, or without one TensorBoard, ends; return the exit code.

    Args:
        port: of this machine's local address; 0: any free one.

    Raises:
        RequestError: there is no such directory or program.
        MachineError: the port is taken, or TensorBoard fails.
    """
    if command is None and not directory.is_dir():
        raise RequestError(
            f"RUNS: {directory} is not a directory; pass the runs/ directory of the working directory of training"
        )
    port = _free(port)
    server = started(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--host", _HOST, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a stop is for the command; the server is ended after it
    )
    say(f"curves: http://{_HOST}:{port}/", file=sys.stderr)
    try:
        code = _wait(server) if command is None else run_program(command)
    except FileNotFoundError:
        assert command is not None
        raise RequestError(f"COMMAND: {command[0]}: program not found") from None
    except KeyboardInterrupt:  # for the server only
        code = 130
    finally:
        _end(server)
    return code if code >= 0 else 128 - code


def _end(server: subprocess.Popen[bytes]) -> None:
    """End TensorBoard, which may miss SIGTERM while it starts; it has nothing to save."""
    server.terminate()
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes]) -> int:
    code = server.wait()
    if code > 0:
        raise MachineError(f"TensorBoard exited with code {code}; run python -m tensorboard.main to see why")
    return 0


def _free(port: int) -> int:
    """Return a port that is currently free: ``port``, or any for 0."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
        except OSError as error:
            raise MachineError(f"--port {port}: {error.strerror}; choose another port, or 0 for any free one") from None
        return int(listener.getsockname()[1])
