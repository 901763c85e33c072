"""Run directories: new ones never over old ones, and the one that --resume means."""

from __future__ import annotations

import fcntl
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from trainwright.engine.checkpoints.manifest import CheckpointError
from trainwright.engine.checkpoints.remote_store import StoredRun, name_in_stores
from trainwright.errors import FaultError, RequestError, Stopped
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run import run_directory
from trainwright.run.relaunch import REPLAN, take_replan
from trainwright.run.shutdown.failure import locate_error_file, read_error_records


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def a_run(name: str) -> Path:
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("task: sft\n")
    return run


def test_auto_names_after_the_recipe_and_never_reuses_a_name() -> None:
    runs = [run_directory.create("auto", "tiny") for _ in range(3)]
    assert len(set(runs)) == 3
    assert all(re.fullmatch(r"tiny-\d{8}-\d{6}(-\d+)?", run.name) and run.is_dir() for run in runs)


def test_a_runs_own_recipe_names_no_directory_and_the_run_knows_its_recipes_name() -> None:
    run = run_directory.create("mine", "tiny")
    recipe = RecipeSchema.model_validate(
        {
            "task": "sft",
            "model": {"name": "some/model"},
            "data": {"train": "pydoc"},
            "logging": {"run_directory": "mine"},
        }
    )
    run_directory.record(run, run_directory.format_recipe(recipe), "tiny", ["why"])
    assert load_recipe(run / "recipe.yaml").logging.run_directory == "auto"
    assert run_directory.choose_stem(run / "recipe.yaml") == "tiny"
    assert run_directory.read_reasons(run) == ["why"]
    assert run_directory.find_run(run / "recipe.yaml") == run
    assert run_directory.find_run(Path("recipe.yaml")) is None
    assert run_directory.choose_stem(Path("other.yaml")) == "other"


def test_a_damaged_plan_is_no_plan() -> None:
    run = a_run("old")
    for content in (b"{", b"[]", b'{"reasons": "\xbd"}'):
        (run / "plan.json").write_bytes(content)
        assert run_directory.read_reasons(run) == []
        with run_directory.undo_on_error(run, created=False):
            pass
        assert run_directory.choose_stem(run / "recipe.yaml") == "recipe"


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '{"strategy": 3}', "7"], ids=lambda each: each[:20])
def test_what_is_no_record_of_a_run_is_none(content: str) -> None:
    run = a_run("old")
    (run / "logs").mkdir(exist_ok=True)
    for file in (run / "plan.json", run / REPLAN, locate_error_file(run / "logs", 0)):
        file.write_text(content)
    assert name_in_stores(run) == "old"
    assert take_replan(run) is None
    assert read_error_records(run / "logs", [0]) == {}
    with pytest.raises(CheckpointError, match=r"run\.json is not the record of a run"):
        StoredRun.parse(content)


def test_existing_directory_is_refused() -> None:
    assert run_directory.create("mine", "tiny") == Path("mine")
    with pytest.raises(RequestError, match="mine exists; choose another directory"):
        run_directory.create("mine", "tiny")
    Path("mine/recipe.yaml").touch()
    with pytest.raises(RequestError, match="mine exists; continue that run with --resume mine, or choose another"):
        run_directory.create("mine", "tiny")


def test_resume_without_a_run_finds_the_newest_of_the_recipe() -> None:
    a_run("tiny-20260101-120000")
    newest = a_run("tiny-20260301-120000")
    a_run("tiny-big-20260401-120000")
    (Path("runs") / "tiny-20260501-120000").mkdir()  # no recipe in it
    assert run_directory.find("", "auto", "tiny") == newest


@pytest.mark.parametrize(("began", "newest"), [("2026-02-01", "tiny-20260301-120000"), ("2026-04-01", "tiny")])
def test_resume_without_a_run_finds_the_one_of_resume_auto_if_it_began_last(began: str, newest: str) -> None:
    a_run("tiny-20260301-120000")
    own = a_run("tiny")
    begun, resumed = datetime.fromisoformat(began).timestamp(), datetime.fromisoformat("2026-05-01").timestamp()
    (own / "events.jsonl").write_text(
        f'{{"event": "start", "time": {begun}}}\n{{"event": "start", "time": {resumed}}}\n'
    )
    assert run_directory.find("", "auto", "tiny") == Path("runs") / newest


def test_resume_without_a_run_finds_the_one_of_resume_auto_before_its_first_event() -> None:
    own = a_run("tiny")
    assert run_directory.find("", "auto", "tiny") == own


