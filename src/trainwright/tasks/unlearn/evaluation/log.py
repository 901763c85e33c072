"""The findings about a model as a JSON file, and reference logs of other projects.

    {"trainwright", "model", "benchmark", "metrics": {name: {set: value}},
     "eval_log_forget.json": {"avg_gt_loss": {"0": …}, "average_perturb_loss": {"0": […]}, …}, "eval_log.json": …}

The parts named after files have the layout of the eval_log_aggregated.json files that TOFU's authors publish
(https://github.com/locuslab/tofu), so programs that read theirs read ours. A TOFU_EVAL.json of open-unlearning is also
accepted as a reference (https://github.com/locuslab/open-unlearning).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import RequestError
from trainwright.tasks.unlearn.evaluation import statistics

if TYPE_CHECKING:
    from trainwright.inference.scoring import TokenScores
    from trainwright.tasks.unlearn.evaluation.report import Findings, SetScores

NAME = "log.json"
# The part of the authors' logs for each set.
PARTS = {
    "forget": "eval_log_forget.json",
    "retain": "eval_log.json",
    "real_authors": "eval_real_author_wo_options.json",
    "world_facts": "eval_real_world_wo_options.json",
}


@dataclass(frozen=True)
class ReferenceLog:
    """The metrics' reference values from a model that was not trained on the forget set.

    Attributes:
        truth_ratios: on the forget set [items]; None: the log has none.
        min_k: AUC of the attack Min-K; None: the log has none.
    """

    file: str
    truth_ratios: npt.NDArray[np.float64] | None = None
    min_k: float | None = None


def read_reference(file: Path, key: str = "--reference-log") -> ReferenceLog:
    """Return the reference in ``file``, or in the directory of an evaluation.

    Raises:
        RequestError: it is not such a log, or has nothing that a metric uses.
    """
    file = file / NAME if file.is_dir() else file
    try:
        log = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{key}: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RequestError(f"{key}: {file}: not JSON: {error}") from None
    try:
        reference = _reference(str(file), log)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{key}: {file}: unknown log format ({error!r})") from None
    if reference.truth_ratios is None and reference.min_k is None:
        raise RequestError(
            f"{key}: {file} has neither truth ratios of the forget set nor an AUC of Min-K; use the {NAME} of an "
            "evaluation, an eval_log_aggregated.json of TOFU or a TOFU_EVAL.json"
        )
    return reference


def _reference(file: str, log: Mapping[str, Any]) -> ReferenceLog:
    ratios, min_k = None, None
    if PARTS["forget"] in log and "average_perturb_loss" in (part := log[PARTS["forget"]]):
        wrong = part["average_perturb_loss"]
        right = np.array([part["avg_paraphrased_loss"][number] for number in wrong], dtype=np.float64)
        ratios = statistics.truth_ratios(
            right, [np.atleast_1d(np.array(each, dtype=np.float64)) for each in wrong.values()]
        )
    elif "forget_truth_ratio" in log:
        ratios = np.array([each["score"] for each in log["forget_truth_ratio"]["value_by_index"].values()], dtype=float)
    if "mia_min_k" in log:
        min_k = float(log["mia_min_k"]["agg_value"])
    elif "mia_min_k" in log.get("metrics", {}):
        min_k = float(log["metrics"]["mia_min_k"]["forget"])
    return ReferenceLog(file, ratios, min_k)


def log_of(findings: Findings, values: Mapping[str, Mapping[str, float]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log of an evaluation. ``about``: the fields at its top."""
    parts = {PARTS[name]: _part(findings, name, scores) for name, scores in findings.scores.items() if name in PARTS}
    return {**about, "metrics": values, **parts}


def _part(findings: Findings, name: str, scores: SetScores) -> dict[str, Any]:
    right = [scores.paraphrases.get(number, answer) for number, answer in enumerate(scores.answers)]
    part = {**_losses(scores.answers, "gt")}
    if scores.wrong:
        wrong = [_losses(each, "perturb") for each in scores.wrong]
        part |= {key: _numbered([list(each[key].values()) for each in wrong]) for key in wrong[0]}
        part["average_perturb_loss"] = part.pop("avg_perturb_loss")
        part |= _losses(right, "paraphrased") | {"truth_ratio": _numbered(scores.truth_ratios.tolist())}
    if name in findings.answers:
        from trainwright.inference.evaluation.metrics import rouge_l

        answers, references = findings.answers[name], findings.references[name]
        prompts = [item.prompt for item in findings.sets[name].items]
        recalls = [rouge_l(*pair, stem=True).recall for pair in zip(references, answers, strict=True)]
        part["generated_text"] = _numbered([list(each) for each in zip(prompts, answers, references, strict=True)])
        part["rougeL_recall"] = _numbered(recalls)
    return part


def _losses(scores: Sequence[TokenScores], what: str) -> dict[str, dict[str, Any]]:
    sums = [float(each.losses.sum(dtype=np.float64)) for each in scores]
    counts = [len(each.losses) for each in scores]
    return {
        f"avg_{what}_loss": _numbered([total / count for total, count in zip(sums, counts, strict=True)]),
        f"{what}_loss": _numbered(sums),
        f"num_token_{what}": _numbered(counts),
    }


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}
