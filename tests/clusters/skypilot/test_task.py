"""Task files of SkyPilot: what they run on a node, what recovers them, what is refused; read by SkyPilot itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainwright as tw
from tests.support.packages import environment_with
from tests.support.runs import ON_ROWS, TINY
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe

CLUSTER = "{scheduler: skypilot, machine: 8xH100, bucket: 's3://runs', setup: [pip install x], spot: true}"
SHARED = "{scheduler: skypilot, machine: 8xH100, mount: /runs, setup: [sudo mount x /runs], spot: true}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    describe(tmp_path, CLUSTER)
    (tmp_path / "r $(touch pwned).yaml").write_text(f"include: {TINY}\n")
    return tmp_path


def describe(here: Path, cluster: str) -> None:
    file = here / "config" / "trainwright" / "clusters.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"sky: {cluster}\n")


def text(*overrides: str, **options: Any) -> str:
    made = tw.submit("r $(touch pwned).yaml", ON_ROWS, *overrides, to="sky", dry_run=True, force=True, **options)
    assert made.job is None and not Path("runs").exists()
    return made.script


def test_the_task_asks_for_nodes_and_recovers_by_our_codes(here: Path) -> None:
    describe(here, SHARED)
    task = yaml.safe_load(text(nodes=2, gpus_per_node=4, name="My_run"))
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("my-run", 2, ".")
    assert task["resources"] == {
        "accelerators": "H100:4",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [5, 75]},
    }
    assert "file_mounts" not in task
    assert task["setup"] == "sudo mount x /runs\n"


@pytest.mark.parametrize("name", ["two", "a #b: c's"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilots_variables_become_ours_and_nothing_that_a_name_says_is_executed(
    nodes: int, name: str, here: Path
) -> None:
    if nodes > 1:
        describe(here, SHARED)
    prompt = "evaluate.prompts=['$(touch pwned) `touch pwned` $HOME']"
    directory = f'logging.run_directory="{here}/{name}"'
    (here / "run.sh").write_text(yaml.safe_load(text(prompt, directory, nodes=nodes))["run"])
    (here / "bin").mkdir()
    (here / "bin" / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >words.txt\n')
    (here / "bin" / "python").chmod(0o755)
    variables = {
        "PATH": f"{here}/bin:/usr/bin:/bin",
        "HOME": "/home/a user",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    subprocess.run(["bash", "run.sh"], env=variables, check=True)
    words = (here / "words.txt").read_text().splitlines()
    train = words[words.index("--") + 1 :]
    run = f"/runs/{name}" if nodes > 1 else f"/home/a user/runs/{name}"
    assert words[:4] == ["-P", "-m", "trainwright.clusters.job_attempts", run]
    assert train[0] == "r $(touch pwned).yaml" and prompt in train
    overrides = [word for word in train[1:] if word.startswith("logging.")]
    assert load_recipe(TINY, overrides).logging.run_directory == run
    if nodes == 1:  # what outlives the machine
        assert 'checkpoint.copies=["s3://runs"]' in train
        assert words[words.index("--count-in") + 1] == "s3://runs"
    place = ["--nodes", "2", "--node-rank", "1", "--rendezvous", "10.0.0.1:29400"] if nodes == 2 else []
    assert train[train.index("auto") + 1 :] == [*place, "--num-processes", str(8 * nodes)]
    assert not [*here.rglob("pwned")]


def test_what_a_task_cannot_have_is_refused(here: Path) -> None:
    with pytest.raises(RequestError, match="--partition: is for slurm, and skypilot has no such setting"):
        text(partition="gpu")
    with pytest.raises(RequestError, match=r"--name: .* is not a plain name"):
        text(name="a\n$(touch pwned)")
    with pytest.raises(RequestError, match="sky jobs launch FILE"):
        tw.submit("r $(touch pwned).yaml", ON_ROWS, to="sky")
    with pytest.raises(RequestError, match=r"the recipe: .* which SkyPilot copies"):
        tw.submit(TINY, ON_ROWS, to="sky", dry_run=True, force=True)
    describe(here, "{scheduler: skypilot, machine: 8xH100}")
    with pytest.raises(RequestError, match="bucket: is missing"):
        text()
    assert 'checkpoint.copies=["s3://mine"]' in text("checkpoint.copies=['s3://mine']")
    describe(here, CLUSTER)
    with pytest.raises(RequestError, match="--nodes: the directory of a run on 2 nodes has to be on a file system"):
        text(nodes=2)
    describe(here, "{scheduler: skypilot, bucket: 's3://runs', mount: /runs}")
    with pytest.raises(RequestError, match="bucket and mount: set one"):
        text()
    describe(here, "{scheduler: skypilot, bucket: 's3://runs', gpus_per_node: 8}")
    with pytest.raises(RequestError, match="machine: is missing"):
        text()


@pytest.mark.slow  # makes an environment with SkyPilot
def test_skypilot_reads_the_task(here: Path) -> None:
    python = environment_with(here / "venv", "skypilot")
    describe(here, SHARED)
    (here / "task.yaml").write_text(text(nodes=2, name="two"))
    (here / "check.py").write_text(
        "import json\n"
        "import sky\n"
        "import yaml\n"
        "config = yaml.safe_load(open('task.yaml'))\n"
        "task = sky.Task.from_yaml_config(config)\n"
        "(resources,) = task.resources\n"
        "print(json.dumps([task.num_nodes, resources.use_spot, resources.accelerators, resources.job_recovery]))\n"
    )
    done = subprocess.run([python, "check.py"], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nodes, spot, accelerators, recovery = json.loads(done.stdout.splitlines()[-1])
    assert (nodes, spot, accelerators) == (2, True, {"H100": 8})
    assert recovery["recover_on_exit_codes"] == [5, 75] and recovery["max_restarts_on_errors"] == 0
