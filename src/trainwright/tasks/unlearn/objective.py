"""The specification of an unlearning objective, and those of the built-in ones. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Objective:
    """A forget loss, and its inputs.

    The parameters of the function ``loss`` are named after its inputs: keys of the section ``unlearn``, and tensors

    - ``of`` tokens: ``losses`` [n], the negative log-likelihoods of the targets; returns [n].
    - ``of`` answers: ``losses`` [D], their sums over each answer, float64; ``counts`` [D], the number of targets of
      each; ``ratios`` and ``refused`` [D], the log-ratios to the reference of the forget answers and of the refusals
      or alternates; returns [D].
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
        alternates: whether it trains the alternate answers of the forget rows, in place of refusals.
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
    alternates: bool = False
    learns: Literal["forget", "refusals"] = "forget"
    ascends: bool = False
    subtracts: bool = False


# The built-in objectives.
_FORMULAS = "trainwright.tasks.unlearn.losses"

GRAD_ASCENT = Objective(
    "raise the loss on the forget rows only",
    "arXiv 2210.01504",
    f"{_FORMULAS}:grad_ascent",
    defaults={"alpha": 0.0},
)
GRAD_DIFF = Objective(
    "raise the loss on the forget rows, lower it on the retain rows",
    "arXiv 2203.12817",
    f"{_FORMULAS}:grad_ascent",
)
NPO = Objective(
    "DPO with only rejected answers: ascent that slows down as rows are forgotten",
    "arXiv 2404.05868",
    f"{_FORMULAS}:npo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
)
SIMNPO = Objective(
    "NPO without a reference model, with the mean over an answer's tokens",
    "arXiv 2410.07163",
    f"{_FORMULAS}:simnpo",
    of="answers",
    defaults={"beta": 4.5, "delta": 0.0, "gamma": 0.125},
)
DPO = Objective(
    "prefer a refusal to each forget answer",
    "arXiv 2305.18290, 2401.06121",
    f"{_FORMULAS}:dpo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
    idk=True,
)
ALTPO = Objective(
    "prefer the alternate answers of a row to its forget answer",
    "arXiv 2409.13474",
    f"{_FORMULAS}:dpo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
    alternates=True,
)
IDK_NLL = Objective(
    "learn a refusal as the answer to each forget question",
    "arXiv 2401.06121",
    f"{_FORMULAS}:descent",
    idk=True,
    learns="refusals",
)
RMU = Objective(
    "steer activations of forget rows to a random direction, keep those of retain rows",
    "arXiv 2403.03218",
    f"{_FORMULAS}:steering",
    of="activations",
    defaults={"layer": 7, "steering_coefficient": 2.0, "retain_loss": "activations"},
)
UNDIAL = Objective(
    "distill the model's own logits, with lower logits of the forget tokens",
    "arXiv 2402.10052",
    f"{_FORMULAS}:undial",
    of="logits",
    defaults={"beta": 10.0, "alpha": 0.0},
    reference="logits",
)
WGA = Objective(
    "ascent weighted by the probability of each token",
    "arXiv 2502.19301",
    f"{_FORMULAS}:wga",
    defaults={"beta": 1.0},
)
SATIMP = Objective(
    "ascent weighted by how saturated and how important each token is",
    "arXiv 2505.11953",
    f"{_FORMULAS}:satimp",
    defaults={"beta": 5.0, "importance": 1.0, "gamma": 0.1},
)
CE_U = Objective(
    "cross-entropy with the model's own prediction without the right token",
    "arXiv 2503.01224",
    f"{_FORMULAS}:ce_u",
    of="logits",
    defaults={"skip_targets": 1, "alpha": 0.0},
)
PDU = Objective(
    "flatten the logits on forget rows while the retain loss stays below a limit (dual ascent)",
    "arXiv 2506.05314",
    f"{_FORMULAS}:flatten",
    of="logits",
    defaults={"retain_limit": None, "dual_step_size": 1.0, "dual_warmup_steps": 0.5},
    ascends=True,
)
TASK_VECTOR = Objective(
    "learn the forget rows, then subtract what was learned from the weights",
    "arXiv 2212.04089",
    f"{_FORMULAS}:descent",
    defaults={"scale": 1.0, "alpha": 0.0},
    subtracts=True,
)
