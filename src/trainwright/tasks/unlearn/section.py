"""The recipe section of unlearning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.registered import Registered
from trainwright.recipe.sections.fields import NotNegative, Positive, Section, Steps, Text, whole
from trainwright.registries import OBJECTIVES
from trainwright.tasks.unlearn.objective import Objective


class UnlearnSection(Section):
    """Unlearning minimizes gamma x forget loss + alpha x retain loss. The objective sets the defaults of the keys."""

    objective: Annotated[str, Registered(OBJECTIVES)] = Field(
        "npo", description="The forget loss; `trainwright recipe objectives` says what each is and takes."
    )
    gamma: Positive | None = Field(
        None, description="What the forget loss counts. Default: 1; simnpo 0.125, satimp 0.1."
    )
    alpha: NotNegative | None = Field(
        None,
        description="What the retain loss counts; of pdu at the start. Default: 1; grad_ascent, undial, ce_u and "
        "task_vector 0. 0: retain rows are not trained on.",
    )
    retain_loss: Literal["nll", "kl", "activations"] | None = Field(
        None,
        description="nll: the loss of fine-tuning. kl: KL(reference || model), per token. activations: the mean square "
        "distance of rmu's activations from the reference's. Default: nll, of rmu activations.",
    )
    reference: Text = Field(
        "start",
        description="What the model is compared with, where something is. start: the model that training starts from. "
        "base: the model without the adapter of model.adapter.start_from. Or another model with the same tokenizer, a "
        "directory or id as model.name has it.",
    )
    beta: Positive | None = Field(
        None,
        description="npo, dpo: how much a departure from the reference counts (0.1). simnpo: the sharpness (4.5). "
        "undial: what is taken off the forget token's logit (10). wga: the power of the probability (1). satimp: the "
        "same (5).",
    )
    delta: float | None = Field(None, description="simnpo: the margin of the mean loss (0).")
    importance: NotNegative | None = Field(None, description="satimp: the power of 1 less the probability (1).")
    layer: Annotated[int, Field(ge=0), BeforeValidator(whole)] | None = Field(
        None, description="rmu: the block, from 0, whose output is steered (7)."
    )
    steering_coefficient: Positive | None = Field(None, description="rmu: the length of the random direction (2).")
    skip_targets: Annotated[int, Field(ge=0), BeforeValidator(whole)] | None = Field(
        None, description="ce_u: how many of an answer's first tokens are left alone (1)."
    )
    retain_limit: Positive | None = Field(
        None, description="pdu: the retain loss, in nats a token, that must not be exceeded. Must be given."
    )
    dual_step_size: Positive | None = Field(
        None, description="pdu: how far alpha moves a step, times what the retain loss is over its limit (1)."
    )
    dual_warmup_steps: Steps | None = Field(
        None,
        description="pdu: the steps before alpha moves: a whole number, or a fraction (below 1) of all steps (0.5).",
    )
    scale: Positive | None = Field(None, description="task_vector: how many times what was learnt is subtracted (1).")
    trainable: list[Text] | None = Field(
        None,
        description="Regular expressions of the names of the parameters that are trained, such as "
        r"model\.layers\.(5|6|7)\.mlp\.down_proj\.weight; all others are frozen. null: all are trained.",
    )

    def value(self, key: str) -> Any:
        """Return the value of a key: from the recipe, or the objective's default."""
        written = getattr(self, key)
        if written is not None:
            return written
        common = {"gamma": 1.0, "alpha": 1.0, "retain_loss": "nll"}
        return self.facts.defaults.get(key, common.get(key))

    @property
    def facts(self) -> Objective:
        """The description of the objective."""
        facts: Objective = OBJECTIVES.get(self.objective)
        return facts

    @property
    def refuses(self) -> bool:
        """Whether a refusal is trained in addition to each forget answer."""
        return self.facts.idk and self.facts.learns == "forget"

    @property
    def retains(self) -> bool:
        """Whether retain rows are trained on."""
        return bool(self.value("alpha") > 0) or self.facts.ascends

    @property
    def last_block(self) -> int | None:
        """The block whose output determines the whole loss, or None if the loss uses the whole model."""
        if self.facts.of != "activations" or (self.retains and self.value("retain_loss") != "activations"):
            return None
        return int(self.value("layer"))

    @property
    def compares(self) -> bool:
        """Whether the loss compares the model with a reference."""
        kept = self.retains and self.value("retain_loss") != "nll"
        return kept or self.facts.reference != "nothing"

    @property
    def needs_reference_model(self) -> bool:
        """Whether the reference runs in every step; log-probabilities are computed before training instead."""
        kept = self.retains and self.value("retain_loss") != "nll"
        return kept or self.facts.reference in ("logits", "activations")
