"""A script that torchrun has started in several processes trains in all of them together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.runs import ON_ROWS, TINY, Runs, column

SCRIPT = """
import json, os, signal, sys
import trainwright as tw

before = dict(os.environ), [signal.getsignal(number) for number in range(1, 32)]
settings = [{rows!r}, "logging.tensorboard=false"]
recipe = tw.Recipe.load({recipe!r}, *settings)
said = []
try:
    tw.train(recipe, "train.max_stepz=3")
except tw.RequestError as error:
    said.append(str(error))
run = tw.train(recipe, "train.max_steps=3", "logging.run_directory=run")
run = tw.resume(run, "train.max_steps=5")
assert before == (dict(os.environ), [signal.getsignal(number) for number in range(1, 32)])
found = {{"said": said, "loss": run.columns()["loss"], "start": run.events("start")[0]["world_size"], "run": str(run)}}
json.dump(found, open("found-" + os.environ["RANK"], "w"))
"""


@pytest.mark.slow
def test_a_script_under_torchrun_trains_on_two_processes(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(recipe=str(TINY), rows=ON_ROWS))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "script.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]
    alone = runs.trained(ON_ROWS, "train.max_steps=3", "parallel.num_processes=2")
    losses = column(runs.resumed(runs.copied(alone), "train.max_steps=5"), "loss")
    for each in found:
        assert each["loss"] == losses and each["start"] == 2 and Path(each["run"]) == tmp_path / "run"
        assert "did you mean max_steps?" in each["said"][0]
    assert "error" not in ended.stdout + ended.stderr


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert "gradient norm nan at step 2" in (tmp_path / f"failed-{rank}").read_text()
