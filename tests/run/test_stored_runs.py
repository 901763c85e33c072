"""A run that moves between machines which share nothing but the place for its copies."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from tests.support.commands import PATIENCE, trainwright, wait_for
from tests.support.object_store import GoogleStore, ObjectStore, google_store, object_store
from tests.support.runs import ON_ROWS, TINY, Runs, column, difference, events
from tests.support.unreliable_store import UnreliableStore
from trainwright.engine.checkpoints.remote_store import RemoteStore
from trainwright.engine.checkpoints.uploader import Copies
from trainwright.errors import FaultError, RequestError

pytest.importorskip("s3fs")
pytest.importorskip("moto")

SETTINGS = (ON_ROWS, "data.validation=null", "logging.observers.tensorboard=false", "train.max_steps=24")


@pytest.fixture(scope="module")
def store() -> object:
    with object_store() as running:
        running.files().mkdir("runs")
        yield running


class Machine:
    """A machine of its own: its home, cache and scratch directory."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.scratch = directory / "scratch"
        self.scratch.mkdir(parents=True)
        self._variables = {
            **variables,
            "HOME": str(directory / "home"),
            "TRAINWRIGHT_CACHE": str(directory / "cache"),
        }

    def train(self, runs: Runs, *words: str):  # type: ignore[no-untyped-def]
        return runs.command("train", *words, cwd=self.scratch, **self._variables)


def is_copied(store: ObjectStore | GoogleStore, pattern: str) -> bool:
    with suppress(FileNotFoundError):  # of a checkpoint that is removed while its folder is listed
        return bool(store.files().glob(pattern))
    return False


