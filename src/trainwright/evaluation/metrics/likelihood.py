"""Metrics from a model's likelihoods of given texts. Each row has a value and a weight; see columns.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainwright.evaluation.columns import Column
from trainwright.inference.scoring import TokenScores

Floats = npt.NDArray[np.float64]


# Applied to the mean of a column.
FINISH = {"perplexity": np.exp}


def likelihood_columns(
    names: Sequence[str], rows: Sequence[TokenScores], last_turn: Sequence[int]
) -> dict[str, Column]:
    """Return the columns of ``names`` over scored rows.

    Args:
        last_turn: for each row, how many of its last targets belong to its last answer.
    """
    losses = [row.losses.astype(np.float64) for row in rows]
    targets = np.array([len(each) for each in losses], dtype=np.float64)
    totals = np.array([each.sum() for each in losses])
    probabilities = [answer_probability(each, count) for each, count in zip(losses, last_turn, strict=True)]
    made = {
        "loss": Column(totals, targets),
        "perplexity": Column(totals, targets, FINISH["perplexity"]),
        "token_accuracy": Column(np.array([float(row.correct.sum()) for row in rows]), targets),
        "answer_probability": Column(np.array(probabilities), np.array([float(count > 0) for count in last_turn])),
    }
    return {name: made[name] for name in names if name in made}


def answer_probability(losses: Floats, count: int) -> float:
    """Return the geometric mean of the probabilities of the last ``count`` targets, P(answer | question)^(1 / tokens),
    as in TOFU (arXiv 2401.06121); 0 if there are none.
    """
    return float(np.exp(-losses[len(losses) - count :].mean())) if count else 0.0
