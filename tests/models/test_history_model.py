"""Models of histories: what they may see, and that acting with a cache is acting without one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from trainwright.tasks.algorithm_distillation.in_context import Context
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape, Steps
from trainwright.tasks.algorithm_distillation.objective import SUMS, HistoryBatch, HistoryObjective, LossWeights

PLAIN = HistoryShape(
    observations=(5, 5), actions=4, width=32, layers=2, heads=4, layout="transition", positions="rotary", steps=12
)
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "parts": {"layout": "parts"},
    "learned positions": {"positions": "learned"},
    "parts, learned positions": {"layout": "parts", "positions": "learned"},
    "a region before": {"regions": 2, "steps": 6},
    "a region before, in parts": {"regions": 2, "steps": 6, "layout": "parts"},
    "latents": {"latents": 3, "steps": 6},
    "latents, learned positions": {"latents": 3, "steps": 6, "positions": "learned"},
}


def lived(count: int, length: int, seed: int = 0) -> Steps:
    """Steps at random, from the beginning of a history; episodes of 5."""
    chance = torch.Generator().manual_seed(seed)
    actions = torch.randint(0, 4, (count, length), generator=chance)
    actions[:, 0] = 4
    rewards = torch.rand(count, length, generator=chance)
    rewards[:, 0] = 0
    dones = (torch.arange(length) % 5 == 0) & (torch.arange(length) > 0)
    return Steps(torch.randint(0, 5, (count, length, 2), generator=chance), actions, rewards, dones.expand(count, -1))


def model_of(**changes: Any) -> HistoryModel:
    """With weights large enough that what a model sees shows in what it says."""
    model = HistoryModel(replace(PLAIN, **changes), seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def batch_of(steps: Steps, absent: int = 0) -> HistoryBatch:
    real = torch.arange(steps.length).expand(len(steps.states), -1) >= absent
    chance = torch.Generator().manual_seed(5)
    actions = torch.randint(0, 4, steps.before_actions.shape, generator=chance)
    return HistoryBatch(steps, actions, steps.before_rewards, steps.states, real, real)


@torch.no_grad()
def acted(model: HistoryModel, steps: Steps, *, moves_by: int, cached: bool) -> torch.Tensor:
    """Logits [n, t, actions] of a context that sees one step after another."""
    context = Context(model.shape, len(steps.states), moves_by=moves_by, cached=cached)
    return torch.stack([context.logits(model, steps.part(t, t + 1)) for t in range(steps.length)], 1)


@pytest.mark.parametrize("name", SHAPES)
def test_acting_with_a_cache_is_acting_without(name: str) -> None:
    model = model_of(**SHAPES[name])
    steps = lived(3, 40)
    with_cache, without = (acted(model, steps, moves_by=4, cached=cached) for cached in (True, False))
    assert torch.allclose(with_cache, without, atol=1e-4)
    assert torch.equal(with_cache.argmax(-1), without.argmax(-1))
    assert with_cache.std() > 0.1


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_trained_is_what_acts(name: str) -> None:
    """The loss of a window is that of the context's own logits, over as many regions as a window has."""
    model = model_of(**SHAPES[name])
    shape = model.shape
    steps = lived(2, 3 * shape.steps if shape.latents else shape.steps)
    batch = batch_of(steps)
    if shape.regions == 2:  # the first window of a history: no region before
        filled = [torch.cat([getattr(steps, field.name)] * 2, 1) for field in fields(Steps)]
        batch = batch_of(Steps(*filled), absent=shape.steps)
    logits = acted(model, steps, moves_by=1, cached=True)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.actions[:, -steps.length :].flatten(), reduction="sum"
    )
    sums = dict(zip(SUMS, HistoryObjective(model, LossWeights())(batch).tolist(), strict=True))
    assert sums["total"] == pytest.approx(expected.item(), rel=1e-5)
    assert sums["actions"] == logits.shape[0] * logits.shape[1]


def test_a_region_and_the_one_before_are_what_acts_in_them() -> None:
    model = model_of(regions=2, steps=6)
    steps = lived(2, 12)
    hidden = acted(model, steps, moves_by=1, cached=True)[:, 6:]
    batch = batch_of(steps.remove_past(4))
    later = replace(batch, targets=batch.real & (torch.arange(12) >= 6))
    expected = torch.nn.functional.cross_entropy(hidden.flatten(0, 1), batch.actions[:, 6:].flatten(), reduction="sum")
    assert HistoryObjective(model, LossWeights())(later)[0].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_no_step_sees_a_later_one(name: str) -> None:
    model = model_of(**SHAPES[name])
    steps = lived(2, 12)
    other = lived(2, 12, seed=9)
    changed = Steps(
        *(
            torch.cat([getattr(steps, field.name)[:, :8], getattr(other, field.name)[:, 8:]], 1)
            for field in fields(Steps)
        )
    )
    objective = HistoryObjective(model, LossWeights())
    early = replace(batch_of(steps), targets=torch.arange(12).expand(2, -1) < 8)
    late = replace(early, targets=~early.targets)
    assert torch.allclose(objective(early)[0], objective(replace(early, steps=changed))[0])
    assert not torch.allclose(objective(late)[0], objective(replace(late, steps=changed))[0])


def test_a_context_holds_no_more_than_its_shape() -> None:
    for changes in SHAPES.values():
        model = model_of(**changes)
        context = Context(model.shape, 2, moves_by=5)
        steps = lived(2, 60)
        with torch.no_grad():
            for t in range(60):
                context.logits(model, steps.part(t, t + 1))
                assert context.held <= model.shape.steps
        assert context.cache_tokens <= model.shape.tokens


def test_reward_and_next_state_are_learnt_beside_the_action() -> None:
    shape = replace(PLAIN, predicts_reward=True, predicts_next_state=True)
    objective = HistoryObjective(HistoryModel(shape, seed=0), LossWeights(reward=1.0, next_state=1.0))
    optimizer = torch.optim.Adam(objective.parameters(), 3e-3)
    batch = batch_of(lived(4, 10))
    first = objective(batch).tolist()
    for _ in range(60):
        optimizer.zero_grad()
        objective(batch)[0].backward()
        optimizer.step()
    last = objective(batch).tolist()
    for name in ("action_loss", "reward_loss", "state_loss"):
        assert last[SUMS.index(name)] < 0.5 * first[SUMS.index(name)], name


def test_the_end_of_a_region_is_foreseen() -> None:
    objective = HistoryObjective(HistoryModel(replace(PLAIN, regions=2, steps=6), seed=0), LossWeights(mark=10.0))
    optimizer = torch.optim.Adam(objective.parameters(), 3e-3)
    for step in range(150):
        optimizer.zero_grad()
        objective(batch_of(lived(8, 12, seed=step)))[0].backward()
        optimizer.step()
    found = dict(zip(SUMS, objective(batch_of(lived(8, 12, seed=-1))).tolist(), strict=True))
    assert found["marks"] == 96 and found["marks_right"] >= 92
