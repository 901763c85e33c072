"""The specification of Algorithm Distillation for recipes and plans: its section, its checks, and its own model.

The section has the algorithms whose histories are collected, training on these histories, whose rows have one length,
and the evaluation of the agent. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.registries import ENVIRONMENTS
from trainwright.recipe.sections.fields import (
    BelowOne,
    Contradiction,
    Count,
    NotNegative,
    Positive,
    Proportion,
    Registered,
    Section,
    Text,
    reject_bool,
)
from trainwright.recipe.task_spec import Needs, TaskModel, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


# Placeholders for the sections about texts; they are not written out.
WITHOUT_TEXTS: dict[str, dict[str, Any]] = {
    "model": {"config": {"model_type": "history"}, "tokenizer": "none"},
    "data": {"train": "histories", "validation": None},
}

Task = Annotated[list[int | float], Field(min_length=1)]
Number = Annotated[int, Field(ge=0), BeforeValidator(reject_bool)]


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
    def build_settings_key(name: str) -> str:
        """Return the key of the settings of the algorithm ``name``."""
        return name.replace("-", "_")

    @property
    def algorithm(self) -> dict[str, Any]:
        """The settings of a collection: ``name``, ``streams``, ``steps``, ``seed`` and the algorithm's own."""
        section: Section = getattr(self, self.build_settings_key(self.name))
        common = {key: getattr(self, key) for key in ("name", "streams", "steps", "seed")}
        return {**common, **section.model_dump()}


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
        None, description="Number of training tasks, or a list of them. null: all that are not held out."
    )
    test_tasks: list[Task] | None = Field(None, description="Tasks to hold out. null: chosen by split_seed.")
    trial: TrialSection = Field(default_factory=TrialSection, description="Evaluation of the agent on held-out tasks.")


_SECTION = "algorithm_distillation"
# Observations, actions and heads have a few dozen rows of embeddings; the exact number hardly matters.
_ROWS_OF_EMBEDDINGS = 64
_TOKENS_OF_A_STEP = {"transition": 1, "parts": 3}


def count_context_tokens(section: AlgorithmDistillationSection) -> int:
    """Return the tokens of a window, including all its regions, which are kept for the backward pass."""
    steps = section.context_length * _TOKENS_OF_A_STEP[section.model.layout]
    if section.context == "full":
        return steps
    if section.compression == "region":
        return 2 * (steps + 1)
    return section.trained_regions * (steps + 2 * section.latents)


def find_section(recipe: RecipeSchema) -> AlgorithmDistillationSection | None:
    """Return the task's section, or None in a recipe of another task."""
    return recipe.own(AlgorithmDistillationSection) if recipe.spec.name == SPEC.name else None