def test_resume_of_a_named_run() -> None:
    run = a_run("named")
    assert run_directory.find(str(run), "auto", "tiny") == run
    assert run_directory.find("", str(run), "tiny") == run


@pytest.mark.parametrize("wanted", ["", "nowhere"])
def test_resume_of_nothing_is_refused(wanted: str) -> None:
    with pytest.raises(RequestError, match="--resume"):
        run_directory.find(wanted, "auto", "tiny")


def test_failed_preparation_leaves_no_new_directory() -> None:
    run = run_directory.create("mine", "tiny")
    with pytest.raises(RequestError), run_directory.undo_on_error(run, created=True):
        run_directory.record(run, "task: sft\n", "tiny", [])
        raise RequestError("refused")
    assert not run.exists()


def test_failed_preparation_leaves_a_resumed_run_as_it_was() -> None:
    run = a_run("old")
    with pytest.raises(RequestError), run_directory.undo_on_error(run, created=False):
        run_directory.record(run, "task: other\n", "tiny", [])
        raise RequestError("refused")
    assert (run / "recipe.yaml").read_text() == "task: sft\n"


def test_a_run_with_a_directory_in_the_place_of_a_file_is_refused_and_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = a_run("tiny-20260101-000000")
    monkeypatch.setattr("os.urandom", bytes)
    (run / ".recipe.yaml.00000000").mkdir()  # where the file is written that takes the place of the one there
    with (
        pytest.raises(RequestError, match=f"{run}: a run cannot be written there: Is a directory"),
        run_directory.undo_on_error(run, created=False),
    ):
        run_directory.record(run, "task: dpo\n", "tiny", [])
    assert (run / "recipe.yaml").read_text() == "task: sft\n"


@pytest.mark.slow
def test_a_run_is_trained_by_one_launch_at_a_time() -> None:
    run = a_run("busy")
    refused = pytest.raises(RequestError, match="being trained by another")
    with run_directory.lock_run(run), refused, run_directory.lock_run(run):
        pass
    with run_directory.lock_run(run):
        pass


@contextmanager
def locked_by(run: Path, machine: str) -> Iterator[Callable[[], None]]:
    """Lock a run as a launch on a machine does; yield what releases the lock."""
    with (run / ".lock").open("w") as file:
        file.write(machine)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


def test_the_lock_of_a_machine_that_was_lost_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_LEAVING_SECONDS", 0.1)
    run = a_run("lost")
    with locked_by(run, "node7 another-boot") as release:
        threading.Timer(1.5, release).start()
        with run_directory.lock_run(run):
            assert (run / ".lock").read_text().strip() != "node7 another-boot"


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "7"}, {"TRAINWRIGHT_STARTS_AGAIN": "1"}])
def test_what_is_started_again_ends_with_a_fault_if_another_machine_keeps_the_lock(
    job: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LEAVING_SECONDS", "_LEASE_SECONDS"):
        monkeypatch.setattr(run_directory, name, 0.1)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    run = a_run("lost")
    expected = pytest.raises(FaultError if job else RequestError, match="another process on node7")
    with locked_by(run, "node7 another-boot"), expected, run_directory.lock_run(run):
        pass


def test_what_is_started_again_ends_with_a_fault_if_an_earlier_attempt_takes_long_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_LEAVING_SECONDS", "_LEASE_SECONDS"):
        monkeypatch.setattr(run_directory, name, 0.1)
    run = a_run("ending")
    with run_directory.lock_run(run):
        with pytest.raises(RequestError, match="another process"), run_directory.lock_run(run):
            pass
        monkeypatch.setenv("TRAINWRIGHT_STARTS_AGAIN", "1")
        with pytest.raises(FaultError, match="another process"), run_directory.lock_run(run):
            pass


@pytest.mark.parametrize("written", ["", "\0\n"])
def test_what_is_left_of_an_attempt_on_an_unknown_machine_is_waited_for(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_LEAVING_SECONDS", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = a_run("left")
    with locked_by(run, written) as release:
        threading.Timer(1.0, release).start()
        with run_directory.lock_run(run):
            pass


def test_a_stop_ends_the_wait_for_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_LEAVING_SECONDS", 0.1)
    run = a_run("lost")
    stopped = pytest.raises(Stopped)
    with locked_by(run, "node7 another-boot"), stopped, run_directory.lock_run(run, lambda: True):
        pass
