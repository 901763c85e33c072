"""Serve the page of runs."""

from __future__ import annotations

import secrets
import socket
import sys
from pathlib import Path

from trainwright.errors import MachineError, RequestError
from trainwright.utils.installation import install_command
from trainwright.utils.text import say

LOCAL = "127.0.0.1"


def serve(root: Path, host: str = LOCAL, port: int = 0) -> None:
    """Serve the page of the runs under ``root`` until Ctrl-C.

    Raises:
        RequestError: there is no such directory, or a package is missing.
        MachineError: the address is not this machine's, or the port is taken.
    """
    if not root.is_dir():
        raise RequestError(f"{root}: no such directory; name a run or a directory of runs")
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise RequestError(f"watch: {error.name} is not installed; {install_command('watch')}") from None
    from trainwright.observe.watching.app import application
    from trainwright.observe.watching.board import Board

    token = secrets.token_urlsafe(24)
    with _listener(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        say(f"runs: http://{shown}:{listener.getsockname()[1]}/?token={token}", file=sys.stderr, wrap=False)
        if host != LOCAL:
            say("note: who has this address sees these runs and can stop them; it is not encrypted", file=sys.stderr)
        config = uvicorn.Config(
            application(Board(root), token), log_level="error", access_log=False, timeout_graceful_shutdown=1
        )
        uvicorn.Server(config).run([listener])


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise MachineError(
            f"--host {host} --port {port}: {error.strerror}; choose another port, or 0 for any free one"
        ) from None
    return listener
