"""The page of runs: all runs under a directory, followed in a thread. Nothing is answered without the token."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
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
from trainwright.engine.event_reader import EventRecord, read_log
from trainwright.errors import MachineError, RequestError, TrainwrightError
from trainwright.machine.usage import format_figures
from trainwright.observe.following import RunFollower, open_follower, save_follower
from trainwright.observe.ledger import CATEGORIES, read_ledger
from trainwright.observe.reports.comparing import find_recipe_differences
from trainwright.observe.reports.figures import FLOPS, RunFigures
from trainwright.observe.reports.page import RunRemarks, iterate_machine_curves, read_remarks, to_json, write_remarks
from trainwright.observe.runs import describe_unreadable, list_run_directories
from trainwright.run.run_directory import RECIPE
from trainwright.utils.installation import install_command
from trainwright.utils.paths import list_files_inside, open_inside
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


def build_application(board: Board, token: str) -> Starlette:
    """Return the application; while it runs, ``board`` follows its runs."""

    @asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        board.start()
        yield
        board.close()

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        query_token = request.query_params.get("token", "")
        if secrets.compare_digest(query_token.encode(), token.encode()):
            response = await answer(request)
        else:
            response = PlainTextResponse("use the address with the token that trainwright watch has printed\n", 403)
        response.headers.update(_HEADERS)
        return response

    def page(request: Request) -> Response:
        text = (_PAGE / "page.html").read_text(encoding="utf-8").replace("TOKEN", token)
        return Response(text, media_type="text/html")

    async def events(request: Request) -> Response:
        return StreamingResponse(_iterate_changes(board), media_type="text/event-stream")

    async def remark(request: Request) -> Response:
        body = await _read_body(request)
        await run_in_threadpool(board.remark, _run(request), RunRemarks(body.get("tags", []), body.get("note", "")))
        return _respond_json("saved")

    routes = [
        Route("/", page),
        Route("/page.js", lambda request: Response((_PAGE / "page.js").read_bytes(), media_type="text/javascript")),
        Route("/page.css", lambda request: Response((_PAGE / "page.css").read_bytes(), media_type="text/css")),
        Route("/events", events),
        Route("/runs", lambda request: _respond_json(board.rows())),
        Route("/curves", lambda request: _respond_json(_look_up_curves(board, request))),
        Route("/differences", lambda request: _respond_json(board.differences(request.query_params.getlist("run")))),
        Route("/details", lambda request: _respond_json(board.details(_run(request)))),
        Route("/seconds", lambda request: _respond_json(board.seconds(_run(request)))),
        Route("/log", lambda request: _respond_json(board.log(_run(request), request.query_params.get("file", "")))),
        Route("/remarks", remark, methods=["POST"]),
        Route("/checkpoint", lambda request: _respond_json(_save(board, request)), methods=["POST"]),
        Route(
            "/stop", lambda request: _respond_json(stop(board.directory(_run(request)), timeout=0)), methods=["POST"]
        ),
    ]
    failures: dict[Any, Any] = dict.fromkeys((KeyError, OSError), _respond_missing)
    failures |= dict.fromkeys((ValueError, TrainwrightError), _respond_wrong)
    return Starlette(
        routes=routes,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers=failures,
        lifespan=following,
    )


def _save(board: Board, request: Request) -> str:
    checkpoint(board.directory(_run(request)), timeout=0)
    return "asked for a checkpoint"


async def _read_body(request: Request) -> dict[str, Any]:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            raise ValueError(f"the request is larger than {_MOST_BYTES:,} bytes")
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("the request is not an object")
    return value


async def _iterate_changes(board: Board) -> AsyncIterator[str]:
    """Yield server-sent events with the rows that have changed and the runs that are gone."""
    sent: dict[str, Any] = {}
    while True:
        rows = await run_in_threadpool(board.rows)  # which may wait for a file
        changed_rows = [row for name, row in rows.items() if sent.get(name) != row]
        gone = [name for name in sent if name not in rows]
        changes = to_json({"rows": changed_rows, "gone": gone})
        yield f"data: {changes}\n\n" if changed_rows or gone else ": nothing new\n\n"
        sent = rows
        await asyncio.sleep(_SEND_SECONDS)


def _look_up_curves(board: Board, request: Request) -> dict[str, Any]:
    query = request.query_params
    axis, limit = query.get("axis", "step"), int(query.get("points", "600"))
    if axis not in AXES or not 1 <= limit <= _MOST_POINTS:
        raise ValueError(f"axis: one of {', '.join(AXES)}; points: 1 to {_MOST_POINTS}")
    return board.curves(query.getlist("run"), axis, limit)


def _run(request: Request) -> str:
    return request.query_params.get("run", "")


def _respond_json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _respond_missing(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "there is no such run or file"}, 404)


def _respond_wrong(request: Request, error: Exception) -> Response:
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

    token = secrets.token_urlsafe(24)
    with _open_listener(host, port) as listener:
        address = f"[{host}]" if ":" in host else host
        say(f"runs: http://{address}:{listener.getsockname()[1]}/?token={token}", file=sys.stderr, wrap=False)
        if host != LOCAL:
            say("note: who has this address sees these runs and can stop them; it is not encrypted", file=sys.stderr)
        application = build_application(Board(root), token)
        config = uvicorn.Config(application, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run([listener])


def _open_listener(host: str, port: int) -> socket.socket:
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


AXES = ("step", "tokens", "seconds", "flops")
_LOOK_SECONDS = 1.0
_LITTLE_BYTES = 2**20  # of a run, read without delay
_LOG_BYTES = 2**16  # the end of a log that is shown
_MOST_CURVES = 100  # of the metrics of evaluations
_NEWEST = 200  # events and samples of a run that are shown


class Board:
    """Follows the runs under ``root``; everything is asked for by a run's path in it.

    Raises:
        KeyError: from methods with the path of a run, if there is none.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._followers: dict[str, RunFollower] = {}
        self._recipes: dict[str, RunFigures] = {}  # a recipe is parsed once
        self._rows: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()  # held while a part of a file is read
        self._ends = threading.Event()
        self._ledgers = Ledgers()
        self._numbers: dict[str, int] = {}  # which stay while this program runs
        self._kept: dict[str, int] = {}  # bytes that the cache has
        self._glances: dict[str, dict[str, Any]] = {}  # rows of long runs, until they are read
        self._until = math.inf  # when no more recipes are read in this look
        self._asked: tuple[str, ...] = ()  # the runs that the page shows, which are read first

    def start(self) -> None:
        """Follow in a thread until ``close``."""
        threading.Thread(target=self._follow, name="watch", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()

    def look(self) -> bool:
        """Read what is new in every run; return whether that was all.

        First comes what little is new in each. Long runs that are new follow for a second, those on the page first.
        """
        self._find()
        self._until = time.monotonic() + _LOOK_SECONDS
        long = []
        for name, follower in list(self._followers.items()):
            if self._ends.is_set():
                return False
            with self._note_errors(name):
                if _count_unread_bytes(follower) <= _LITTLE_BYTES:
                    self._look_at(name, follower, math.inf)
                    continue
                long.append(name)
                if name not in self._glances:
                    self._show_glance(name)
        until = time.monotonic() + _LOOK_SECONDS
        for name in sorted(long, key=lambda name: name not in self._asked):
            if time.monotonic() >= until or self._ends.is_set():
                return False
            with self._note_errors(name):
                self._look_at(name, self._followers[name], until)
        return True

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the row of each run by its path, as far as they have been read."""
        with self._lock:
            return dict(self._rows)

    def directory(self, name: str) -> Path:
        """Return a run's directory."""
        return self._followers[name].directory

    def curves(self, names: Sequence[str], axis: str, limit: int) -> dict[str, dict[str, list[list[float | None]]]]:
        """Return all curves of several runs by name, each as columns: place, mean, lowest and highest value.

        A curve is named as a field or metric of steps, or ``validation/METRIC``.
        """
        self._asked = tuple(names)
        curves = {}
        for name in names:
            with self._lock:
                curves[name] = _build_curves(self._followers[name], axis, limit)
        return curves

    def differences(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the keys of the recipes whose values differ, with the value of every run."""
        return find_recipe_differences([self._recipes[name] for name in names])

    def details(self, name: str) -> dict[str, Any]:
        """Return what one run is shown with: evaluations, samples, events and names of logs."""
        with self._lock:
            follower = self._followers[name]
            figures = RunFigures.followed(follower)
            samples = [event for event in follower.events if event["event"] == "generate"]
            return {
                "row": self._rows.get(name),
                "samples": samples[-_NEWEST:],
                "events": figures.timeline[-_NEWEST:],
                "evaluations": figures.evaluations[-_NEWEST:],
                "logs": _list_logs(follower.directory),
            }

    def remark(self, name: str, remarks: RunRemarks) -> None:
        """Write the tags and the note of a run. Raises RequestError if its directory cannot be written to."""
        directory = self.directory(name)
        try:
            write_remarks(directory, remarks)
        except OSError as error:
            raise RequestError(f"{directory}: {error.strerror}") from None
        with self._lock:
            self._rows[name] = {**self._rows[name], "tags": remarks.tags, "remark": remarks.note}

    def seconds(self, name: str) -> dict[str, Any]:
        """Return the seconds of every rank of a run by category. Raises KeyError if the run is gone."""
        with self._lock:
            follower = self._followers[name]
            events = list(follower.events)
        return self._ledgers.of(follower.directory, events)

    def log(self, name: str, file: str) -> str:
        """Return the end of a log."""
        directory = self.directory(name)
        if file not in _list_logs(directory):
            raise KeyError(file)
        with open_inside(directory, "logs", file) as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _LOG_BYTES))
            return log.read(_LOG_BYTES).decode(errors="replace")

    def _find(self) -> None:
        runs = {str(directory.relative_to(self.root)): directory for directory in list_run_directories(self.root)}
        with self._lock:
            for gone in self._followers.keys() - runs.keys():
                del self._followers[gone], self._recipes[gone], self._kept[gone]
                self._rows.pop(gone, None)
                self._glances.pop(gone, None)
        # In the order in which they were begun, as their numbers give them their colors.
        for name in sorted(runs.keys() - self._followers.keys(), key=lambda name: (_read_start_time(runs[name]), name)):
            self._numbers.setdefault(name, len(self._numbers))
            follower = open_follower(runs[name])
            with self._lock:
                self._followers[name] = follower
                self._recipes[name] = RunFigures(runs[name], [], [])
                self._kept[name] = follower.read_bytes

    def _follow(self) -> None:
        while not self._ends.is_set():
            if self.look():
                self._ends.wait(_LOOK_SECONDS)

    @contextmanager
    def _note_errors(self, name: str) -> Iterator[None]:
        """Show an error as a note of its run, so that the others are followed whatever is wrong with this one."""
        try:
            yield
        except Exception as error:
            figures = dict.fromkeys(("step", "steps", "best", "speed", "goodput", "changed"))
            about = {"name": name, "task": "", "model": "", "status": "unknown", "version": 0, "read": 1.0}
            about |= {"number": self._numbers[name], "tags": [], "remark": ""}
            with self._lock:
                self._rows[name] = {"id": name, **figures, **about, "note": describe_unreadable(error)}

    def _show_glance(self, name: str) -> None:
        """Show what the beginning and the end of a long run say."""
        with suppress(OSError):
            self._glances[name] = self._row(name, RunFollower.from_glance(self._followers[name].directory), "")
            self._show_reading(name)

    def _show_reading(self, name: str) -> None:
        follower = self._followers[name]
        share = follower.read_bytes / max(1, follower.read_bytes + _count_unread_bytes(follower))
        with self._lock:
            self._rows[name] = {**self._glances[name], "read": share, "version": follower.version}

    def _look_at(self, name: str, follower: RunFollower, until: float) -> None:
        damage = ""
        parts = follower.read_in_parts()
        try:
            while not self._ends.is_set():
                with self._lock:  # only for one part, as the page waits for it
                    if next(parts, None) is None:
                        break
                if time.monotonic() >= until:
                    break
        except FileNotFoundError:  # it has not begun, or was deleted
            pass
        except OSError as error:
            damage = f"events.jsonl: {error.strerror}"
        if name in self._glances and not damage and _count_unread_bytes(follower) > _LITTLE_BYTES:
            self._show_reading(name)
            return
        self._glances.pop(name, None)
        row = self._row(name, follower, damage)
        with self._lock:
            self._rows[name] = row
        self._kept[name] = save_follower(follower, self._kept[name])

    def _row(self, name: str, follower: RunFollower, damage: str) -> dict[str, Any]:
        figures, recipe = RunFigures.followed(follower), self._recipes[name]
        # Of hundreds of large recipes, each look reads some.
        reads = recipe.recipe_is_read or time.monotonic() < self._until
        problem = recipe.recipe_problem if reads else "recipe.yaml is still to be read"
        notes = [note for note in (figures.parent, damage, *figures.damage, problem, figures.newer) if note]
        last, remarks = follower.last_step or {}, read_remarks(follower.directory)
        return {
            "id": name,
            "number": self._numbers[name],
            "tags": remarks.tags,
            "remark": remarks.note,
            "name": name if name != "." else follower.directory.resolve().name,
            "task": recipe.task if reads else "",
            "model": recipe.model if reads else "",
            "status": figures.status,
            "step": follower.step,
            "steps": (follower.start or {}).get("max_steps"),
            "best": None if figures.best is None else figures.best[1],
            "speed": last.get("tokens_per_second"),
            "goodput": follower.goodput,
            "changed": follower.changed,
            "version": follower.version,
            "note": "; ".join(notes),
            "read": 1.0,
        }


def _build_curves(follower: RunFollower, axis: str, limit: int) -> dict[str, list[list[float | None]]]:
    by = "tokens" if axis == "flops" else axis
    columns_by_name = {name: follower.curves.points(name, by, limit) for name in follower.curves.values}
    metrics = {metric for event in follower.events if event["event"] == "evaluate" for metric in event["metrics"]}
    columns_by_name |= {
        f"validation/{metric}": _collect_evaluations(follower, metric, by) for metric in sorted(metrics)[:_MOST_CURVES]
    }
    columns_by_name |= {
        name: curves.points(name, by, limit) for name, curves in follower.metrics.items() if name not in columns_by_name
    }
    if axis == "flops":
        per_token = FLOPS * float((follower.start or {}).get("parameters", 0))
        for columns in columns_by_name.values():
            columns[0] = [None if step is None else step * per_token for step in columns[0]]
    return {
        name: columns for name, columns in columns_by_name.items() if any(value is not None for value in columns[1])
    }


def _read_start_time(directory: Path) -> float:
    try:
        return (directory / RECIPE).lstat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0


def _count_unread_bytes(follower: RunFollower) -> int:
    try:
        return follower.count_unread_bytes()
    except OSError:  # it has not begun, or was deleted
        return 0


def _collect_evaluations(follower: RunFollower, metric: str, by: str) -> list[list[float | None]]:
    at, positions = follower.curves.positions["step"], follower.curves.positions[by]
    points: list[tuple[float | None, float]] = []
    for event in follower.events:
        value = event["metrics"].get(metric) if event["event"] == "evaluate" else None
        if isinstance(value, int | float) and value - value == 0:
            index = bisect_left(at, event["step"])
            step = 0.0 if event["step"] == 0 or not at else positions[min(index, len(at) - 1)]
            points.append((step, float(value)))
    values: list[float | None] = [value for _, value in points]
    return [[step for step, _ in points], values, values, values]


def _list_logs(directory: Path) -> list[str]:
    return [name for name in list_files_inside(directory, "logs") if name.endswith(".log")]


_MAX_RANKS = 256  # of more, the first ones
_MAX_POINTS = 120  # of a curve
# A ledger is read again after this time, or this many times what reading it takes.
_REREAD_SECONDS, _REREAD_TIMES = 5.0, 20.0


class Ledgers:
    """The ledgers of runs, which are read at most every few seconds."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[float, dict[str, Any]]] = {}  # until when, and what

    def of(self, run: Path, events: Sequence[EventRecord]) -> dict[str, Any]:
        """Return ``categories`` in their order, and for each of ``ranks`` its number, ``trained``, ``seconds`` by
        category and ``now``, what it does in few words by name; and ``machine``, its curves over the seconds since the
        run began.

        Args:
            events: those of the run that count.
        """
        until, figures = self._known.get(run, (0.0, {}))
        start = time.monotonic()
        if start >= until:
            figures = _build_ledger_figures(run, events)
            now = time.monotonic()
            self._known[run] = now + max(_REREAD_SECONDS, _REREAD_TIMES * (now - start)), figures
        return figures


def _build_ledger_figures(run: Path, events: Sequence[EventRecord]) -> dict[str, Any]:
    # Only a run that went back has repeated anything; which steps, all its events say.
    went_back = sum(event["event"] in ("start", "rewind") for event in events) > 1
    ledger = read_ledger(run, read_log(run / "events.jsonl").everything if went_back else ())[:_MAX_RANKS]
    return {
        "categories": [name for name in CATEGORIES if any(name in rank.seconds for rank in ledger)],
        "ranks": [
            {
                "rank": rank_ledger.rank,
                "trained": rank_ledger.trained,
                "seconds": dict(rank_ledger.seconds),
                "now": format_figures([rank_ledger.lines[-1].system]),
            }
            for rank_ledger in ledger
        ],
        "machine": [
            {
                "title": f"{curves.title} ({curves.unit})",
                "notable": curves.is_notable,
                "ranks": {rank: list(zip(*points, strict=True)) for rank, points in curves.points.items() if points},
            }
            for curves in iterate_machine_curves(ledger, _MAX_POINTS)
        ],
    }
