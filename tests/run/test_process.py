"""The preparation child: its errors surface in the parent, its threads and its life do not outlast it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, all_gone, descendants, python, started, wait_for
from trainwright.errors import MachineError
from trainwright.run.nodes import NodeFailed
from trainwright.run.process import count_allowed_threads, prepare_environment, run_in_child
from trainwright.run.run_worker import _set_precision_of_fp32_products
from trainwright.run.shutdown.stop import Stopping

ENTRIES = str(Path(__file__).parents[1] / "support" / "launch_entries.py")


def run(kind: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return python(ENTRIES, f"prepare-{kind}", "1", str(tmp_path / "logs"), cwd=tmp_path)


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    result = run("well", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert "noise of preparation" in (tmp_path / "logs" / "prepare.log").read_text()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("refuse", "RequestError: data.train: the file has no rows"),
        ("refuse-turns", "RequestError: the chat template refuses the conversation"),
        ("break", "TrainingError: preparation failed: KeyError: 'unexpected'"),
        ("die", "TrainingError: preparation ended with exit code -9"),
    ],
)
def test_error_is_raised_again_in_the_parent(tmp_path: Path, kind: str, error: str) -> None:
    assert error in run(kind, tmp_path).stderr


def test_stop_ends_the_preparation(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with started(ENTRIES, "prepare-sleep", "1", str(tmp_path / "logs"), cwd=tmp_path, output=output) as process:
        wait_for((tmp_path / "preparing").exists)
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        assert all_gone(children)
    assert "Stopped: stopped before the first step" in output.read_text()


def test_a_stop_signal_that_the_preparation_gets_first_is_a_stop(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with started(ENTRIES, "prepare-sleep", "1", str(tmp_path / "logs"), cwd=tmp_path, output=output) as process:
        wait_for((tmp_path / "preparing").exists)
        (child,) = descendants(process.pid)
        child.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
    assert "Stopped: stopped before the first step" in output.read_text()


class _OtherNodeFails(Stopping):
    @property
    def requested(self) -> bool:
        raise NodeFailed("node 1: data.train: no such file", 2)


def _prepare(done: Path) -> None:
    time.sleep(20)
    done.touch()


def test_the_failure_of_another_node_ends_the_preparation_here(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with pytest.raises(NodeFailed, match=r"data\.train"):
        run_in_child(functools.partial(_prepare, done), tmp_path / "prepare.log", _OtherNodeFails())
    assert not multiprocessing.active_children() and not done.exists()


def test_preparation_dies_with_a_killed_parent(tmp_path: Path) -> None:
    with started(ENTRIES, "prepare-sleep", "1", str(tmp_path / "logs"), cwd=tmp_path) as process:
        wait_for((tmp_path / "preparing").exists)
        children = descendants(process.pid)
        assert children
        process.kill()
        assert all_gone(children)


@pytest.mark.parametrize(
    ("given", "cores", "processes", "threads"),
    [(None, 8, 2, 4), (None, 2, 3, 1), ("3", 8, 2, 3), ("6,2", 8, 2, 6)],
)
def test_cores_are_shared_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, cores: int, processes: int, threads: int
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert prepare_environment(cores, processes) == threads == count_allowed_threads()


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("said", [None, *ALLOCATOR])
def test_the_allocator_expands_segments_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if said is not None:
        monkeypatch.setenv(said, "max_split_size_mb:128")
    prepare_environment(2, 1)
    found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    assert found == ({ALLOCATOR[0]: "expandable_segments:True"} if said is None else {said: "max_split_size_mb:128"})


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_compiled_code_is_kept_in_the_cache_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given or "")
    if given is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    prepare_environment(2, 1)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (given or str(tmp_path / "compiled"))


def test_tf32_that_the_environment_turns_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(MachineError, match=r"train\.tf32: NVIDIA_TF32_OVERRIDE is 0, which turns TF32 off; unset it"):
        _set_precision_of_fp32_products(True)
    _set_precision_of_fp32_products(False)
