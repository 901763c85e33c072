"""The recipe section of Algorithm Distillation: training on histories, and the evaluation of the agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.registered import Registered
from trainwright.recipe.registries import ENVIRONMENTS
from trainwright.recipe.sections.fields import BelowOne, Count, NotNegative, Section, Text, reject_bool
from trainwright.tasks.algorithm_distillation.algorithms import SourceAlgorithmSection

# Placeholders for the sections about texts; they are not written out.
WITHOUT_TEXTS: dict[str, dict[str, Any]] = {
    "model": {"config": {"model_type": "history"}, "tokenizer": "none"},
    "data": {"train": "histories", "validation": None},
}

Task = Annotated[list[int | float], Field(min_length=1)]
Number = Annotated[int, Field(ge=0), BeforeValidator(reject_bool)]


class HistoryModelSection(Section):
    """The transformer, which is always trained from scratch."""

    n_embd: Count = Field(64, description="Width of the model.")
    n_layer: Count = Field(4, description="Number of blocks.")
    n_head: Count = Field(
        4,
        description="Number of attention heads. n_embd must be divisible by it; with rotary positions, the quotient "
        "must be even.",
    )
    positions: Literal["rotary", "learned"] = Field(
        "rotary",
        description="Position encoding: rotary embeddings of queries and keys (arXiv 2104.09864), or a learned "
        "embedding per position.",
    )
    layout: Literal["transition", "parts"] = Field(
        "transition",
        description="transition: one token per step. parts: three tokens per step: previous action, its reward, state.",
    )
    dropout: BelowOne = Field(0.0, description="Dropout probability in every block.")


class TrialSection(Section):
    """How to evaluate the agent on held-out tasks."""

    episodes: Count = Field(50, description="Number of consecutive episodes in one context.")
    tasks: Count | None = Field(64, description="Number of held-out tasks to evaluate on. null: all of them.")
    copies: Count = Field(8, description="Independent agents per task.")
    last_episodes: Count = Field(5, description="Number of last episodes whose mean is reported as the final return.")
    temperature: NotNegative = Field(
        1.0, description="Sampling temperature of actions. 0: always take the most likely action."
    )
    greedy_after: Count | None = Field(
        None,
        description="Number of episodes with sampled actions, after which the most likely action is taken. null: "
        "always sample.",
    )


class AlgorithmDistillationSection(Section):
    """Training on the histories of a reinforcement-learning algorithm (arXiv 2210.14215)."""

    environment: Annotated[str, Registered(ENVIRONMENTS, imports=False)] = Field(
        "darkroom", description="The environment. gymnasium: your own class, given by its entry_point."
    )
    environment_options: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    histories: Text = Field(
        "histories.h5", description="File of histories, written by `trainwright collect` and read by training."
    )
    source: SourceAlgorithmSection = Field(
        default_factory=SourceAlgorithmSection,
        description="The algorithm whose histories `trainwright collect` records.",
    )
    model: HistoryModelSection = Field(
        default_factory=HistoryModelSection, description="The transformer; always trained from scratch."
    )
    context_length: Count = Field(
        240, description="Context length in environment steps; for a compressed context, the length of a region."
    )
    context: Literal["full", "compressed"] = Field(
        "full",
        description="full: the last context_length steps. compressed: a region of context_length steps and a "
        "compressed form of all earlier steps.",
    )
    compression: Literal["region", "latents"] = Field(
        "region",
        description="What a compressed context keeps. region: the previous region, between markers. latents: tokens "
        "that the model computes from each region and the previous latents, trained through several regions.",
    )
    latents: Count = Field(16, description="compression latents: number of tokens that represent the past.")
    trained_regions: Annotated[int, Field(ge=2), BeforeValidator(reject_bool)] = Field(
        3, description="compression latents: number of consecutive regions to backpropagate through."
    )
    mark_weight: NotNegative = Field(
        0.1, description="compression region: weight of the loss for predicting whether a region ends after a step."
    )
    subsample: Count = Field(
        1,
        description="Train on every n-th episode of a history, so that the agent learns up to n times as fast as the "
        "algorithm.",
    )
    targets: Literal["every", "last"] = Field(
        "every", description="Which actions of a window are predicted; last is as published."
    )
    label_smoothing: BelowOne = Field(
        0.0, description="Fraction of the target probability that is spread over all actions."
    )
    reward_weight: NotNegative = Field(
        0.0, description="Weight of the squared error of the predicted reward. 0: rewards are not predicted."
    )
    next_state_weight: NotNegative = Field(
        0.0, description="Weight of the loss of the predicted next state. 0: states are not predicted."
    )
    split_seed: Number = Field(0, description="Seed of the choice of held-out tasks.")
    test_fraction: BelowOne = Field(0.1, description="Fraction of the tasks to hold out.")
    train_tasks: Count | list[Task] | None = Field(
        None,
        description="Number of training tasks, or a list of them. null: all that are not held out.",
    )
    test_tasks: list[Task] | None = Field(None, description="Tasks to hold out. null: chosen by split_seed.")
    trial: TrialSection = Field(default_factory=TrialSection, description="Evaluation of the agent on held-out tasks.")
