"""The recipe section of the algorithms whose histories are collected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.sections.fields import BelowOne, Count, NotNegative, Positive, Proportion, Section, whole


class PpoSection(Section):
    """Proximal policy optimization; names and defaults follow Stable-Baselines3."""

    rollout_steps: Count = Field(80, description="Steps of every stream from one round of learning to the next.")
    batch_size: Annotated[int, Field(ge=2), BeforeValidator(whole)] = Field(
        40, description="Steps in a minibatch; rollout_steps times streams is a multiple of it."
    )
    epochs: Count = Field(20, description="How often a round goes through what was seen.")
    learning_rate: Positive = Field(3e-4, description="Of Adam.")
    gamma: Proportion = Field(0.99, description="What a reward counts a step later.")
    gae_lambda: Proportion = Field(0.95, description="How far advantages look ahead (arXiv 1506.02438).")
    clip_range: Positive = Field(0.2, description="How far the policy may go from the one that acted, in a round.")
    value_coefficient: NotNegative = Field(0.5, description="What the squared error of the values counts.")
    max_grad_norm: Positive = Field(0.5, description="Gradients with a larger norm are scaled down to it.")
    hidden_size: Count = Field(64, description="Units of each of the two hidden layers.")


class QLearningSection(Section):
    """Tabular Q-learning."""

    learning_rate: Proportion = Field(0.5, description="How far an estimate moves to what was just seen.")
    gamma: BelowOne = Field(0.9, description="What a reward counts a step later.")
    epsilon: Proportion = Field(0.05, description="How often an action is drawn at random.")
    optimism: NotNegative = Field(
        0.5, description="What an action is taken to be worth until it was tried, so that all are tried."
    )


class UcbSection(Section):
    """UCB1."""

    exploration: NotNegative = Field(1.0, description="What is added for arms that were seldom tried, as a factor.")


class SourceSection(Section):
    """The algorithm whose learning histories are collected."""

    name: Literal["ppo", "q-learning", "ucb"] = Field(
        "ppo",
        description="ppo: proximal policy optimisation (arXiv 1707.06347), a learner for each task, taught by all of "
        "its streams. q-learning: with a table of the environment's states, a learner for each stream, seconds where "
        "ppo takes minutes. ucb: UCB1 for bandits (Auer et al. 2002), a learner for each stream.",
    )
    streams: Count = Field(100, description="How often a task is lived through side by side.")
    steps: Count = Field(1000, description="Steps of every stream.")
    tasks: Count | None = Field(
        None,
        description="Collect the first so many of the tasks that are not held back, in the order of split_seed. null: "
        "all of the environment's, those held back too.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(whole)] = Field(
        0, description="Seeds the environment, the learners and what they try."
    )
    ppo: PpoSection = Field(default_factory=PpoSection, description="With name ppo.")
    q_learning: QLearningSection = Field(default_factory=QLearningSection, description="With name q-learning.")
    ucb: UcbSection = Field(default_factory=UcbSection, description="With name ucb.")

    @property
    def algorithm(self) -> dict[str, Any]:
        """The settings of a collection: ``name``, ``streams``, ``steps``, ``seed`` and the algorithm's own."""
        own: Section = getattr(self, _section_of(self.name))
        common = {key: getattr(self, key) for key in ("name", "streams", "steps", "seed")}
        return {**common, **own.model_dump()}


def source_contradictions(source: SourceSection, key: str) -> Iterator[Contradiction]:
    """Yield contradictions in the section at ``key``."""
    for name in ("ppo", "q-learning", "ucb"):
        section = _section_of(name)
        kind = type(getattr(source, section))
        if name != source.name and getattr(source, section) != kind():
            yield Contradiction(
                (f"{key}.{section}", f"{key}.name"),
                f"has no effect with {key}.name {source.name}; remove it, or set that to {name}",
            )
    seen = source.ppo.rollout_steps * source.streams
    if source.name == "ppo" and seen % source.ppo.batch_size:
        yield Contradiction(
            (f"{key}.ppo.batch_size", f"{key}.ppo.rollout_steps", f"{key}.streams"),
            f"{source.ppo.rollout_steps} rollout_steps x {source.streams} streams are {seen:,} steps, which "
            f"minibatches of {source.ppo.batch_size} do not divide; change one of them",
        )


def _section_of(name: str) -> str:
    return name.replace("-", "_")
