"""Run a trained model with frozen weights: it acts over episodes and learns only in its context.

A cache holds the keys and values of the context's tokens. When the context is full, it drops several steps at once and
recomputes the rest: keys depend on earlier tokens, so a cache without only the oldest tokens would differ from the
contexts seen in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from trainwright.parallel.world import World
from trainwright.tasks.algorithm_distillation.environments import Environment
from trainwright.tasks.algorithm_distillation.environments.base import mix_bits, sample_uniform
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape, KeyValueCache, Steps
from trainwright.tasks.algorithm_distillation.objective import HistoryObjective
from trainwright.utils import heartbeat

Returns = npt.NDArray[np.float32]
# Maps observations and previous actions of the copies to their next actions [n].
Policy = Callable[[Steps], torch.Tensor]
# The fraction of a full context to drop at once is 1 / _MOVES_BY. With smaller parts, the same few last episodes would
# always remain: agents without success in these repeat them, and the rest is recomputed more often.
_MOVES_BY = 2


@dataclass(frozen=True)
class Trial:
    """How to evaluate an agent on a task.

    Attributes:
        episodes: consecutive episodes, with the earlier ones in the context.
        copies: independent agents per task.
        temperature: divides the logits of actions before sampling; 0 selects the most likely action.
        greedy_after: episodes with sampled actions, after which the most likely action is selected. None: never.
        cached: False recomputes the whole context in every step.
    """

    episodes: int
    copies: int
    temperature: float
    seed: int = 0
    cached: bool = True
    greedy_after: int | None = None


def evaluate_model(
    module: HistoryObjective,
    environment: Environment,
    tasks: torch.Tensor,
    trial: Trial,
    world: World,
    *,
    together: bool = False,
    every_step: Callable[[], None] | None = None,
) -> Returns:
    """Evaluate the agent; return the returns of every episode [tasks, copies, episodes], float32, on every rank.

    The actions of a copy depend on the seed, its task and its index, but not on the rank that computes it.

    Args:
        tasks: ``[tasks, p]``.
        world: its ranks share the copies; all ranks must call.
        together: every rank runs the module equally often, regardless of its number of copies.
        every_step: called at every step of all copies.
    """
    rows = len(tasks) * trial.copies
    mine = list(range(world.rank, rows, world.size)) or ([0] if together else [])
    returns_of_episodes = np.zeros((0, trial.episodes), np.float32)
    if mine:
        shape = module.model.shape
        context = Context(
            shape, len(mine), moves_by=choose_context_stride(shape, environment.horizon), cached=trial.cached
        )
        seeds = _build_seeds(trial.seed, torch.tensor(mine))
        agents = Agents(context, seeds.to(world.device), trial.temperature, trial.greedy_after)

        def policy(step: Steps) -> torch.Tensor:
            if every_step is not None:
                every_step()
            return module(use=lambda model: agents.actions(model, step))

        own_tasks = tasks[torch.tensor(mine) // trial.copies]
        # Compiled blocks would be recompiled for every length of the context.
        with torch.compiler.set_stance("force_eager"):
            returns_of_episodes = play(policy, environment, own_tasks, trial.episodes, seeds, world.device, together)
    together_found = np.zeros((rows, trial.episodes), np.float32)
    for which, values in world.gather((mine, returns_of_episodes)):
        together_found[which] = values
    return together_found.reshape(len(tasks), trial.copies, trial.episodes)


def evaluate_random(
    environment: Environment, tasks: torch.Tensor, copies: int, episodes: int, seed: int = 0
) -> Returns:
    """Evaluate an agent with uniformly random actions as ``evaluate_model`` does; [tasks, copies, episodes]."""
    rows = torch.arange(len(tasks) * copies)
    seeds = _build_seeds(seed, rows)
    draws = _Draws(seeds)

    def policy(step: Steps) -> torch.Tensor:
        return (draws.next() * environment.action_count).long()

    returns_of_episodes = play(policy, environment, tasks[rows // copies], episodes, seeds, torch.device("cpu"))
    return returns_of_episodes.reshape(len(tasks), copies, episodes)


@torch.no_grad()
def play(
    policy: Policy,
    environment: Environment,
    tasks: torch.Tensor,
    episodes: int,
    seeds: torch.Tensor,
    device: torch.device,
    full_length: bool = False,
) -> Returns:
    """Run a policy on tasks [n, p], with one copy of the environment each; return the returns [n, episodes].

    Args:
        full_length: take as many steps as the longest possible episodes need, even if all end earlier.
    """
    copies = environment.vector(tasks, device, seeds)
    rows = torch.arange(len(tasks), device=device)
    returns = torch.zeros(len(tasks), episodes + 1, device=device)  # the last column collects later rewards
    episode = torch.zeros(len(tasks), dtype=torch.int64, device=device)
    states = copies.reset()
    step = build_first_step(states, environment.action_count)
    for _ in range(episodes * environment.horizon):
        actions = policy(step)
        states, rewards, dones = copies.step(actions)
        returns[rows, episode] += rewards
        episode = (episode + dones).clamp_(max=episodes)
        step = Steps(states[:, None], actions[:, None], rewards[:, None], dones[:, None])
        heartbeat.note_progress()
        if not full_length and bool((episode == episodes).all()):
            break
    return returns[:, :episodes].cpu().numpy()


def choose_context_stride(shape: HistoryShape, horizon: int) -> int:
    """Return how many steps a full context drops at once: whole episodes if it holds more than one."""
    if shape.steps <= horizon:
        return max(1, shape.steps // 2)
    episodes = max(1, shape.steps // (_MOVES_BY * horizon))
    # The rest then starts with an episode if all episodes have the maximum length.
    return episodes * horizon


context_stride = choose_context_stride  # the earlier name, which programs on agents import


class Agents:
    """How agents choose their actions, each in its own row of ``context``.

    Args:
        seeds: int64 [n], of the random numbers of each agent.
        temperature, greedy_after: as in ``Trial``; each agent counts its own episodes.
    """

    def __init__(
        self, context: Context, seeds: torch.Tensor, temperature: float = 1.0, greedy_after: int | None = None
    ) -> None:
        self._context = context
        self._draws = _Draws(seeds)
        self._temperature = temperature
        self._greedy_after = greedy_after
        self._episodes = torch.zeros(len(seeds), dtype=torch.int64, device=seeds.device)

    def actions(self, model: HistoryModel, step: Steps) -> torch.Tensor:
        """Return the next actions, int64 [n], after one more step [n, 1]."""
        logits = self._context.logits(model, step).float()
        uniforms = self._draws.next()
        self._episodes += step.before_dones[:, 0]
        likeliest = logits.argmax(-1)
        if self._temperature == 0:
            return likeliest
        up_to = (logits / self._temperature).softmax(-1).cumsum(-1)
        sampled_actions = (uniforms[:, None] * up_to[:, -1:] >= up_to).sum(-1).clamp_(max=logits.shape[-1] - 1)
        if self._greedy_after is None:
            return sampled_actions
        return torch.where(self._episodes >= self._greedy_after, likeliest, sampled_actions)


class _Draws:
    """Random numbers in [0, 1), one per copy and step, independent of those of the environment."""

    def __init__(self, seeds: torch.Tensor) -> None:
        self._seeds = mix_bits(mix_bits(seeds))
        self._count = 0

    def next(self) -> torch.Tensor:
        self._count += 1
        return sample_uniform(self._seeds, self._count)


def _build_seeds(seed: int, rows: torch.Tensor) -> torch.Tensor:
    return rows + (seed << 32)


def build_first_step(states: torch.Tensor, actions: int) -> Steps:
    """Return the step before which nothing happened, from first observations [n, k] and the number of actions."""
    count = len(states)
    return Steps(
        states[:, None],
        torch.full((count, 1), actions, device=states.device),
        torch.zeros(count, 1, device=states.device),
        torch.zeros(count, 1, dtype=torch.bool, device=states.device),
    )


def mean_over_last(returns: Returns, episodes: int) -> Returns:
    """Return the mean return of the last episodes of every copy [...]."""
    return returns[..., -episodes:].mean(-1)


class Context:
    """The contexts of ``count`` parallel copies of a model.

    Args:
        moves_by: steps to drop at once when a context is full; best a number of whole episodes.
        cached: False recomputes the whole context in every step, for measurements and tests.
    """

    def __init__(self, shape: HistoryShape, count: int, *, moves_by: int, cached: bool = True) -> None:
        assert 1 <= moves_by <= shape.steps
        self._shape = shape
        self._count = count
        self._moves_by = moves_by
        self._cache = KeyValueCache(shape.tokens) if cached else None
        self._steps: Steps | None = None  # steps in the context; in a compressed one, those of this region
        self._before: torch.Tensor | None = None  # tokens before them
        self._has_started = False

    @property
    def held(self) -> int:
        """Return the number of steps in the context; in a compressed one, of this region."""
        return 0 if self._steps is None else self._steps.length

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens allocated in the cache, which is constant."""
        return 0 if self._cache is None else self._cache.free_positions

    def logits(self, model: HistoryModel, step: Steps) -> torch.Tensor:
        """Return the logits of actions [count, actions] after one more step [count, 1]."""
        if not self._has_started:
            self._has_started = True
            self._begin(model)
        elif self.held == self._shape.steps:
            self._move_on(model)
        self._steps = step if self._steps is None else _join_steps(self._steps, step)
        if self._cache is not None:
            hidden = model.decode_tokens(model.tokens(step), self._cache)
        else:
            hidden = model.decode_tokens(self._tokens(model))
        return model.act(hidden[:, -1])

    def _begin(self, model: HistoryModel) -> None:
        if self._shape.latents:
            self._prefill_cache(model, model.build_first_memory(self._count), None)
        elif self._shape.regions == 2:
            self._prefill_cache(model, self._enclose_in_marks(model, model.build_missing_region(self._count)), None)

    def _move_on(self, model: HistoryModel) -> None:
        """Free space in a full context."""
        assert self._steps is not None
        shape = self._shape
        if shape.latents:
            queries = model.build_memory_questions(self._count)
            if self._cache is not None:
                hidden = model.decode_tokens(queries, self._cache)
            else:
                hidden = model.decode_tokens(torch.cat([self._tokens(model), queries], 1))
            self._prefill_cache(model, model.compute_memory(hidden[:, -shape.latents :]), None)
        elif shape.regions == 2:
            region = model.tokens(self._steps.remove_past(shape.actions))
            self._prefill_cache(model, self._enclose_in_marks(model, region), None)
        else:
            recent = self._steps.part(self._moves_by, shape.steps)
            self._prefill_cache(model, None, recent.remove_past(shape.actions) if recent.length else None)

    def _enclose_in_marks(self, model: HistoryModel, region: torch.Tensor) -> torch.Tensor:
        opens, closes = (model.mark(self._count, closes=closes) for closes in (False, True))
        return torch.cat([opens, region, closes], 1)

    def _prefill_cache(self, model: HistoryModel, before: torch.Tensor | None, steps: Steps | None) -> None:
        self._before, self._steps = before, steps
        if self._cache is None:
            return
        self._cache.length = 0
        if before is not None or steps is not None:
            model.decode_tokens(self._tokens(model), self._cache)

    def _tokens(self, model: HistoryModel) -> torch.Tensor:
        parts = [] if self._before is None else [self._before]
        if self._steps is not None:
            parts.append(model.tokens(self._steps))
        return torch.cat(parts, 1)


def _join_steps(first: Steps, second: Steps) -> Steps:
    return Steps(*(torch.cat([getattr(first, f.name), getattr(second, f.name)], 1) for f in fields(Steps)))
