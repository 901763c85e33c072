"""A script trains and resumes as the commands do, and is left as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.commands import PATIENCE, environment, started, trainwright, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, events

SETTINGS = (ON_ROWS, "parallel.num_processes=1", "logging.observers.tensorboard=false")

# No `if __name__ == "__main__"`: what trains must not run it again.
SCRIPT = """
import json, os, signal, sys
import trainwright as tw

before = dict(os.environ), [signal.getsignal(number) for number in range(1, 32)], os.getcwd()
recipe = tw.Recipe.load({recipe!r}, *{settings!r}).override(train={{"max_steps": 3}})
run = tw.train(recipe, "logging.run_directory=run")
assert run.status == "finished" and list(run.checkpoints) == [3]
again = tw.resume(run, "train.max_steps=5")
assert again == run and run.model.name == "final"
assert before == (dict(os.environ), [signal.getsignal(number) for number in range(1, 32)], os.getcwd())
assert "torch" not in sys.modules and sys.stdout is sys.__stdout__
json.dump(run.columns("step"), open("columns.json", "w"))
"""


@pytest.mark.slow
def test_a_script_trains_and_resumes_silently_as_the_command(tmp_path: Path, runs: Runs) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(recipe=str(TINY), settings=SETTINGS))
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    run = runs.resumed(runs.copied(runs.trained(*SETTINGS[:2], "train.max_steps=3")), "train.max_steps=5")
    found = json.loads((tmp_path / "columns.json").read_text())
    for name in ("loss", "grad_norm", "tokens", "learning_rate"):
        assert found[name] == column(run, name)
    assert tw.Run(tmp_path / "run").metrics == events(run, "evaluate")[-1]["metrics"]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["train", "nowhere.yaml"], lambda: tw.train("nowhere.yaml")),
        (["train", str(TINY), "train.max_stepz=3"], lambda: tw.train(TINY, "train.max_stepz=3")),
        (["train", str(TINY), "--nodes", "2"], lambda: tw.train(TINY, nodes=2)),
        (
            ["train", str(TINY), "parallel.num_processes=3", "--num-processes", "2"],
            lambda: tw.train(TINY, "parallel.num_processes=3", num_processes=2),
        ),
        (["train", "--resume", "nowhere"], lambda: tw.resume("nowhere")),
        (["plan"], lambda: tw.plan()),
        (["plan", "--model", "gpt2", "--price", "2"], lambda: tw.plan(model="gpt2", price=2.0)),
        (["plan", str(TINY), "--on", "8xNone"], lambda: tw.plan(TINY, on="8xNone")),
    ],
)
def test_a_wrong_argument_raises_what_the_command_says(
    words: list[str], call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = trainwright(*words, cwd=tmp_path)
    with pytest.raises(tw.TrainwrightError) as refused:
        call()  # type: ignore[operator]
    assert f"error: {refused.value}\n" == command.stderr
    assert refused.value.exit_code == command.returncode == 2 and isinstance(refused.value, tw.RequestError)
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_a_plan_is_the_commands(tmp_path: Path) -> None:
    command = trainwright("plan", str(TINY), "--on", "2xA100-80GB", "--json", "--tokens", "5x", cwd=tmp_path)
    made = tw.plan(TINY, on="2xA100-80GB", tokens="5x")
    assert json.loads(command.stdout) == json.loads(json.dumps(made.as_json()))
    command = trainwright("plan", str(TINY), "--on", "2xA100-80GB", cwd=tmp_path)
    assert command.stdout == str(tw.plan(TINY, on="2xA100-80GB")) + "\n"


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tw.RequestError, match="is not a run"):
        tw.Run(tmp_path)


STOPPED = """
import trainwright as tw
try:
    tw.train({recipe!r}, *{settings!r}, "train.max_steps=10000", "logging.run_directory=run")
except tw.Stopped as stopped:
    run = tw.Run(stopped.run)
    print(stopped, run.status, list(run.checkpoints) == [len(run.columns()["step"])])
import time; time.sleep(600)  # until the second one
"""


@pytest.mark.slow
def test_ctrl_c_stops_after_a_checkpoint_and_is_the_scripts_own_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STOPPED.format(recipe=str(TINY), settings=SETTINGS))
    output = tmp_path / "output"
    with started("script.py", cwd=tmp_path, output=output) as process:
        wait_for(lambda: (tmp_path / "run" / "events.jsonl").is_file() and tw.Run(tmp_path / "run").events("step"))
        os.kill(process.pid, signal.SIGINT)
        wait_for(lambda: "stopped after" in output.read_text())
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
    said = "stopped after a checkpoint; continue with: trainwright train --resume run stopped True\n"
    assert output.read_text().startswith(said) and "KeyboardInterrupt" in output.read_text()
