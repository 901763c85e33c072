"""The recipe section of unlearning, and its keys of the section ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from trainwright.errors import RequestError
from trainwright.recipe.registries import OBJECTIVES
from trainwright.recipe.sections.data import DataSection, SourceSection
from trainwright.recipe.sections.fields import (
    Contradiction,
    Contradictions,
    NotNegative,
    Positive,
    Registered,
    Section,
    Steps,
    Text,
    reject_bool,
)
from trainwright.tasks.unlearn.benchmarks import find_benchmark

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


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
        setting = getattr(self, key)
        if setting is not None:
            return setting
        common = {"gamma": 1.0, "alpha": 1.0, "retain_loss": "nll"}
        return self.facts.defaults.get(key, common.get(key))

    @property
    def facts(self) -> Objective:
        """The description of the objective."""
        return OBJECTIVES.get(self.objective)

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
        empty_fields = dict.fromkeys(("benchmark", "validation", *PARTS))
        section = self.model_copy(update={**empty_fields, "train": getattr(self, key)})
        section._part = f"data.{key}"
        return section

    @property
    def sources(self) -> tuple[SourceSection, ...]:
        """Return the training sources: without ``train``, the rows to forget and to retain."""
        if self.train is not None:
            return super().sources
        parts = (self.forget, self.retain)
        return tuple(
            SourceSection(source=source, limit=self.limit, **self._select_row_keys()) for source in parts if source
        )

    @property
    def source_keys(self) -> tuple[str, ...]:
        """Return the recipe keys of ``sources``, for messages."""
        if self.train is not None:
            return super().source_keys if self._part is None else (self._part,)
        return tuple(f"data.{key}" for key in ("forget", "retain") if getattr(self, key))


def select_data(recipe: RecipeSchema) -> UnlearnData:
    """Return the section ``data`` of a recipe, which has the keys of all tasks."""
    assert isinstance(recipe.data, UnlearnData)
    return recipe.data


@dataclass(frozen=True)
class Objective:
    """A forget loss, and its inputs.

    The parameters of the function ``loss`` are named after its inputs: keys of the section ``unlearn``, and tensors

    - ``of`` tokens: ``losses`` [n], the negative log-likelihoods of the targets; returns [n].
    - ``of`` answers: ``losses`` [D], their sums over each answer, float64; ``counts`` [D], the number of targets of
      each; ``ratios`` and ``refused`` [D], the log-ratios to the reference of the forget answers and of the refusals
      or alternates; returns [D].
    - ``of`` logits: ``logits`` [n, V], ``targets`` [n] and, with ``reference`` logits, ``teacher`` [n, V]; returns [n].
    - ``of`` activations: ``activations`` [n, H] of a block, and the ``direction`` [H] that they are steered to; returns
      [n]. The keys ``layer`` and ``steering_coefficient`` set the block and the length of the direction.

    Args:
        line: what it does, in one line.
        paper: the publication.
        loss: the location of its function, ``module:function``.
        of: the input of the loss.
        defaults: defaults of its own keys of the section; of ``gamma`` and ``alpha`` if they are not 1.
        reference: what the forget loss needs from the reference.
        idk: whether it trains the refusals of data.idk.
        alternates: whether it trains the alternate answers of the forget rows, in place of refusals.
        learns: whether the loss is over the tokens of the forget answers or of the refusals.
        ascends: the retain loss is kept under ``retain_limit`` by dual ascent of ``alpha``.
        subtracts: ``scale`` times what was learned is subtracted from the weights at the end.
    """

    line: str
    paper: str
    loss: str
    of: Literal["tokens", "answers", "logits", "activations"] = "tokens"
    defaults: dict[str, Any] = field(default_factory=dict)
    reference: Literal["nothing", "log-probabilities", "logits", "activations"] = "nothing"
    idk: bool = False
    alternates: bool = False
    learns: Literal["forget", "refusals"] = "forget"
    ascends: bool = False
    subtracts: bool = False


# The built-in objectives.
_FORMULAS = "trainwright.tasks.unlearn.losses"

GRAD_ASCENT = Objective(
    "raise the loss on the forget rows only", "arXiv 2210.01504", f"{_FORMULAS}:grad_ascent", defaults={"alpha": 0.0}
)
GRAD_DIFF = Objective(
    "raise the loss on the forget rows, lower it on the retain rows", "arXiv 2203.12817", f"{_FORMULAS}:grad_ascent"
)
NPO = Objective(
    "DPO with only rejected answers: ascent that slows down as rows are forgotten",
    "arXiv 2404.05868",
    f"{_FORMULAS}:npo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
)
SIMNPO = Objective(
    "NPO without a reference model, with the mean over an answer's tokens",
    "arXiv 2410.07163",
    f"{_FORMULAS}:simnpo",
    of="answers",
    defaults={"beta": 4.5, "delta": 0.0, "gamma": 0.125},
)
DPO = Objective(
    "prefer a refusal to each forget answer",
    "arXiv 2305.18290, 2401.06121",
    f"{_FORMULAS}:dpo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
    idk=True,
)
ALTPO = Objective(
    "prefer the alternate answers of a row to its forget answer",
    "arXiv 2409.13474",
    f"{_FORMULAS}:dpo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
    alternates=True,
)
IDK_NLL = Objective(
    "learn a refusal as the answer to each forget question",
    "arXiv 2401.06121",
    f"{_FORMULAS}:descent",
    idk=True,
    learns="refusals",
)
RMU = Objective(
    "steer activations of forget rows to a random direction, keep those of retain rows",
    "arXiv 2403.03218",
    f"{_FORMULAS}:steering",
    of="activations",
    defaults={"layer": 7, "steering_coefficient": 2.0, "retain_loss": "activations"},
)
UNDIAL = Objective(
    "distill the model's own logits, with lower logits of the forget tokens",
    "arXiv 2402.10052",
    f"{_FORMULAS}:undial",
    of="logits",
    defaults={"beta": 10.0, "alpha": 0.0},
    reference="logits",
)
WGA = Objective(
    "ascent weighted by the probability of each token", "arXiv 2502.19301", f"{_FORMULAS}:wga", defaults={"beta": 1.0}
)
SATIMP = Objective(
    "ascent weighted by how saturated and how important each token is",
    "arXiv 2505.11953",
    f"{_FORMULAS}:satimp",
    defaults={"beta": 5.0, "importance": 1.0, "gamma": 0.1},
)
CE_U = Objective(
    "cross-entropy with the model's own prediction without the right token",
    "arXiv 2503.01224",
    f"{_FORMULAS}:ce_u",
    of="logits",
    defaults={"skip_targets": 1, "alpha": 0.0},
)
PDU = Objective(
    "flatten the logits on forget rows while the retain loss stays below a limit (dual ascent)",
    "arXiv 2506.05314",
    f"{_FORMULAS}:flatten",
    of="logits",
    defaults={"retain_limit": None, "dual_step_size": 1.0, "dual_warmup_steps": 0.5},
    ascends=True,
)
TASK_VECTOR = Objective(
    "learn the forget rows, then subtract what was learned from the weights",
    "arXiv 2212.04089",
    f"{_FORMULAS}:descent",
    defaults={"scale": 1.0, "alpha": 0.0},
    subtracts=True,
)
