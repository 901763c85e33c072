"""``trainwright collect`` as a user runs it: once, stopped and again, and asked for what there is not."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import started, trainwright
from trainwright.reinforcement.histories import ARRAYS, Histories

pytest.importorskip("h5py")
RECIPE = """\
task: algorithm_distillation
algorithm_distillation:
  environment: darkroom
  environment_options: {size: 3, horizon: 5}
  histories: out/rooms.h5
  source: {name: q-learning, streams: 4, steps: 100}
"""
PPO = "algorithm_distillation.source={name: ppo, streams: 4, steps: 60, ppo: {rollout_steps: 10, batch_size: 8}}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rooms.yaml").write_text(RECIPE)
    return tmp_path


def test_collects_draws_and_does_nothing_twice(place: Path) -> None:
    pytest.importorskip("matplotlib")
    done = trainwright("collect", "rooms.yaml", "--num-processes", "1", "--chart", "curves.png", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "q-learning in darkroom: 9 tasks x 4 streams x 100 steps, 1 processes" in done.stdout
    assert "9 of 9 tasks finished" in done.stdout and "mean return: " in done.stdout
    assert (place / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (place / "out").iterdir()] == ["rooms.h5"]
    with Histories(place / "out/rooms.h5") as histories:
        assert (len(histories), histories.time, histories.streams) == (9, 100, 4)
        assert histories.source["epsilon"] == 0.05
    again = trainwright("collect", "rooms.yaml", cwd=place)
    assert again.returncode == 0 and "was there already" in again.stdout
    other = trainwright("collect", "rooms.yaml", "algorithm_distillation.source.seed=1", cwd=place)
    assert other.returncode == 2 and "is there, and of another environment, source or choice of tasks" in other.stderr


def test_killed_and_run_again_is_the_same(place: Path) -> None:
    whole = trainwright(
        "collect", "rooms.yaml", PPO, "algorithm_distillation.histories=whole.h5", "--num-processes", "2", cwd=place
    )
    assert whole.returncode == 0, whole.stderr
    parts = place / "out/rooms.h5.parts"
    with started("-m", "trainwright", "collect", "rooms.yaml", PPO, "--num-processes", "1", cwd=place) as process:
        deadline = time.monotonic() + 120
        while not list(parts.glob("*.h5")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.h5")}
    assert kept and not (place / "out/rooms.h5").exists()
    other = trainwright("collect", "rooms.yaml", cwd=place)
    assert other.returncode == 2 and "has parts of a collection that was asked for differently" in other.stderr
    again = trainwright("collect", "rooms.yaml", PPO, "--num-processes", "1", cwd=place)
    assert again.returncode == 0, again.stderr
    assert not parts.exists()
    with Histories(place / "whole.h5") as one, Histories(place / "out/rooms.h5") as other_file:
        assert one.goals == other_file.goals == list(range(9))
        for name, array, same in zip(ARRAYS, one.read(), other_file.read(), strict=True):
            assert np.array_equal(array, same), name


def test_a_part_of_the_tasks(place: Path) -> None:
    done = trainwright("collect", "rooms.yaml", "algorithm_distillation.source.tasks=3", cwd=place)
    assert done.returncode == 0, done.stderr
    with Histories(place / "out/rooms.h5") as histories:
        environment = histories.make_environment()
        assert histories.goals == sorted(environment.split_indices(0)[0][:3])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm_distillation.source.tasks=9"], "9 is more than the 8 tasks of darkroom that are not held back"),
        (["algorithm_distillation.source.name=sarsa"], "algorithm_distillation.source.name: expected"),
        (["algorithm_distillation.source.epochs=2"], "algorithm_distillation.source.epochs: unknown key"),
        (["algorithm_distillation.source.ppo.epochs=2"], "has no effect with algorithm_distillation.source.name q-l"),
        (
            ["algorithm_distillation.source={name: ppo, streams: 3, ppo: {batch_size: 7}}"],
            "80 rollout_steps x 3 streams are 240 steps, which minibatches of 7 do not divide",
        ),
        (["algorithm_distillation.source={name: ucb}"], "source ucb: learns one state, and darkroom has more"),
        (["algorithm_distillation.environment=darkrom"], "did you mean darkroom"),
        (["algorithm_distillation.environment_options={sise: 3}"], "has no option sise"),
        (
            [
                "algorithm_distillation.environment=gymnasium",
                "algorithm_distillation.environment_options={entry_point: 'nowhere:Lake', tasks: [{}], horizon: 5}",
            ],
            "entry_point nowhere:Lake cannot be imported: No module named 'nowhere'",
        ),
        (["task=sft", "algorithm_distillation=null", "model.name=m", "data.train=d"], "collects no histories"),
    ],
)
def test_what_cannot_be_collected_is_refused(place: Path, overrides: list[str], said: str) -> None:
    refused = trainwright("collect", "rooms.yaml", *overrides, cwd=place)
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr and not (place / "out").exists()
