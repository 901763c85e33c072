"""Step policies and observers of somebody else's package, and of a module beside the recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.commands import MACHINE, PATIENCE, environment, trainwright
from tests.support.runs import ON_ROWS, TINY, Runs, column, events

MODULE = """
    import json
    from trainwright.engine.policies.base import StepPolicy
    from trainwright import extension


    class EverySecond(StepPolicy):
        def skips(self, step, found):
            self.state["skipped"] = self.state.get("skipped", 0) + (step % 2 == 0)
            return step % 2 == 0

        def metrics(self, step, found):
            return {"skipped_before": self.state.get("skipped", 0.0)}


    class Torch(StepPolicy):
        def metrics(self, step, found):
            import os

            import torch

            expands = os.environ.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
            return {"deterministic": float(torch.are_deterministic_algorithms_enabled()), "expands": float(expands)}


    class Lines:
        def __init__(self, run):
            self.file = run / "seen.txt"

        def __call__(self, event):
            with self.file.open("a") as file:
                file.write(event["event"] + "\\n")


    @extension("observer")
    class Breaks:
        def __init__(self, run):
            pass

        def __call__(self, event):
            raise ValueError("no such tracker")


    class Lacks:
        pass


    class Fails(StepPolicy):
        def after(self, step):
            if step == 2:
                raise RuntimeError("no luck")
"""
SHORT = (ON_ROWS, "train.max_steps=4", "checkpoint.every=2", "parallel.num_processes=1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a package that is installed in it, and registers what its module has."""
    site = tmp_path / "site"
    metadata = site / "somebody-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "somebody.py").write_text(textwrap.dedent(MODULE))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[trainwright.step_policies]\nevery-second = somebody:EverySecond\nlacks = somebody:Lacks\n"
        "[trainwright.observers]\nlines = somebody:Lines\n"
    )
    return site


def started(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which has the package on its path from the beginning."""
    found = environment(TRAINWRIGHT_CACHE=str(site.parent / "cache"), TRAINWRIGHT_MACHINE=str(MACHINE))
    found["PYTHONPATH"] += os.pathsep + str(site)
    command = [sys.executable, "-m", "trainwright", *words]
    return subprocess.run(command, env=found, cwd=site.parent, capture_output=True, text=True, timeout=PATIENCE)


def train(site: Path, *overrides: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    run = site.parent / "run"
    fixed = (f"logging.run_directory={run}", "logging.observers.tensorboard=false", *SHORT)
    return run, started(site, "train", str(TINY), *fixed, *overrides)


@pytest.mark.slow
def test_a_policy_and_an_observer_come_in_by_entry_points(runs: Runs, place: Path) -> None:
    run, ended = train(place, "train.step_policies=[every-second]", "logging.observers=[lines]")
    assert ended.returncode == 0, ended.stderr
    assert column(run, "metrics") == [{"skipped_before": n} for n in (0.0, 0.0, 1.0, 1.0)]
    losses, plain = column(run, "loss"), column(runs.trained(*SHORT), "loss")
    assert losses[:2] == plain[:2] and losses[2:] != plain[2:]
    written = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert [seen for seen in (run / "seen.txt").read_text().split() if seen not in ("phase", "progress")] == written


@pytest.mark.slow
def test_a_policy_goes_on_with_its_state(place: Path) -> None:
    run, ended = train(place, "train.step_policies=['somebody:EverySecond']", "train.max_steps=2")
    assert ended.returncode == 0, ended.stderr
    ended = started(place, "train", "--resume", str(run), "train.max_steps=4")
    assert ended.returncode == 0, ended.stderr
    assert column(run, "metrics")[2:] == [{"skipped_before": 1.0}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_torch_is_told_to_be_deterministic_if_the_recipe_asks(runs: Runs, place: Path, asked: bool) -> None:
    override = f"train.deterministic={str(asked).lower()}"
    run, ended = train(place, "train.step_policies=['somebody:Torch']", override)
    assert ended.returncode == 0, ended.stderr
    assert column(run, "metrics") == [{"deterministic": float(asked), "expands": 1.0}] * 4
    assert column(run, "loss") == column(runs.trained(*SHORT), "loss")  # bit-identical on a CPU in any case
    assert events(run, "start")[0]["attention"]
    assert "\nattention " in ended.stdout + ended.stderr


@pytest.mark.slow
def test_an_observer_that_fails_ends_no_run(place: Path) -> None:
    run, ended = train(place, "logging.observers=['somebody:Breaks']")
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout + ended.stderr).count("observer somebody:Breaks failed at") == 1
    assert events(run, "finish")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "train.step_policies=[lacks]",
            "train.step_policies: package somebody: step policy lacks (entry point ",
            marks=pytest.mark.slow,
        ),
        ("train.step_policies=[every-secnd]", "unknown step policy 'every-secnd'; did you mean every-second?"),
        pytest.param(
            "logging.observers=['somebody:Gone']",
            "logging.observers: observer somebody:Gone cannot be imported: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(place: Path, override: str, message: str) -> None:
    run, ended = train(place, override)
    assert ended.returncode == 2
    assert message in " ".join(ended.stderr.split())
    assert not run.exists()


@pytest.mark.slow
def test_a_failed_run_says_why_in_its_events_and_on_its_page(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    where = (f"logging.run_directory={run}", "logging.observers.tensorboard=false", "logging.observers.report=true")
    ended = trainwright("train", str(TINY), *SHORT, *where, "train.step_policies=['somebody:Fails']", cwd=place)
    assert ended.returncode == 4, ended.stderr
    (fault,) = events(run, "fault")
    assert (fault["kind"], fault["rank"], fault["action"]) == ("failure", 0, "the run ends") and fault["detail"]
    assert '<span class="badge bad">failed</span>' in (run / "report.html").read_text()
