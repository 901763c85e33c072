"""The page of runs, and what it asks for. Nothing is answered without the token."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trainwright.api.run import checkpoint, stop
from trainwright.errors import MachineError, RequestError, TrainwrightError
from trainwright.observe.reports.page import RunRemarks, as_json
from trainwright.observe.watching.board import AXES, Board
from trainwright.utils.installation import install_command
from trainwright.utils.text import say

_PAGE = files("trainwright.observe.watching")
_SEND_SECONDS = 1.0
_MOST_POINTS = 2000
_MOST_BYTES = 2**17  # of a request
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def application(board: Board, token: str) -> Starlette:
    """Return the application; while it runs, ``board`` follows its runs."""

    @asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        board.start()
        yield
        board.close()

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        presented = request.query_params.get("token", "")
        if secrets.compare_digest(presented.encode(), token.encode()):
            response = await answer(request)
        else:
            response = PlainTextResponse("use the address with the token that trainwright watch has printed\n", 403)
        response.headers.update(_HEADERS)
        return response

    def page(request: Request) -> Response:
        text = (_PAGE / "page.html").read_text(encoding="utf-8").replace("TOKEN", token)
        return Response(text, media_type="text/html")

    def script(request: Request) -> Response:
        return Response((_PAGE / "page.js").read_bytes(), media_type="text/javascript")

    def styles(request: Request) -> Response:
        return Response((_PAGE / "page.css").read_bytes(), media_type="text/css")

    async def events(request: Request) -> Response:
        return StreamingResponse(_changes(board), media_type="text/event-stream")

    async def remark(request: Request) -> Response:
        body = await _body(request)
        await run_in_threadpool(board.remark, _run(request), RunRemarks(body.get("tags", []), body.get("note", "")))
        return _json("saved")

    routes = [
        Route("/", page),
        Route("/page.js", script),
        Route("/page.css", styles),
        Route("/events", events),
        Route("/runs", lambda request: _json(board.rows())),
        Route("/curves", lambda request: _json(_curves(board, request))),
        Route("/differences", lambda request: _json(board.differences(request.query_params.getlist("run")))),
        Route("/details", lambda request: _json(board.details(_run(request)))),
        Route("/seconds", lambda request: _json(board.seconds(_run(request)))),
        Route("/log", lambda request: _json(board.log(_run(request), request.query_params.get("file", "")))),
        Route("/remarks", remark, methods=["POST"]),
        Route("/checkpoint", lambda request: _json(_save(board, request)), methods=["POST"]),
        Route("/stop", lambda request: _json(stop(board.directory(_run(request)), timeout=0)), methods=["POST"]),
    ]
    failures: dict[Any, Any] = {KeyError: _missing, OSError: _missing, ValueError: _wrong, TrainwrightError: _wrong}
    return Starlette(
        routes=routes,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers=failures,
        lifespan=following,
    )


def _save(board: Board, request: Request) -> str:
    checkpoint(board.directory(_run(request)), timeout=0)
    return "asked for a checkpoint"


async def _body(request: Request) -> dict[str, Any]:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            raise ValueError(f"the request is larger than {_MOST_BYTES:,} bytes")
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("the request is not an object")
    return value


async def _changes(board: Board) -> AsyncIterator[str]:
    """Yield server-sent events with the rows that have changed and the runs that are gone."""
    sent: dict[str, Any] = {}
    while True:
        rows = await run_in_threadpool(board.rows)  # which may wait for a file
        changed = [row for name, row in rows.items() if sent.get(name) != row]
        gone = [name for name in sent if name not in rows]
        yield f"data: {as_json({'rows': changed, 'gone': gone})}\n\n" if changed or gone else ": nothing new\n\n"
        sent = rows
        await asyncio.sleep(_SEND_SECONDS)


def _curves(board: Board, request: Request) -> dict[str, Any]:
    query = request.query_params
    axis, limit = query.get("axis", "step"), int(query.get("points", "600"))
    if axis not in AXES or not 1 <= limit <= _MOST_POINTS:
        raise ValueError(f"axis: one of {', '.join(AXES)}; points: 1 to {_MOST_POINTS}")
    return board.curves(query.getlist("run"), axis, limit)


def _run(request: Request) -> str:
    return request.query_params.get("run", "")


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")


def _missing(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "there is no such run or file"}, 404)


def _wrong(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


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