def _needs(recipe: RecipeSchema) -> Needs:
    section = recipe.own(AlgorithmDistillationSection)
    model, tokens = section.model, count_context_tokens(section)
    config = {
        "model_type": "gpt2",
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_positions": tokens,
        "vocab_size": _ROWS_OF_EMBEDDINGS,
        "resid_pdrop": model.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": model.dropout,
    }
    target_share = 1.0 if section.targets == "every" else 1 / tokens
    assumption = "every window is full; the model is planned as a gpt2 of its sizes"
    return Needs(own_model=TaskModel(config, tokens, target_share, assumption))


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Yield contradictions between the section and the task, and within the section."""
    section = recipe.own(AlgorithmDistillationSection)
    yield from _check_texts(recipe)
    yield from _check_source(section.source)
    yield from _check_model(section)
    yield from _check_compression(section)
    yield from _check_tasks(section)


def _check_texts(recipe: RecipeSchema) -> Iterator[Contradiction]:
    stand_ins = (recipe.model, "model"), (recipe.data, "data")
    if any(section != type(section).model_validate(WITHOUT_TEXTS[name]) for section, name in stand_ins):
        yield Contradiction(
            ("model", "data", "task"),
            f"task {_SECTION} reads no texts: remove the sections model and data; set {_SECTION}.model and "
            f"{_SECTION}.histories instead",
        )
    evaluate = recipe.evaluate
    for key, field in type(evaluate).model_fields.items():
        if key != "every" and getattr(evaluate, key) != field.get_default(call_default_factory=True):
            yield Contradiction(
                (f"evaluate.{key}", "task"),
                f"has no effect with task {_SECTION}, which has {_SECTION}.trial; remove it",
            )


def _check_source(source: SourceAlgorithmSection) -> Iterator[Contradiction]:
    key = f"{_SECTION}.source"
    for name in ("ppo", "q-learning", "ucb"):
        section = source.build_settings_key(name)
        kind = type(getattr(source, section))
        if name != source.name and getattr(source, section) != kind():
            yield Contradiction(
                (f"{key}.{section}", f"{key}.name"),
                f"has no effect with {key}.name {source.name}; remove it, or set {key}.name to {name}",
            )
    steps = source.ppo.rollout_steps * source.streams
    if source.name == "ppo" and steps % source.ppo.batch_size:
        yield Contradiction(
            (f"{key}.ppo.batch_size", f"{key}.ppo.rollout_steps", f"{key}.streams"),
            f"{source.ppo.rollout_steps} rollout_steps x {source.streams} streams = {steps:,} steps, which is not "
            f"divisible by batch_size {source.ppo.batch_size}; change one of them",
        )


def _check_model(section: AlgorithmDistillationSection) -> Iterator[Contradiction]:
    model, key = section.model, f"{_SECTION}.model"
    if model.n_embd % model.n_head:
        yield Contradiction(
            (f"{key}.n_head", f"{key}.n_embd"), f"{model.n_head} heads cannot share a width of {model.n_embd} evenly"
        )
    elif model.positions == "rotary" and model.n_embd // model.n_head % 2:
        yield Contradiction(
            (f"{key}.positions", f"{key}.n_embd", f"{key}.n_head"),
            f"rotary positions need an even head size, not {model.n_embd // model.n_head}; change model.n_embd or "
            "model.n_head, or set it to learned",
        )


# The compression that reads each key.
_READ_BY = {"compression": "", "mark_weight": "region", "latents": "latents", "trained_regions": "latents"}


def _check_compression(section: AlgorithmDistillationSection) -> Iterator[Contradiction]:
    for key, compression in _READ_BY.items():
        if getattr(section, key) == type(section).model_fields[key].default:
            continue
        if section.context != "compressed":
            yield Contradiction(
                (f"{_SECTION}.{key}", f"{_SECTION}.context"),
                "has no effect with a full context; set context to compressed",
            )
        elif compression not in ("", section.compression):
            yield Contradiction(
                (f"{_SECTION}.{key}", f"{_SECTION}.compression"),
                f"has no effect with compression {section.compression}, only with {compression}",
            )


def _check_tasks(section: AlgorithmDistillationSection) -> Iterator[Contradiction]:
    train, test = section.train_tasks, section.test_tasks
    for key, tasks in (("train_tasks", train), ("test_tasks", test)):
        if isinstance(tasks, list) and (twice := [task for task in tasks if tasks.count(task) > 1]):
            yield Contradiction((f"{_SECTION}.{key}",), f"{twice[0]} is given more than once; list each task once")
    if isinstance(train, list) and test is not None and (both := [task for task in train if task in test]):
        yield Contradiction(
            (f"{_SECTION}.test_tasks", f"{_SECTION}.train_tasks"),
            f"{len(both)} tasks are in both, such as {both[0]}: test tasks must not be trained on; remove them from "
            "one",
        )
    if section.trial.last_episodes > section.trial.episodes:
        yield Contradiction(
            (f"{_SECTION}.trial.last_episodes", f"{_SECTION}.trial.episodes"),
            f"{section.trial.last_episodes} is more than trial.episodes",
        )


SPEC = TaskSpec(
    name="algorithm_distillation",
    summary="an agent that learns in context, trained on the histories of a reinforcement-learning algorithm",
    module="trainwright.tasks.algorithm_distillation.task",
    section=AlgorithmDistillationSection,
    section_description="Histories, model and loss; only with `task: algorithm_distillation`, which has no sections "
    "model and data.",
    check=_check,
    fill=lambda values: {**WITHOUT_TEXTS, **values},
    needs=_needs,
    inputs=lambda recipe: ("a fresh transformer", recipe.own(AlgorithmDistillationSection).histories),
    reads_texts=False,
    keeps_best=False,  # the loss of predicted actions does not show how well an agent learns in context
    examples=("algorithm_distillation.histories", "the file, or what windows are cut from it,"),
    length_keys="algorithm_distillation.context_length",
)
