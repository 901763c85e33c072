"""The losses of unlearning: gamma x forget loss + alpha x retain loss of a micro-batch, for any objective.

Each loss is a mean over the tokens or answers of the whole global batch. Their numbers (``Counts``) are known before
the passes, so the sums of micro-batches add up to the same value for any division.

The formulas are at the end, by what they are computed from; ``_TENSORS`` lists what each may take. In them pi is
the trained model and pi_ref the reference, x a question and y its answer with |y| tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from trainwright.data.stream.batch import Batch, copy_to_device
from trainwright.errors import RequestError
from trainwright.models.causal_lm import evaluate_objective
from trainwright.models.linear_losses import Head, LogitLoss, linear_logit_loss
from trainwright.recipe.extensions import load
from trainwright.tasks.unlearn.module import UnlearnLM
from trainwright.tasks.unlearn.section import UnlearnSection
from trainwright.tasks.unlearn.stream import FORGET, REFUSAL, RETAIN

ROLES = (FORGET, RETAIN, REFUSAL)


@dataclass(frozen=True)
class Counts:
    """The number of tokens or answers of the global batch that each loss is averaged over."""

    forget: float
    retain: float

    @classmethod
    def of(cls, section: UnlearnSection, sequences: Sequence[tuple[int, int]]) -> Counts:
        """Return the counts for sequences ``(role, number of targets)``."""
        learned_role = _choose_learned_role(section)
        skip = section.value("skip_targets") or 0
        by_answer = section.facts.of in ("answers", "activations")
        forget = [1 if by_answer else max(0, targets - skip) for role, targets in sequences if role == learned_role]
        one_each = section.value("retain_loss") == "activations"
        retain = [1 if one_each else targets for role, targets in sequences if role == RETAIN]
        return cls(float(sum(forget)), float(sum(retain)))


@dataclass
class LossSums:
    """Sums over a micro-batch, without gradients.

    Attributes:
        forget: sum of the forget loss.
        retain: sum of the retain loss.
        likelihoods: by role, the targets' summed negative log-likelihood and their number, and the summed probabilities
            exp(-mean) of answers and their number.
    """

    forget: torch.Tensor | float = 0.0
    retain: torch.Tensor | float = 0.0
    likelihoods: dict[int, tuple[torch.Tensor, int, torch.Tensor, int]] = field(default_factory=dict)

    def see(self, batch: Batch, losses: torch.Tensor, role: int) -> None:
        """Add the losses of the targets [n] of the sequences with ``role``."""
        counts = _list_counts(batch, role)
        sums = [part.sum() for part in losses.double().split(counts)]
        if sums:
            chances = torch.stack([(-total / count).exp() for total, count in zip(sums, counts, strict=True)])
            self.likelihoods[role] = torch.stack(sums).sum(), sum(counts), chances.sum(), len(counts)

    def vector(self, counts: Counts, device: torch.device) -> torch.Tensor:
        """Return ``[forget loss, its count, retain loss, its count, then four numbers per role]``, float64."""
        values: list[torch.Tensor | float] = [self.forget, counts.forget, self.retain, counts.retain]
        for role in ROLES:
            values += self.likelihoods.get(role, (0.0, 0, 0.0, 0))
        numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
        constants = copy_to_device(torch.tensor(numbers, dtype=torch.float64), device).unbind()
        return torch.stack(
            [value.double() if isinstance(value, torch.Tensor) else constants[i] for i, value in enumerate(values)]
        )


class UnlearnLosses:
    """The loss of an unlearning section.

    Args:
        reference: returns the log-probability of each sequence of a batch [S], float64, for objectives that need it.
        direction: the direction that rmu steers to [H].
    """

    def __init__(
        self,
        section: UnlearnSection,
        reference: Callable[[Batch], torch.Tensor] | None = None,
        direction: torch.Tensor | None = None,
    ) -> None:
        self._section = section
        self._of = section.facts.of
        self._learned = _choose_learned_role(section)
        self._formula = Formula.of(section)
        self._reference = reference
        self._direction = direction
        self._retain_loss = section.value("retain_loss") if section.retains else None

    def __call__(self, lm: UnlearnLM, batch: Batch, forget: float, retain: float, sums: LossSums) -> torch.Tensor:
        """Return ``forget`` times the summed forget loss plus ``retain`` times the summed retain loss, a scalar.

        Call it within the forward pass of the module. The sums are written to ``sums``.
        """
        if self._of == "activations":
            return self._compute_steering_loss(lm, batch, forget, retain, sums)
        head = lm.head(batch)
        total, plain = head.hidden.new_zeros((), dtype=torch.float32), set[int]()
        if self._of == "logits":
            part, sums.forget = self._sum_logit_loss(lm, head, batch, FORGET, self._compute_logit_loss, sums)
            total = total + forget * part
        else:
            plain |= {FORGET, REFUSAL}
        if self._retain_loss == "kl":
            part, sums.retain = self._sum_logit_loss(lm, head, batch, RETAIN, _compute_divergence, sums)
            total = total + retain * part
        elif RETAIN in batch.roles:
            plain.add(RETAIN)
        return total + self._compute_likelihood_losses(head, batch, plain, forget, retain, sums) if plain else total

    def _compute_likelihood_losses(
        self, head: Head, batch: Batch, roles: set[int], forget: float, retain: float, sums: LossSums
    ) -> torch.Tensor:
        """Return the losses that are functions of the targets' negative log-likelihoods."""
        indices = find_target_indices(batch, roles)
        head, targets = _select_targets(head, indices), batch.targets.index_select(0, indices)

        def objective(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
            by_role = _split_by_role(batch, losses, roles)
            for role, part in by_role.items():
                sums.see(batch, part.detach(), role)
            value = losses.new_zeros(())
            if FORGET in roles:
                forgotten = self._forget(by_role, batch).sum()
                sums.forget = forgotten.detach()
                value = value + forget * forgotten
            if RETAIN in roles:
                retain_loss = by_role[RETAIN].sum()
                sums.retain = retain_loss.detach()
                value = value + retain * retain_loss
            return value.to(losses.dtype)

        return evaluate_objective(head, targets, objective, batch)

    def _forget(self, losses: dict[int, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the forget loss of every token or answer, from the token losses of each role."""
        if self._of == "tokens":
            return self._formula(losses=lambda: losses[self._learned])
        forget_losses = losses[FORGET]
        return self._formula(
            losses=lambda: _sum_by_sequence(batch, forget_losses, FORGET),
            counts=lambda: copy_to_device(
                torch.tensor(_list_counts(batch, FORGET), dtype=torch.float64), forget_losses.device
            ),
            ratios=lambda: self._compute_ratios(batch, forget_losses, FORGET),
            refused=lambda: self._compute_ratios(batch, losses[REFUSAL], REFUSAL),
        )

    def _compute_ratios(self, batch: Batch, losses: torch.Tensor, role: int) -> torch.Tensor:
        """Return log pi(y|x) - log pi_ref(y|x) of sequences with ``role``, float64, from losses of their targets."""
        assert self._reference is not None
        indices = torch.tensor([index for index, row_role in enumerate(batch.roles) if row_role == role])
        of_role = self._reference(batch).index_select(0, copy_to_device(indices, losses.device))
        return -_sum_by_sequence(batch, losses, role) - of_role

    def _compute_logit_loss(
        self, logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None
    ) -> torch.Tensor:
        return self._formula(logits=lambda: logits, targets=lambda: targets, teacher=lambda: teacher)

    def _sum_logit_loss(
        self, lm: UnlearnLM, head: Head, batch: Batch, role: int, loss: LogitLoss, sums: LossSums
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss over the targets of sequences with ``role``, with and without gradient."""
        skip = self._section.value("skip_targets") or 0 if role == FORGET else 0
        indices = find_target_indices(batch, {role}, skip)
        teacher = None
        if loss is _compute_divergence or self._section.facts.reference == "logits":
            with lm.open_reference() as reference:
                teacher = reference.head(select_role_sequences(batch, {role}))
        targets = batch.targets.index_select(0, indices)
        total, loss_values, losses = linear_logit_loss(_select_targets(head, indices), targets, loss, teacher)
        if not skip:
            sums.see(batch, losses, role)
        return total, loss_values.double().sum()

    def _compute_steering_loss(
        self, lm: UnlearnLM, batch: Batch, forget: float, retain: float, sums: LossSums
    ) -> torch.Tensor:
        """Return the loss of rmu: means over the tokens of each answer, summed over answers."""
        assert self._direction is not None
        needs_logits = self._retain_loss in ("nll", "kl")
        head = lm.head(batch) if needs_logits else None
        at = lm.taken(batch) if needs_logits else lm.compute_activations(batch)
        forget_indices = find_target_indices(batch, {FORGET})
        direction = self._direction.to(at.device, at.dtype)
        distances = self._formula(activations=lambda: at.index_select(0, forget_indices), direction=lambda: direction)
        forgotten = _sum_means(batch, distances, FORGET)
        sums.forget = forgotten.detach()
        total = forget * forgotten
        if self._retain_loss == "activations":
            with lm.open_reference() as reference:
                frozen = reference.compute_activations(select_role_sequences(batch, {RETAIN}))
            activations = at.index_select(0, find_target_indices(batch, {RETAIN}))
            retain_loss = _sum_means(batch, activation_distance(activations, frozen), RETAIN)
            sums.retain = retain_loss.detach()
            total = total + retain * retain_loss
        elif self._retain_loss == "kl":
            assert head is not None
            part, sums.retain = self._sum_logit_loss(lm, head, batch, RETAIN, _compute_divergence, sums)
            total = total + retain * part
        elif self._retain_loss == "nll":
            assert head is not None
            total = total + self._compute_likelihood_losses(head, batch, {RETAIN}, forget, retain, sums)
        return total


@dataclass(frozen=True)
class Formula:
    """The loss function of an objective, the settings it takes from the section, and its tensors."""

    function: Callable[..., torch.Tensor]
    settings: dict[str, Any]
    tensors: tuple[str, ...]

    @classmethod
    def of(cls, section: UnlearnSection) -> Formula:
        """Return the formula of an objective; raise RequestError if it cannot be imported or has unknown parameters."""
        description = f"objective {section.objective}: its loss {section.facts.loss}"
        function = load(section.facts.loss, description)
        names = [*inspect.signature(function).parameters]
        tensors = _TENSORS[section.facts.of]
        keys = [name for name in names if name not in tensors]
        if unknown := [key for key in keys if key not in type(section).model_fields]:
            raise RequestError(
                f"{description} takes {unknown[0]}, which is not a key of unlearn; a loss of {section.facts.of} is "
                f"given {', '.join(tensors)}"
            )
        values = {key: section.value(key) for key in keys}
        return cls(function, values, tuple(name for name in names if name in tensors))

    def __call__(self, **tensors: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """Compute the loss from the tensors that the function takes."""
        return self.function(**{name: tensors[name]() for name in self.tensors}, **self.settings)


# The tensors that a loss may take, by what it is computed from.
_TENSORS = {
    "tokens": ("losses",),
    "answers": ("losses", "counts", "ratios", "refused"),
    "logits": ("logits", "targets", "teacher"),
    "activations": ("activations", "direction"),
}


def _choose_learned_role(section: UnlearnSection) -> int:
    return REFUSAL if section.facts.learns == "refusals" else FORGET


def _compute_divergence(logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    assert teacher is not None
    return divergence(logits, teacher)


def _select_targets(head: Head, chosen: torch.Tensor) -> Head:
    if len(chosen) == len(head.hidden):
        return head
    return head._replace(hidden=head.hidden.index_select(0, chosen))


def _list_counts(batch: Batch, role: int) -> list[int]:
    """Return the number of targets of each sequence with ``role``."""
    return [count for row_role, count in zip(batch.roles, batch.target_counts, strict=True) if row_role == role]


def _split_by_role(batch: Batch, losses: torch.Tensor, roles: set[int]) -> dict[int, torch.Tensor]:
    """Split the target losses [n] of the sequences with ``roles`` by role."""
    role_counts = [(role, count) for role, count in zip(batch.roles, batch.target_counts, strict=True) if role in roles]
    parts = list(zip(role_counts, losses.split([count for _, count in role_counts]), strict=True))
    return {
        role: torch.cat([part for (row_role, _), part in parts if row_role == role])
        for role in roles
        if any(row_role == role for row_role, _ in role_counts)
    }


def _sum_by_sequence(batch: Batch, values: torch.Tensor, role: int) -> torch.Tensor:
    """Return the sums of target values over each sequence with ``role``, in float64."""
    return torch.stack([part.sum() for part in values.double().split(_list_counts(batch, role))])


def _sum_means(batch: Batch, values: torch.Tensor, role: int) -> torch.Tensor:
    """Return the sum over sequences with ``role`` of the mean of ``values`` over their targets."""
    parts = values.split(_list_counts(batch, role))
    return torch.stack([part.mean() for part in parts]).sum()


def find_target_indices(batch: Batch, roles: Collection[int], skip: int = 0) -> torch.Tensor:
    """Return indices of targets, int64 [n]: of sequences with one of ``roles``, but each one's first ``skip``."""
    parts, begin = [np.zeros(0, np.int64)], 0
    for role, count in zip(batch.roles, batch.target_counts, strict=True):
        if role in roles:
            parts.append(np.arange(begin + min(skip, count), begin + count))
        begin += count
    return copy_to_device(torch.from_numpy(np.concatenate(parts)), batch.targets.device)


def select_role_sequences(batch: Batch, roles: Collection[int]) -> Batch:
    """Return the batch with only the sequences that have one of ``roles``; there must be at least one."""
    sequence_indices = [index for index, role in enumerate(batch.roles) if role in roles]
    if len(sequence_indices) == len(batch.roles):
        return batch
    indices = find_target_indices(batch, roles)
    part = replace(
        batch,
        targets=batch.targets.index_select(0, indices),
        target_index=batch.target_index.index_select(0, indices),
        sequences=tuple(batch.sequences[index] for index in sequence_indices),
        lengths=tuple(batch.lengths[index] for index in sequence_indices),
        roles=tuple(batch.roles[index] for index in sequence_indices),
        target_counts=tuple(batch.target_counts[index] for index in sequence_indices),
    )
    return (
        _select_lines(part, sequence_indices) if batch.boundaries is None else _select_stretches(part, sequence_indices)
    )


def _select_lines(part: Batch, selected: list[int]) -> Batch:
    """Select rows of a padded batch."""
    lines = copy_to_device(torch.tensor(selected), part.targets.device)
    assert part.attention_mask is not None
    width = part.input_ids.shape[1]
    return replace(
        part,
        input_ids=part.input_ids.index_select(0, lines),
        position_ids=part.position_ids.index_select(0, lines),
        attention_mask=part.attention_mask.index_select(0, lines),
        target_index=_shift_target_index(part, [(new - old) * width for new, old in enumerate(selected)]),
        tokens=sum(part.lengths),
    )


def _select_stretches(part: Batch, selected: list[int]) -> Batch:
    """Select sequences of a flat batch."""
    assert part.boundaries is not None
    edges = list(pairwise(part.boundaries.tolist()))
    begins = np.cumsum([0, *part.lengths])
    cut = copy_to_device(
        torch.from_numpy(np.concatenate([np.arange(*edges[index]) for index in selected])), part.targets.device
    )
    return replace(
        part,
        input_ids=part.input_ids.index_select(1, cut),
        position_ids=part.position_ids.index_select(1, cut),
        boundaries=torch.from_numpy(begins.astype(np.int32)),
        target_index=_shift_target_index(
            part, [int(new) - edges[old][0] for new, old in zip(begins, selected, strict=False)]
        ),
        longest=max(part.lengths),
        tokens=int(begins[-1]),
    )


def _shift_target_index(part: Batch, by: list[int]) -> torch.Tensor:
    shifts = np.repeat(np.asarray(by, dtype=np.int64), part.target_counts)
    return part.target_index + copy_to_device(torch.from_numpy(shifts), part.target_index.device)


# From the logits of every position [n, V], and optionally those of a teacher, which get no gradient.


def undial(logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute UNDIAL (arXiv 2402.10052): cross-entropy from softmax(z_ref - beta 1_target) to the model.

    The teacher is the reference with the logit of the forget token lowered by ``beta``.
    """
    lowered_logits = teacher.scatter_add(1, targets[:, None], teacher.new_full((len(teacher), 1), -beta))
    return _compute_soft_cross_entropy(logits, lowered_logits.softmax(1))


def ce_u(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute CE-U (arXiv 2503.01224): cross-entropy from the model's own softmax without the target to the model.

    In the target distribution, which gets no gradient, the logit of the forget token is minus infinity.
    """
    aim = logits.detach().scatter(1, targets[:, None], float("-inf")).softmax(1)
    return _compute_soft_cross_entropy(logits, aim)


def flatten(logits: torch.Tensor) -> torch.Tensor:
    """Compute the logit-margin flattening of PDU (arXiv 2506.05314): (max_v z_v - mean_v z_v)^2."""
    return (logits.amax(1) - logits.mean(1)).square()


def divergence(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute KL(reference || model) = sum_v pi_ref(v) (log pi_ref(v) - log pi(v)) on retain (arXiv 2401.06121)."""
    teacher_logs = teacher.log_softmax(1)
    return (teacher_logs.exp() * (teacher_logs - logits.log_softmax(1))).sum(1)


def _compute_soft_cross_entropy(logits: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """Return -sum_v aim(v) log pi(v) [n]."""
    return -(aim * logits.log_softmax(1)).sum(1)


# From the negative log-likelihood of every forget token in nats [N], element-wise.


def grad_ascent(losses: torch.Tensor) -> torch.Tensor:
    """Return log pi(y_i | x, y_<i): gradient ascent (arXiv 2210.01504), GradDiff with retain (arXiv 2203.12817)."""
    return -losses


def wga(losses: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute weighted gradient ascent (arXiv 2502.19301): w log pi(y_i | x, y_<i), with w = pi(y_i | x, y_<i)^beta.

    The weight has no gradient. Tokens that are almost forgotten have almost no weight.
    """
    return -(-beta * losses.detach()).exp() * losses


def satimp(losses: torch.Tensor, beta: float, importance: float) -> torch.Tensor:
    """Compute SatImp (arXiv 2505.11953): as ``wga`` with w = p^beta (1 - p)^importance, p = pi(y_i | x, y_<i).

    The first factor is the saturation of a token, the second its importance.
    """
    probability = (-losses.detach()).exp()
    return -(probability**beta) * (1 - probability) ** importance * losses


def descent(losses: torch.Tensor) -> torch.Tensor:
    """Return -log pi(y_i | x, y_<i), the fine-tuning loss: for refusals, and for what is subtracted at the end."""
    return losses


# From sums over the tokens of every forget answer [D], element-wise.


def npo(ratios: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute negative preference optimization (arXiv 2404.05868): -(2 / beta) log sigma(-beta log(pi / pi_ref)).

    Args:
        ratios: log pi(y|x) - log pi_ref(y|x), summed over the answer.
    """
    return -2 / beta * logsigmoid(-beta * ratios)


def simnpo(losses: torch.Tensor, counts: torch.Tensor, beta: float, delta: float) -> torch.Tensor:
    """Compute SimNPO (arXiv 2410.07163): -(2 / beta) log sigma(-(beta / |y|) log pi(y|x) - beta delta).

    The gamma of the paper is beta times ``delta``.

    Args:
        losses: -log pi(y|x), summed over the answer.
        counts: |y|.
    """
    return -2 / beta * logsigmoid(beta * (losses / counts - delta))


def dpo(refused: torch.Tensor, ratios: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute DPO for refusals (arXiv 2305.18290, equation 7): -(2 / beta) log sigma(beta (r_refusal - r_forget)).

    With alternate answers in place of the refusals it is AltPO (arXiv 2409.13474). The factor 2 / beta is that of
    ``npo``, so that both have the same weight relative to a retain loss.

    Args:
        refused: log-ratios of the refusals or alternates.
        ratios: log-ratios of the forget answers.
    """
    return -2 / beta * logsigmoid(beta * (refused - ratios))


# From activations: RMU, representation misdirection for unlearning (arXiv 2403.03218).


def steering(activations: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of (h - c u)^2 at every forget position [n], with c u the fixed ``direction`` [H]."""
    return (activations - direction).square().mean(1)


def activation_distance(activations: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of (h - h_ref)^2 at every retain position [n].

    Args:
        frozen: the reference's activations [n, H].
    """
    return (activations - frozen).square().mean(1)


def sample_direction(width: int, coefficient: float, seed: int) -> torch.Tensor:
    """Return c u: a vector [H], fp32, of length ``coefficient``, with uniform entries in [0, 1) before scaling.

    It depends only on ``width``, ``coefficient`` and ``seed``.
    """
    vector = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm() * coefficient


# Dual ascent of PDU (arXiv 2506.05314): forget as much as the limit of the retain loss permits.


def update_multiplier(weight: float, retain_loss: float, limit: float, step_size: float) -> float:
    """Update the multiplier of L_forget + lambda (L_retain - limit): max(0, lambda + eta (L_retain - limit))."""
    return max(0.0, weight + step_size * (retain_loss - limit))
