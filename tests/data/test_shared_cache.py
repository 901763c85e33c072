"""A cache that several processes, users and machines share."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import wait_for
from tests.support.forked import Finished, Started, fork_server
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.errors import MachineError
from trainwright.machine.sharing import build_once
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.schema import DataSection

ROWS = "".join(json.dumps({"question": f"What is {i}?", "answer": f"It is {i}."}) + "\n" for i in range(300))
SEED = 20
UNPRIVILEGED = 65_534


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(ROWS)
    return file


def started(files: Path, number: int, *arguments: Any, function: str = "prepare_rows") -> Started:
    request = {"function": f"tests.support.preparing:{function}", "arguments": arguments, "environment": {}}
    return fork_server().start(request, files / str(number))


def tree(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*")}


def said(ended: Finished) -> tuple[str, str, int, int]:
    assert ended.code == 0, ended.stderr
    fingerprint, content, made, moments = ended.stdout.split()
    return fingerprint, content, int(made), int(moments)


class Trials:
    """Several processes that need the same, of which the first to make it is killed at some moment."""

    def __init__(self, files: Path, function: str, *arguments: str, others: int) -> None:
        self._files, self._function, self._arguments, self._others = files, function, arguments, others
        self.killed = self._tried = 0
        (files / "whole").mkdir()
        fingerprint, content, made, self.moments = said(self._start(files / "whole", 0).wait())
        assert made and self.moments > 20
        self._expected, self._whole = (fingerprint, content), tree(files / "whole" / "cache")

    def killed_at(self, moment: int) -> None:
        files = self._files / str(self._tried)
        files.mkdir()
        self._tried += 1
        victim = self._start(files, 0, moment)
        wait_for(lambda: victim.ended or any((files / "cache").rglob("*.lock")), every=0.001)
        ended = [each.wait() for each in [self._start(files, 1 + n) for n in range(self._others)]]
        self.killed += victim.wait().code != 0
        found = [said(each) for each in ended]
        assert {each[:2] for each in found} == {self._expected}
        assert sum(each[2] for each in found) <= 1, "the others waited for one of them"
        assert said(self._start(files, 1 + self._others).wait())[:3] == (*self._expected, 0)
        assert tree(files / "cache") == self._whole, f"nothing half-written is left after moment {moment}"

    def _start(self, files: Path, number: int, kill_at: int | None = None) -> Started:
        return started(files, number, *self._arguments, str(files / "cache"), kill_at, function=self._function)


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_may_be_killed_at_every_moment(tmp_path: Path, every: int) -> None:
    trials = Trials(tmp_path, "make_files", others=2)
    moments = range(1, trials.moments + 1, every)
    for moment in moments:
        trials.killed_at(moment)
    assert trials.killed > len(moments) // 2


@pytest.mark.slow
@pytest.mark.parametrize("tries", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_preparation_is_completed_by_another(tmp_path: Path, rows: Path, tries: int) -> None:
    trials = Trials(tmp_path, "prepare_rows", str(rows), others=2)
    for moment in random.Random(SEED).sample(range(20, trials.moments), tries):
        trials.killed_at(moment)
    assert trials.killed > tries // 2


@pytest.mark.slow
def test_the_same_rows_under_other_keys_are_prepared_once(tmp_path: Path, rows: Path) -> None:
    cache = tmp_path / "cache"
    begun = [started(tmp_path, n, str(rows), str(cache), None, True, 1_000 + n) for n in range(4)]
    found = [said(each.wait()) for each in begun]
    assert len({each[:2] for each in found}) == 1
    assert sum(each[2] for each in found) == 1


def test_without_locks_every_process_gets_a_whole_cache(tmp_path: Path, rows: Path) -> None:
    cache = tmp_path / "cache"
    begun = [started(tmp_path, n, str(rows), str(cache), None, False) for n in range(4)]
    found = [said(each.wait()) for each in begun]
    assert len({each[:2] for each in found}) == 1
    assert not [path for path in tree(cache) if "/." in path]


def prepared(rows: Path, cache: Path) -> PreparedData:
    return prepare(DataSection(train=str(rows)), build_bytes_tokenizer(), seed=0, cache=cache)


class _Stale:
    """Opening a file in a directory fails with ESTALE, as of NFS, the first few times for each file."""

    def __init__(self, below: Path, times: int) -> None:
        self._below, self._times = str(below), times
        self.seen: Counter[str] = Counter()
        self._open = io.open

    def __call__(self, file: Any, *args: Any, **options: Any) -> Any:
        name = str(file)
        if name.startswith(self._below) and self.seen[name] < self._times:
            self.seen[name] += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        return self._open(file, *args, **options)


@pytest.mark.parametrize(("times", "readable"), [(1, True), (10**6, False)])
def test_a_stale_cache_is_read_again_and_never_replaced(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, times: int, readable: bool
) -> None:
    cache = tmp_path / "cache"
    directory = prepared(rows, cache).directory
    before = {path: path.stat().st_ino for path in directory.rglob("*")}
    key = next((cache / "datasets" / "keys").glob("*.json"))
    stale = _Stale(key if readable else directory, times)
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", stale)
        patched.setattr(io, "open", stale)
        if readable:
            assert prepared(rows, cache).summary[-1].endswith("(reused)")
        else:
            with pytest.raises(MachineError, match=r"cannot be stored in .*[Ss]tale"):
                prepared(rows, cache)
    assert stale.seen
    assert {path: path.stat().st_ino for path in directory.rglob("*")} == before


def test_what_other_machines_have_begun_stays_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "this.host")
    directory = tmp_path / "made"
    names = {
        "here": ".made.this-host-1234",
        "elsewhere": ".made.another-host-1234",
        "long ago": ".made.another-host-5678",
    }
    for name in names.values():
        (tmp_path / name / "made").mkdir(parents=True)
    for path in (tmp_path / names["long ago"], tmp_path / names["long ago"] / "made"):
        os.utime(path, (1_000, 1_000))
    build_once(directory, lambda: directory if directory.is_dir() else None, lambda path: path.mkdir())
    assert {path.name for path in tmp_path.iterdir()} == {"made", "made.lock", names["elsewhere"]}


def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "made"

    def make(path: Path) -> None:
        path.mkdir(exist_ok=True)
        if not (path / "first").exists():
            (path / "first").write_text("1")
            raise RuntimeError("interrupted")
        (path / "second").write_text("2")

    def find() -> Path | None:
        return directory if (directory / "second").exists() else None

    with pytest.raises(RuntimeError):
        build_once(directory, find, make, goes_on=True)
    assert not directory.exists()
    build_once(directory, find, make, goes_on=True)
    assert tree(tmp_path) == {"made", "made/first", "made/second", "made.lock"}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user may enter, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    (directory / "rows.jsonl").write_text(ROWS)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_two_users_share_a_cache(tmp_path: Path, shared: Path) -> None:
    rows, cache = shared / "rows.jsonl", shared / "cache"
    refused = started(tmp_path, 0, str(rows), str(shared / "root" / "cache"), None, True, None, UNPRIVILEGED).wait()
    assert refused.code != 0 and "tokens cannot be stored in" in refused.stderr
    assert "(in a directory of root); set TRAINWRIGHT_CACHE to a directory of your own" in refused.stderr
    first = said(started(tmp_path, 1, str(rows), str(cache)).wait())
    second = said(started(tmp_path, 2, str(rows), str(cache), None, True, None, UNPRIVILEGED).wait())
    assert first[:3] == (*second[:2], 1) and second[2] == 0, "made by one user, read by the other"
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (rows.parent / "more.jsonl").write_text("".join(ROWS.splitlines(keepends=True)[:100]))
    more = shared / "more.jsonl"
    both = [started(tmp_path, 3 + n, str(more), str(cache), None, True, None, UNPRIVILEGED - n) for n in range(2)]
    found = [said(each.wait()) for each in both]
    assert sum(each[2] for each in found) == 1 and found[0][:2] == found[1][:2]
