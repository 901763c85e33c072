"""The metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainwright.registries import METRICS

# From the reference and the answer to a score, at best 1.
Judge = Callable[[str, str], float]

LIKELIHOODS = ("loss", "perplexity", "token_accuracy", "answer_probability")
USUAL = ("loss", "perplexity", "token_accuracy", "exact_match", "rouge_l", "f1")


def judges(names: Sequence[str], answer_pattern: str | None = None, json_schema: str | None = None) -> dict[str, Judge]:
    """Return the judges of answers among ``names``; ``answer`` and ``json_schema`` need their option.

    Raises:
        RequestError: the pattern, the schema, or a metric of another package is invalid.
        MachineError: a library that a metric needs is not installed.
    """
    settings = {"answer_pattern": answer_pattern, "json_schema": json_schema}
    made = {}
    for name in names:
        if name not in LIKELIHOODS:
            found = METRICS.get(name)
            setting = getattr(found, "setting", None)
            made[name] = found if setting is None else found(settings[setting])
    return made
