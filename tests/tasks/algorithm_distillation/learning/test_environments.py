"""Many copies at once do what one copy in plain Python does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tasks.algorithm_distillation.learning.plain_environments import ROOMS
from trainwright.errors import RequestError
from trainwright.recipe.registries import ENVIRONMENTS
from trainwright.tasks.algorithm_distillation.environments import Environment, make
from trainwright.tasks.algorithm_distillation.environments.base import sample_uniform
from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection

LAKE = "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv"
LAKES: dict[str, Any] = {
    "entry_point": LAKE,
    "tasks": [{"desc": ["SFF", "FHF", "FFG"], "is_slippery": False}, {"desc": ["SFH", "FFF", "GFF"]}],
    "horizon": 12,
}


def some_tasks(environment: Environment, count: int) -> torch.Tensor:
    tasks = environment.tasks()
    chosen = torch.randperm(len(tasks), generator=torch.Generator().manual_seed(0))[:count]
    return tasks[chosen]


@pytest.mark.parametrize("name", ROOMS)
@pytest.mark.parametrize("options", [{}, {"size": 3, "horizon": 7}], ids=["default", "small"])
def test_steps_as_one_copy_does(name: str, options: dict[str, int]) -> None:
    environment = make(name, **options)
    tasks = some_tasks(environment, 40)
    copies = environment.vector(tasks)
    plain = [ROOMS[name](task.tolist(), **options) for task in tasks]
    assert copies.reset().tolist() == [one.reset() for one in plain]
    generator = torch.Generator().manual_seed(1)
    rewarded = 0.0
    for _ in range(3 * environment.horizon + 2):
        actions = torch.randint(environment.action_count, (len(tasks),), generator=generator)
        observations, rewards, dones = copies.step(actions)
        stepped = [one.step(action) for one, action in zip(plain, actions.tolist(), strict=True)]
        assert copies.final_observations.tolist() == [place for place, _, _ in stepped]
        assert rewards.tolist() == [reward for _, reward, _ in stepped]
        assert dones.tolist() == [done for _, _, done in stepped]
        now = [one.reset() if done else place for one, (place, _, done) in zip(plain, stepped, strict=True)]
        assert observations.tolist() == now
        rewarded += float(rewards.sum())
        states = copies.states()
        assert int(states.min()) >= 0 and int(states.max()) < environment.state_count
    assert rewarded > 0 or name == "darkroom-permuted"


@pytest.mark.parametrize("name", ["darkroom", "darkroom-hard", "key-to-door", "darkroom-permuted"])
def test_optimal_return_is_what_exhaustive_search_finds(name: str) -> None:
    options = {"size": 3, "horizon": 4}
    environment = make(name, **options)
    tasks = environment.tasks()[::7]
    best = []
    for task in tasks:
        # All sequences of actions at once: a copy for each.
        sequences = torch.cartesian_prod(*[torch.arange(5)] * 4)
        copies = environment.vector(task.repeat(len(sequences), 1))
        copies.reset()
        best.append(sum(copies.step(sequences[:, step])[1] for step in range(4)).max())  # type: ignore[union-attr]
    assert environment.optimal_return(tasks).tolist() == [float(one) for one in best]


def test_seed_0_holds_back_the_goals_of_the_reference() -> None:
    environment = make("darkroom")
    train, test = environment.split(0)
    assert test.tolist() == [[4, 2], [5, 6], [6, 8], [7, 2], [3, 6], [0, 5], [5, 8], [5, 4]]
    assert float(environment.optimal_return(test).mean()) == 17.25
    assert len(train) == 73 and not {tuple(one) for one in train.tolist()} & {tuple(one) for one in test.tolist()}
    assert environment.split(1)[1].tolist() != test.tolist()


def test_counts_of_tasks() -> None:
    counts = {name: len(make(name).tasks()) for name in ("darkroom", "darkroom-permuted", "key-to-door", "bandit")}
    assert counts == {"darkroom": 81, "darkroom-permuted": 120, "key-to-door": 6561, "bandit": 1000}


def test_reset_of_some_copies() -> None:
    copies = make("darkroom").vector(torch.tensor([[0, 0], [8, 8]]))
    copies.reset()
    copies.step(torch.tensor([0, 0]))
    assert copies.reset(torch.tensor([True, False])).tolist() == [[4, 4], [5, 4]]
    for _ in range(19):
        _, _, dones = copies.step(torch.tensor([4, 4]))
    assert dones.tolist() == [False, True]


@pytest.mark.parametrize("rewards", ["bernoulli", "gaussian"])
def test_arms_pay_their_means(rewards: str) -> None:
    environment = make("bandit", arms=3, count=5, horizon=1000, rewards=rewards)
    task = environment.tasks()[0]
    copies = environment.vector(task.repeat(3000, 1), seed=3)
    copies.reset()
    arms = torch.arange(3000) % 3
    paid = torch.stack([copies.step(arms)[1] for _ in range(50)])
    means = torch.stack([paid[:, arms == arm].mean() for arm in range(3)])
    assert torch.allclose(means, task, atol=0.01)
    expected = task * (1 - task) if rewards == "bernoulli" else torch.full((3,), 0.09)
    spread = torch.stack([paid[:, arms == arm].var() for arm in range(3)])
    assert torch.allclose(spread, expected, atol=0.01)
    assert float(environment.optimal_return(task[None])) == pytest.approx(1000 * float(task.max()))


def test_what_is_random_depends_on_the_copy_alone() -> None:
    environment = make("bandit", arms=2)
    tasks = environment.tasks()[:6]
    seeds = torch.arange(6) + 100
    together, alone = environment.vector(tasks, seed=seeds), environment.vector(tasks[4:5], seed=seeds[4:5])
    for _ in range(30):
        actions = torch.zeros(6, dtype=torch.int64)
        assert together.step(actions)[1][4] == alone.step(actions[:1])[1][0]


def test_numbers_are_even_and_do_not_go_together() -> None:
    seeds = torch.arange(50_000)
    first, second = sample_uniform(seeds, 3).numpy(), sample_uniform(seeds, 4).numpy()
    assert first.min() >= 0 and first.max() < 1
    counts = np.histogram(first, bins=50, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 86  # the 99.9th percentile of chi-squared with 49 degrees of freedom
    for other in (second, np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02


def test_a_users_environment() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    environment = make("gymnasium", **LAKES)
    assert (environment.action_count, environment.observation_counts, environment.state_count) == (4, (9,), 9)
    copies = environment.vector(environment.tasks(), seed=5)
    plain = [gymnasium.make("FrozenLake-v1", **keywords, max_episode_steps=12) for keywords in LAKES["tasks"]]
    first = [one.reset(seed=5 * 2**32 + number & 0x7FFFFFFF)[0] for number, one in enumerate(plain)]
    assert copies.reset()[:, 0].tolist() == first
    generator = np.random.default_rng(0)
    ends = 0
    for _ in range(120):
        actions = generator.integers(4, size=2)
        observations, rewards, dones = copies.step(torch.as_tensor(actions))
        for number, one in enumerate(plain):
            seen, reward, terminated, truncated, _ = one.step(int(actions[number]))
            assert int(copies.final_observations[number, 0]) == seen
            assert (float(rewards[number]), bool(dones[number])) == (reward, terminated or truncated)
            ends += terminated
            if terminated or truncated:
                seen = one.reset()[0]
            assert int(observations[number, 0]) == seen
    assert ends > 3


def test_a_users_environment_of_early_ends_and_horizon() -> None:
    pytest.importorskip("gymnasium")
    environment = make("gymnasium", **LAKES | {"horizon": 3})
    copies = environment.vector(environment.tasks()[:1])
    copies.reset()
    down, right = 1, 2
    for action, done, ended in ((right, False, False), (down, True, True), (0, False, False)):
        _, _, dones = copies.step(torch.tensor([action]))
        assert (bool(dones[0]), bool(copies.ended[0])) == (done, ended)
    copies.step(torch.tensor([0]))
    _, _, dones = copies.step(torch.tensor([0]))
    assert (bool(dones[0]), bool(copies.ended[0])) == (True, False)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("darkrom", {}, "did you mean darkroom"),
        ("chess", {}, "unknown environment 'chess'; choose from darkroom, "),
        ("darkroom", {"sise": 3}, "has no option sise; it has size, horizon"),
        ("darkroom", {"size": "nine"}, "size is a whole number of at least 1, not nine"),
        ("key-to-door", {"horizon": 0}, "horizon is a whole number of at least 1, not 0"),
        ("bandit", {"arms": 2.5}, "arms is a whole number of at least 1, not 2.5"),
        ("bandit", {"rewards": "always"}, "bernoulli or gaussian, not always"),
        ("bandit", {"noise": 1.0}, "noise has no effect"),
        ("gymnasium", {"entry_point": LAKE}, "needs the option tasks"),
        ("gymnasium", LAKES | {"entry_point": "no_such_module:Lake"}, "cannot be imported: No module named"),
        ("gymnasium", LAKES | {"entry_point": LAKE + "x"}, "cannot be imported: module"),
        ("gymnasium", LAKES | {"entry_point": "FrozenLake"}, "expected package.module:Name"),
        ("gymnasium", LAKES | {"tasks": [{"depth": 3}]}, "cannot be created with"),
        ("bandit", {"seed": "first"}, "seed is a whole number from 0 to below 2**31, not first"),
        ("bandit", {"seed": 2**31}, "seed is a whole number from 0"),
        ("bandit", {"rewards": "gaussian", "noise": -1}, "noise is a number of at least 0, not -1"),
        ("gymnasium", LAKES | {"tasks": []}, "tasks is empty"),
        ("gymnasium", LAKES | {"tasks": {"size": 3}}, "tasks is a list of the keywords of each task"),
        ("gymnasium", LAKES | {"tasks": [3]}, "tasks is a list of the keywords of each task"),
        ("gymnasium", LAKES | {"optimal_returns": 1.0}, "optimal_returns is a list of a number for each task, not 1.0"),
        ("gymnasium", LAKES | {"entry_point": "os:getcwd", "tasks": [{}]}, "is of Python's standard library"),
        ("gymnasium", LAKES | {"entry_point": "pytest:exit", "tasks": [{}]}, "is not a subclass of gymnasium.Env"),
        ("torch:nn.Linear", {}, "lacks tasks, describe"),
        ("gymnasium", LAKES | {"optimal_returns": [1.0]}, "1 optimal_returns for 2 tasks"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    if name == "gymnasium":
        pytest.importorskip("gymnasium")
    with pytest.raises(RequestError, match=re.escape(said)):
        make(name, **options)


MAZE = """\
import gymnasium
from gymnasium import spaces

