"""The specification of preference tuning for recipes and plans: its section, its checks, its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainwright.recipe.registries import PREFERENCE_LOSSES
from trainwright.recipe.sections.fields import BelowHalf, Contradiction, NotNegative, Positive, Registered, Section
from trainwright.recipe.task_spec import Needs, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of preference tuning, named by ``dpo.loss``.

    Attributes:
        function: place ``module:function`` of a function of the scores of the chosen and the rejected answers, float64
            [P], and of the section ``dpo``, that returns the losses of the pairs [P].
        reads: which of the keys of ``_OWN_KEYS`` have an effect.
        has_reference: whether the score of an answer is its log-ratio to a reference, or its log-probability.
        averages: whether scores are means over the tokens of an answer, or sums.
        sft_weight: the default of ``dpo.sft_weight``.
        rates_answers: whether every answer is good or bad by itself (KTO), instead of a pair compared.
    """

    function: str
    reads: tuple[str, ...] = ()
    has_reference: bool = True
    averages: bool = False
    sft_weight: float = 0.0
    rates_answers: bool = False


_LOSSES = "trainwright.tasks.dpo.losses"
_OF_PAIRS = ("length_normalized",)
DPO = PreferenceLoss(f"{_LOSSES}:dpo", ("label_smoothing", *_OF_PAIRS))
IPO = PreferenceLoss(f"{_LOSSES}:ipo", averages=True)
KTO = PreferenceLoss(f"{_LOSSES}:kto", ("desirable_weight", "undesirable_weight"), rates_answers=True)
HINGE = PreferenceLoss(f"{_LOSSES}:hinge", _OF_PAIRS)
ROBUST = PreferenceLoss(f"{_LOSSES}:robust", ("label_smoothing", *_OF_PAIRS))
APO_ZERO = PreferenceLoss(f"{_LOSSES}:apo_zero", _OF_PAIRS)
APO_DOWN = PreferenceLoss(f"{_LOSSES}:apo_down", _OF_PAIRS)
SPPO = PreferenceLoss(f"{_LOSSES}:sppo", _OF_PAIRS)
SIMPO = PreferenceLoss(f"{_LOSSES}:simpo", ("label_smoothing", "margin"), has_reference=False, averages=True)
CPO = PreferenceLoss(f"{_LOSSES}:dpo", ("label_smoothing", *_OF_PAIRS), has_reference=False, sft_weight=1.0)
ORPO = PreferenceLoss(f"{_LOSSES}:orpo", has_reference=False, averages=True, sft_weight=1.0)
# Keys that only some losses read.
_OWN_KEYS = ("label_smoothing", "length_normalized", "margin", "desirable_weight", "undesirable_weight")


