"""The findings of an evaluation on a benchmark, by set and item, and its output: a table, and a directory, written
completely or not at all.

    metrics.json   every metric, by set
    log.json       the same with the numbers of every item
    samples.jsonl  prompts, references and answers, if the model generated any

The findings about a model as a JSON file, and reference logs of other projects.

    {"trainwright", "model", "benchmark", "metrics": {name: {set: value}},
     "eval_log_forget.json": {"avg_gt_loss": {"0": …}, "average_perturb_loss": {"0": […]}, …}, "eval_log.json": …}

The parts named after files have the layout of the eval_log_aggregated.json files that TOFU's authors publish
(https://github.com/locuslab/tofu), so programs that read theirs read ours. A TOFU_EVAL.json of open-unlearning is also
accepted as a reference (https://github.com/locuslab/open-unlearning).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import RequestError
from trainwright.inference.evaluation.metrics import rouge_l
from trainwright.inference.evaluation.report import align_columns, complete_directory, format_number, write_text
from trainwright.inference.scoring import TokenScores
from trainwright.tasks.unlearn.evaluation import statistics
from trainwright.tasks.unlearn.evaluation.items import ANSWER, PARAPHRASE, WRONG, ItemSequences, ItemSet

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


def read_reference(file: Path) -> ReferenceLog:
    """Return the reference in ``file``, or in the directory of an evaluation.

    Raises:
        RequestError: it is not such a log, or has nothing that a metric uses.
    """
    file = file / NAME if file.is_dir() else file
    try:
        log = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"--reference-log: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RequestError(f"--reference-log: {file}: not JSON: {error}") from None
    try:
        reference = _parse_reference(str(file), log)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"--reference-log: {file}: unknown log format ({error!r})") from None
    if reference.truth_ratios is None and reference.min_k is None:
        raise RequestError(
            f"--reference-log: {file} has neither truth ratios of the forget set nor an AUC of Min-K; use the {NAME} "
            "of an evaluation, an eval_log_aggregated.json of TOFU or a TOFU_EVAL.json"
        )
    return reference


def _parse_reference(file: str, log: Mapping[str, Any]) -> ReferenceLog:
    ratios, min_k = None, None
    if PARTS["forget"] in log and "average_perturb_loss" in (part := log[PARTS["forget"]]):
        wrong = part["average_perturb_loss"]
        right = np.array([part["avg_paraphrased_loss"][number] for number in wrong], dtype=np.float64)
        ratios = statistics.compute_truth_ratios(
            right, [np.atleast_1d(np.array(item, dtype=np.float64)) for item in wrong.values()]
        )
    elif "forget_truth_ratio" in log:
        ratios = np.array([item["score"] for item in log["forget_truth_ratio"]["value_by_index"].values()], dtype=float)
    if "mia_min_k" in log:
        min_k = float(log["mia_min_k"]["agg_value"])
    elif "mia_min_k" in log.get("metrics", {}):
        min_k = float(log["metrics"]["mia_min_k"]["forget"])
    return ReferenceLog(file, ratios, min_k)


def log_of(findings: Findings, values: Mapping[str, Mapping[str, float]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log of an evaluation. ``about``: the fields at its top."""
    parts = {
        PARTS[name]: _build_set_part(findings, name, scores)
        for name, scores in findings.scores.items()
        if name in PARTS
    }
    return {**about, "metrics": values, **parts}


def _build_set_part(findings: Findings, name: str, scores: SetScores) -> dict[str, Any]:
    right = [scores.paraphrases.get(number, answer) for number, answer in enumerate(scores.answers)]
    part = _build_losses(scores.answers, "gt")
    if scores.wrong:
        wrong = [_build_losses(entry, "perturb") for entry in scores.wrong]
        part |= {key: _number_values([list(entry[key].values()) for entry in wrong]) for key in wrong[0]}
        part["average_perturb_loss"] = part.pop("avg_perturb_loss")
        part |= _build_losses(right, "paraphrased") | {"truth_ratio": _number_values(scores.truth_ratios.tolist())}
    if name in findings.answers:
        answers, references = findings.answers[name], findings.references[name]
        prompts = [item.prompt for item in findings.sets[name].items]
        texts = list(map(list, zip(prompts, answers, references, strict=True)))
        recalls = [rouge_l(*pair, stem=True).recall for pair in zip(references, answers, strict=True)]
        part |= {"generated_text": _number_values(texts), "rougeL_recall": _number_values(recalls)}
    return part


def _build_losses(scores: Sequence[TokenScores], what: str) -> dict[str, dict[str, Any]]:
    sums = [float(token_scores.losses.sum(dtype=np.float64)) for token_scores in scores]
    counts = [len(token_scores.losses) for token_scores in scores]
    return {
        f"avg_{what}_loss": _number_values([total / count for total, count in zip(sums, counts, strict=True)]),
        f"{what}_loss": _number_values(sums),
        f"num_token_{what}": _number_values(counts),
    }


