"""`trainwright gpus` beside runs that train, and on a GPU that a library of the tests shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.commands import PATIENCE, environment, trainwright, wait_for
from tests.support.doctor import driver
from tests.support.forked import Started
from tests.support.runs import Runs
from trainwright.errors import MachineError
from trainwright.machine.accelerators import read_installed_build
from trainwright.observe.commands import gpus as show_gpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")

# A GPU that a torch for CPUs cannot use.
CODE = 3 if read_installed_build().cuda is None else 0


@pytest.fixture(scope="module")
def training(runs: Runs) -> Iterator[Started]:
    """A run of two ranks that trains until the tests have ended."""
    policy = "train.step_policies=[tests.support.slow_steps:SlowSteps]"
    started = runs.train(policy, "train.max_steps=10000", "parallel.num_processes=2", "checkpoint.every=10000")
    started.wait_for_step(1)
    yield started
    started.kill()


def gpus(*arguments: str, before: Sequence[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "trainwright", "gpus", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE
    )


def ranks_of(text: str, run: Path) -> list[dict[str, object]]:
    return [each for each in json.loads(text)["processes"] if each["run"] == os.path.realpath(run)]


def test_the_ranks_of_a_run_on_the_cpu(training: Started, tmp_path: Path) -> None:
    assert training.run is not None
    done = trainwright("gpus", "--json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    ranks = ranks_of(done.stdout, training.run)
    assert [each["rank"] for each in ranks] == [0, 1]
    for each in ranks:
        process = psutil.Process(int(str(each["pid"])))
        assert os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/logs/rank-{each['rank']}.log")
        resident = process.memory_info().rss
        assert resident / 2 < int(str(each["memory"])) < resident * 2
        assert 0.0 <= float(str(each["cpu"])) <= process.num_threads() + 0.5


def test_what_a_rank_has_started_is_not_a_rank(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "logs").mkdir()
    program = "import subprocess, sys; child = subprocess.Popen(['sleep', '400'])\nprint(child.pid, flush=True)\n"
    log = tmp_path / "logs" / "rank-3.log"
    with log.open("w") as file:
        rank = subprocess.Popen([sys.executable, "-c", f"{program}sys.exit(child.wait())"], stdout=file)
    try:
        wait_for(lambda: log.read_text().endswith("\n"))
        shown = ranks_of(trainwright("gpus", "--json", cwd=tmp_path).stdout, tmp_path)
        assert [(each["pid"], each["rank"]) for each in shown] == [(rank.pid, 3)]
    finally:
        psutil.Process(int(log.read_text())).kill()
        rank.wait()


def test_a_time_without_watch_is_refused(tmp_path: Path) -> None:
    done = trainwright("gpus", "5", cwd=tmp_path)
    assert done.returncode == 2 and "5: a time between tables needs --watch" in done.stderr


def test_the_table_fits_80_columns_and_says_that_there_is_no_gpu(training: Started) -> None:
    assert training.run is not None
    done = trainwright("gpus", cwd=training.run.resolve().parent, CUDA_VISIBLE_DEVICES="")
    if "no NVIDIA GPU" not in done.stdout:
        pytest.skip("there is a GPU here")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("no NVIDIA GPU can be read here; runs train on the CPU")
    rows = [line for line in lines if line.endswith(f"of {training.run.name}")]
    assert [re.search(r"cores +[\d.]+ MiB +(rank \d)", line)[1] for line in rows] == ["rank 0", "rank 1"]  # type: ignore[index]
    assert max(map(len, [lines[2], *rows])) <= 80


def test_the_gpus_are_shown_before_the_processes_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: shown.append(capsys.readouterr().out))
    with contextlib.suppress(MachineError):  # of a GPU that cannot be used
        show_gpus(None, watch=False, as_json=False)
    (before,) = shown
    assert before.startswith(("GPU  USE", "no NVIDIA GPU can be read here")) and "PROCESS" not in before
    assert re.search(r"^(PID|no run trains)", capsys.readouterr().out, re.MULTILINE)


def test_a_gpu_and_the_rank_that_uses_it(training: Started, this_machine: None, tmp_path: Path) -> None:
    assert training.run is not None
    (rank, _) = ranks_of(trainwright("gpus", "--json", cwd=tmp_path).stdout, training.run)
    shown = driver(tmp_path)
    done = gpus(before=shown, cwd=training.run.parent, GPU_PROCESS=str(rank["pid"]))
    assert done.returncode == CODE, done.stderr
    lines = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert lines[1] == ["0", "97%", "4.0 of 80.0 GiB", "350 W", "91 °C", "NVIDIA H100 80GB HBM3"]
    row = next(line for line in lines if line[0] == str(rank["pid"]))
    assert row[1:3] == ["0", "3.0 GiB"] and row[-1].startswith("rank 0 of ")
    if CODE:
        assert "is a build for CPUs" in done.stderr
    values = json.loads(gpus("--json", before=shown, cwd=tmp_path, GPU_PROCESS=str(rank["pid"])).stdout)
    assert (values["gpus"][0]["used"], values["gpus"][0]["total_memory"]) == (0.97, 80 << 30)
    assert next(each for each in values["processes"] if each["pid"] == rank["pid"])["gpus"] == {"0": 3 << 30}


def test_another_program_on_a_gpu_and_one_that_cannot_be_seen(this_machine: None, tmp_path: Path) -> None:
    shown = driver(tmp_path)
    done = gpus(before=shown, cwd=tmp_path, GPU_PROCESS=str(os.getpid()))
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"{os.getpid()} "))
    assert psutil.Process().cmdline()[0][:20] in row and len(row) <= 80
    hidden = gpus(before=shown, cwd=tmp_path, GPU_PROCESS=str(2**22 + 1))
    (row,) = (line for line in hidden.stdout.splitlines() if line.startswith(f"{2**22 + 1} "))
    assert re.split(r"  +", row)[1:] == ["0", "3.0 GiB", "not visible from here"]


def test_what_a_gpu_does_not_tell_is_left_out(this_machine: None, tmp_path: Path) -> None:
    done = gpus("--json", before=driver(tmp_path, "DENIED"), cwd=tmp_path)
    values = json.loads(done.stdout)
    (gpu,) = values["gpus"]
    assert done.returncode == CODE and gpu["temperature"] == 91 and "limited" not in gpu
    assert not any(each["gpus"] for each in values["processes"])


def test_a_gpu_that_is_lost_beside_one_that_answers(this_machine: None, tmp_path: Path) -> None:
    done = gpus(before=driver(tmp_path, "LOST"), cwd=tmp_path)
    lines = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert lines[1][-1] == "NVIDIA H100 80GB HBM3" and lines[2] == ["1", "not readable: GPU is lost"]
    assert done.returncode == 3 and "of 2 NVIDIA GPUs one does not answer (NVML: GPU is lost)" in done.stderr
    others = gpus(before=driver(tmp_path, "LOST"), cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert others.returncode == CODE and "does not answer" not in others.stderr


def test_watching_prints_tables_until_it_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "trainwright", "gpus", "--watch", "0.1", "--json"]
    with out.open("w") as file:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: out.read_text().count("\n") >= 3)
        process.send_signal(2)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
    assert [set(json.loads(line)) for line in out.read_text().splitlines()][:3] == [{"gpus", "processes"}] * 3
