"""The metrics of benchmarks by name: what each needs, and how to compute it from the findings about a model.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainwright.errors import RequestError
from trainwright.inference.evaluation.metrics import Overlap, rouge_l
from trainwright.tasks.unlearn.evaluation import statistics

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.evaluation.items import ItemSet
    from trainwright.tasks.unlearn.evaluation.report import Findings, Floats, SetScores

# By set; metrics of several sets together are under "all".
Values = dict[str, float]

QUESTIONS = ("forget", "retain", "real_authors", "world_facts")
# Sets whose probability is relative to the other options, as in TOFU.
OPTIONS = ("real_authors", "world_facts")


@dataclass(frozen=True)
class Metric:
    """How to compute a metric.

    Attributes:
        compute: from the findings.
        sets: the sets it uses, if the benchmark has them.
        needs: those of them that it requires.
        wrong: whether items must have wrong answers.
        answers: whether the model must generate answers.
        attacked: additional findings for each item; see ``Findings.attacked``.
        option: the command's option that must be given.
        attack: whether the model is modified, and then measured.
    """

    compute: Callable[[Findings], Values]
    sets: tuple[str, ...]
    needs: tuple[str, ...] = ("forget",)
    wrong: bool = False
    answers: bool = False
    attacked: str | None = None
    option: str | None = None
    attack: bool = False


def _compute_probability(findings: Findings) -> Values:
    def of(name: str, scores: SetScores) -> float:
        if name in OPTIONS and scores.wrong:
            return float(statistics.compute_option_probabilities(scores.losses, scores.wrong_losses).mean())
        return float(np.exp(-scores.losses).mean())

    return {name: of(name, findings.scores[name]) for name in (*QUESTIONS, "holdout") if name in findings.scores}


def _build_rouge(pick: Callable[[Overlap], float], sets: tuple[str, ...]) -> Callable[[Findings], Values]:
    def compute(findings: Findings) -> Values:
        values = {}
        for name in sets:
            if name in findings.answers:
                stem = findings.sets[name].style == "chat"  # TOFU's authors count word stems, MUSE's do not
                pairs = zip(findings.references[name], findings.answers[name], strict=True)
                values[name] = float(np.mean([pick(rouge_l(*pair, stem=stem)) for pair in pairs]))
        return values

    return compute


def _compute_truth_ratio(findings: Findings) -> Values:
    values = {}
    for name in QUESTIONS:
        if name in findings.scores and findings.scores[name].wrong:
            aggregate = (
                statistics.compute_forget_truth_ratio if name == "forget" else statistics.compute_utility_truth_ratio
            )
            values[name] = aggregate(findings.scores[name].truth_ratios)
    return values


def _compute_forget_quality(findings: Findings) -> Values:
    assert findings.reference is not None
    if findings.reference.truth_ratios is None:
        raise RequestError(f"--metrics forget_quality: {findings.reference.file} has no truth ratios of the forget set")
    return {
        "forget": statistics.forget_quality(findings.scores["forget"].truth_ratios, findings.reference.truth_ratios)
    }


def _compute_model_utility(findings: Findings) -> Values:
    recall = _build_rouge(lambda overlap: overlap.recall, QUESTIONS)
    parts = (_compute_probability(findings), recall(findings), _compute_truth_ratio(findings))
    return {"all": statistics.model_utility([part[name] for part in parts for name in QUESTIONS[1:]])}


def _build_memorization(measure: Callable[[statistics.Bools], float]) -> Callable[[Findings], Values]:
    def compute(findings: Findings) -> Values:
        name = "verbatim" if "verbatim" in findings.scores else "forget"
        scores = findings.scores[name]
        values = [measure(scores.select_text_correct(number)) for number in range(len(scores.answers))]
        return {"forget": float(np.mean(values))}

    return compute


def _compute_auc(findings: Findings, attack: Callable[[str, int], float]) -> float:
    members = "members" if "members" in findings.sets else "forget"
    attack_scores = [
        np.array([attack(name, number) for number in range(len(findings.sets[name].items))])
        for name in (members, "holdout")
    ]
    return statistics.compute_auc(*attack_scores)


def _build_loss_attack(attack: Callable[[Floats, str], float]) -> Callable[[Findings], Values]:
    def compute(findings: Findings) -> Values:
        def of(name: str, number: int) -> float:
            return attack(
                findings.scores[name].select_text_losses(number), findings.sets[name].items[number].answer.strip()
            )

        return {"forget": _compute_auc(findings, of)}

    return compute


def _build_attack_on_items(what: str, attack: Callable[[Floats], float]) -> Callable[[Findings], Values]:
    def compute(findings: Findings) -> Values:
        return {"forget": _compute_auc(findings, lambda name, number: attack(findings.attacked[what][name][number]))}

    return compute


def _compute_mia_reference(findings: Findings) -> Values:
    def of(name: str, number: int) -> float:
        other_losses = findings.attacked["other_losses"][name][number]
        return statistics.compute_reference_attack(findings.scores[name].select_text_losses(number), other_losses)

    return {"forget": _compute_auc(findings, of)}


_min_k = _build_loss_attack(lambda losses, text: statistics.compute_min_k_attack(losses))


def _compute_privleak(findings: Findings) -> Values:
    assert findings.reference is not None
    if findings.reference.min_k is None:
        raise RequestError(
            f"--metrics privleak: {findings.reference.file} has no AUC of Min-K; measure that model with "
            "--metrics mia_min_k, too"
        )
    return {"forget": statistics.privleak(_min_k(findings)["forget"], findings.reference.min_k)}


def _build_answer_metric(measure: Callable[[str], float]) -> Callable[[Findings], Values]:
    def compute(findings: Findings) -> Values:
        names = [name for name in ("forget", "retain") if name in findings.answers]
        return {name: float(np.mean([measure(answer) for answer in findings.answers[name]])) for name in names}

    return compute


def _compute_choice_accuracy(findings: Findings) -> Values:
    """Return the fraction of questions whose right letter is the most probable; a tie of two counts half."""
    scores = findings.scores["choices"]
    pairs = zip(scores.losses, scores.wrong_losses, strict=True)
    return {"choices": float(np.mean([(loss < wrong.min()) + 0.5 * (loss == wrong.min()) for loss, wrong in pairs]))}


def _refuse_attack(findings: Findings) -> Values:
    raise AssertionError("an attack is measured separately")


_UTILITY = QUESTIONS[1:]
_MEMBERS = ("forget", "members", "holdout")
_TEXTS = ("forget", "verbatim")

METRICS: dict[str, Metric] = {
    "answer_probability": Metric(_compute_probability, (*QUESTIONS, "holdout")),
    "rouge_l_recall": Metric(_build_rouge(lambda overlap: overlap.recall, QUESTIONS), QUESTIONS, answers=True),
    "rouge_l": Metric(_build_rouge(lambda overlap: overlap.f1, QUESTIONS), QUESTIONS, answers=True),
    "truth_ratio": Metric(_compute_truth_ratio, QUESTIONS, wrong=True),
    "forget_quality": Metric(_compute_forget_quality, ("forget",), wrong=True, option="--reference-log"),
    "model_utility": Metric(_compute_model_utility, _UTILITY, _UTILITY, wrong=True, answers=True),
    "verbatim_memorisation": Metric(
        _build_rouge(lambda overlap: overlap.f1, ("verbatim",)), ("verbatim",), ("verbatim",), answers=True
    ),
    "knowledge_memorisation": Metric(
        _build_rouge(lambda overlap: overlap.f1, QUESTIONS[:2]), QUESTIONS[:2], ("forget", "retain"), answers=True
    ),
    "exact_memorisation": Metric(_build_memorization(statistics.exact_memorisation), _TEXTS),
    "extraction_strength": Metric(_build_memorization(statistics.extraction_strength), _TEXTS),
    "mia_loss": Metric(
        _build_loss_attack(lambda losses, text: statistics.compute_loss_attack(losses)), _MEMBERS, ("forget", "holdout")
    ),
    "mia_zlib": Metric(_build_loss_attack(statistics.compute_zlib_attack), _MEMBERS, ("forget", "holdout")),
    "mia_reference": Metric(
        _compute_mia_reference, _MEMBERS, ("forget", "holdout"), attacked="other_losses", option="--reference-model"
    ),
    "mia_gradient_norm": Metric(
        _build_attack_on_items("gradient_norm", lambda norm: float(norm[0])),
        _MEMBERS,
        ("forget", "holdout"),
        attacked="gradient_norm",
    ),
    "mia_min_k": Metric(_min_k, _MEMBERS, ("forget", "holdout")),
    "mia_min_k_plus_plus": Metric(
        _build_attack_on_items("standardized", statistics.compute_min_k_plus_plus_attack),
        _MEMBERS,
        ("forget", "holdout"),
        attacked="standardized",
    ),
    "privleak": Metric(_compute_privleak, _MEMBERS, ("forget", "holdout"), option="--reference-log"),
    "gibberish": Metric(
        _build_answer_metric(lambda answer: float(statistics.is_gibberish(answer))), QUESTIONS[:2], answers=True
    ),
    "fluency": Metric(_build_answer_metric(statistics.fluency), QUESTIONS[:2], answers=True),
    "choice_accuracy": Metric(_compute_choice_accuracy, ("choices",), ("choices",), wrong=True),
    "relearning": Metric(_refuse_attack, ("forget",), attack=True),
    "quantisation": Metric(_refuse_attack, ("forget",), attack=True),
}
# Slow, or with a library of their own: measured only if named.
_NOT_USUAL = ("mia_gradient_norm", "relearning", "quantisation")


def select_sets(name: str, available: Sequence[str]) -> list[str]:
    """Return the sets that a metric uses in a benchmark with the sets ``available``."""
    metric = METRICS[name]
    used_sets = [part for part in metric.sets if part in available]
    fallbacks = {"members": "forget", "verbatim": "forget"}  # if the benchmark has a separate set for the purpose
    dropped_sets = {fallbacks[part] for part in used_sets if part in fallbacks and set(metric.sets) & {fallbacks[part]}}
    return [part for part in used_sets if part not in dropped_sets]


def describe_missing(name: str, sets: Mapping[str, ItemSet], options: Mapping[str, object]) -> str | None:
    """Return what a metric lacks, as text; None if nothing.

    Args:
        sets: the available sets.
        options: of the command, by name; None or False if not given.
    """
    metric = METRICS[name]
    if absent := [part for part in metric.needs if part not in sets]:
        return f"the benchmark has no set {' and '.join(absent)}"
    if metric.wrong and (bare := [part for part in metric.needs if not sets[part].has_wrong]):
        return f"the rows of {' and '.join(bare)} have no wrong answers (perturbed_answer)"
    if metric.answers and (mute := [part for part in metric.needs if not _has_prompts(sets[part])]):
        return f"the rows of {' and '.join(mute)} are texts without prompts"
    if metric.option is not None and not options.get(metric.option):
        return f"it needs {metric.option}"
    return None


def select_usual(sets: Mapping[str, ItemSet], options: Mapping[str, object]) -> list[str]:
    """Return the metrics that lack nothing, except slow ones."""
    return [name for name in METRICS if name not in _NOT_USUAL and describe_missing(name, sets, options) is None]


def _has_prompts(each: ItemSet) -> bool:
    return each.style != "choices" and all(item.prompt for item in each.items)
