"""Preference tuning: train on compared or labelled answers, relative to a reference model.

In the losses, w is the chosen answer of a pair and l the rejected one. They are element-wise, in the precision of their
inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from trainwright.data.rows.pairs import CHOSEN
from trainwright.data.stream.batch import Batch
from trainwright.data.stream.dataset_cache import PreparedData
from trainwright.data.stream.stream import GlobalBatch, MicroBatch, Stream
from trainwright.data.stream.transfer import on_device
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.forward_only import ForwardOnly
from trainwright.engine.task import LossSum
from trainwright.errors import RequestError
from trainwright.models.adapters.attaching import switched_off
from trainwright.models.load import load_tokenizer
from trainwright.recipe.schema import Recipe
from trainwright.tasks.dpo.spec import DpoSection
from trainwright.tasks.language_model import prepare_data, prepare_once
from trainwright.tasks.reference import Reference, ReferenceTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["PreferenceTuning", "build", "prepare_once"]


def build(recipe: Recipe, cache: Path) -> PreferenceTuning:
    """Return the task of a resolved recipe."""
    tokenizer = load_tokenizer(recipe.model)
    return PreferenceTuning(recipe, tokenizer, prepare_data(recipe, tokenizer, cache), cache)


@dataclass(frozen=True)
class _Answers:
    """The answers of a stream, and their log-probabilities under the reference."""

    stream: Stream
    reference: Reference

    def ratios(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return log pi(y|x) - log pi_ref(y|x) of a batch's answers [S], float64, from the losses of its targets
        [N].
        """
        return -batch.by_sequence(losses) - self.reference.of(batch)


