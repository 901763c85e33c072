"""A script that another launcher has started in several processes trains in all of them together."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.runs import ON_ROWS, TINY, Runs, column, difference
from tests.support.workers import srun

# A file for several processes on a CPU; of those, Accelerate starts more than one for FSDP alone.
ACCELERATE = (
    "{distributed_type: FSDP, use_cpu: true, num_processes: 2, num_machines: 1, mixed_precision: 'no', "
    "fsdp_config: {fsdp_version: 2}}"
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "accelerate launch": (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"),
    "srun": ("srun", "--ntasks", "2", sys.executable),
}
RANK = 'next(os.environ[name] for name in ("RANK", "SLURM_PROCID") if name in os.environ)'
SCRIPT = """
import json, os, signal, sys
import trainwright as tw

before = dict(os.environ), [signal.getsignal(number) for number in range(1, 32)]
settings = [{rows!r}, "logging.observers.tensorboard=false"]
recipe = tw.Recipe.load({recipe!r}, *settings)
said = []
try:
    tw.train(recipe, "train.max_stepz=3")
except tw.RequestError as error:
    said.append(str(error))
run = tw.train(recipe, "train.max_steps=3", "logging.run_directory=run")
run = tw.resume(run, "train.max_steps=5")
assert before == (dict(os.environ), [signal.getsignal(number) for number in range(1, 32)])
start = run.events("start")[0]
found = {{"said": said, "loss": run.columns()["loss"], "start": start["world_size"], "run": str(run)}}
json.dump({{**found, "strategy": start["strategy"]}}, open("found-" + {rank}, "w"))
"""


def needs(launcher: str) -> None:
    if launcher == "srun" and shutil.which("srun") is None:
        pytest.skip("srun is not installed")
    if launcher == "accelerate launch" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")


def check_found(directory: Path, runs: Runs, strategy: str) -> None:
    """Both ranks have the run that the product's own two processes make."""
    alone = runs.trained(ON_ROWS, "train.max_steps=3", "parallel.num_processes=2")
    losses = column(runs.resumed(runs.copied(alone), "train.max_steps=5"), "loss")
    for each in (json.loads((directory / f"found-{rank}").read_text()) for rank in range(2)):
        assert difference(each["loss"], losses) <= (0 if strategy == "ddp" else 1e-6)
        assert (each["start"], each["strategy"]) == (2, strategy) and Path(each["run"]) == directory / "run"
        assert "did you mean max_steps?" in each["said"][0]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_trains_on_two_processes_under(launcher: str, tmp_path: Path, runs: Runs) -> None:
    needs(launcher)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    (tmp_path / "script.py").write_text(SCRIPT.format(recipe=str(TINY), rows=ON_ROWS, rank=RANK))
    command = [*LAUNCHERS[launcher], "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    check_found(tmp_path, runs, "fsdp" if launcher == "accelerate launch" else "ddp")
    assert "error" not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_script_trains_on_two_processes_with_the_variables_of_srun(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(recipe=str(TINY), rows=ON_ROWS, rank=RANK))
    started = [
        subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment(**variables))
        for variables in srun(2, str(os.getpid()))
    ]
    assert [script.wait(500) for script in started] == [0, 0]
    check_found(tmp_path, runs, "ddp")


FAILING = """
import os, sys
import trainwright as tw
try:
    tw.train({recipe!r}, {rows!r}, "optimizer.learning_rate=1e30", "train.max_steps=9", "logging.run_directory=run")
except tw.TrainingError as error:
    open("failed-" + os.environ["RANK"], "w").write(str(error))
"""


@pytest.mark.slow
def test_a_run_that_fails_is_raised_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING.format(recipe=str(TINY), rows=ON_ROWS))
    command = [*TORCHRUN, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert "gradient norm nan at step 2" in (tmp_path / f"failed-{rank}").read_text()
