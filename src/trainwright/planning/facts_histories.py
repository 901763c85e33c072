"""The workload of a recipe that trains on histories: rows of one length, and a model whose sizes the recipe has."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainwright.planning.architecture import Architecture, from_config
from trainwright.planning.workload import Workload

if TYPE_CHECKING:
    from trainwright.recipe.algorithm_distillation_schema import AlgorithmDistillationSection
    from trainwright.recipe.schema import Recipe

# Observations, actions and heads are a few dozen rows of embeddings; which environment it is hardly matters.
_ROWS_OF_EMBEDDINGS = 64
_TOKENS_OF_A_STEP = {"transition": 1, "parts": 3}


class Facts(NamedTuple):
    """``assumptions``: what is not known yet and was taken for granted, in words."""

    workload: Workload
    assumptions: tuple[str, ...]


def histories_of(recipe: Recipe) -> Facts:
    """What a recipe for Algorithm Distillation asks for; the file of histories need not be there."""
    section, train = recipe.algorithm_distillation, recipe.train
    assert section is not None
    tokens = context_tokens(section)
    return Facts(
        Workload(
            architecture=_architecture(section, tokens),
            row_tokens=tokens,
            global_batch_rows=train.global_batch_size,
            packed=False,
            target_fraction=1.0 if section.targets == "every" else 1 / tokens,
            steps=train.max_steps,
            optimizer=recipe.optimizer.name,
            batch_tokens=train.global_batch_size * tokens,
            texts=False,
            takes_adapters=False,
        ),
        ("every window is full; the model is planned as a gpt2 of its sizes",),
    )


def context_tokens(section: AlgorithmDistillationSection) -> int:
    """Tokens of a window. With latents its regions follow each other, and all are kept for the backward pass."""
    steps = section.context_length * _TOKENS_OF_A_STEP[section.model.layout]
    if section.context == "full":
        return steps
    if section.compression == "region":
        return 2 * (steps + 1)
    return section.trained_regions * (steps + 2 * section.latents)


def _architecture(section: AlgorithmDistillationSection, tokens: int) -> Architecture:
    model = section.model
    found = from_config(
        {
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
    )
    assert found is not None
    return found
