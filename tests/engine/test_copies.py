"""Copies of checkpoints in other directories and in what fsspec opens."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.registry import _registry

from tests.support.commands import PATIENCE, trainwright, wait_for
from tests.support.runs import TINY, Runs, column, events
from tests.support.unreliable_store import UnreliableStore
from trainwright.engine.checkpoints.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.checkpoints.uploader import Copies, RemoteStore
from trainwright.errors import MachineError, RequestError
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World
from trainwright.run.stored_runs import bring_up_to_date

WORLD = World(0, 1, 0, 1, torch.device("cpu"))


def saved(checkpoints: Checkpoints, step: int) -> Path:
    run = checkpoints.directory.parent
    run.mkdir(exist_ok=True)
    for name in ("recipe.yaml", "plan.json"):
        (run / name).write_text("{}")
    with (run / "events.jsonl").open("a") as events:
        events.write(f'{{"step": {step}}}\n')
    shards = {"weight": Shard.full(torch.full((4, 3), float(step)))}
    return checkpoints.save(WORLD, step, shards, {"progress": {"step": step}}, "").path


def same(one: Path, other: Path) -> bool:
    names = {file.name for file in one.iterdir()}
    return names == {file.name for file in other.iterdir() if file.name != "run.json"} and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_a_copy_is_restored_where_the_newest_is_missing_or_damaged(tmp_path: Path, kind: str) -> None:
    where = str(tmp_path / "copies") if kind == "directory" else f"memory://{tmp_path}"
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    copies = Copies([where], checkpoints.directory)
    for step in (1, 2, 3):
        path = saved(checkpoints, step)
        checkpoints.prune(None)
        copies.add(path)
        copies.wait()
    assert copies.problems() == []
    assert set(RemoteStore(where, "run").steps()) == {2, 3}, "what the run has removed is removed"
    third = checkpoints.path(3)
    shutil.copytree(third, tmp_path / "third")
    assert copies.newest(3, Checkpoint.open) is None
    (third / "rank-00000.safetensors").write_bytes(b"damaged")
    restored = copies.newest(2, Checkpoint.open)
    assert restored is not None and restored.path == third and same(third, tmp_path / "third")
    shutil.rmtree(checkpoints.directory)
    restored = copies.newest(None, Checkpoint.open)
    assert restored is not None and same(third, tmp_path / "third")


def test_copies_that_are_damaged_or_incomplete_are_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=False)
    copies = Copies([str(tmp_path / "one"), str(tmp_path / "two")], checkpoints.directory)
    for step in (1, 2, 3):
        copies.add(saved(checkpoints, step))
        copies.wait()
    shutil.rmtree(checkpoints.directory)
    for place in ("one", "two"):
        (tmp_path / place / "run" / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "one" / "run" / "step-00000002" / "state.json").write_text("{}")
    restored = copies.newest(None, Checkpoint.open)
    assert restored is not None and restored.path.name == "step-00000002"
    assert len(copies.problems()) == 3
    copies.remove_from(2)
    copies.wait()
    assert set(RemoteStore(str(tmp_path / "two"), "run").steps()) == {1}


def test_a_run_that_resumes_behind_its_copies_keeps_the_newer_ones(tmp_path: Path) -> None:
    where = str(tmp_path / "copies")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    copies = Copies([where], checkpoints.directory)
    for step in (10, 1000):
        copies.add(saved(checkpoints, step))
        copies.wait()
    (tmp_path / "copies" / "run" / "step-00000500").mkdir()  # an upload that was killed
    shutil.rmtree(checkpoints.directory)
    behind = Copies([where], checkpoints.directory)
    behind.add(saved(checkpoints, 20))
    behind.wait()
    assert behind.problems() == []
    place = RemoteStore(where, "run")
    assert set(place.steps()) == {20, 1000} and place.is_complete("step-00001000")
    shutil.rmtree(checkpoints.directory)
    behind.add(saved(checkpoints, 1020))
    behind.wait()
    assert set(place.steps()) == {1020}, "one that the run has passed is removed"


def test_a_copy_whose_events_this_machine_has_not_is_not_taken_while_the_run_is_trained(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    saved(checkpoints, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")
    elsewhere = Checkpoints(tmp_path / "elsewhere" / "run" / "checkpoints", keep_last=2, keep_best=False)
    ahead = Copies([str(tmp_path / "copies")], elsewhere.directory)
    ahead.add(saved(elsewhere, 2))
    ahead.wait()
    behind = Copies([str(tmp_path / "copies")], checkpoints.directory)
    assert behind.newest(1, Checkpoint.open) is None and checkpoints.steps() == [1]
    (problem,) = behind.problems()
    assert "step-00000002" in problem and "gone on elsewhere" in problem


@pytest.mark.slow
def test_two_runs_of_one_name_that_begin_at_once_do_not_mix(tmp_path: Path) -> None:
    where = str(tmp_path / "copies")
    first, second = (
        Checkpoints(tmp_path / each / "run" / "checkpoints", keep_last=2, keep_best=False) for each in ("a", "b")
    )
    of_first, of_second = Copies([where], first.directory), Copies([where], second.directory)
    (tmp_path / "b" / "run").mkdir(parents=True)
    (tmp_path / "b" / "run" / "events.jsonl").write_text('{"of": "the second"}\n')
    of_second.remove_from(1)  # it has looked while nothing was there
    of_second.wait()
    (tmp_path / "a").mkdir()
    of_first.add(saved(first, 5))
    of_first.wait()
    (tmp_path / "b").mkdir(exist_ok=True)
    of_second.add(saved(second, 3))
    of_second.wait()
    assert of_first.problems() == []
    assert ["copies of another run of this name" in each for each in of_second.problems()] == [True, False]
    of_second.remove_from(1)
    of_second.wait()
    assert of_second.newest(None, Checkpoint.open) is None and second.steps() == [3]
    assert set(RemoteStore(where, "run").steps()) == {5}
    restored = of_first.newest(None, Checkpoint.open)
    assert restored is not None and restored.step == 5


@pytest.mark.slow
def test_a_place_that_fails_keeps_neither_training_nor_other_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    copies = Copies([str(tmp_path / "file"), str(tmp_path / "copies")], checkpoints.directory)
    copies.add(saved(checkpoints, 1))
    copies.wait()
    problem, last = copies.problems()
    assert str(tmp_path / "file") in problem
    assert "step-00000001 is not complete there" in last
    assert same(checkpoints.path(1), tmp_path / "copies" / "run" / "step-00000001")


@pytest.mark.slow
def test_the_end_of_a_run_says_what_is_not_in_a_place_that_failed_before(tmp_path: Path) -> None:
    (tmp_path / "copies").write_text("not a directory")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2, keep_best=False)
    copies = Copies([str(tmp_path / "copies")], checkpoints.directory)
    copies.add(saved(checkpoints, 1))
    wait_for(lambda: bool(copies._problems))
    assert len(copies.problems()) == 1
    final = _model(tmp_path / "run", config="{}")
    copies.add_model(final)
    copies.wait()
    checkpoint, model = copies.problems()
    assert "step-00000001 is not complete there" in checkpoint
    assert model.endswith(f"{tmp_path / 'copies'}: final is not complete there; copy it yourself from {final}")


def test_what_is_abandoned_is_removed_once_its_place_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UnreliableStore.install(monkeypatch)
    where = f"unreliable://{tmp_path}/copies"
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=False)
    copies = Copies([where], checkpoints.directory)
    for step in (80, 100):
        copies.add(saved(checkpoints, step))
        copies.wait()
    UnreliableStore.reset_connections("list")
    checkpoints.remove_from(95)
    copies.remove_from(95)
    copies.wait()
    _, abandoned = copies.problems()
    assert "from step 95 on" in abandoned
    UnreliableStore.mend()
    copies.add(saved(checkpoints, 90))
    copies.wait()
    assert copies.problems() == [] and set(RemoteStore(where, "run").steps()) == {80, 90}


@pytest.fixture
def gone_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoints, str, str]:
    """A run that went back to before step 85, and its places, of which the second could not be reached then."""
    UnreliableStore.install(monkeypatch)
    reached, missed = str(tmp_path / "reached"), f"unreliable://{tmp_path}/missed"
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=False)
    copies = Copies([reached, missed], checkpoints.directory)
    for step in (80, 90, 100):
        copies.add(saved(checkpoints, step))
        copies.wait()
    UnreliableStore.reset_connections("list")
    checkpoints.remove_from(85)
    copies.remove_from(95)
    copies.remove_from(85)
    copies.wait()
    assert set(RemoteStore(reached, "run").steps()) == {80}
    UnreliableStore.mend()
    assert set(RemoteStore(missed, "run").steps()) == {80, 90, 100}
    return checkpoints, reached, missed


def test_what_is_abandoned_is_not_restored_by_a_later_launch(gone_back: tuple[Checkpoints, str, str]) -> None:
    checkpoints, reached, missed = gone_back
    run = checkpoints.directory.parent
    bring_up_to_date(run, [RemoteStore(where, "run") for where in (reached, missed)])
    assert checkpoints.steps() == [80]
    later = Copies([reached, missed], checkpoints.directory)
    assert later.newest(80, Checkpoint.open) is None
    later.add(saved(checkpoints, 85))
    later.wait()
    assert later.problems() == []
    assert set(RemoteStore(reached, "run").steps()) == set(RemoteStore(missed, "run").steps()) == {80, 85}
    shutil.rmtree(checkpoints.directory / "step-00000085")
    restored = Copies([missed], checkpoints.directory).newest(80, Checkpoint.open)
    assert restored is not None and restored.path.name == "step-00000085", "nothing is abandoned any more"


def test_a_launch_without_a_checkpoint_removes_what_is_abandoned(gone_back: tuple[Checkpoints, str, str]) -> None:
    checkpoints, reached, missed = gone_back
    later = Copies([reached, missed], checkpoints.directory)
    assert later.newest(80, Checkpoint.open) is None
    later.wait()
    assert later.problems() == [] and set(RemoteStore(missed, "run").steps()) == {80}
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-00000080"]


def test_what_another_machine_wrote_since_is_not_abandoned(
    gone_back: tuple[Checkpoints, str, str], tmp_path: Path
) -> None:
    checkpoints, _, missed = gone_back
    run = checkpoints.directory.parent
    other = Checkpoints(tmp_path / "other" / "run" / "checkpoints", keep_last=1, keep_best=False)
    shutil.copytree(run, tmp_path / "other" / "run")
    shutil.rmtree(other.directory)
    elsewhere = Copies([missed], other.directory)
    elsewhere.add(saved(other, 110))
    elsewhere.wait()
    behind = Copies([missed], checkpoints.directory)
    behind.add(saved(checkpoints, 85))
    behind.wait()
    assert set(RemoteStore(missed, "run").steps()) == {85, 110}
    bring_up_to_date(run, [RemoteStore(missed, "run")])
    assert checkpoints.steps()[-1] == 110
    restored = Copies([missed], checkpoints.directory)
    restored.add(saved(checkpoints, 120))
    restored.wait()
    assert RemoteStore(missed, "run").is_complete("step-00000110")


def test_a_checkpoint_that_is_abandoned_while_it_is_copied_goes_to_no_further_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UnreliableStore.install(monkeypatch)
    asked, may, written = threading.Event(), threading.Event(), []

    def before(operation: str, path: str) -> None:
        if operation == "write" and "step-00000100" in path:
            written.append(path)
            asked.set()
            assert may.wait(PATIENCE)

    UnreliableStore.set(before)
    places = [f"unreliable://{tmp_path}/{name}" for name in ("first", "second")]
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=False)
    copies = Copies(places, checkpoints.directory)
    copies.add(saved(checkpoints, 100))
    assert asked.wait(PATIENCE)
    copies.remove_from(95)
    may.set()
    copies.wait()
    assert copies.problems() == [] and all("/first/" in path for path in written)
    assert [set(RemoteStore(where, "run").steps()) for where in places] == [set(), set()]


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_name_of_a_run_is_no_pattern_in_its_places(tmp_path: Path, kind: str) -> None:
    where = str(tmp_path / "copies") if kind == "directory" else f"memory://{tmp_path}"
    for name, steps in (("sft-1", (10,)), ("sft-?", (10, 11)), ("sft[lr=1e-4]", (10, 11)), ("sft-*", (10, 11))):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", keep_last=1, keep_best=False)
        copies = Copies([where], checkpoints.directory)
        for step in steps:
            path = saved(checkpoints, step)
            checkpoints.prune(None)
            copies.add(path)
            copies.wait()
            copies.add_model(_model(tmp_path / name, config="{}", **{f"nested__{step}": "deep"}))
            copies.wait()
        assert copies.problems() == []
        assert set(RemoteStore(where, name).steps()) == {steps[-1]}
        assert _copied(where, name) == _files(tmp_path / name / "final")
    assert RemoteStore(where, "sft-1").is_complete("step-00000010")


def test_the_first_checkpoint_after_a_rewind_is_copied_although_an_earlier_copy_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UnreliableStore.install(monkeypatch)
    asked, may = threading.Event(), threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "write" and "step-00000080" in path:
            asked.set()
            assert may.wait(PATIENCE)

    UnreliableStore.set(before)
    where = f"unreliable://{tmp_path}/copies"
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=False)
    copies = Copies([where], checkpoints.directory)
    copies.add(saved(checkpoints, 80))
    assert asked.wait(PATIENCE)
    copies.remove_from(95)
    copies.add(saved(checkpoints, 100))
    may.set()
    copies.wait()
    assert copies.problems() == [] and set(RemoteStore(where, "run").steps()) == {80, 100}


@pytest.mark.parametrize(
    ("error", "told"), [(PermissionError("not yours"), RequestError), (ConnectionResetError("gone"), MachineError)]
)
def test_a_place_that_may_not_be_looked_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, told: type[Exception]
) -> None:
    def before(operation: str, path: str) -> None:
        if operation == "info":
            raise error

    UnreliableStore.install(monkeypatch)
    UnreliableStore.set(before)
    with pytest.raises(told, match=rf"checkpoint\.copies: unreliable://{tmp_path}.*{error}"):
        RemoteStore(f"unreliable://{tmp_path}", "run").check()
    assert not (tmp_path / "run").exists()


def test_a_disk_of_this_machine_that_is_full_is_not_said_to_be_the_store(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=False)
    copies = Copies([str(tmp_path / "copies")], checkpoints.directory)
    copies.add(saved(checkpoints, 1))
    copies.wait()
    place = RemoteStore(str(tmp_path / "copies"), "run")
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(MachineError, match=r"^/dev/full: .*No space left"),
        place.in_words(),
    ):
        place.read_part(place.parts()[0], full)


def test_a_place_of_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(RequestError, match=r"checkpoint\.copies: .*nosuch"):
        RemoteStore("nosuch://bucket", "run")


@pytest.mark.parametrize(("scheme", "library", "extra"), [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")])
def test_a_place_whose_library_is_not_installed_names_the_extra(
    scheme: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # an import of it fails
    monkeypatch.delitem(_registry, scheme, raising=False)  # another test may have used it
    with pytest.raises(RequestError, match=rf"checkpoint\.copies: .*{library}.*pip install .*\[{extra}\]"):
        RemoteStore(f"{scheme}://bucket/runs", "run")


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_lost_goes_on_from_a_copy(runs: Runs, tmp_path: Path) -> None:
    copied = ("checkpoint.every=3", f"checkpoint.copies=[{tmp_path / 'copies'}]")
    undisturbed = runs.trained("train.max_steps=9")
    started = runs.train("train.max_steps=9", *copied)
    started.wait_for_step(8)
    started.kill()
    run = started.run
    assert run is not None
    shutil.rmtree(run / "checkpoints")
    runs.resumed(run)
    assert column(run, "loss") == column(undisturbed, "loss")
    assert any("restored from a copy" in event["message"] for event in events(run, "notice"))
    again = trainwright("train", str(TINY), *copied, f"logging.run_directory={tmp_path / run.name}", cwd=tmp_path)
    assert again.returncode == 2 and "has copies of a run named" in again.stderr
    assert _copied(str(tmp_path / "copies"), run.name) == _files(run / "final")


def _model(run: Path, **files: str) -> Path:
    final = run / "final"
    shutil.rmtree(final, ignore_errors=True)
    for name, content in files.items():
        file = final / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return final


def _copied(where: str, run: str = "run") -> dict[str, bytes]:
    """The files of the model in a place, as its manifest has them."""
    files, root = fsspec.url_to_fs(f"{where}/{run}/final")
    found = {path.removeprefix(root).strip("/"): bytes(files.cat_file(path)) for path in files.find(root)}
    stated = json.loads(found.pop("manifest.json"))["files"]
    measured = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in found.items()}
    assert measured == stated
    return found


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()
    }


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_model_is_copied_with_its_checksums_after_the_last_checkpoint(tmp_path: Path, kind: str) -> None:
    where = str(tmp_path / "copies") if kind == "directory" else f"memory://{tmp_path}"
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=1, keep_best=False)
    copies = Copies([where], checkpoints.directory)
    copies.add(saved(checkpoints, 1))
    final = _model(tmp_path / "run", config="{}", weights="first", nested__part="deep")
    copies.add_model(final)
    copies.wait()
    place = RemoteStore(where, "run")
    assert copies.problems() == []
    assert place.is_complete("step-00000001")
    assert _copied(where) == _files(final)
    moved = sum(writing.store.moved for writing in copies._stores)
    copies.add_model(final)
    copies.wait()
    assert sum(writing.store.moved for writing in copies._stores) == moved, "the same model is not copied again"
    copies.add_model(_model(tmp_path / "run", config="{}", weights="second"))
    copies.wait()
    assert _copied(where) == _files(final)
    assert set(place.steps()) == {1}


def test_a_model_that_cannot_be_copied_is_told_and_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "copies"
    broken.write_text("not a directory")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=1, keep_best=False)
    copies = Copies([str(broken)], checkpoints.directory)
    saved(checkpoints, 1)
    final = _model(tmp_path / "run", config="{}")
    copies.add_model(final)
    wait_for(lambda: bool(copies._problems))
    broken.unlink()
    copies.wait()
    (problem,) = copies.problems()
    assert str(broken) in problem and "tried again" in problem
    (line,) = copies.take_recovered()
    assert "final" in line
    assert _copied(str(broken)) == _files(final)
