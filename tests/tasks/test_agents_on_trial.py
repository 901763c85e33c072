"""What an agent is shown of its past, which tasks it is trained and tried on, and what its trials come to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.learners import write_histories
from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.evaluation import average_best_copies
from trainwright.tasks.algorithm_distillation.histories import Histories
from trainwright.tasks.algorithm_distillation.in_context import Agents, Context, Trial, evaluate_model, play
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape, Steps
from trainwright.tasks.algorithm_distillation.objective import HistoryObjective, LossWeights
from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection
from trainwright.tasks.algorithm_distillation.task import find_goals
from trainwright.tasks.algorithm_distillation.windows import Cut, HistoryWindows
from trainwright.utils.heartbeat import Use

SHAPE = HistoryShape((4, 4), 5, 16, 1, 2, "transition", "rotary", steps=16)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_histories(tmp_path_factory.mktemp("histories") / "tiny.h5")


@pytest.mark.parametrize(("regions", "region_before"), [(1, False), (2, True)])
def test_a_step_shows_what_was_done_before_it_and_nothing_of_its_own(
    file: Path, regions: int, region_before: bool
) -> None:
    cut = Cut(subsample=1, steps=24, regions=regions, last_only=False, region_before=region_before, shortest=8)
    with Histories(file) as histories:
        windows = HistoryWindows(histories, [0, 3], cut, SHAPE)
    batch = windows.batch(range(len(windows)))
    lengths = {windows.length(row) for row in range(len(windows))}
    assert len(lengths) > 1, "some rows are filled up"
    ends = 0
    for row in range(len(windows)):
        begin, length = int(windows._begins[row]), windows.length(row)
        of = {name: values[begin : begin + length] for name, values in windows._steps.items()}
        real = batch.real[row].nonzero().flatten()
        assert real.tolist() == list(range(int(real[0]), int(real[0]) + length))
        assert batch.targets[row].tolist() == batch.real[row].tolist()
        assert batch.actions[row][real].tolist() == of["actions"].tolist()
        assert batch.steps.states[row][real].tolist() == of["states"].tolist()
        assert batch.steps.before_actions[row][real].tolist() == [5, *of["actions"][:-1].tolist()]
        assert batch.steps.before_rewards[row][real].tolist() == [0.0, *of["rewards"][:-1].tolist()]
        assert batch.steps.before_dones[row][real].tolist() == [False, *of["dones"][:-1].tolist()]
        ends += int(of["dones"].sum())
    assert ends and batch.rewards.any()


@pytest.mark.parametrize("train_tasks", [None, 3])
def test_no_task_that_an_agent_is_tried_on_is_trained_on(file: Path, train_tasks: int | None) -> None:
    environment = make("darkroom", size=4, horizon=8)
    given = environment.tasks()[[1, 6, 9]]
    section = AlgorithmDistillationSection.model_validate(
        {"histories": str(file), "train_tasks": train_tasks, "test_tasks": given.tolist()}
    )
    with Histories(file) as histories:
        goals = find_goals(section, environment, histories)
    trained = {tuple(task) for task in goals.train_tasks.tolist()}
    assert not trained & {tuple(task) for task in given.tolist()}
    assert goals.tried.tolist() == given.tolist()
    assert goals.held_out == [1, 6, 9]
    assert len(goals.train) == (train_tasks or 13)
    assert not set(goals.train) & set(goals.held_out)


def test_every_step_of_a_trial_is_progress(marks: list[Use]) -> None:
    environment = make("darkroom", size=4, horizon=5)
    tasks, still = environment.tasks(), torch.zeros(16, dtype=torch.int64)
    play(lambda step: still, environment, tasks, 3, torch.arange(16), torch.device("cpu"), full_length=True)
    assert len(marks) == 15


def test_returns_are_those_of_the_episode_in_which_they_were_had() -> None:
    environment = make("darkroom", size=4, horizon=5)
    tasks, seeds = environment.tasks(), torch.arange(16)
    walks = torch.randint(environment.action_count, (15, 16), generator=torch.Generator().manual_seed(0))
    left = iter(walks)
    found = play(lambda step: next(left), environment, tasks, 3, seeds, torch.device("cpu"))
    copies = environment.vector(tasks, "cpu", seeds)
    copies.reset()
    rewards = torch.stack([copies.step(actions)[1] for actions in walks]).view(3, 5, 16)
    assert rewards[:, -1].any(), "some are had with the last step of an episode"
    assert found.tolist() == rewards.sum(1).T.tolist()


def test_an_agent_that_is_all_but_cold_is_greedy() -> None:
    environment = make("darkroom", size=4, horizon=8)
    module = HistoryObjective(HistoryModel(SHAPE, seed=3), LossWeights()).eval()
    alone: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), gather=lambda own: [own])
    tasks = environment.tasks()[:8]
    cold, greedy, warm = (
        evaluate_model(module, environment, tasks, Trial(4, 2, temperature), alone) for temperature in (1e-6, 0.0, 1.0)
    )
    assert np.array_equal(cold, greedy)
    assert not np.array_equal(warm, greedy)


def test_an_agent_samples_at_first_and_is_greedy_after_its_own_episodes() -> None:
    module = HistoryModel(SHAPE, seed=3).eval()
    seeds, generator = torch.arange(6), torch.Generator().manual_seed(0)
    contexts = [Context(SHAPE, 6, moves_by=8) for _ in range(3)]
    sampling, greedy = Agents(contexts[0], seeds, 1.0), Agents(contexts[1], seeds, 0.0)
    mixed = Agents(contexts[2], seeds, 1.0, greedy_after=2)
    episodes = torch.zeros(6, dtype=torch.int64)
    differ = 0
    for _ in range(40):
        step = Steps(
            torch.randint(4, (6, 1, 2), generator=generator),
            torch.randint(5, (6, 1), generator=generator),
            torch.rand(6, 1, generator=generator),
            torch.rand(6, 1, generator=generator) < 0.1,
        )
        episodes += step.before_dones[:, 0]
        with torch.no_grad():
            drawn, likeliest, chosen = (agents.actions(module, step) for agents in (sampling, greedy, mixed))
        assert chosen.tolist() == torch.where(episodes < 2, drawn, likeliest).tolist()
        differ += int((drawn != likeliest).sum())
    assert differ and int((episodes >= 2).sum())


def test_the_best_copy_is_chosen_by_other_episodes_than_it_is_measured_on() -> None:
    returns = np.array([[[9, 1, 1, 2, 2], [0, 3, 5, 1, 0], [0, 0, 0, 8, 8]]], np.float32)
    chosen = average_best_copies(returns, 2)
    assert chosen is not None and chosen.tolist() == [0.5]
    assert average_best_copies(returns, 3) is None and average_best_copies(returns[:, :1], 2) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_actions_are_learnt_with_the_smoothing_that_is_asked_for(file: Path, smoothing: float) -> None:
    cut = Cut(subsample=1, steps=16, regions=1, last_only=False, region_before=False, shortest=16)
    with Histories(file) as histories:
        batch = HistoryWindows(histories, [0], cut, SHAPE).batch([0, 3])
    objective = HistoryObjective(HistoryModel(SHAPE, seed=3), LossWeights(label_smoothing=smoothing)).eval()
    with torch.no_grad():
        total, action_loss, correct, count, *_ = objective(batch).tolist()
        hidden = objective.model.select_at_steps(objective.model.decode_tokens(objective.model.tokens(batch.steps)))
        logits = objective.model.act(hidden[batch.targets])
    actions = batch.actions[batch.targets]
    expected = torch.nn.functional.cross_entropy(logits, actions, label_smoothing=smoothing, reduction="sum")
    assert total == action_loss == pytest.approx(expected.item(), rel=1e-5)
    assert (correct, count) == (int((logits.argmax(-1) == actions).sum()), len(actions))