def _number_values(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


METRICS_FILE = "metrics.json"


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of an evaluation on a benchmark.

    Attributes:
        metrics: values by metric and set.
        rows: the number of items of each set.
        about: the fields at the top of the log.
    """

    metrics: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    about: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: list[str]
    log: Mapping[str, Any]
    samples: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        findings: Findings,
        values: Mapping[str, Mapping[str, float]],
        about: Mapping[str, Any],
        settings: Mapping[str, Any],
        notes: list[str],
    ) -> BenchmarkReport:
        """Build the report from the findings."""
        samples = [
            {"set": name, "row": number + 1, "prompt": item.prompt, "reference": reference, "answer": answer}
            for name, answers in findings.answers.items()
            for number, (item, reference, answer) in enumerate(
                zip(findings.sets[name].items, findings.references[name], answers, strict=True)
            )
        ]
        rows = {name: len(item_set.items) for name, item_set in findings.sets.items()}
        return cls(values, rows, about, settings, notes, log_of(findings, values, about), samples)

    def save(self, file: Path) -> None:
        """Write the object to a file or directory."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def open(cls, file: Path) -> BenchmarkReport:
        """Read what ``save`` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def lines(self) -> list[str]:
        """Return the table and its notes."""
        rows = [
            [metric, name, format_number(value), f"{self.rows[name]:,}" if name in self.rows else ""]
            for metric, values in self.metrics.items()
            for name, value in values.items()
        ]
        return [*align_columns(rows, ("metric", "set", "value", "rows")), *(f"note: {note}" for note in self.notes)]

    def write(self, directory: Path) -> None:
        """Write all files to the new ``directory``. Raises RequestError if they cannot be written."""
        with complete_directory(directory) as scratch:
            content = {**self.about, "settings": self.settings, "metrics": self.metrics, "rows": self.rows}
            write_text(scratch / METRICS_FILE, json.dumps({**content, "notes": self.notes}, indent=2) + "\n")
            write_text(scratch / NAME, json.dumps(self.log) + "\n")
            if self.samples:
                lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in self.samples)
                write_text(scratch / "samples.jsonl", "".join(lines))


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SetScores:
    """Likelihoods of one set.

    Attributes:
        answers: of every item [items], each with the stop after it.
        text_targets: for each answer, how many of its first targets are text.
        paraphrases: of the items that have one, by item number.
        wrong: the wrong answers of every item; empty if they were not scored.
    """

    answers: list[TokenScores]
    text_targets: list[int]
    paraphrases: dict[int, TokenScores] = field(default_factory=dict)
    wrong: list[list[TokenScores]] = field(default_factory=list)

    @property
    def losses(self) -> Floats:
        """Return the mean negative log-likelihood of every answer [items], including the stop."""
        return np.array([mean_loss(answer) for answer in self.answers])

    @property
    def wrong_losses(self) -> list[Floats]:
        """Return the losses of the wrong answers of every item."""
        return [np.array([mean_loss(answer) for answer in wrong]) for wrong in self.wrong]

    @property
    def right_losses(self) -> Floats:
        """Return the losses of right answers to compare with wrong ones [items]: of the paraphrase, if there is one."""
        right = [self.paraphrases.get(number, answer) for number, answer in enumerate(self.answers)]
        return np.array([mean_loss(answer) for answer in right])

    @property
    def truth_ratios(self) -> Floats:
        """Return the truth ratio of every item; all items must have wrong answers."""
        return statistics.compute_truth_ratios(self.right_losses, self.wrong_losses)

    def select_text_losses(self, number: int) -> Floats:
        """Return the losses of the tokens of an answer's text."""
        return self.answers[number].losses[: self.text_targets[number]].astype(np.float64)

    def select_text_correct(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of an answer's text are the most probable ones."""
        return self.answers[number].correct[: self.text_targets[number]]


def mean_loss(scores: TokenScores) -> float:
    """Return the mean loss over the targets of a sequence."""
    return float(scores.losses.astype(np.float64).mean())


@dataclass(frozen=True)
class Findings:
    """The inputs of the metrics, as far as needed.

    Attributes:
        sets: the items, by the set's name.
        scores: likelihoods, by set.
        answers: the model's answers to every item, by set, and ``references`` the right ones.
        attacked: other numbers of every item by set, by their kind: ``standardized`` has those of every token,
            ``gradient_norm`` and ``other_losses`` one.
        reference: the reference values of another model.
    """

    sets: Mapping[str, ItemSet]
    scores: Mapping[str, SetScores] = field(default_factory=dict)
    answers: Mapping[str, list[str]] = field(default_factory=dict)
    references: Mapping[str, list[str]] = field(default_factory=dict)
    attacked: Mapping[str, Mapping[str, Sequence[Floats]]] = field(default_factory=dict)
    reference: ReferenceLog | None = None


def group_by_set(sequences: ItemSequences, scores: Sequence[TokenScores]) -> dict[str, SetScores]:
    """Return the scores of all sequences, grouped by set."""
    by_name: dict[str, SetScores] = {}
    for (name, item, kind, _), number in sequences.places.items():
        set_scores = by_name.setdefault(name, SetScores([], []))
        if kind == ANSWER:
            assert item == len(set_scores.answers), "sequences of a set are in the order of its items"
            set_scores.answers.append(scores[number])
            set_scores.text_targets.append(sequences.text_targets[number])
        elif kind == PARAPHRASE:
            set_scores.paraphrases[item] = scores[number]
        elif kind == WRONG:
            set_scores.wrong.extend([] for _ in range(item + 1 - len(set_scores.wrong)))
            set_scores.wrong[item].append(scores[number])
    return by_name
