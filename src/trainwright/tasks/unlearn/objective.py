"""The specification of an unlearning objective. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Objective:
    """A forget loss, and its inputs.

    The parameters of the function ``loss`` are named after its inputs: keys of the section ``unlearn``, and tensors

    - ``of`` tokens: ``losses`` [n], the negative log-likelihoods of the targets; returns [n].
    - ``of`` answers: ``losses`` [D], their sums over each answer, float64; ``counts`` [D], the number of targets of
      each; ``ratios`` and ``refused`` [D], the log-ratios to the reference of the forget answers and of the refusals;
      returns [D].
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
    learns: Literal["forget", "refusals"] = "forget"
    ascends: bool = False
    subtracts: bool = False
