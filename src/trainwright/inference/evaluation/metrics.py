"""The request of an evaluation; and metrics of answers: the same as the reference, words in common, JSON by a schema.

Short answers are extracted from texts by a pattern and compared as numbers if both are.
"""

from __future__ import annotations

import functools
import json
import os
import re
import string
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from trainwright.errors import RequestError
from trainwright.recipe.files import read_json
from trainwright.recipe.registries import METRICS
from trainwright.recipe.sections.fields import Count, Length
from trainwright.utils.installation import require
from trainwright.utils.paths import expand_user_path

# From the reference and the answer to a score, at best 1.
Judge = Callable[[str, str], float]
LIKELIHOODS = ("loss", "perplexity", "token_accuracy", "answer_probability")
USUAL = ("loss", "perplexity", "token_accuracy", "exact_match", "rouge_l", "f1")


def build_judges(
    names: Sequence[str], answer_pattern: str | None = None, json_schema: str | None = None
) -> dict[str, Judge]:
    """Return the judges of answers among ``names``; ``answer`` and ``json_schema`` need their option.

    Raises:
        RequestError: the pattern, the schema, or a metric of another package is invalid.
        MachineError: a library that a metric needs is not installed.
    """
    settings = {"answer_pattern": answer_pattern, "json_schema": json_schema}
    by_name = {}
    for name in names:
        if name not in LIKELIHOODS:
            metric = METRICS.get(name)
            setting = getattr(metric, "setting", None)
            by_name[name] = metric if setting is None else metric(settings[setting])
    return by_name


# Named patterns. gsm8k: the format of https://github.com/openai/grade-school-math.
NAMED = {"gsm8k": r"####\s*\$?\s*(-?[\d.,]+)"}
NUMBER = "number"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")

Extract = Callable[[str], str | None]


def build_extractor(pattern: str) -> Extract:
    """Return a function that extracts the short answer from a text, or None if it has none.

    Args:
        pattern: ``gsm8k`` (what follows ``####``), ``number`` (the last number), or a regular expression: the first
            group of its first match, or the match if it has no group.

    Raises:
        RequestError: it is not a valid regular expression.
    """
    if pattern == NUMBER:
        return lambda text: next(reversed(_NUMBER.findall(text)), None)
    try:
        expression = re.compile(NAMED.get(pattern, pattern))
    except re.error as error:
        raise RequestError(f"the answer pattern {pattern!r} is not a regular expression: {error}") from None
    group = 1 if expression.groups else 0
    return lambda text: match[group] if (match := expression.search(text)) else None


class AnswerMatch:
    """Score 1 if the short answer equals the reference's; an answer without a short answer is wrong."""

    setting = "answer_pattern"

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._extract = build_extractor(pattern)

    def check(self, reference: str) -> None:
        """Raise RequestError if the reference has no short answer."""
        if self._extract(reference) is None:
            ending = " ".join(reference.split())[-60:]
            raise RequestError(
                f"the pattern {self._pattern!r} matches no answer in the reference (it ends with {ending!r})"
            )

    def __call__(self, reference: str, answer: str) -> float:
        """Return 1 if both texts have the same short answer, else 0."""
        expected, actual = self._extract(reference), self._extract(answer)
        return float(expected is not None and actual is not None and is_same_answer(expected, actual))


def is_same_answer(one: str, other: str) -> bool:
    """Return whether two short answers are equal: 1,000.0 equals 1000, and 18. at the end of a sentence 18."""
    numbers = _parse_number(one), _parse_number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return one.strip() == other.strip()


def _parse_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", "").lstrip("$").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


