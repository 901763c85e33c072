"""The packages beside the core: training needs none of them, and what is asked of one that is not there is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright
from tests.support.commands import PATIENCE, ROOT, environment
from tests.support.runs import events

ROOMS = ("clusters", "compatibility", "doctor", "faults", "observe", "planning")
TINY = str(ROOT / "recipes" / "sft" / "tiny.yaml")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the package whose folders of the rooms are deleted."""
    directory = tmp_path_factory.mktemp("core")
    copy = directory / "trainwright"
    shutil.copytree(Path(trainwright.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc.*"))  # half-written
    for room in ROOMS:
        shutil.rmtree(copy / room)
    return directory


def train(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", "train", TINY, *words]
    variables = environment(PYTHONPATH=str(core))
    return subprocess.run(command, env=variables, cwd=core, capture_output=True, text=True, timeout=PATIENCE)


def test_a_run_is_trained_without_the_rooms(core: Path) -> None:
    """On two processes, to its end, with the values of auto that need no plan."""
    run = core / "run"
    open_keys = ("train.micro_batch_size=auto", "train.mixed_precision=auto", "parallel.strategy=auto")
    done = train(core, "train.max_steps=2", f"logging.run_directory={run}", "parallel.num_processes=2", *open_keys)
    assert done.returncode == 0, done.stderr
    (start,) = events(run, "start")
    assert start["world_size"] == 2 and start["strategy"] == "ddp" and start["micro_batch_size"] == 1
    assert (run / "final").is_dir() and list((run / "tensorboard").iterdir())
    assert "no plan, as no planner is installed: ddp on 2" in done.stdout
    assert "finished at step 2" in done.stdout


@pytest.mark.slow
def test_what_only_a_room_can_do_is_refused_with_its_name(core: Path) -> None:
    (core / "accelerate.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    (core / "small.gguf").write_bytes(b"GGUF")
    for words, says in (
        (["--accelerate-config", "accelerate.yaml"], "launcher accelerate needs trainwright.compatibility."),
        (["logging.observers=[wandb]"], "logging.observers.wandb: observer wandb needs trainwright.observe."),
        (["--simulate", "8xH100"], "simulation simulate needs trainwright.planning."),
        (
            ["model.name=small.gguf", "model.config=null", "model.tokenizer=null"],
            "model.name: small.gguf: weight format gguf needs trainwright.compatibility.",
        ),
    ):
        done = train(core, *words)
        assert done.returncode == 2, (words, done.stderr)
        assert says in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)
        assert not [*core.glob("runs/*")]
