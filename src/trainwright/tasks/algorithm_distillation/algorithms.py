"""The recipe sections of the algorithms whose histories are collected. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.sections.fields import BelowOne, Count, NotNegative, Positive, Proportion, Section, reject_bool


class PpoSection(Section):
    """Proximal policy optimization; names and defaults follow Stable-Baselines3."""

    rollout_steps: Count = Field(80, description="Steps per stream between updates.")
    batch_size: Annotated[int, Field(ge=2), BeforeValidator(reject_bool)] = Field(
        40, description="Steps per minibatch; must divide rollout_steps times streams."
    )
    epochs: Count = Field(20, description="Passes over the collected steps per update.")
    learning_rate: Positive = Field(3e-4, description="Learning rate of Adam.")
    gamma: Proportion = Field(0.99, description="Discount factor per step.")
    gae_lambda: Proportion = Field(0.95, description="Lambda of generalized advantage estimation (arXiv 1506.02438).")
    clip_range: Positive = Field(0.2, description="Clipping range of the policy's probability ratio.")
    value_coefficient: NotNegative = Field(0.5, description="Weight of the value loss.")
    max_grad_norm: Positive = Field(0.5, description="Clip gradients to this norm.")
    hidden_size: Count = Field(64, description="Units of each of the two hidden layers.")


class QLearningSection(Section):
    """Tabular Q-learning."""

    learning_rate: Proportion = Field(0.5, description="Learning rate of the value estimates.")
    gamma: BelowOne = Field(0.9, description="Discount factor per step.")
    epsilon: Proportion = Field(0.05, description="Probability of a random action.")
    optimism: NotNegative = Field(0.5, description="Initial value of every action, so that all are tried.")


class UcbSection(Section):
    """UCB1."""

    exploration: NotNegative = Field(1.0, description="Factor of the exploration bonus.")


class SourceAlgorithmSection(Section):
    """The algorithm whose learning histories are collected."""

    name: Literal["ppo", "q-learning", "ucb"] = Field(
        "ppo",
        description="ppo: proximal policy optimization (arXiv 1707.06347), one learner per task, trained on all of "
        "its streams. q-learning: tabular, one learner per stream; takes seconds instead of minutes. ucb: UCB1 for "
        "bandits (Auer et al. 2002), one learner per stream.",
    )
    streams: Count = Field(100, description="Number of parallel streams per task.")
    steps: Count = Field(1000, description="Number of steps per stream.")
    tasks: Count | None = Field(
        None,
        description="Number of training tasks to collect, in the order of split_seed. null: all tasks of the "
        "environment, including held-out ones.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(reject_bool)] = Field(
        0, description="Seed of the environment, the learners and their exploration."
    )
    ppo: PpoSection = Field(default_factory=PpoSection, description="Settings of ppo.")
    q_learning: QLearningSection = Field(default_factory=QLearningSection, description="Settings of q-learning.")
    ucb: UcbSection = Field(default_factory=UcbSection, description="Settings of ucb.")

    @staticmethod
    def key_of(name: str) -> str:
        """Return the key of the settings of the algorithm ``name``."""
        return name.replace("-", "_")

    @property
    def algorithm(self) -> dict[str, Any]:
        """The settings of a collection: ``name``, ``streams``, ``steps``, ``seed`` and the algorithm's own."""
        own: Section = getattr(self, self.key_of(self.name))
        common = {key: getattr(self, key) for key in ("name", "streams", "steps", "seed")}
        return {**common, **own.model_dump()}