class JsonSchema:
    """Score 1 if the whole answer is one JSON value that is valid under the schema in ``file``. The reference is
    ignored.

    Raises:
        RequestError: the file is not a JSON Schema.
    """

    setting = "json_schema"

    def __init__(self, file: str | Path) -> None:
        file = expand_user_path(file)
        require("jsonschema", "json_schema")
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        schema = _read(file)
        self._file = file
        kind = validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            location = "/".join(map(str, error.absolute_path)) or "the top"
            raise RequestError(f"{file}: not a JSON Schema: at {location}: {error.message}") from None
        # An empty registry: references of a schema are never fetched.
        self._validator = kind(schema, registry=Registry())

    def __call__(self, reference: str, answer: str) -> float:
        """Return 1 if the answer is JSON that is valid under the schema, else 0."""
        from referencing.exceptions import Unresolvable

        try:
            value = json.loads(answer, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float(self._validator.is_valid(value))
        except Unresolvable as error:
            raise RequestError(f"{self._file}: the schema refers to {error.ref}, which is not in it") from None


def _read(file: Path) -> Any:
    schema = read_json(file)
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{file}: not a JSON Schema: it should be an object")
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed in JSON")


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Overlap(NamedTuple):
    """Overlap of the words of a reference answer and an answer."""

    precision: float
    recall: float
    f1: float


def exact_match(reference: str, answer: str) -> float:
    """Return 1 if the texts are equal except for surrounding white space, else 0."""
    return float(reference.strip() == answer.strip())


def word_f1(reference: str, answer: str) -> float:
    """Return the F1 of common words, ignoring case, punctuation and articles, as in SQuAD (arXiv 1606.05250)."""
    expected, actual = _split_words(reference), _split_words(answer)
    if not expected or not actual:
        return float(expected == actual)
    common = sum((Counter(expected) & Counter(actual)).values())
    return 2 * common / (len(expected) + len(actual))


def rouge_l(reference: str, answer: str, *, stem: bool = False) -> Overlap:
    """Return ROUGE-L as the package rouge-score computes it: overlap by the longest common subsequence of words (Lin
    2004).

    Args:
        stem: compare the stems of words (Porter).
    """
    score = _load_rouge_scorer(stem).score(reference, answer)["rougeL"]
    return Overlap(score.precision, score.recall, score.fmeasure)


def rouge_l_f1(reference: str, answer: str) -> float:
    """Return the F1 of ``rouge_l``."""
    return rouge_l(reference, answer).f1


def rouge_l_recall(reference: str, answer: str) -> float:
    """Return the recall of ``rouge_l``."""
    return rouge_l(reference, answer).recall


@functools.cache
def _load_rouge_scorer(stem: bool) -> Any:
    require("rouge_score", "rouge_l")
    if os.path.expanduser("~") == "~":  # nltk, whose stemmer it uses, needs a download directory
        os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=stem)


def _split_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


QUICK_ROWS, USUAL_ANSWERS = 50, 200


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of ``trainwright eval`` that an evaluation takes as they are given; None: not given."""

    model: str
    against: str | None = None
    adapter: str | None = None
    checkpoint: str | None = None
    data: str | None = None
    format: str = "auto"
    limit: Count | None = None
    quick: bool = False
    full: bool = False
    answer_pattern: str | None = None
    json_schema: str | None = None
    max_length: Annotated[Length, Field(ge=2)] | None = None
    batch_size: Count | None = None
    benchmark: str | None = None
    reference_log: str | None = None
    reference_model: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(EvaluationOptions):
    """The request of an evaluation. ``metrics`` in display order; ``explicit``: they were named by the user;
    ``on_benchmark``: on an unlearning benchmark, named or the run's own, instead of rows.
    """

    metrics: tuple[str, ...]
    explicit: bool = False
    max_new_tokens: int = 256
    dtype: str = "fp32"
    tasks: tuple[str, ...] = ()
    task_directory: str | None = None
    on_benchmark: bool = False
    relearning_steps: int = 20
    relearning_rate: float = 1e-5

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options that were given or have a default, as plain values."""
        return {key: value for key, value in asdict(self).items() if value not in (None, (), False)}

    @property
    def on_rows(self) -> bool:
        """Return whether rows are measured, and not only tasks of lm-evaluation-harness."""
        return self.data is not None or not self.tasks
