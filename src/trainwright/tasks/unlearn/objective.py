"""What an objective of unlearning is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Objective:
    """A forget loss, and what it takes.

    ``loss`` is called with what its parameters are named after: keys of the section ``unlearn``, and of the rows

    - ``of`` tokens: ``losses`` [n], the negative log-likelihoods of the targets; gives [n].
    - ``of`` answers: ``losses`` [D], their sums over each answer, float64; ``counts`` [D], the targets of each;
      ``ratios`` and ``refused`` [D], the log-ratios to the reference of the forget answers and of the refusals; gives
      [D].
    - ``of`` logits: ``logits`` [n, V], ``targets`` [n] and, with ``reference`` logits, ``teacher`` [n, V]; gives [n].
    - ``of`` activations: ``activations`` [n, H] of a block, and the ``direction`` [H] that they are steered to; gives
      [n]. The block and the direction are those of the keys ``layer`` and ``steering_coefficient``.

    Args:
        line: what it does.
        paper: where it is from.
        loss: the place of its formula, ``module:function``.
        of: what the loss is a function of.
        defaults: of the keys of the section that are its own; of ``gamma`` and ``alpha`` where they are not 1.
        reference: what of the reference the forget loss needs.
        idk: whether it teaches the refusals of data.idk.
        learns: whose tokens the loss is of: those of the forget answers or of the refusals.
        ascends: the retain loss is kept under ``retain_limit`` by dual ascent of ``alpha``.
        subtracts: what was learnt is subtracted from the weights in the end, ``scale`` times.
    """

    line: str
    paper: str
    loss: str
    of: Literal["tokens", "answers", "logits", "activations"] = "tokens"
    defaults: dict[str, Any] = field(default_factory=dict)
    reference: Literal["nothing", "log-probabilities", "logits", "activations"] = "nothing"
    idk: bool = False
    learns: Literal["forget", "refusals"] = "forget"
    ascends: bool = False
    subtracts: bool = False
