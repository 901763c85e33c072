"""Jobs of Ray: the script that submits one, what runs on each node, and a run on a real cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.commands import ROOT, all_gone, descendants, environment, started, wait_for
from tests.support.packages import environment_with
from tests.support.runs import ON_ROWS, TINY, Runs, column, events
from trainwright.clusters.ray import build_command
from trainwright.errors import RequestError

SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"
SETTINGS = (ON_ROWS, "data.validation=null", "logging.observers.tensorboard=false", "checkpoint.every=1000")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def script(*overrides: str, recipe: Path = TINY, **options: Any) -> str:
    made = tw.submit(recipe, *SETTINGS, *overrides, to="ray", dry_run=True, **options)
    assert made.job is None and not Path("runs").exists()
    return made.script


def test_the_entry_point_survives_rays_shell(here: Path) -> None:
    """The script is run with a client that gives the entry point to a shell, as Ray does."""
    odd = here / "a b'\"$(touch pwned)"
    odd.mkdir()
    (odd / 'r """.yaml').write_text(f"include: {TINY}\n")
    prompt = "evaluate.prompts=['$(touch pwned) `touch pwned`']"
    (here / "job.py").write_text(script(prompt, recipe=odd / 'r """.yaml', nodes=2, gpus_per_node=8, name="two"))
    (here / "ray" / "job_submission").mkdir(parents=True)
    (here / "ray" / "__init__.py").touch()
    (here / "ray" / "job_submission" / "__init__.py").write_text(
        "import subprocess\n"
        "class JobSubmissionClient:\n"
        "    def submit_job(self, entrypoint):\n"
        "        subprocess.run('printf \"%s\\\\n\" ' + entrypoint + ' >words.txt', shell=True, check=True)\n"
        "        return 'raysubmit_1'\n"
    )
    done = subprocess.run([sys.executable, "job.py"], cwd=here, capture_output=True, text=True, check=False)
    assert done.stdout == f"job raysubmit_1\nrun {here}/runs/two\n", done.stderr
    words = (here / "words.txt").read_text().splitlines()
    assert words[:6] == ["python", "-P", "-m", "trainwright.clusters.ray", "--nodes=2", "--gpus-per-node=8"]
    train = words[words.index("--") + 1 :]
    assert train[0] == str(odd / 'r """.yaml') and prompt in train
    assert not [*here.rglob("pwned")]


def test_nodes_have_the_gpus_of_the_machine_that_is_planned_for(here: Path) -> None:
    (here / "config" / "trainwright").mkdir(parents=True)
    (here / "config" / "trainwright" / "clusters.yaml").write_text("ray: {scheduler: ray, machine: 8xH100}\n")
    assert "'--gpus-per-node=8'" in script(nodes=2)


def test_each_node_gets_its_place() -> None:
    words = build_command(Path("/runs/r"), ["r.yaml"], 2, 1, "10.0.0.1:999")
    assert words == [
        *("-P", "-m", "trainwright.clusters.job_attempts", "--node-rank", "1", "/runs/r", "--", "r.yaml"),
        *("--nodes", "2", "--node-rank", "1", "--rendezvous", "10.0.0.1:999"),
    ]
    assert build_command(Path("/r"), ["r.yaml"], 1, 0, None)[3:] == ["/r", "--", "r.yaml"]


def test_what_a_task_runs_does_not_outlive_the_process_of_ray(here: Path) -> None:
    code = "from trainwright.clusters.ray import _train; _train('.', ['-c', 'import time; time.sleep(600)'], 0)"
    with started("-c", code, cwd=here) as task:
        family = wait_for(lambda: descendants(task.pid))
        task.kill()
        task.wait()
        assert all_gone(family)


def test_what_a_job_of_ray_cannot_have_is_refused() -> None:
    with pytest.raises(RequestError, match="--time: is for slurm and kubernetes, and ray has no such setting"):
        script(time="1 h")
    with pytest.raises(RequestError, match=r"--name: .* is not a plain name"):
        script(name='a"b')
    with pytest.raises(RequestError, match="python FILE submits it"):
        tw.submit(TINY, ON_ROWS, to="ray")


@pytest.mark.slow  # makes an environment with Ray, and starts a cluster
@pytest.mark.timeout(1800)
def test_a_run_on_a_real_cluster_survives_a_killed_worker(runs: Runs, here: Path) -> None:
    python = environment_with(here / "venv", "ray[default]")
    # Its Python has Ray; Trainwright and its libraries come from here.
    own = next(path for path in sys.path if path.endswith("site-packages"))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), own])
    variables = environment(PYTHONPATH=paths, PATH=f"{python.parent}:{os.environ['PATH']}", RAY_TMPDIR="/tmp/tw-ray")
    ray = str(python.parent / "ray")
    (here / "job.py").write_text(script(SLOW, "train.max_steps=40", "parallel.num_processes=1", name="one"))
    start = [ray, "start", "--head", "--num-cpus=2", "--disable-usage-stats", "--port=0", "--dashboard-port=8299"]
    subprocess.run(start, env=variables, check=True, cwd=here)
    run = here / "runs" / "one"
    try:
        variables["RAY_ADDRESS"] = "http://127.0.0.1:8299"
        done = subprocess.run([python, "job.py"], env=variables, cwd=here, capture_output=True, text=True, check=True)
        job = done.stdout.splitlines()[0].split()[1]
        wait_for(lambda: (run / "events.jsonl").exists() and len(events(run, "step")) >= 3, every=0.5)
        subprocess.run(["kill", "-TERM", str(_train_process(run))], check=True)
        wait_for(lambda: events(run, "finish")[-1:] and events(run, "finish")[-1]["status"] == "finished", every=1.0)
        ask = f"from ray.job_submission import JobSubmissionClient as C; print(C().get_job_status({job!r}).value)"
        wait_for(lambda: "SUCCEEDED" in subprocess.check_output([python, "-c", ask], env=variables, text=True), 1.0)
    finally:
        subprocess.run([ray, "stop"], env=variables, check=False, cwd=here)
    assert len(events(run, "start")) == 2 and events(run, "start")[1]["resumed_from"]
    undisturbed = runs.trained(*SETTINGS, "train.max_steps=40", "parallel.num_processes=1")
    assert column(run, "loss") == column(undisturbed, "loss")


def _train_process(run: Path) -> int:
    import psutil

    wanted = f"logging.run_directory={run}"
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if wanted in words and words[1:5] == ["-P", "-m", "trainwright", "train"]:
            return int(process.pid)
    raise AssertionError(shlex.quote(wanted))