class PreferenceTuning(ReferenceTask):
    """DPO, IPO or KTO of a causal language model; an example is a pair of answers, or one labelled answer."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prepared: PreparedData, cache: Path) -> None:
        self._dpo = recipe.own(DpoSection)
        super().__init__(recipe, tokenizer, prepared, cache, self._dpo.reference)
        # For training (False) and validation (True); _mismatched holds KTO's answers to other prompts.
        self._answers: dict[bool, _Answers] = {}
        self._mismatched: dict[bool, _Answers] = {}
        self._divergence: torch.Tensor | float = 0.0

    def _example_weight(self, dataset: TokenDataset) -> float:
        return float(dataset.sequences_per_example) if self._dpo.loss == "kto" else 1.0

    def begin(
        self, passes: ForwardOnly, weights: Iterable[tuple[str, torch.Tensor]], notify: Callable[[str], None]
    ) -> None:
        """Compute the reference's log-probabilities of every answer in this run."""
        self._keep_start(weights, passes.world)
        for validation, stream in ((False, self.stream), (True, self.validation)):
            if stream is None:
                continue
            examples = stream.seen()
            self._answers[validation] = self._ask(passes, stream, examples, notify)
            if self._dpo.loss == "kto":
                key = "data.validation" if validation else "data.train"
                mismatched = Mismatched.of(stream.dataset, self._recipe.data.max_length, key)
                others = self._stream(mismatched, len(mismatched), shuffle=False)
                self._mismatched[validation] = self._ask(passes, others, examples, notify)

    def _ask(
        self, passes: ForwardOnly, stream: Stream, examples: Sequence[int], notify: Callable[[str], None]
    ) -> _Answers:
        without = functools.partial(switched_off, self._lm.model) if self._without_adapter else nullcontext
        return _Answers(stream, self._reference(passes, stream, examples, notify, str(self.start), without))

    def before_passes(self, passes: ForwardOnly, batch: GlobalBatch, *, validation: bool) -> None:
        """Estimate KTO's divergence from the whole global batch."""
        if self._dpo.loss != "kto":
            return
        answers, device = self._mismatched[validation], passes.world.device
        sums = [torch.zeros(2, dtype=torch.float64, device=device)]  # stay on the device, which nobody waits for

        def visit(module: nn.Module, micro: MicroBatch) -> None:
            tensors = self._batch(answers.stream.dataset, micro, device)
            ratios = answers.ratios(module(tensors, losses=True), tensors)
            if micro.weight:
                sums.append(torch.stack([ratios.sum(), ratios.new_full((), len(ratios))]))

        examples = sorted(example for micro in batch.micro_batches for example in micro.examples)
        passes([answers.stream.divide(examples, batch.rows)], visit)
        total, count = passes.world.sum_tensor(functools.reduce(torch.add, sums)).unbind()
        self._divergence = (total / count).clamp(min=0.0)

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the summed losses of the pairs or answers of one micro-batch."""
        batch = self._batch(self._prepared.train, micro, device)
        seen: list[torch.Tensor] = []

        def objective(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
            scores = self._scores(self._answers[False].ratios(losses, batch), batch)
            seen.append(self._statistics(scores.detach(), batch))
            return self._losses(scores, batch).sum().float()

        return LossSum(module(batch, objective=objective), micro.weight, seen[-1])

    def _scores(self, ratios: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the scores of answers [S]: their log-ratios, for IPO averaged over tokens."""
        if self._dpo.loss != "ipo":
            return ratios
        return ratios / on_device(torch.tensor(batch.target_counts, dtype=ratios.dtype), ratios.device)

    def _losses(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss of every pair [P], or for KTO of every answer [S]."""
        dpo = self._dpo
        if dpo.loss == "kto":
            weights = dpo.desirable_weight, dpo.undesirable_weight
            return kto_loss(scores, _chosen(batch), self._divergence, dpo.beta, *weights)
        chosen, rejected = scores.view(-1, 2).unbind(1)
        if dpo.loss == "ipo":
            return ipo_loss(chosen, rejected, dpo.beta)
        return dpo_loss(chosen, rejected, dpo.beta, dpo.label_smoothing)

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return a vector of sums over one micro-batch of the validation stream."""
        assert self._prepared.validation is not None
        batch = self._batch(self._prepared.validation, micro, device)
        scores = self._scores(self._answers[True].ratios(module(batch, losses=True), batch), batch)
        return self._statistics(scores, batch) * float(micro.weight > 0)

    def _statistics(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return ``[loss, weight, divergence, right pairs, pairs, rewards of the chosen, how many, of the rejected,
        …]``.
        """
        rewards, chosen = self._dpo.beta * scores, _chosen(batch)
        right = rewards.new_zeros(0)
        if len(rewards) == 2 * len(batch.examples):
            # A tie counts half, as before training.
            right = (rewards.view(-1, 2).diff(dim=1).neg().sign() + 1) / 2
        weight = rewards.new_full((), batch.weight)
        sums = [
            self._losses(scores, batch).sum(),
            weight,
            weight * self._divergence,
            right.sum(),
            rewards.new_full((), right.numel()),
            (rewards * chosen).sum(),
            chosen.sum(),
            (rewards * ~chosen).sum(),
            (~chosen).sum(),
        ]
        return torch.stack([value.double() for value in sums])

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics from statistics summed over the split or step."""
        loss, weight, divergence, right, pairs, chosen, of_chosen, rejected, of_rejected = statistics
        metrics = {"loss": loss / weight}
        if pairs:
            metrics["reward_accuracy"] = right / pairs
        if of_chosen and of_rejected:
            metrics["reward_margin"] = chosen / of_chosen - rejected / of_rejected
        if of_chosen:
            metrics["chosen_reward"] = chosen / of_chosen
        if of_rejected:
            metrics["rejected_reward"] = rejected / of_rejected
        if self._dpo.loss == "kto":
            metrics["kl"] = divergence / weight
        return metrics


def _chosen(batch: Batch) -> torch.Tensor:
    """Return which answers are chosen or good; bool [S]."""
    return on_device(torch.tensor([role == CHOSEN for role in batch.roles]), batch.targets.device)


@dataclass(frozen=True, kw_only=True)
class Mismatched(TokenDataset):
    """The examples of a dataset, every sequence with the answer of another one; created on access.

    KTO compares answers with KL(pi || pi_ref). Its estimate is the mean log-ratio over answers that do not belong to
    their prompt (arXiv 2402.01306, section 4.2); the paper takes each from another example of the batch. Here it is
    always the answer of the next example of the dataset with another prompt, so its reference log-probability is known
    before training, and the estimate does not depend on ranks or micro-batches.
    """

    max_length: int
    prompts: npt.NDArray[np.int64]  # [sequences]: number of tokens before the answer
    others: npt.NDArray[np.int64]  # [sequences]: the sequence that provides the answer

    @classmethod
    def of(cls, dataset: TokenDataset, max_length: int, key: str) -> Mismatched:
        """Create it from ``dataset``; sequences are cut to ``max_length`` tokens, as in the dataset.

        Raises:
            RequestError: all prompts are the same; ``key`` is that of the source.
        """
        prompts = np.asarray([_prompt_length(dataset, d) for d in range(dataset.sequence_count)], dtype=np.int64)
        return cls(
            dataset.tokens,
            dataset.targets,
            dataset.offsets,
            f"{dataset.fingerprint}-mismatched-{max_length}",
            dataset.report,
            dataset.members,
            dataset.roles,
            max_length=max_length,
            prompts=prompts,
            others=_others(dataset, prompts, key),
        )

    def sequence_length(self, sequence: int) -> int:
        """Return the number of tokens of one sequence."""
        other = self.others[sequence]
        answer = super().sequence_length(int(other)) - self.prompts[other]
        return int(min(self.prompts[sequence] + answer, self.max_length))

    def sequence(self, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return ``(tokens, targets)`` of a prompt with the answer of another sequence."""
        tokens, targets = super().sequence(sequence)
        answer, answer_targets = super().sequence(int(self.others[sequence]))
        begin, other_begin = self.prompts[sequence], self.prompts[self.others[sequence]]
        joined = np.concatenate([tokens[:begin], answer[other_begin:]])[: self.max_length]
        flags = np.concatenate([targets[:begin], answer_targets[other_begin:]])[: self.max_length]
        return joined, flags

    def sequence_targets(self, sequence: int) -> int:
        """Return the number of targets of one sequence."""
        return int(np.count_nonzero(self.sequence(sequence)[1][1:]))


def _prompt_length(dataset: TokenDataset, sequence: int) -> int:
    """Return the number of tokens of a sequence before its first target."""
    return 1 + int(np.argmax(dataset.sequence(sequence)[1][1:]))


def _others(dataset: TokenDataset, prompts: npt.NDArray[np.int64], key: str) -> npt.NDArray[np.int64]:
    """Return, for every sequence, the one at its position in the next example (cyclically) with another prompt."""
    count, each = dataset.sequence_count, dataset.sequences_per_example
    assert dataset.members is None or np.array_equal(dataset.members.ravel(), np.arange(count)), "as it is prepared"
    texts = [dataset.sequence(d)[0][: prompts[d]].tobytes() for d in range(count)]
    others = np.zeros(count, dtype=np.int64)
    for position in range(each):
        column = list(range(position, count, each))
        if len({texts[d] for d in column}) < 2:
            raise RequestError(
                f"{key}: dpo.loss kto needs answers to at least two different prompts, because it compares answers "
                "with those to other prompts; add rows, or change dpo.loss"
            )
        # Backwards: if the next example has the same prompt, its own successor is used.
        following = {column[-1]: next(d for d in column if texts[d] != texts[column[-1]])}
        for sequence, after in zip(reversed(column[:-1]), reversed(column[1:]), strict=True):
            following[sequence] = after if texts[after] != texts[sequence] else following[after]
        for sequence, other in following.items():
            others[sequence] = other
    return others


def dpo_loss(chosen: torch.Tensor, rejected: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Compute direct preference optimization (arXiv 2305.18290, equation 7): -log sigma(beta (r_w - r_l)).

    ``label_smoothing`` e is the probability that a pair is swapped: the loss is (1 - e) times that of the pair plus e
    times that of the swapped pair (conservative DPO, https://ericmitchell.ai/cdpo.pdf).

    Args:
        chosen, rejected: log-ratios r_w and r_l of summed log-probabilities [P].
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo_loss(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute identity preference optimization (arXiv 2310.12036, equation 17): (r_w - r_l - 1 / (2 beta))^2.

    Args:
        chosen, rejected: log-ratios of the mean log-probabilities of an answer's tokens [P]; with sums, the target
            margin would depend on the length.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto_loss(
    ratios: torch.Tensor,
    good: torch.Tensor,
    divergence: torch.Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Compute Kahneman-Tversky optimization (arXiv 2402.01306, equations 7 and 8) of single answers.

    lambda_D (1 - sigma(beta (r - z))) for a good answer and lambda_U (1 - sigma(beta (z - r))) for a bad one.

    Args:
        ratios: log-ratios r of summed log-probabilities [D].
        good: whether an answer is desirable, bool [D].
        divergence: z, the estimate of KL(pi || pi_ref) that answers are compared with; at least 0.
    """
    gain = beta * (ratios - divergence)
    weights = torch.where(good, desirable_weight, undesirable_weight)
    return weights.to(gain.dtype) * (1 - torch.sigmoid(torch.where(good, gain, -gain)))