def goes_on_elsewhere(
    runs: Runs, tmp_path: Path, store: ObjectStore | GoogleStore, first: tuple[str, int], second: tuple[str, int]
) -> None:
    """A run that is killed on one machine has the undisturbed losses after its end on another one."""
    undisturbed = runs.trained(*SETTINGS, "parallel.num_processes=1", "parallel.strategy=single")
    name = f"{first[0]}-to-{second[0]}-{second[1]}"
    copies = f"{store.scheme}://runs/{tmp_path.name}"
    one, two = (Machine(tmp_path / each, **store.variables) for each in ("one", "two"))
    spread = [f"parallel.strategy={first[0]}", f"parallel.num_processes={first[1]}"]
    keys = ["checkpoint.every=2", f"checkpoint.copies=[{copies}]", f"logging.run_directory={name}"]
    slow = "train.step_policies=['tests.support.slow_steps:SlowSteps']"
    started = one.train(runs, str(TINY), *SETTINGS, *spread, *keys, slow)
    started.run = one.scratch / name
    wait_for(lambda: is_copied(store, f"runs/{tmp_path.name}/{name}/step-*/manifest.json"))
    started.wait_for_step(random.randint(8, 20))
    started.kill()
    kept = [file.read_text(errors="replace") for file in started.run.rglob("*") if file.is_file()]
    assert not any(secret in text for secret in store.hidden for text in kept)
    shutil.rmtree(tmp_path / "one")
    again = [f"parallel.strategy={second[0]}", f"parallel.num_processes={second[1]}"]
    ended = two.train(runs, "--resume", f"{copies}/{name}", *again).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    moved = two.scratch / "runs" / name
    start = events(moved, "start")[-1]
    assert start["resumed_from"] and start["world_size"] == second[1]
    losses, expected = column(moved, "loss"), column(undisturbed, "loss")
    if (first, second) == (("single", 1), ("single", 1)):
        assert losses == expected
    else:
        assert difference(losses, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("single", 1), ("single", 1)),
        (("ddp", 2), ("single", 1)),
        (("fsdp", 2), ("fsdp", 1)),
        (("single", 1), ("fsdp", 2)),
    ],
)
def test_a_killed_run_goes_on_on_another_machine(
    runs: Runs, tmp_path: Path, store: ObjectStore, first: tuple[str, int], second: tuple[str, int]
) -> None:
    goes_on_elsewhere(runs, tmp_path, store, first, second)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_google_cloud_storage(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with google_store() as store:
        store.files().mkdir("runs")
        goes_on_elsewhere(runs, tmp_path, store, ("ddp", 2), ("single", 1))


@pytest.mark.slow
def test_a_run_goes_on_from_a_bucket_with_the_same_command(runs: Runs, tmp_path: Path, store: ObjectStore) -> None:
    undisturbed = runs.trained(*SETTINGS, "parallel.num_processes=1")
    copies = f"s3://runs/{tmp_path.name}"
    words = [str(TINY), "--resume", "auto", *SETTINGS, "parallel.num_processes=1", "checkpoint.every=2"]
    words.append(f"checkpoint.copies=[{copies}]")
    one, two = (Machine(tmp_path / each, **store.variables) for each in ("one", "two"))
    started = one.train(runs, *words)
    started.run = one.scratch / "runs" / "tiny"
    started.wait_for_step(10)
    started.kill()
    ended = two.train(runs, *words).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    moved = two.scratch / "runs" / "tiny"
    assert events(moved, "start")[-1]["resumed_from"]
    assert column(moved, "loss") == column(undisturbed, "loss")
    # The first machine comes back: it takes what the other has done, and has nothing left to do but the end.
    ended = one.train(runs, *words).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    back = one.scratch / "runs" / "tiny"
    assert events(back, "start")[-1]["resumed_from"] == 24
    assert column(back, "loss") == column(undisturbed, "loss")


@pytest.mark.slow
def test_places_that_cannot_be_used_are_refused_before_training(tmp_path: Path, store: ObjectStore) -> None:
    def refused(where: str, **variables: str) -> str:
        words = ("train", str(TINY), *SETTINGS, f"checkpoint.copies=['{where}']", "logging.run_directory=run")
        ended = trainwright(*words, cwd=tmp_path, **{**store.variables, **variables})
        assert not (tmp_path / "run").exists() and "Traceback" not in ended.stderr
        return f"{ended.returncode}: {ended.stderr}"

    assert "2: " in (said := refused("s3://no-such-bucket/runs")) and "does not exist" in said, said
    assert "no-such-bucket" not in [each.split("/")[0] for each in store.files().ls("")]
    assert "2: " in (said := refused("nosuch://bucket")) and "nosuch" in said, said
    assert "2: " in (said := refused("s3://key:hidden@runs/x")) and "hidden" not in said, said
    (tmp_path / "file").touch()
    assert "2: " in (said := refused(str(tmp_path / "file"))) and "not a directory" in said, said
    assert "3: " in (said := refused("s3://runs/x", AWS_ENDPOINT_URL="http://127.0.0.1:9")) and "cannot be" in said, (
        said
    )


@pytest.mark.slow
def test_keys_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with object_store() as store:
        store.files().mkdir("runs")
        store.refuse_keys()
        words = ("train", str(TINY), *SETTINGS, "checkpoint.copies=['s3://runs/x']", "logging.run_directory=run")
        ended = trainwright(*words, cwd=tmp_path, **store.variables)
    assert ended.returncode == 2 and "refuses access" in ended.stderr and not (tmp_path / "run").exists(), ended.stderr


def test_a_url_without_a_run_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "copies"
    (place / "half" / "step-00000002").mkdir(parents=True)
    for url, why in [("half", "no complete copy"), ("none", "no complete copy")]:
        ended = trainwright("train", "--resume", f"file://{place}/{url}", cwd=tmp_path)
        assert ended.returncode == 2 and why in ended.stderr, ended.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["copies"]


@pytest.mark.slow
def test_a_dry_run_of_a_stored_run_writes_nothing(runs: Runs, tmp_path: Path) -> None:
    done = runs.trained(
        *SETTINGS[:-1], "parallel.num_processes=1", "train.max_steps=2", f"checkpoint.copies=[{tmp_path / 'copies'}]"
    )
    url = f"file://{tmp_path / 'copies' / done.name}"
    shown = trainwright("train", "--dry-run", "--resume", url, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert not list((tmp_path / "runs").glob("*"))
    (tmp_path / "runs" / done.name).mkdir(parents=True)
    (tmp_path / "runs" / done.name / "recipe.yaml").write_text((done / "recipe.yaml").read_text())
    other = trainwright("train", "--resume", url, cwd=tmp_path)
    assert other.returncode == 2 and "is another run" in other.stderr, other.stderr


@pytest.mark.slow
def test_copies_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    where = tmp_path / "copies"
    for run, first in (("a", "one"), ("b", "two")):
        directory = tmp_path / run / "run"
        directory.mkdir(parents=True)
        (directory / "events.jsonl").write_text(f'{{"event": "{first}"}}\n')
        checkpoints = Checkpoints(directory / "checkpoints", keep_last=2, keep_best=False)
        copies = Copies([str(where)], checkpoints.directory)
        copies.add(saved(checkpoints, 1 if run == "a" else 2))
        copies.wait()
    problem, last = copies.problems()
    assert "another run" in problem and "step-00000002 is not complete there" in last
    assert set(RemoteStore(str(where), "run").steps()) == {1}


def test_a_key_in_a_url_is_refused() -> None:
    for where in ("s3://key:secret@bucket/x", "https://store/x?sig=abc", "az://box/x?AccountKey=abc"):
        with pytest.raises(RequestError, match="password or key") as caught:
            RemoteStore(where, "run")
        assert "secret" not in str(caught.value) and "abc" not in str(caught.value)


class _Broken:
    """A place for copies that fails until it is mended: a file is where its directory has to be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("not a directory")


def test_a_place_that_works_again_gets_the_copy_that_failed(tmp_path: Path) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    broken = _Broken(tmp_path / "copies")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    copies = Copies([str(broken.path)], checkpoints.directory)
    copies.add(saved(checkpoints, 1))
    wait_for(lambda: bool(copies._problems))
    broken.path.unlink()
    wait_for(lambda: bool(copies._recovered))
    assert len(copies.problems()) == 1, "told once, however often it was tried"
    assert len(copies.take_recovered()) == 1
    assert RemoteStore(str(broken.path), "run").is_complete("step-00000001")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    path = saved(checkpoints, 1)
    tensors = path / "rank-00000.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    copies = Copies([str(tmp_path / "copies")], checkpoints.directory)
    copies.add(path)
    copies.wait()
    problem, last = copies.problems()
    assert "damaged" in problem and "step-00000001 is not complete there" in last
    assert not RemoteStore(str(tmp_path / "copies"), "run").is_complete("step-00000001")


def test_events_are_copied_in_parts_that_make_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints import remote_store
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    monkeypatch.setattr(remote_store, "_SMALL", 16)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    for step in range(1, 9):
        copies = Copies([str(tmp_path / "copies")], checkpoints.directory)  # a new one, as after each resume
        copies.add(saved(checkpoints, step))
        copies.wait()
        checkpoints.prune(None)
    place = RemoteStore(str(tmp_path / "copies"), "run")
    stored = remote_store.StoredRun.of(place, "step-00000008")
    assert stored is not None and 1 < len(stored.events) < 8
    stored.write_events(place, tmp_path / "events.jsonl")
    assert (tmp_path / "events.jsonl").read_bytes() == (tmp_path / "run" / "events.jsonl").read_bytes()
    before = remote_store.StoredRun.of(place, "step-00000007")
    assert before is not None
    assert set(place.parts()) == {part.name for part in (*stored.events, *before.events)}


class SlowStore(LocalFileSystem):
    """A store that sends the events of a run once it may."""

    protocol = "slow"
    asked, may = threading.Event(), threading.Event()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if path.endswith(".jsonl") and mode == "rb":
            self.asked.set()
            assert self.may.wait(PATIENCE)
        return super()._open(path, mode, **options)


@pytest.mark.slow
def test_starters_that_fetch_a_run_at_once_wait_for_the_first_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints
    from trainwright.run.stored_runs import fetch_run

    monkeypatch.setitem(_registry, "slow", SlowStore)
    copies = Copies([str(tmp_path / "copies")], (tmp_path / "run" / "checkpoints"))
    copies.add(saved(Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False), 1))
    copies.wait()
    run = tmp_path / "elsewhere" / "run"
    with ThreadPoolExecutor(2) as pool:
        place = RemoteStore(f"slow://{tmp_path}/copies", "run")
        first = pool.submit(fetch_run, [place], run)
        assert SlowStore.asked.wait(PATIENCE)
        second = pool.submit(fetch_run, [place], run)
        try:
            with pytest.raises(TimeoutError):
                second.result(timeout=5)  # longer than a launch that ends is waited for
        finally:
            SlowStore.may.set()
        assert (first.result(), second.result()) == (True, False)
    assert (run / "events.jsonl").read_bytes() == (tmp_path / "run" / "events.jsonl").read_bytes()
    assert sorted(each.name for each in run.iterdir()) == ["events.jsonl", "plan.json", "recipe.yaml"]


def test_a_fetched_run_never_begins_again_without_its_copy_whoever_fetched_it(tmp_path: Path) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints
    from trainwright.run.stored_runs import bring_up_to_date, fetch_run

    copies = Copies([str(tmp_path / "copies")], (tmp_path / "run" / "checkpoints"))
    copies.add(saved(Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False), 1))
    copies.wait()
    place, run = RemoteStore(str(tmp_path / "copies"), "run"), tmp_path / "elsewhere"
    assert [fetch_run([place], run) for _ in range(2)] == [True, False]
    weights = tmp_path / "copies" / "run" / "step-00000001" / "rank-00000.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"damaged")
    with pytest.raises(RequestError, match=r"--resume: no copy of .* can be used: .* is damaged"):
        bring_up_to_date(run, [place])
    weights.write_bytes(content)
    bring_up_to_date(run, [place])
    assert (run / "checkpoints" / "step-00000001").is_dir()


def test_checkpoints_that_cannot_be_written_here_are_not_said_to_be_the_place(tmp_path: Path) -> None:
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints
    from trainwright.run.stored_runs import bring_up_to_date, fetch_run

    copies = Copies([str(tmp_path / "copies")], (tmp_path / "run" / "checkpoints"))
    copies.add(saved(Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False), 1))
    copies.wait()
    place, run = RemoteStore(str(tmp_path / "copies"), "run"), tmp_path / "elsewhere"
    assert fetch_run([place], run)
    (run / "checkpoints").write_text("not a directory")
    with pytest.raises(RequestError, match=rf"^{run}/checkpoints: a run cannot be written there"):
        bring_up_to_date(run, [place])


def stored_in(tmp_path: Path, *places: str, steps: tuple[int, ...] = (1,)) -> list[RemoteStore]:
    """The places of a run whose checkpoints are copied to these directories, which fail where a test says so."""
    from tests.engine.test_copies import saved
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    wheres = [f"unreliable://{tmp_path}/{each}" for each in places]
    copies = Copies(wheres, checkpoints.directory)
    for step in steps:
        copies.add(saved(checkpoints, step))
        copies.wait()
    assert copies.problems() == []
    return [RemoteStore(where, "run") for where in wheres]


def test_a_copy_that_cannot_be_read_now_is_read_by_running_the_command_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwright.run.stored_runs import bring_up_to_date, fetch_run

    UnreliableStore.install(monkeypatch)
    places, run = stored_in(tmp_path, "copies", steps=(1, 2)), tmp_path / "elsewhere"
    UnreliableStore.reset_connections("list")
    with pytest.raises(FaultError, match="cannot be used now: the connection was reset"):
        fetch_run(places, run)
    UnreliableStore.mend()
    assert fetch_run(places, run)
    UnreliableStore.reset_connections("read", "step-00000002/rank")
    with pytest.raises(FaultError, match=r"step-00000002 cannot be read now: .* reset.*run the same command again"):
        bring_up_to_date(run, places)
    assert not list((run / "checkpoints").iterdir()), "an older one is not used instead"
    UnreliableStore.mend()
    bring_up_to_date(run, places)
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step-00000002"]
    (tmp_path / "copies" / "run").rename(tmp_path / "copies" / "away")
    (run / "plan.json").write_text("{}")  # as training that begins writes it
    UnreliableStore.reset_connections("list")
    bring_up_to_date(run, places)  # it goes on from its own checkpoints


def test_a_place_that_may_have_newer_copies_and_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainwright.run.stored_runs import bring_up_to_date

    UnreliableStore.install(monkeypatch)
    places = stored_in(tmp_path, "one", "two")
    UnreliableStore.reset_connections("list", "/two/")
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()  # as new as the copy that can be read
    bring_up_to_date(tmp_path / "run", places)
    said = " ".join(capsys.readouterr().err.split())
    assert "/two cannot be used now" in said and "the run goes on from its own checkpoints" in said


def test_a_run_is_fetched_from_the_second_place_where_the_first_is_down_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwright.run.stored_runs import bring_up_to_date, fetch_run

    UnreliableStore.install(monkeypatch)
    places = stored_in(tmp_path, "one", "two")
    UnreliableStore.reset_connections("list", "/one/")
    down = tmp_path / "down"
    assert fetch_run(places, down)
    bring_up_to_date(down, places)
    assert (down / "checkpoints" / "step-00000001").is_dir()
    shutil.move(tmp_path / "two", tmp_path / "away")
    with pytest.raises(FaultError, match="/one cannot be used now"):  # its copies may be there: nothing begins anew
        fetch_run(places, tmp_path / "anew")
    shutil.move(tmp_path / "away", tmp_path / "two")
    UnreliableStore.mend()
    for part in (tmp_path / "one" / "run" / "events").iterdir():
        part.unlink()
    assert fetch_run(places, tmp_path / "damaged")
    assert (tmp_path / "damaged" / "events.jsonl").read_bytes() == (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(RequestError, match=r"no copy of .* a part of its events is missing"):
        fetch_run(places[:1], tmp_path / "lost")
