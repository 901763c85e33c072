"""``trainwright tensorboard``: the curves of runs in a browser, alone or while a command runs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import MachineError, RequestError
from trainwright.launch.program import run_program, started
from trainwright.text import say

_HOST = "127.0.0.1"
CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the directory belongs to the other command


def tensorboard(
    directory: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Directory of runs.")] = Path("runs"),
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...", help="Command to run; TensorBoard stops when it ends.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port. 0: any free port.")] = 0,
) -> None:
    """Show curves on a local address; with a command, until it ends, and with its exit code."""
    if command is None and not directory.is_dir():
        raise RequestError(
            f"RUNS: {directory} is not a directory; pass the runs/ directory of the working directory of training"
        )
    port = _port(port)
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
        server.terminate()
        server.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


def _wait(server: subprocess.Popen[bytes]) -> int:
    code = server.wait()
    if code > 0:
        raise MachineError(f"TensorBoard exited with code {code}; run python -m tensorboard.main to see why")
    return 0


def _port(wanted: int) -> int:
    """Return a port that is currently free: ``wanted``, or any for 0."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, wanted))
        except OSError as error:
            raise MachineError(
                f"--port {wanted}: {error.strerror}; choose another port, or 0 for any free one"
            ) from None
        return int(listener.getsockname()[1])
