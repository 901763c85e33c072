"""Paths of users, files that other machines write, and locks of directories."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PATIENCE, trainwright
from tests.support.runs import TINY
from trainwright.errors import RequestError
from trainwright.machine.sharing import is_locked, lock_directory, remove_locked
from trainwright.utils.paths import expand_user_path, run_path, wait_for_text, write_file


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_user_path("~/rows.jsonl") == tmp_path / "rows.jsonl"
    assert expand_user_path("rows~.jsonl") == Path("rows~.jsonl")


def test_an_unknown_user_is_named() -> None:
    with pytest.raises(RequestError, match=r"^~nosuchuser/rows.jsonl: there is no user nosuchuser; write the whole"):
        expand_user_path("~nosuchuser/rows.jsonl")


@pytest.mark.parametrize(
    "words",
    [
        ("train", str(TINY), "data.train=~nosuchuser/rows.jsonl"),
        ("train", str(TINY), "logging.run_directory=~nosuchuser/run"),
        ("train", "--resume", "~nosuchuser/run"),
        ("recipe", "check", str(TINY), "model.name=~nosuchuser/model", "model.config=null"),
        ("data", "check", str(TINY), "data.train=~nosuchuser/rows.jsonl"),
        ("generate", "~nosuchuser/model", "--prompt", "x"),
        ("plan", "--model", "~nosuchuser/model"),
        ("merge", "~nosuchuser/run", "--out", "merged"),
    ],
)
def test_commands_end_with_2(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = trainwright(*words, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "nosuchuser" in ended.stderr and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("stop",), ("checkpoint",), ("report",), ("runs",), ("watch",), ("compare", ".")])
def test_commands_for_a_directory_refuse_the_url_of_a_place(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    ended = trainwright(*words, "s3://bucket/runs/tiny", cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: s3://bucket/runs/tiny is a place for copies of runs, and this command needs")
    assert "trainwright train --resume s3://bucket/runs/tiny" in ended.stderr
    assert "Traceback" not in ended.stderr and [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_directory_may_have_a_name_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    assert run_path("s3://bucket") == Path("s3:/bucket")
    assert run_path("runs/tiny:1") == Path("runs/tiny:1")


def test_what_another_machine_writes_may_be_seen_late(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("old")
    assert not wait_for_text(file, "new", seconds=0.0)
    assert not wait_for_text(tmp_path / "missing" / "recipe.yaml", "new", seconds=0.3)
    threading.Timer(0.5, lambda: write_file(file, "new")).start()
    assert wait_for_text(file, "new", seconds=60.0)


def test_a_locked_directory_is_locked_where_locks_of_directories_reach_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where each machine keeps those of directories to itself."""
    flock = fcntl.flock

    def on_this_machine(descriptor: int, operation: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", on_this_machine)
    assert not is_locked(tmp_path)
    with lock_directory(tmp_path, "it is in use"):
        assert is_locked(tmp_path)
        with pytest.raises(RequestError, match="it is in use"), lock_directory(tmp_path, "it is in use"):
            pass
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
    assert is_locked(tmp_path)  # by the child
    child.kill()
    child.join()
    assert not is_locked(tmp_path)
    with lock_directory(tmp_path, "it is in use"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_directory_is_locked_by_one_of_many_at_a_time(tmp_path: Path) -> None:
    """Also while others remove the file of the lock."""
    context = multiprocessing.get_context("fork")
    place, workers = tmp_path / "place", range(4)
    place.mkdir()
    (tmp_path / "count").write_text("0")
    started = [context.Process(target=_count, args=(place, tmp_path / "count")) for _ in workers]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE)
    assert [process.exitcode for process in started] == [0] * len(workers)
    assert (tmp_path / "count").read_text() == str(100 * len(workers)) and not any(place.iterdir())


def _count(place: Path, file: Path) -> None:
    for _ in range(100):
        with lock_directory(place, "it is in use", patience=600):
            found = int(file.read_text())
            time.sleep(0.001)
            file.write_text(str(found + 1))


def test_a_directory_that_cannot_be_written_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def only_reads(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", only_reads)
    with lock_directory(tmp_path, "it is in use"):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path) and not any(tmp_path.iterdir())


def test_a_locked_directory_is_removed(tmp_path: Path) -> None:
    with lock_directory(tmp_path, "it is in use"):
        remove_locked(tmp_path)
    assert not tmp_path.exists()


def test_a_file_system_without_locks_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with lock_directory(tmp_path, "it is in use"):
        assert not is_locked(tmp_path)
