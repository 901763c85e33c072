"""The directory of a run: named, made, found again, and used by one launch at a time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainwright.errors import RequestError

RUNS = Path("runs")
RECIPE = "recipe.yaml"
PLAN = "plan.json"

_LEAVING_SECONDS = 3.0
_STAMP = r"\d{8}-\d{6}(-\d+)?"


def create(wanted: str, stem: str) -> Path:
    """Make the directory that `logging.run_directory` asks for; auto: runs/<stem>-<date>-<time>.

    Raises RequestError when it exists.
    """
    if wanted != "auto":
        directory = Path(wanted).expanduser()
        check_new(directory)
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise RequestError(f"logging.run_directory: {directory} cannot be made: {error.strerror}") from error
        return directory
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        directory = RUNS / f"{name}{suffix}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise RequestError(f"logging.run_directory: no free name under {RUNS / name}")


def check_new(directory: Path) -> None:
    """Raise RequestError when there is something where a new run is to be written."""
    if directory.exists():
        raise RequestError(
            f"logging.run_directory: {directory} exists; continue that run with --resume {directory}, "
            "or choose another directory"
        )


def find(wanted: str, run_directory: str, stem: str) -> Path:
    """The run that --resume means: the directory `wanted`, or, where that is empty, the recipe's newest run.

    `run_directory` is the recipe's logging.run_directory. Raises RequestError when there is no such run.
    """
    if wanted or run_directory != "auto":
        directory = Path(wanted or run_directory).expanduser()
        if not (directory / RECIPE).is_file():
            raise RequestError(f"--resume: {directory} is not a run: it has no {RECIPE}")
        return directory
    pattern = re.compile(re.escape(stem) + "-" + _STAMP)
    runs = RUNS.iterdir() if RUNS.is_dir() else ()
    found = [run for run in runs if pattern.fullmatch(run.name) and (run / RECIPE).is_file()]
    if not found:
        raise RequestError(f"--resume: no run of this recipe under {RUNS}/ ({stem}-<date>-<time>)")
    return max(found, key=lambda run: (run.name.removeprefix(f"{stem}-")[:15], run.stat().st_mtime))


def record(directory: Path, recipe: str, reasons: Sequence[str]) -> None:
    """Write the resolved recipe (YAML) and why each automatic choice was made, each file whole or not."""
    _write(directory / RECIPE, recipe)
    _write(directory / PLAN, json.dumps({"reasons": list(reasons)}, indent=2) + "\n")


@contextmanager
def undone_on_error(directory: Path, created: bool) -> Iterator[None]:
    """While preparing: an exception leaves no new directory behind, and an existing run as it was."""
    before = {} if created else {name: _read(directory / name) for name in (RECIPE, PLAN)}
    try:
        yield
    except BaseException:
        if created:
            shutil.rmtree(directory, ignore_errors=True)
        for name, text in before.items():
            if text is not None:
                _write(directory / name, text)
        raise


@contextmanager
def only_launch(directory: Path) -> Iterator[None]:
    """Hold the run; raises RequestError when another launch does. The workers hold it too until they end."""
    descriptor = os.open(directory, os.O_RDONLY)
    if not _locked(descriptor):
        os.close(descriptor)
        raise RequestError(f"--resume: {directory} is being trained by another process")
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock, with patience for the processes of a run that was killed just now: they hold it until they are gone."""
    deadline = time.monotonic() + _LEAVING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
