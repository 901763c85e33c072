"""The metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from trainwright.evaluation.metrics.extraction import AnswerMatch
from trainwright.evaluation.metrics.json_schema import JsonSchema
from trainwright.evaluation.metrics.overlap import exact_match, rouge_l, word_f1
from trainwright.recipe.schema import AnswerMetric

# From the reference and the answer to a score, 1 where it is best.
Judge = Callable[[str, str], float]

LIKELIHOODS = ("loss", "perplexity", "token_accuracy", "answer_probability")
ANSWERS: tuple[str, ...] = get_args(AnswerMetric)
LOWER_IS_BETTER = ("loss", "perplexity")
USUAL = ("loss", "perplexity", "token_accuracy", "exact_match", "rouge_l", "f1")


def judges(names: Sequence[str], answer_pattern: str | None = None, json_schema: str | None = None) -> dict[str, Judge]:
    """What judges answers, for those of ``names`` that do; ``answer`` and ``json_schema`` need theirs.

    Raises:
        RequestError: the pattern or the schema cannot be used.
        MachineError: a library that a metric needs is not installed.
    """
    made: dict[str, Callable[[], Judge]] = {
        "exact_match": lambda: exact_match,
        "f1": lambda: word_f1,
        "rouge_l": lambda: lambda reference, answer: rouge_l(reference, answer).f1,
        "rouge_l_recall": lambda: lambda reference, answer: rouge_l(reference, answer).recall,
        "answer": lambda: AnswerMatch(str(answer_pattern)),
        "json_schema": lambda: JsonSchema(Path(str(json_schema)).expanduser()),
    }
    return {name: made[name]() for name in names if name in made}
