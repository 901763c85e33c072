"""The specification of Algorithm Distillation for recipes and plans: rows of one length, and its own model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.recipe.task_spec import Needs, OwnModel, TaskSpec
from trainwright.tasks.algorithm_distillation.checks import check
from trainwright.tasks.algorithm_distillation.section import WITHOUT_TEXTS, AlgorithmDistillationSection

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

# Observations, actions and heads have a few dozen rows of embeddings; the exact number hardly matters.
_ROWS_OF_EMBEDDINGS = 64
_TOKENS_OF_A_STEP = {"transition": 1, "parts": 3}


def context_tokens(section: AlgorithmDistillationSection) -> int:
    """Return the tokens of a window, including all its regions, which are kept for the backward pass."""
    steps = section.context_length * _TOKENS_OF_A_STEP[section.model.layout]
    if section.context == "full":
        return steps
    if section.compression == "region":
        return 2 * (steps + 1)
    return section.trained_regions * (steps + 2 * section.latents)


def section_of(recipe: Recipe) -> AlgorithmDistillationSection | None:
    """Return the task's section, or None in a recipe of another task."""
    return recipe.own(AlgorithmDistillationSection) if recipe.spec.name == SPEC.name else None


def _needs(recipe: Recipe) -> Needs:
    section = recipe.own(AlgorithmDistillationSection)
    model, tokens = section.model, context_tokens(section)
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
    predicted = 1.0 if section.targets == "every" else 1 / tokens
    assumption = "every window is full; the model is planned as a gpt2 of its sizes"
    return Needs(own_model=OwnModel(config, tokens, predicted, assumption))


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    return {**WITHOUT_TEXTS, **values}


def _inputs(recipe: Recipe) -> tuple[str, str]:
    return "a fresh transformer", recipe.own(AlgorithmDistillationSection).histories


SPEC = TaskSpec(
    name="algorithm_distillation",
    summary="an agent that learns in context, trained on the histories of a reinforcement-learning algorithm",
    module="trainwright.tasks.algorithm_distillation.task",
    section=AlgorithmDistillationSection,
    section_description="Histories, model and loss; only with `task: algorithm_distillation`, which has no sections "
    "model and data.",
    check=check,
    fill=_fill,
    needs=_needs,
    inputs=_inputs,
    reads_texts=False,
    keeps_best=False,  # the loss of predicted actions does not show how well an agent learns in context
    examples=("algorithm_distillation.histories", "the file, or what windows are cut from it,"),
    length_keys="algorithm_distillation.context_length",
)
