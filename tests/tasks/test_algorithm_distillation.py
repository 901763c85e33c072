"""Algorithm Distillation: windows of histories, the same run on any number of processes, agents that are tried."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.learners import write_histories
from tests.support.runs import ROOT, Runs, column, difference, events
from tests.support.slow import slow_but
from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.evaluation import compute_interval, select_last_episodes
from trainwright.tasks.algorithm_distillation.histories import Histories, History, write
from trainwright.tasks.algorithm_distillation.in_context import (
    Trial,
    choose_context_stride,
    evaluate_model,
    evaluate_random,
)
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape
from trainwright.tasks.algorithm_distillation.objective import HistoryObjective, LossWeights
from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection, SourceAlgorithmSection
from trainwright.tasks.algorithm_distillation.task import explain_other_source, explain_short_histories
from trainwright.tasks.algorithm_distillation.windows import Cut, HistoryWindows

TINY = ROOT / "recipes" / "algorithm_distillation" / "tiny.yaml"
SHAPE = HistoryShape((4, 4), 5, 16, 1, 2, "transition", "rotary", steps=16)
STRATEGIES = {"ddp": 2, "fsdp": 2, "single": 1}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("histories") / "tiny.h5")


def on(file: Path, *overrides: str) -> tuple[str, ...]:
    return f"algorithm_distillation.histories={file}", *overrides


def windows_of(file: Path, goals: Sequence[int] = (0, 3), **changes: Any) -> HistoryWindows:
    cut = {"subsample": 2, "steps": 16, "regions": 1, "last_only": False, "region_before": False, "shortest": 16}
    with Histories(file) as histories:
        return HistoryWindows(histories, list(goals), Cut(**{**cut, **changes}), SHAPE)


def test_windows_are_every_nth_episode_one_after_another(file: Path) -> None:
    windows = windows_of(file)
    with Histories(file) as histories:
        history = histories.goal(0)
    stream = 0
    batch = windows.batch(range(len(windows)))
    for phase in (0, 1):
        # Six of twelve episodes of eight steps; a window of two begins at each of the first five.
        episodes = [slice(8 * (2 * i + phase), 8 * (2 * i + phase + 1)) for i in range(6)]
        actions = np.concatenate([history.actions[at, stream] for at in episodes])
        states = np.concatenate([history.states[at, stream] for at in episodes])
        for start in range(5):
            row, at = phase * 5 + start, slice(8 * start, 8 * start + 16)
            assert batch.actions[row].tolist() == actions[at].tolist()
            assert batch.steps.states[row].tolist() == states[at].tolist()
            assert batch.steps.before_actions[row].tolist() == [5, *actions[at][:-1].tolist()]
            assert batch.steps.before_dones[row].nonzero().flatten().tolist() == [8]
    assert bool(batch.targets.all()) and len(windows) == 2 * 6 * 10


def test_every_step_is_in_some_window(file: Path) -> None:
    for steps in (5, 8, 12, 40, 200):
        windows = windows_of(file, steps=steps)
        covered = np.zeros(windows.steps, bool)
        for begin, length in zip(windows._begins, windows._lengths, strict=True):
            covered[begin : begin + length] = True
        assert covered.all(), steps
        assert windows._lengths.max() <= steps


def test_a_region_before_is_there_but_at_the_beginning(file: Path) -> None:
    windows = windows_of(file, steps=8, regions=2, region_before=True)
    batch = windows.batch(range(6))
    assert batch.real[0].tolist() == [False] * 8 + [True] * 8
    assert bool(batch.real[1:].all())
    assert windows.target_count(0) == 8 and windows.target_count(1) == 16
    assert batch.steps.before_actions[0, 8] == 5 and batch.steps.before_actions[1, 8] != 5


def test_what_a_context_goes_on_from_is_trained_wherever_it_begins(file: Path) -> None:
    windows = windows_of(file, goals=[0], steps=24, shortest=16)
    assert windows._lengths[:5].tolist() == [24, 24, 24, 24, 16]
    assert windows._begins[:6].tolist() == [0, 8, 16, 24, 32, 48]


def test_contexts_that_move_on_within_an_episode_are_trained(tmp_path: Path) -> None:
    ends = [4, 6, 11, 13, 18, 22, 24]  # of episodes of two to five steps
    dones = np.isin(np.arange(24) + 1, ends)[:, None]
    room = make("darkroom", size=4, horizon=5)
    places, nothing = np.zeros((24, 1, 2), np.uint8), np.zeros((24, 1), np.uint8)
    write(tmp_path / "uneven.h5", room, {}, [(0, History(places, nothing, nothing, places, dones))])
    starts = {0, *ends[:-1]}
    whole = windows_of(tmp_path / "uneven.h5", goals=[0], subsample=1, steps=10, shortest=5)
    assert set(whole._begins.tolist()) == {start for start in starts | {0, 5, 10, 15, 20} if start <= 19}
    regions = windows_of(
        tmp_path / "uneven.h5", goals=[0], subsample=1, steps=7, shortest=14, regions=2, region_before=True
    )
    later = {start for start in starts | {7, 14, 21} if start >= 7}
    assert regions._begins.tolist() == [0, *(start - 7 for start in sorted(later))]


LAST = {"full": (1, False), "a region before": (2, True), "regions before": (3, False)}


@pytest.mark.parametrize("name", LAST)
def test_every_step_is_the_last_of_one_window_where_only_that_is_a_target(file: Path, name: str) -> None:
    regions, before = LAST[name]
    windows = windows_of(file, goals=[0], last_only=True, regions=regions, region_before=before, steps=10)
    with Histories(file) as histories:
        history = histories.goal(0)
    count = 6 * 8  # every second of twelve episodes of eight steps
    batch = windows.batch(range(count))
    assert len(windows) == windows.steps and windows.target_count(0) == 1
    assert batch.targets.sum(1).tolist() == [1] * count
    kept = [time for time in range(96) if time // 8 % 2 == 0]
    assert batch.actions[batch.targets].tolist() == history.actions[kept, 0].tolist()
    seen = batch.real.sum(1).tolist()
    if regions == 1:
        assert seen == [min(step + 1, 10) for step in range(count)]
    else:
        assert seen == [min(step // 10, regions - 1) * 10 + step % 10 + 1 for step in range(count)]
    places = batch.targets.int().argmax(1)
    if before:  # a region that is not there takes its room
        assert places.tolist() == [10 + step % 10 for step in range(count)]


def test_a_fingerprint_is_of_steps_and_cut(file: Path, tmp_path: Path) -> None:
    fingerprints = {
        windows_of(file).fingerprint,
        windows_of(file, subsample=3).fingerprint,
        windows_of(file, goals=(0, 4)).fingerprint,
        windows_of(write_histories(tmp_path / "other.h5", episodes=10)).fingerprint,
    }
    assert len(fingerprints) == 4
    assert windows_of(file).fingerprint == windows_of(file).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one_does(runs: Runs, file: Path, strategy: str) -> None:
    one = runs.trained(*on(file, "parallel.num_processes=1"), recipe=TINY)
    two = runs.trained(*on(file, "parallel.num_processes=2", f"parallel.strategy={strategy}"), recipe=TINY)
    assert len(column(one, "loss")) == 20
    assert column(one, "loss")[-1] < column(one, "loss")[0] - 0.1
    assert difference(column(two, "loss"), column(one, "loss")) < 1e-5
    assert column(two, "target_tokens") == column(one, "target_tokens")
    for name, value in events(one, "evaluate")[-1]["metrics"].items():
        assert events(two, "evaluate")[-1]["metrics"][name] == pytest.approx(value, abs=1e-5), name


COMPRESSED = "algorithm_distillation.context=compressed", "algorithm_distillation.context_length=8"


@pytest.mark.slow
@pytest.mark.parametrize("compression", slow_but("region", among=("region", "latents")))
def test_compressed_contexts_are_trained_in_two_processes(runs: Runs, file: Path, compression: str) -> None:
    settings = (*COMPRESSED, f"algorithm_distillation.compression={compression}", "train.max_steps=8")
    one = runs.trained(*on(file, *settings, "parallel.num_processes=1"), recipe=TINY)
    two = runs.trained(*on(file, *settings, "parallel.num_processes=2", "parallel.strategy=fsdp"), recipe=TINY)
    assert len(column(one, "loss")) == 8
    assert difference(column(two, "loss"), column(one, "loss")) < 1e-5


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(runs: Runs, file: Path) -> None:
    whole = runs.trained(*on(file, "parallel.num_processes=1"), recipe=TINY)
    started = runs.train(*on(file, "parallel.num_processes=1", "checkpoint.every=2"), recipe=TINY)
    started.wait_for_step(6)
    started.kill()
    assert started.run is not None
    runs.resumed(started.run)
    assert events(started.run, "start")[-1]["resumed_from"]
    assert column(started.run, "loss") == column(whole, "loss")


REFUSALS = {
    "no file": (("algorithm_distillation.histories=nowhere.h5",), ("nowhere.h5", "trainwright collect")),
    "another environment": (("algorithm_distillation.environment=darkroom-hard",), ("histories", "darkroom-hard")),
    "another size": (("algorithm_distillation.environment_options.size=5",), ("'size': 4", "'size': 5")),
    "an unknown environment": (("algorithm_distillation.environment=darkrom",), ("environment", "darkroom")),
    "tasks that overlap": (
        ("algorithm_distillation.train_tasks=[[0, 0], [1, 1]]", "algorithm_distillation.test_tasks=[[1, 1]]"),
        ("algorithm_distillation.test_tasks", "[1, 1]"),
    ),
    "a task twice": (("algorithm_distillation.test_tasks=[[1, 1], [0, 0], [1, 1]]",), ("test_tasks", "more than once")),
    "a task that is none": (("algorithm_distillation.test_tasks=[[9, 9]]",), ("test_tasks", "[9, 9]")),
    "more tasks than there are": (("algorithm_distillation.train_tasks=99",), ("train_tasks", "14")),
    "a data section": (("data.train=pydoc",), ("data", "algorithm_distillation.histories")),
    "latents of a full context": (("algorithm_distillation.latents=4",), ("latents", "context")),
    "heads that do not divide": (("algorithm_distillation.model.n_head=3",), ("n_head", "n_embd")),
    "a key that is none": (("algorithm_distillation.contxt=full",), ("algorithm_distillation.contxt", "context")),
    "prompts": (("evaluate.prompts=[hello]",), ("evaluate.prompts", "trial")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_request_is_refused(runs: Runs, file: Path, name: str) -> None:
    overrides, words = REFUSALS[name]
    fixed = on(file, "parallel.num_processes=1")
    ended = runs.train(*fixed, *overrides, recipe=TINY).wait()
    assert ended.code == 2, ended.stdout + ended.stderr
    for word in words:
        assert word in ended.stderr


@pytest.mark.slow
def test_a_context_of_less_than_an_episode_is_warned_of(runs: Runs, file: Path) -> None:
    settings = ("parallel.num_processes=1", "train.max_steps=1", "algorithm_distillation.context_length=4")
    run = runs.trained(*on(file, *settings), recipe=TINY)
    (notice,) = events(run, "notice")
    assert "context_length: 4 steps are less than an episode of 8" in notice["message"]


def test_histories_of_another_source_than_the_recipes_are_told_of() -> None:
    section = AlgorithmDistillationSection(source=SourceAlgorithmSection(name="q-learning", steps=400))
    made_by = section.source.algorithm
    for unknown in ({}, {"name": "scripted"}, made_by):
        assert explain_other_source(section, unknown) is None
    warning = explain_other_source(section, {**made_by, "steps": 200})
    assert warning is not None and "was made with steps 200, but the recipe has 400" in warning
    warning = explain_other_source(section, SourceAlgorithmSection().algorithm)
    assert warning is not None and "was made with name ppo, but the recipe has q-learning" in warning


def test_a_context_that_no_history_fills_is_warned_of(file: Path) -> None:
    assert explain_short_histories(windows_of(file, steps=48)) is None
    warning = explain_short_histories(windows_of(file, steps=49))
    assert warning is not None and "history (subsample 2) has 48 steps, but a window has 49" in warning


def world(rank: int = 0, size: int = 1, results: list[Any] | None = None) -> Any:
    """A rank that is told what the others found."""
    others = [] if results is None else results
    return SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), gather=lambda own: [own, *others])


def test_what_a_copy_does_does_not_depend_on_who_computes_it() -> None:
    environment = make("darkroom", size=4, horizon=8)
    module = HistoryObjective(HistoryModel(SHAPE, seed=3), LossWeights()).eval()
    tasks = environment.tasks()[:3]
    trial = Trial(episodes=5, copies=2, temperature=1.0)
    alone = evaluate_model(module, environment, tasks, trial, world())
    parts: list[Any] = []
    for rank in (1, 0):
        seen: list[Any] = []
        evaluate_model(module, environment, tasks, trial, SimpleNamespace(
            rank=rank, size=2, device=torch.device("cpu"), gather=lambda own, seen=seen: seen.append(own) or [own]
        ))  # fmt: skip
        parts += seen
    together = np.zeros((6, 5), np.float32)
    for which, found in parts:
        together[which] = found
    assert (together.reshape(3, 2, 5) == alone).all()
    assert (evaluate_model(module, environment, tasks, trial, world()) == alone).all()
    other = evaluate_model(module, environment, tasks, Trial(5, 2, 1.0, seed=1), world())
    assert not (other == alone).all()


def test_random_actions_find_less_than_the_optimum() -> None:
    environment = make("darkroom")
    tasks = environment.tasks()
    returns = evaluate_random(environment, tasks, copies=4, episodes=3)
    assert returns.shape == (81, 4, 3)
    assert 0.2 < returns.mean() < 2 < environment.optimal_return(tasks).mean()


def test_a_full_context_forgets_whole_episodes() -> None:
    shape = HistoryShape((9, 9), 5, 16, 1, 2, "transition", "rotary", steps=240)
    assert choose_context_stride(shape, 20) == 120 and choose_context_stride(shape, 100) == 100
    assert 1 <= choose_context_stride(shape, 300) <= 240


def test_intervals_hold_the_mean_of_other_copies() -> None:
    chance = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        mean, low, high = compute_interval(
            chance.normal([[1.0], [5.0], [9.0]], [[1.0], [2.0], [0.5]], (3, 16))[..., None]
        )
        held += low <= 5.0 <= high
        assert low < mean < high
    assert 175 <= held <= 199


def test_streams_of_fewer_episodes_count_by_those_they_have() -> None:
    nan = np.nan
    returns = np.array([[[1, 2, 3, nan], [1, 4, nan, nan]], [[5, 5, 5, 5], [nan] * 4]], np.float32)
    assert select_last_episodes(returns, 2)[:1].tolist() == [[[2, 3], [1, 4]]]
    mean, low, high = compute_interval(select_last_episodes(returns, 2))
    assert mean == (2.5 + 5) / 2 and low == high == mean  # of the second task there is one stream, which varies not
    assert np.isnan(compute_interval(returns[..., 3:])).all()


@pytest.mark.slow
def test_an_agent_is_tried_by_itself(runs: Runs, file: Path, tmp_path: Path) -> None:
    run = runs.trained(*on(file, "parallel.num_processes=1"), recipe=TINY)
    out = tmp_path / "tried"
    ended = runs.command("eval", str(run), "--copies", "3", "--num-processes", "2", "--out", str(out)).wait()
    assert ended.code == 0, ended.stderr
    with np.load(out / "eval_result.npz") as arrays:
        assert arrays["sampled"].shape == arrays["greedy"].shape == arrays["random"].shape == (2, 3, 4)
        assert arrays["source"].shape == (2, 6, 12)
        assert arrays["source"][..., -1].mean() > arrays["source"][..., 0].mean() + 2
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["sampled"]["last"]["low"] <= metrics["sampled"]["last"]["mean"] <= metrics["optimum"]
    assert (out / "returns.png").read_bytes().startswith(b"\x89PNG")
    assert "optimum" in ended.stdout
    refused = runs.command("eval", str(run), "--metrics", "f1").wait()
    assert refused.code == 2 and "--metrics" in refused.stderr


def test_commands_that_want_texts_refuse_an_agent(runs: Runs, file: Path) -> None:
    run = runs.trained(*on(file, "parallel.num_processes=1"), recipe=TINY)
    for asked in (
        ("generate", str(run), "--prompt", "hello"),
        ("export", str(run), "--out", "out"),
        ("data", "show", str(TINY)),
    ):
        ended = runs.command(*asked).wait()
        assert ended.code == 2 and "reads no texts" in ended.stderr, (asked, ended.stderr)


@pytest.mark.slow
def test_an_agent_is_a_directory_that_can_be_moved(runs: Runs, file: Path, tmp_path: Path) -> None:
    apart = ("algorithm_distillation.test_tasks=[[0, 0], [3, 1], [2, 2]]", "algorithm_distillation.trial.episodes=3")
    run = runs.trained(*on(file, "parallel.num_processes=1"), *apart, recipe=TINY)
    moved = tmp_path / "agent"
    shutil.copytree(run / "final", moved)
    asked = ("eval", str(moved), "--out", str(tmp_path / "tried"))
    ended = runs.command(*asked).wait()
    assert ended.code == 0, ended.stderr
    with np.load(tmp_path / "tried" / "eval_result.npz") as arrays:
        assert arrays["tasks"].tolist() == [[0, 0], [3, 1], [2, 2]] and arrays["sampled"].shape == (3, 2, 3)
    (moved / "model.safetensors").write_bytes(b"cut")
    ended = runs.command(*asked[:-1], str(tmp_path / "again")).wait()
    assert ended.code == 2 and str(moved) in ended.stderr


@pytest.mark.slow
def test_other_histories_are_refused_on_resuming(runs: Runs, file: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copy(file, tmp_path / "mine.h5"))
    started = runs.train(*on(mine, "parallel.num_processes=1", "checkpoint.every=2"), recipe=TINY)
    started.wait_for_step(4)
    started.kill()
    write_histories(mine, episodes=10)
    ended = runs.resume(started.run).wait()  # type: ignore[arg-type]
    assert ended.code == 2 and "algorithm_distillation.histories" in ended.stderr