class DpoSection(Section):
    """The loss of preference tuning."""

    loss: Annotated[str, Registered(PREFERENCE_LOSSES)] = Field(
        "dpo",
        description="dpo: prefer the chosen answer to the rejected one (arXiv 2305.18290). ipo: with a fixed margin "
        "between means over tokens (arXiv 2310.12036). kto: each answer separately, as good or bad (arXiv 2402.01306); "
        "accepts labelled rows as well as pairs. hinge: no loss from a margin of 1 on (arXiv 2305.10425). robust: dpo "
        "without the bias of swapped pairs (arXiv 2403.00409). apo_zero, apo_down: raise the chosen answer and lower "
        "the rejected one, or lower both (arXiv 2408.06266). sppo: scores of plus and minus 1 / 2 beta (arXiv "
        "2405.00675). Without a reference: simpo: means over tokens a margin apart (arXiv 2405.14734). cpo: dpo, and "
        "the chosen answer is learned (arXiv 2401.08417). orpo: the chosen answer is learned, and its odds exceed "
        "those of the rejected one (arXiv 2403.07691).",
    )
    beta: Positive = Field(
        0.1, description="Weight of the deviation from the reference; larger values keep the model closer to it."
    )
    label_smoothing: BelowHalf = Field(
        0.0,
        description="dpo, cpo, simpo: probability that the answers of a pair are swapped (conservative DPO). robust: "
        "the share of pairs that are.",
    )
    length_normalized: bool = Field(
        False,
        description="The score of an answer is the mean over its tokens, not the sum (length-normalized DPO, arXiv "
        "2411.15124). ipo, simpo and orpo always have it.",
    )
    margin: NotNegative = Field(0.5, description="simpo: the margin between the rewards of the two answers.")
    sft_weight: NotNegative | None = Field(
        None,
        description="Weight of the mean negative log-probability of the tokens of the chosen answer, which is added to "
        "the loss of a pair (arXiv 2404.19733). null: 1 for cpo and orpo, otherwise 0.",
    )
    desirable_weight: Positive = Field(1.0, description="kto: weight of good answers.")
    undesirable_weight: Positive = Field(1.0, description="kto: weight of bad answers.")
    reference: Literal["start", "base"] = Field(
        "start",
        description="The reference model. start: the model that training starts from. base: the model without the "
        "adapter of model.adapter.start_from.",
    )

    @property
    def loss_spec(self) -> PreferenceLoss:
        """The loss that ``loss`` names."""
        return PREFERENCE_LOSSES.get(self.loss)


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    data, dpo = recipe.data, recipe.own(DpoSection)
    loss = dpo.loss_spec
    if data.long_documents == "split":
        yield Contradiction(
            ("data.long_documents", "task"), "answers to compare cannot be split; set it to auto or cut"
        )
    if data.format in ("labelled", ["labelled"]) and not loss.rates_answers:
        yield Contradiction(
            ("dpo.loss", "data.format"), f"{dpo.loss} compares two answers, but labelled rows have one; set it to kto"
        )
    packs_are_short = data.pack_length is not None and data.max_length <= data.pack_length < 2 * data.max_length
    if packs_are_short and not loss.rates_answers:
        yield Contradiction(
            ("data.pack_length", "data.max_length"),
            f"a pair of two answers of data.max_length {data.max_length} would not fit; raise it to "
            f"{2 * data.max_length} or lower data.max_length",
        )
    for key in _OWN_KEYS:
        if getattr(dpo, key) != type(dpo).model_fields[key].default and key not in loss.reads:
            readers = [name for name in PREFERENCE_LOSSES.names() if key in PREFERENCE_LOSSES.get(name).reads]
            yield Contradiction(
                (f"dpo.{key}", "dpo.loss"), f"has no effect with dpo.loss {dpo.loss}, only with {', '.join(readers)}"
            )
    if dpo.sft_weight and loss.rates_answers:
        yield Contradiction(("dpo.sft_weight", "dpo.loss"), f"{dpo.loss} has no pairs of which one answer is chosen")
    if dpo.reference == "base" and not loss.has_reference:
        yield Contradiction(("dpo.reference", "dpo.loss"), f"{dpo.loss} has no reference; leave it at start")
    elif dpo.reference == "base" and recipe.model.adapter.start_from is None:
        yield Contradiction(
            ("dpo.reference", "model.adapter.start_from"),
            "without an adapter to start from, the model that training starts from is the base; leave it at start",
        )


def _choose_row_kind(recipe: RecipeSchema, key: str) -> str:
    return "answers" if recipe.own(DpoSection).loss_spec.rates_answers else "pairs"


def _needs(recipe: RecipeSchema) -> Needs:
    return Needs(of_losses=True, sequences_per_example=1 if _choose_row_kind(recipe, "train") == "answers" else 2)


SPEC = TaskSpec(
    name="dpo",
    summary="preference tuning on compared or rated answers",
    module="trainwright.tasks.dpo.task",
    section=DpoSection,
    section_description="Preference loss; only with `task: dpo`.",
    check=_check,
    rows=_choose_row_kind,
    needs=_needs,
    no_validation_rows="a run on answers to compare; name rows with one answer each",
    also_called=("preference",),
)
