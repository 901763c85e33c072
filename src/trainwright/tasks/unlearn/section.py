"""The section of unlearning, and what each objective takes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainwright.recipe.fields import NotNegative, Positive, Section, Steps, Text, whole

ObjectiveName = Literal[
    "grad_ascent",
    "grad_diff",
    "npo",
    "simnpo",
    "dpo",
    "idk_nll",
    "rmu",
    "undial",
    "wga",
    "satimp",
    "ce_u",
    "pdu",
    "task_vector",
]


@dataclass(frozen=True)
class ObjectiveFacts:
    """What an objective is and takes.

    ``defaults``: of the keys of the section that are its own; of ``gamma`` and ``alpha`` where they are not 1.
    ``reference``: what of the reference the forget loss needs. ``idk``: whether it teaches the refusals of data.idk.
    """

    line: str
    paper: str
    defaults: dict[str, Any] = field(default_factory=dict)
    reference: Literal["nothing", "log-probabilities", "logits", "activations"] = "nothing"
    idk: bool = False


OBJECTIVES: dict[ObjectiveName, ObjectiveFacts] = {
    "grad_ascent": ObjectiveFacts(
        "raise the loss on the forget rows, and do nothing for the rest", "arXiv 2210.01504", {"alpha": 0.0}
    ),
    "grad_diff": ObjectiveFacts("raise the loss on the forget rows, lower that on the retain rows", "arXiv 2203.12817"),
    "npo": ObjectiveFacts(
        "DPO with nothing but rejected answers: ascent that slows down as rows are forgotten",
        "arXiv 2404.05868",
        {"beta": 0.1},
        reference="log-probabilities",
    ),
    "simnpo": ObjectiveFacts(
        "NPO without a reference, by the mean over an answer's tokens",
        "arXiv 2410.07163",
        {"beta": 4.5, "delta": 0.0, "gamma": 0.125},
    ),
    "dpo": ObjectiveFacts(
        "a refusal is preferred to each forget answer",
        "arXiv 2305.18290, 2401.06121",
        {"beta": 0.1},
        reference="log-probabilities",
        idk=True,
    ),
    "idk_nll": ObjectiveFacts(
        "a refusal is learnt as the answer to each forget question", "arXiv 2401.06121", idk=True
    ),
    "rmu": ObjectiveFacts(
        "activations of forget rows are steered to a random direction, those of retain rows held",
        "arXiv 2403.03218",
        {"layer": 7, "steering_coefficient": 2.0, "retain_loss": "activations"},
    ),
    "undial": ObjectiveFacts(
        "distil the model's own logits, those of the forget tokens lowered",
        "arXiv 2402.10052",
        {"beta": 10.0, "alpha": 0.0},
        reference="logits",
    ),
    "wga": ObjectiveFacts("ascent weighted by the probability of each token", "arXiv 2502.19301", {"beta": 1.0}),
    "satimp": ObjectiveFacts(
        "ascent weighted by how saturated and how important each token is",
        "arXiv 2505.11953",
        {"beta": 5.0, "importance": 1.0, "gamma": 0.1},
    ),
    "ce_u": ObjectiveFacts(
        "cross-entropy towards the model's own prediction without the right token",
        "arXiv 2503.01224",
        {"skip_targets": 1, "alpha": 0.0},
    ),
    "pdu": ObjectiveFacts(
        "flatten the logits on forget rows while the retain loss stays under a limit (dual ascent)",
        "arXiv 2506.05314",
        {"retain_limit": None, "dual_step_size": 1.0, "dual_warmup_steps": 0.5},
    ),
    "task_vector": ObjectiveFacts(
        "learn the forget rows, then subtract what was learnt from the weights",
        "arXiv 2212.04089",
        {"scale": 1.0, "alpha": 0.0},
    ),
}


class UnlearnSection(Section):
    """How is forgotten: gamma x forget loss + alpha x retain loss. Keys left out are as the objective has them."""

    objective: ObjectiveName = Field(
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
        """What a key is: as written, or else as the objective has it."""
        written = getattr(self, key)
        if written is not None:
            return written
        common = {"gamma": 1.0, "alpha": 1.0, "retain_loss": "nll"}
        return OBJECTIVES[self.objective].defaults.get(key, common.get(key))

    @property
    def facts(self) -> ObjectiveFacts:
        """Of the objective."""
        return OBJECTIVES[self.objective]

    @property
    def refuses(self) -> bool:
        """Whether a refusal is trained on beside each forget answer."""
        return self.objective == "dpo"

    @property
    def retains(self) -> bool:
        """Whether retain rows are trained on."""
        return bool(self.value("alpha") > 0) or self.objective == "pdu"

    @property
    def last_block(self) -> int | None:
        """The block whose output all of the loss is of; None where it is of the whole model."""
        if self.objective != "rmu" or (self.retains and self.value("retain_loss") != "activations"):
            return None
        return int(self.value("layer"))

    @property
    def compares(self) -> bool:
        """Whether anything is compared with a reference."""
        kept = self.retains and self.value("retain_loss") != "nll"
        return kept or self.facts.reference != "nothing"

    @property
    def needs_reference_model(self) -> bool:
        """Whether the reference has to compute beside the model in every step: log-probabilities do not do."""
        kept = self.retains and self.value("retain_loss") != "nll"
        return kept or self.facts.reference in ("logits", "activations")
