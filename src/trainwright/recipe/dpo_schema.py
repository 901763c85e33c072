"""The section of preference tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainwright.recipe.fields import BelowHalf, Positive, Section


class DpoSection(Section):
    """What preference tuning minimises."""

    loss: Literal["dpo", "ipo", "kto"] = Field(
        "dpo",
        description="dpo: the chosen answer over the rejected one (arXiv 2305.18290). ipo: by a fixed margin, in means "
        "over tokens (arXiv 2310.12036). kto: each answer for itself, good or bad (arXiv 2402.01306); takes rows with "
        "a label as well as pairs.",
    )
    beta: Positive = Field(
        0.1, description="How much a departure from the reference counts: the larger, the nearer the model stays to it."
    )
    label_smoothing: BelowHalf = Field(
        0.0, description="dpo: the probability that a pair is the wrong way round (conservative DPO)."
    )
    desirable_weight: Positive = Field(1.0, description="kto: what a good answer counts.")
    undesirable_weight: Positive = Field(1.0, description="kto: what a bad answer counts.")
    reference: Literal["start", "base"] = Field(
        "start",
        description="What the model is compared with. start: the model that training starts from. base: the model "
        "without the adapter of model.adapter.start_from.",
    )