class Maze(gymnasium.Env):
    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(2)

    def __init__(self, ends):
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return self.place, {}

    def step(self, action):
        if self.ends == "badly":
            raise ValueError("a wall fell down")
        self.place += 2
        return self.place, 1.0, False, False, {}
"""


def test_a_users_environment_in_the_directory_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "a_maze_of_mine.py").write_text(MAZE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
    environment = make(
        "gymnasium", entry_point="a_maze_of_mine:Maze", horizon=9, tasks=[{"ends": "well"}, {"ends": "badly"}]
    )
    copies = environment.vector(environment.tasks())
    copies.reset()
    with pytest.raises(RequestError, match=r"step\(1\) of a_maze_of_mine:Maze with {'ends': 'badly'}: .* a wall fell"):
        copies.step(torch.tensor([0, 1]))
    copies = environment.vector(environment.tasks()[:1])
    copies.reset()
    copies.step(torch.tensor([1]))
    with pytest.raises(RequestError, match="the observation 4 is outside the environment's observation_space"):
        copies.step(torch.tensor([1]))


def test_every_environment_is_registered_with_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from trainwright.tasks.algorithm_distillation.registered import IDS

    assert set(IDS.values()) == set(ENVIRONMENTS.names()) - {"gymnasium"}
    for name, environment in IDS.items():
        family = make(environment)
        copies = gymnasium.make_vec(f"trainwright.tasks.algorithm_distillation.registered:{name}", num_envs=5)
        direct = family.vector(family.tasks()[:5])
        copies.action_space.seed(0)
        observations, _ = copies.reset(seed=0)
        assert (observations == direct.reset().numpy()).all()
        for _ in range(family.horizon + 1):
            actions = copies.action_space.sample()
            observations, rewards, terminated, truncated, infos = copies.step(actions)
            expected = direct.step(torch.as_tensor(actions))
            assert copies.observation_space.contains(observations)
            assert (observations == expected[0].numpy()).all() and (rewards == expected[1].numpy()).all()
            assert (truncated == expected[2].numpy()).all() and not terminated.any()
            assert ("final_obs" in infos) == bool(truncated.any())
            if truncated.any():
                assert (infos["final_obs"] == direct.final_observations.numpy()).all()


def test_an_environment_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = "from trainwright.tasks.algorithm_distillation.environments.grid import Darkroom\n"
    (tmp_path / "a_room_of_mine.py").write_text(f"{base}class Room(Darkroom): pass\nclass Nothing: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
    section = AlgorithmDistillationSection(environment="a_room_of_mine:Room", environment_options={"size": 3})
    made = make(section.environment, **section.environment_options)
    assert (made.name, len(made.tasks())) == ("a_room_of_mine:Room", 9)
    with pytest.raises(RequestError, match="environment a_room_of_mine:Nothing lacks tasks, describe, optimal_return"):
        make("a_room_of_mine:Nothing")


PENDULUM: dict[str, Any] = {
    "entry_point": "gymnasium.envs.classic_control.pendulum:PendulumEnv",
    "tasks": [{"g": 2.0}, {"g": 10.0}],
    "horizon": 20,
}
CART: dict[str, Any] = {
    "entry_point": "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    "tasks": [{}],
    "horizon": 30,
}
CART_BOUNDS = [[-2.4, 2.4], [-3, 3], [-0.21, 0.21], [-3, 3]]


def test_real_numbers_are_divided_into_bins() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    environment = make("gymnasium", **PENDULUM, action_bins=5, observation_bins=16)
    assert (environment.action_count, environment.observation_counts) == (5, (16, 16, 16))
    assert environment.options["action_bins"] == 5, "files of histories name it"
    copies = environment.vector(environment.tasks(), seed=5)
    plain = [gymnasium.make("Pendulum-v1", g=task["g"], max_episode_steps=20) for task in PENDULUM["tasks"]]
    first = [one.reset(seed=5 * 2**32 + number & 0x7FFFFFFF)[0] for number, one in enumerate(plain)]
    low, width = np.array([-1, -1, -8]), np.array([2, 2, 16]) / 16

    def bins(observations: list[Any]) -> list[Any]:
        return [np.minimum(np.floor((seen - low) / width), 15).tolist() for seen in observations]

    assert copies.reset().tolist() == bins(first)
    generator = np.random.default_rng(0)
    for _ in range(45):
        actions = generator.integers(5, size=2)
        _, rewards, dones = copies.step(torch.as_tensor(actions))
        stepped = [one.step(np.array([action - 2.0], np.float32)) for one, action in zip(plain, actions, strict=True)]
        assert copies.final_observations.tolist() == bins([seen for seen, *_ in stepped])
        assert rewards.tolist() == pytest.approx([float(reward) for _, reward, *_ in stepped])
        assert dones.tolist() == [truncated for *_, truncated, _ in stepped]
        for one, done in zip(plain, dones.tolist(), strict=True):
            if done:
                one.reset()


def test_observations_without_bounds_are_given_some() -> None:
    pytest.importorskip("gymnasium")
    environment = make("gymnasium", **CART, observation_bounds=CART_BOUNDS, observation_bins=10)
    assert (environment.action_count, environment.observation_counts) == (2, (10,) * 4)
    copies = environment.vector(environment.tasks())
    copies.reset()
    fastest = 0
    for _ in range(30):
        copies.step(torch.ones(1, dtype=torch.int64))
        fastest = max(fastest, int(copies.final_observations[0, 1]))
    assert fastest >= 8, "the cart is pushed to one side all the time"


def test_the_pendulum_with_a_target_rewards_standing_there() -> None:
    pytest.importorskip("gymnasium")
    from trainwright.tasks.algorithm_distillation.environments.pendulum import TargetPendulum

    class Balanced(TargetPendulum):
        """Starts at rest at an angle."""

        def start(self, angle: float) -> float:
            self.reset(seed=0)
            self.state = np.array([angle, 0.0])
            return self.step(np.zeros(1))[1]

    one = Balanced(target=1.0)
    assert one.start(1.0) == 0.0
    assert one.start(1.5) == pytest.approx(-0.25 / np.pi**2)
    assert one.start(1.0 - np.pi) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CART, "without bounds; set observation_bounds to [[lowest, highest], ...] of its 4 numbers"),
        (CART | {"observation_bounds": [[0, 1]]}, "of the 4 numbers of an observation of"),
        (CART | {"observation_bounds": [[1, 0]] * 4}, "observation_bounds is [[lowest, highest], ...]"),
        (CART | {"observation_bounds": CART_BOUNDS, "action_bins": 3}, "action_bins has no effect: the actions are"),
        (LAKES | {"observation_bins": 3}, "observation_bins has no effect: the observations are Discrete(9)"),
        (PENDULUM | {"action_bins": 1}, "action_bins is a whole number from 2 to 1,024, not 1"),
        (PENDULUM | {"observation_bins": 2.5}, "observation_bins is a whole number from 2 to 1,024, not 2.5"),
    ],
)
def test_bins_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(RequestError, match=re.escape(message)):
        make("gymnasium", **options)
