"""The recipe section of Algorithm Distillation: training on histories, and the evaluation of the agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.registered import Registered
from trainwright.recipe.sections.fields import BelowOne, Count, NotNegative, Section, Text, whole
from trainwright.registries import ENVIRONMENTS
from trainwright.tasks.algorithm_distillation.source_section import SourceSection

# Placeholders for the sections about texts; they are not written out.
WITHOUT_TEXTS: dict[str, dict[str, Any]] = {
    "model": {"config": {"model_type": "history"}, "tokenizer": "none"},
    "data": {"train": "histories", "validation": None},
}

Task = Annotated[list[int | float], Field(min_length=1)]
Number = Annotated[int, Field(ge=0), BeforeValidator(whole)]


class HistoryModelSection(Section):
    """The transformer, which is always trained from scratch."""

    n_embd: Count = Field(64, description="Width of the model.")
    n_layer: Count = Field(4, description="Number of blocks.")
    n_head: Count = Field(4, description="Attention heads; they divide n_embd, with rotary positions by an even size.")
    positions: Literal["rotary", "learned"] = Field(
        "rotary",
        description="How the model knows the order of its context: by turning queries and keys (arXiv "
        "2104.09864), or by an embedding of each place.",
    )
    layout: Literal["transition", "parts"] = Field(
        "transition",
        description="transition: a step is one token. parts: it is three: action before, its reward, state.",
    )
    dropout: BelowOne = Field(0.0, description="Dropout in every block.")


class TrialSection(Section):
    """How to evaluate the agent on held-out tasks."""

    episodes: Count = Field(50, description="Episodes one after another, in one context.")
    tasks: Count | None = Field(
        64, description="The agent is tried on the first so many of the tasks that are held back. null: on all of them."
    )
    copies: Count = Field(8, description="Independent agents of each task.")
    last_episodes: Count = Field(5, description="The last so many are what is reported as the return in the end.")
    temperature: NotNegative = Field(
        1.0, description="Logits of actions are divided by it before one is drawn. 0: the likeliest is always taken."
    )


class AlgorithmDistillationSection(Section):
    """Training on the histories of a reinforcement-learning algorithm (arXiv 2210.14215)."""

    environment: Annotated[str, Registered(ENVIRONMENTS, imports=False)] = Field(
        "darkroom", description="What is acted in; gymnasium: a class of your own, by its entry_point."
    )
    environment_options: dict[str, Any] = Field({}, description="What the environment is made with, by its names.")
    histories: Text = Field(
        "histories.h5", description="The file of histories that trainwright collect writes and training reads."
    )
    source: SourceSection = Field(
        default_factory=SourceSection, description="The algorithm that trainwright collect keeps histories of."
    )
    model: HistoryModelSection = Field(
        default_factory=HistoryModelSection, description="The transformer, which is always a fresh one."
    )
    context_length: Count = Field(
        240, description="Steps of the environment that the model sees at once; of a compressed context, of a region."
    )
    context: Literal["full", "compressed"] = Field(
        "full",
        description="full: the last steps as they are. compressed: a region of context_length steps, and what is left "
        "of all before.",
    )
    compression: Literal["region", "latents"] = Field(
        "region",
        description="What a compressed context keeps. region: the one before, between marks. latents: tokens that the "
        "model itself makes of each region and of the tokens before, trained through several regions.",
    )
    latents: Count = Field(16, description="compression latents: how many tokens stand for the past.")
    trained_regions: Annotated[int, Field(ge=2), BeforeValidator(whole)] = Field(
        3, description="compression latents: through how many regions in a row is trained."
    )
    mark_weight: NotNegative = Field(
        0.1, description="compression region: what the model's guess counts that the region ends behind a step."
    )
    subsample: Count = Field(
        1,
        description="Train on every n-th episode of a history, so that it is learnt to learn n times as fast as the "
        "algorithm did.",
    )
    targets: Literal["every", "last"] = Field(
        "every", description="Which steps of a window are predicted; last is what was published."
    )
    label_smoothing: BelowOne = Field(0.0, description="This much of every action's probability goes to all alike.")
    reward_weight: NotNegative = Field(
        0.0, description="What the squared error of a predicted reward counts beside the action. 0: none is predicted."
    )
    next_state_weight: NotNegative = Field(
        0.0, description="What the next state counts beside the action. 0: none is predicted."
    )
    split_seed: Number = Field(0, description="Decides which tasks are held back.")
    test_fraction: BelowOne = Field(0.1, description="How many of the tasks are held back.")
    train_tasks: Count | list[Task] | None = Field(
        None,
        description="Train on the first so many of the tasks that are not held back, or on these. null: on all.",
    )
    test_tasks: list[Task] | None = Field(None, description="Hold these tasks back. null: as split_seed decides.")
    trial: TrialSection = Field(default_factory=TrialSection, description="How the agent is tried at every evaluation.")
