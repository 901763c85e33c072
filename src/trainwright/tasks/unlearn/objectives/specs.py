"""The specifications of the built-in objectives. Imports no torch."""

from __future__ import annotations

from trainwright.tasks.unlearn.objective import Objective

_HERE = __package__

GRAD_ASCENT = Objective(
    "raise the loss on the forget rows only",
    "arXiv 2210.01504",
    f"{_HERE}.ascent:grad_ascent",
    defaults={"alpha": 0.0},
)
GRAD_DIFF = Objective(
    "raise the loss on the forget rows, lower it on the retain rows",
    "arXiv 2203.12817",
    f"{_HERE}.ascent:grad_ascent",
)
NPO = Objective(
    "DPO with only rejected answers: ascent that slows down as rows are forgotten",
    "arXiv 2404.05868",
    f"{_HERE}.preference:npo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
)
SIMNPO = Objective(
    "NPO without a reference model, with the mean over an answer's tokens",
    "arXiv 2410.07163",
    f"{_HERE}.preference:simnpo",
    of="answers",
    defaults={"beta": 4.5, "delta": 0.0, "gamma": 0.125},
)
DPO = Objective(
    "prefer a refusal to each forget answer",
    "arXiv 2305.18290, 2401.06121",
    f"{_HERE}.preference:dpo",
    of="answers",
    defaults={"beta": 0.1},
    reference="log-probabilities",
    idk=True,
)
IDK_NLL = Objective(
    "learn a refusal as the answer to each forget question",
    "arXiv 2401.06121",
    f"{_HERE}.ascent:descent",
    idk=True,
    learns="refusals",
)
RMU = Objective(
    "steer activations of forget rows to a random direction, keep those of retain rows",
    "arXiv 2403.03218",
    f"{_HERE}.activations:steered",
    of="activations",
    defaults={"layer": 7, "steering_coefficient": 2.0, "retain_loss": "activations"},
)
UNDIAL = Objective(
    "distill the model's own logits, with lower logits of the forget tokens",
    "arXiv 2402.10052",
    f"{_HERE}.distillation:undial",
    of="logits",
    defaults={"beta": 10.0, "alpha": 0.0},
    reference="logits",
)
WGA = Objective(
    "ascent weighted by the probability of each token",
    "arXiv 2502.19301",
    f"{_HERE}.ascent:wga",
    defaults={"beta": 1.0},
)
SATIMP = Objective(
    "ascent weighted by how saturated and how important each token is",
    "arXiv 2505.11953",
    f"{_HERE}.ascent:satimp",
    defaults={"beta": 5.0, "importance": 1.0, "gamma": 0.1},
)
CE_U = Objective(
    "cross-entropy with the model's own prediction without the right token",
    "arXiv 2503.01224",
    f"{_HERE}.distillation:ce_u",
    of="logits",
    defaults={"skip_targets": 1, "alpha": 0.0},
)
PDU = Objective(
    "flatten the logits on forget rows while the retain loss stays below a limit (dual ascent)",
    "arXiv 2506.05314",
    f"{_HERE}.distillation:flatten",
    of="logits",
    defaults={"retain_limit": None, "dual_step_size": 1.0, "dual_warmup_steps": 0.5},
    ascends=True,
)
TASK_VECTOR = Objective(
    "learn the forget rows, then subtract what was learnt from the weights",
    "arXiv 2212.04089",
    f"{_HERE}.ascent:descent",
    defaults={"scale": 1.0, "alpha": 0.0},
    subtracts=True,
)
