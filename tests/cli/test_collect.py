"""``trainwright collect`` as a user runs it: once, stopped and again, and asked for what there is not."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

import trainwright as tw
from tests.support.commands import PATIENCE, all_gone, started, trainwright, wait_for
from trainwright.cli.data import collect
from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.histories import ARRAYS, Histories

pytest.importorskip("h5py")
RECIPE = """\
task: algorithm_distillation
algorithm_distillation:
  environment: darkroom
  environment_options: {size: 3, horizon: 5}
  histories: out/rooms.h5
  source: {name: q-learning, streams: 4, steps: 100}
"""
PPO = (
    "algorithm_distillation.environment_options={size: 4, horizon: 5}",
    "algorithm_distillation.source={name: ppo, tasks: 12, streams: 4, steps: 120, "
    "ppo: {rollout_steps: 10, batch_size: 8}}",
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rooms.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.slow
def test_collects_draws_and_does_nothing_twice(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    done = trainwright("collect", "rooms.yaml", "--num-processes", "1", "--chart", "curves.png", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "q-learning in darkroom: 9 tasks x 4 streams x 100 steps, 1 process" in done.stdout
    assert "9 of 9 tasks finished" in done.stdout and "mean return: " in done.stdout
    assert (place / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (place / "out").iterdir()] == ["rooms.h5"]
    with Histories(place / "out/rooms.h5") as histories:
        assert (len(histories), histories.time, histories.streams) == (9, 100, 4)
        assert histories.source["epsilon"] == 0.05
    again = trainwright("collect", "rooms.yaml", cwd=place)
    assert again.returncode == 0 and "already collected" in again.stdout
    monkeypatch.chdir(place)
    capfd.readouterr()
    found = tw.collect(Path("rooms.yaml"), num_processes=1)
    assert again.stdout.endswith(f"{found}\n") and capfd.readouterr() == ("", "")
    assert found.seconds is None and len(found.returns) >= 20
    other = trainwright("collect", "rooms.yaml", "algorithm_distillation.source.seed=1", cwd=place)
    assert (
        other.returncode == 2 and "already exists, with another environment, source or choice of tasks" in other.stderr
    )


@pytest.mark.slow
def test_killed_and_run_again_is_the_same(place: Path) -> None:
    whole = trainwright(
        "collect", "rooms.yaml", *PPO, "algorithm_distillation.histories=whole.h5", "--num-processes", "2", cwd=place
    )
    assert whole.returncode == 0, whole.stderr
    parts = place / "out/rooms.h5.parts"
    one = ("--num-processes", "1")
    with started("-m", "trainwright", "collect", "rooms.yaml", *PPO, *one, cwd=place) as process:
        wait_for(lambda: list(parts.glob("*.h5")) or process.poll() is not None, every=0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = list(parts.glob("*.h5"))
    assert 0 < len(kept) < 12 and not (place / "out/rooms.h5").exists()
    other = trainwright("collect", "rooms.yaml", cwd=place)
    assert other.returncode == 2 and "has parts of a collection with other settings" in other.stderr
    again = trainwright("collect", "rooms.yaml", *PPO, *one, cwd=place)
    assert again.returncode == 0, again.stderr
    assert not parts.exists()
    with Histories(place / "whole.h5") as expected, Histories(place / "out/rooms.h5") as found:
        assert expected.goals == found.goals == sorted(make("darkroom", size=4).split_indices(0)[0][:12])
        for name, array, same in zip(ARRAYS, expected.read(), found.read(), strict=True):
            assert np.array_equal(array, same), name


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm_distillation.source.tasks=9"], "9 is more than the 8 tasks of darkroom that are not held out"),
        (["algorithm_distillation.source.name=sarsa"], "algorithm_distillation.source.name: expected"),
        (["algorithm_distillation.source.epochs=2"], "algorithm_distillation.source.epochs: unknown key"),
        (["algorithm_distillation.source.ppo.epochs=2"], "has no effect with algorithm_distillation.source.name q-l"),
        (
            ["algorithm_distillation.source={name: ppo, streams: 3, ppo: {batch_size: 7}}"],
            "80 rollout_steps x 3 streams = 240 steps, which is not divisible by batch_size 7",
        ),
        (["algorithm_distillation.source={name: ucb}"], "source ucb: learns one state, and darkroom has more"),
        (["algorithm_distillation.environment=darkrom"], "did you mean darkroom"),
        (["train.seed=5"], "train.seed: has no effect on what is collected"),
        (["train.seed=5"], "set algorithm_distillation.source.seed"),
        (
            ["algorithm_distillation.environment_options={sise: 3}"],
            "algorithm_distillation.environment: environment darkroom: has no option sise",
        ),
        (
            [
                "algorithm_distillation.environment=gymnasium",
                "algorithm_distillation.environment_options={entry_point: 'nowhere:Lake', tasks: [{}], horizon: 5}",
            ],
            "entry_point nowhere:Lake cannot be imported: No module named 'nowhere'",
        ),
    ],
)
def test_what_cannot_be_collected_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(RequestError) as refused:
        collect(Path("rooms.yaml"), overrides)
    assert said in str(refused.value) and not (place / "out").exists()


@pytest.mark.parametrize(
    ("chart", "said"),
    [("curves.doc", "--chart: curves.doc has an unsupported file type"), ("no/c.png", "no such directory no")],
)
def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_is_collected(
    place: Path, monkeypatch: pytest.MonkeyPatch, chart: str, said: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(place)
    with pytest.raises(RequestError, match=said):
        collect(Path("rooms.yaml"), [], chart=Path(chart))
    assert not (place / "out").exists()


def test_a_recipe_of_texts_is_refused(place: Path) -> None:
    (place / "texts.yaml").write_text("task: sft\nmodel: {name: some-model}\ndata: {train: rows.jsonl}\n")
    refused = trainwright("collect", "texts.yaml", cwd=place)
    assert refused.returncode == 2 and "collect needs a recipe with task: algorithm_distillation" in refused.stderr, (
        refused.stderr
    )


def spawned(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children() if "spawn_main" in " ".join(one.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["a worker dies", pytest.param("a signal", marks=pytest.mark.slow)])
def test_an_end_before_the_end_says_so(place: Path, end: str) -> None:
    endless = [one.replace("steps: 120", "steps: 1000000") for one in PPO]
    log = place / "log"
    with started("-m", "trainwright", "collect", "rooms.yaml", *endless, cwd=place, output=log) as process:
        workers = wait_for(lambda: spawned(process.pid))
        if end == "a signal":
            process.send_signal(signal.SIGTERM)
        else:
            workers[0].kill()
        assert process.wait(PATIENCE) == (75 if end == "a signal" else 4)
        assert all_gone(workers)
    said = log.read_text()
    assert "run the same command again to continue" in said and "Traceback" not in said
    assert ("a process was killed" in said) == (end == "a worker dies")
