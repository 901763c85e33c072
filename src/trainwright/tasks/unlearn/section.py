"""The recipe section of unlearning, and its keys of the section ``data``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from trainwright.errors import RequestError
from trainwright.recipe.contradiction import Contradiction, Contradictions
from trainwright.recipe.registered import Registered
from trainwright.recipe.registries import OBJECTIVES
from trainwright.recipe.sections.data import DataSection, SourceSection
from trainwright.recipe.sections.fields import NotNegative, Positive, Section, Steps, Text, reject_bool
from trainwright.tasks.unlearn.benchmarks import find_benchmark
from trainwright.tasks.unlearn.objective import Objective

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

# The keys of ``data`` that a benchmark can provide.
PARTS = ("forget", "retain", "holdout", "idk")


class UnlearnSection(Section):
    """Unlearning minimizes gamma x forget loss + alpha x retain loss. The objective sets the defaults of the keys."""

    objective: Annotated[str, Registered(OBJECTIVES)] = Field(
        "npo", description="The forget loss; see `trainwright recipe objectives`."
    )
    gamma: Positive | None = Field(None, description="Weight of the forget loss. Default: 1; simnpo 0.125, satimp 0.1.")
    alpha: NotNegative | None = Field(
        None,
        description="Weight of the retain loss; for pdu, its initial value. Default: 1; grad_ascent, undial, ce_u "
        "and task_vector 0. 0: no training on retain rows.",
    )
    retain_loss: Literal["nll", "kl", "activations"] | None = Field(
        None,
        description="nll: negative log-likelihood, as in fine-tuning. kl: KL(reference || model), per token. "
        "activations: mean squared distance of rmu's activations from the reference's. Default: nll; rmu activations.",
    )
    reference: Text = Field(
        "start",
        description="The reference model, if the objective uses one. start: the model that training starts from. "
        "base: the model without the adapter of model.adapter.start_from. Or another model with the same tokenizer, "
        "a directory or id as in model.name.",
    )
    beta: Positive | None = Field(
        None,
        description="npo, dpo, altpo: weight of the deviation from the reference (0.1). simnpo: inverse temperature "
        "(4.5). undial: subtracted from the logit of the forget token (10). wga, satimp: exponent of the probability "
        "(1, 5).",
    )
    delta: float | None = Field(None, description="simnpo: margin of the mean loss (0).")
    importance: NotNegative | None = Field(None, description="satimp: exponent of 1 minus the probability (1).")
    layer: Annotated[int, Field(ge=0), BeforeValidator(reject_bool)] | None = Field(
        None, description="rmu: index of the block whose output is steered, from 0 (7)."
    )
    steering_coefficient: Positive | None = Field(None, description="rmu: norm of the random direction (2).")
    skip_targets: Annotated[int, Field(ge=0), BeforeValidator(reject_bool)] | None = Field(
        None, description="ce_u: number of first tokens of an answer to skip (1)."
    )
    retain_limit: Positive | None = Field(
        None, description="pdu: upper limit of the retain loss in nats per token. Required."
    )
    dual_step_size: Positive | None = Field(
        None, description="pdu: step size of alpha, multiplied by how far the retain loss exceeds its limit (1)."
    )
    dual_warmup_steps: Steps | None = Field(
        None,
        description="pdu: steps before alpha is first updated: a whole number, or a fraction (below 1) of all steps "
        "(0.5).",
    )
    scale: Positive | None = Field(None, description="task_vector: factor of the subtracted difference in weights (1).")

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
        """Whether a refusal or an alternate is trained in addition to each forget answer."""
        return (self.facts.idk or self.facts.alternates) and self.facts.learns == "forget"

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
        compares_retain = self.retains and self.value("retain_loss") != "nll"
        return compares_retain or self.facts.reference != "nothing"

    @property
    def needs_reference_model(self) -> bool:
        """Whether the reference runs in every step; log-probabilities are computed before training instead."""
        compares_retain = self.retains and self.value("retain_loss") != "nll"
        return compares_retain or self.facts.reference in ("logits", "activations")


class UnlearnData(DataSection):
    """The section ``data`` with the keys of unlearning."""

    benchmark: Text | None = Field(
        None,
        description="unlearn: a benchmark that provides forget, retain, holdout and idk if they are not set: "
        "tofu:forget01, tofu:forget05, tofu:forget10, muse:news, muse:books or wmdp:cyber, with @DIRECTORY for a "
        "local copy.",
    )
    forget: Text | None = Field(None, description="unlearn: the rows to forget; a source as in train.")
    retain: Text | None = Field(
        None,
        description="unlearn: the rows to retain; each forget row is paired with one, a different one every epoch.",
    )
    holdout: Text | None = Field(
        None, description="unlearn: rows that were never trained on, for comparison with the forget rows."
    )
    idk: Text | None = Field(
        None,
        description='unlearn: a file with one refusal per line, such as "I do not know", for objectives that train '
        "on refusals.",
    )
    _part: str | None = PrivateAttr(None)  # the key of the rows that are in `train`

    @model_validator(mode="before")
    @classmethod
    def _of_the_benchmark(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(name := values.get("benchmark"), str):
            return values
        key = "data.benchmark"
        try:
            parts = find_benchmark(name, key).training
        except RequestError as error:
            raise Contradictions([Contradiction((key,), str(error).removeprefix(f"{key}: "))]) from None
        return {**values, **{key: parts[key] for key in PARTS if key in parts and values.get(key) is None}}

    def part(self, key: str) -> UnlearnData:
        """Return the data of one of ``PARTS`` alone, as training data; no validation rows are held out."""
        nothing = dict.fromkeys(("benchmark", "validation", *PARTS))
        section = self.model_copy(update={**nothing, "train": getattr(self, key)})
        section._part = f"data.{key}"
        return section

    @property
    def sources(self) -> tuple[SourceSection, ...]:
        """Return the training sources: without ``train``, the rows to forget and to retain."""
        if self.train is not None:
            return super().sources
        parts = (self.forget, self.retain)
        return tuple(SourceSection(source=one, limit=self.limit, **self._row_keys()) for one in parts if one)

    @property
    def source_keys(self) -> tuple[str, ...]:
        """Return the recipe keys of ``sources``, for messages."""
        if self.train is not None:
            return super().source_keys if self._part is None else (self._part,)
        return tuple(f"data.{key}" for key in ("forget", "retain") if getattr(self, key))


def data_of(recipe: Recipe) -> UnlearnData:
    """Return the section ``data`` of a recipe, which has the keys of all tasks."""
    assert isinstance(recipe.data, UnlearnData)
    return recipe.data
