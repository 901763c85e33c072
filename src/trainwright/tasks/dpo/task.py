"""Preference tuning: train on compared or labelled answers, mostly relative to a reference model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainwright.data.rows.pairs import CHOSEN
from trainwright.data.stream.batch import Batch, copy_to_device
from trainwright.data.stream.dataset_cache import PreparedData
from trainwright.data.stream.stream import GlobalBatch, MicroBatch, Stream
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.task import ForwardOnly, LossSum
from trainwright.errors import RequestError
from trainwright.models.adapters.attaching import disable_adapters
from trainwright.models.load import load_tokenizer
from trainwright.recipe.extensions import load
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.dpo.spec import DpoSection
from trainwright.tasks.language_model import prepare_data, prepare_once
from trainwright.tasks.reference import Reference, ReferenceTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["PreferenceTuning", "build", "prepare_once"]


def build(recipe: RecipeSchema, cache: Path) -> PreferenceTuning:
    """Return the task of a resolved recipe."""
    tokenizer = load_tokenizer(recipe.model)
    return PreferenceTuning(recipe, tokenizer, prepare_data(recipe, tokenizer, cache), cache)


@dataclass(frozen=True)
class _Answers:
    """The answers of a stream, and their log-probabilities under the reference; None: without one."""

    stream: Stream
    reference: Reference | None

    def compute_ratios(self, log_probabilities: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return log pi(y|x) - log pi_ref(y|x) of a batch's answers [S], or log pi(y|x) without a reference."""
        return log_probabilities if self.reference is None else log_probabilities - self.reference.of(batch)


class _Scored(NamedTuple):
    """The ``scores`` of answers [S], the ``losses`` of pairs [P] or of rated answers [S], and of their losses the part
    ``sft`` [P]: the mean negative log-probability of the chosen answer's tokens.
    """

    scores: torch.Tensor
    losses: torch.Tensor
    sft: torch.Tensor | None


class PreferenceTuning(ReferenceTask):
    """A preference loss of a causal language model; an example is a pair of answers, or one labelled answer."""

    def __init__(
        self, recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, prepared: PreparedData, cache: Path
    ) -> None:
        self._dpo = recipe.own(DpoSection)
        self._spec = self._dpo.loss_spec
        self._loss_of = load(self._spec.function, f"dpo.loss {self._dpo.loss}")
        self._averages = self._spec.averages or self._dpo.length_normalized
        chosen_weight = self._dpo.sft_weight
        self._sft_weight = self._spec.sft_weight if chosen_weight is None else chosen_weight
        super().__init__(recipe, tokenizer, prepared, cache, self._dpo.reference)
        # For training (False) and validation (True); _mismatched holds KTO's answers to other prompts.
        self._answers: dict[bool, _Answers] = {}
        self._mismatched: dict[bool, _Answers] = {}
        self._divergence: torch.Tensor | float = 0.0

    def _choose_example_weight(self, dataset: TokenDataset) -> float:
        return float(dataset.sequences_per_example) if self._spec.rates_answers else 1.0

    def begin(
        self, passes: ForwardOnly, weights: Iterable[tuple[str, torch.Tensor]], notify: Callable[[str], None]
    ) -> None:
        """Compute the reference's log-probabilities of every answer in this run."""
        if not self._spec.has_reference:
            super().begin(passes, weights, notify)
            self._answers = {False: _Answers(self.stream, None)}
            if self.validation is not None:
                self._answers[True] = _Answers(self.validation, None)
            return
        self._keep_start(weights, passes.world)
        for validation, stream in ((False, self.stream), (True, self.validation)):
            if stream is None:
                continue
            examples = stream.seen()
            self._answers[validation] = self._ask(passes, stream, examples, notify)
            if self._spec.rates_answers:
                key = "data.validation" if validation else "data.train"
                mismatched_dataset = Mismatched.of(stream.dataset, self._recipe.data.max_length, key)
                mismatched_stream = self._stream(mismatched_dataset, len(mismatched_dataset), shuffle=False)
                self._mismatched[validation] = self._ask(passes, mismatched_stream, examples, notify)

    def _ask(
        self, passes: ForwardOnly, stream: Stream, examples: Sequence[int], notify: Callable[[str], None]
    ) -> _Answers:
        without = functools.partial(disable_adapters, self._lm.model) if self._without_adapter else nullcontext
        return _Answers(stream, self._reference(passes, stream, examples, notify, str(self.start), without))

    def before_passes(self, passes: ForwardOnly, batch: GlobalBatch, *, validation: bool) -> None:
        """Estimate KTO's divergence from the whole global batch."""
        if not self._spec.rates_answers:
            return
        answers, device = self._mismatched[validation], passes.world.device
        sums = [torch.zeros(2, dtype=torch.float64, device=device)]  # stay on the device, which nobody waits for

        def visit(module: nn.Module, micro: MicroBatch) -> None:
            tensors = self._batch(answers.stream.dataset, micro, device)
            ratios = answers.compute_ratios(-tensors.sum_by_sequence(module(tensors, losses=True)), tensors)
            if micro.weight:
                sums.append(torch.stack([ratios.sum(), ratios.new_full((), len(ratios))]))

        examples = sorted(example for micro in batch.micro_batches for example in micro.examples)
        passes([answers.stream.divide(examples, batch.rows)], visit)
        total, count = passes.world.sum_tensor(functools.reduce(torch.add, sums)).unbind()
        self._divergence = (total / count).clamp(min=0.0)

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the summed losses of the pairs or answers of one micro-batch."""
        batch = self._batch(self._prepared.train, micro, device)
        pass_statistics: list[torch.Tensor] = []

        def objective(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
            answers = self._score_answers(self._answers[False], losses, batch)
            pass_statistics.append(self._compute_statistics(answers, batch))
            return answers.losses.sum().float()

        return LossSum(module(batch, objective=objective), micro.weight, pass_statistics[-1])

    def _score_answers(self, answers: _Answers, losses: torch.Tensor, batch: Batch) -> _Scored:
        """Return the scores of a batch's answers and their losses, from the losses of its targets [N]."""
        log_probabilities = -batch.sum_by_sequence(losses)
        counts = copy_to_device(torch.tensor(batch.target_counts, dtype=log_probabilities.dtype), losses.device)
        scores = answers.compute_ratios(log_probabilities, batch)
        if self._averages:
            scores = scores / counts
        if self._spec.rates_answers:
            answer_losses = self._loss_of(scores, _mark_chosen(batch), self._dpo, self._divergence)
            return _Scored(scores, answer_losses, None)
        answer_losses = self._loss_of(*scores.view(-1, 2).unbind(1), self._dpo)
        if not self._sft_weight:
            return _Scored(scores, answer_losses, None)
        sft_losses = -(log_probabilities / counts).view(-1, 2)[:, 0]
        return _Scored(scores, answer_losses + self._sft_weight * sft_losses, sft_losses)

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return a vector of sums over one micro-batch of the validation stream."""
        assert self._prepared.validation is not None
        batch = self._batch(self._prepared.validation, micro, device)
        answers = self._score_answers(self._answers[True], module(batch, losses=True), batch)
        return self._compute_statistics(answers, batch) * float(micro.weight > 0)

    def _compute_statistics(self, answers: _Scored, batch: Batch) -> torch.Tensor:
        """Return ``[loss, weight, divergence, right pairs, pairs, rewards of the chosen, how many, of the rejected,
        …, the term of the chosen answers]``.
        """
        rewards, is_chosen = self._dpo.beta * answers.scores.detach(), _mark_chosen(batch)
        right = rewards.new_zeros(0)
        if len(rewards) == 2 * len(batch.examples):
            # A tie counts half, as before training.
            right = (rewards.view(-1, 2).diff(dim=1).neg().sign() + 1) / 2
        weight = rewards.new_full((), batch.weight)
        sums = [
            answers.losses.detach().sum(),
            weight,
            weight * self._divergence,
            right.sum(),
            rewards.new_full((), right.numel()),
            (rewards * is_chosen).sum(),
            is_chosen.sum(),
            (rewards * ~is_chosen).sum(),
            (~is_chosen).sum(),
            weight * 0 if answers.sft is None else answers.sft.detach().sum(),
        ]
        return torch.stack([value.double() for value in sums])

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics from statistics summed over the split or step."""
        loss, weight, divergence, right, pairs, chosen, of_chosen, rejected, of_rejected, sft = statistics
        metrics = {"loss": loss / weight}
        if pairs:
            metrics["reward_accuracy"] = right / pairs
        if of_chosen and of_rejected:
            metrics["reward_margin"] = chosen / of_chosen - rejected / of_rejected
        if of_chosen:
            metrics["chosen_reward"] = chosen / of_chosen
        if of_rejected:
            metrics["rejected_reward"] = rejected / of_rejected
        if self._sft_weight:
            metrics["sft_loss"] = sft / weight
        if self._spec.rates_answers:
            metrics["kl"] = divergence / weight
        return metrics


def _mark_chosen(batch: Batch) -> torch.Tensor:
    """Return which answers are chosen or good; bool [S]."""
    return copy_to_device(torch.tensor([role == CHOSEN for role in batch.roles]), batch.targets.device)


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
        targets = (dataset.sequence(d)[1] for d in range(dataset.sequence_count))
        prompts = np.asarray([1 + np.argmax(flags[1:]) for flags in targets], dtype=np.int64)  # before the first target
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
            others=_choose_others(dataset, prompts, key),
        )

    def sequence_length(self, sequence: int) -> int:
        """Return the number of tokens of one sequence."""
        partner = self.others[sequence]
        answer = super().sequence_length(int(partner)) - self.prompts[partner]
        return int(min(self.prompts[sequence] + answer, self.max_length))

    def sequence(self, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return ``(tokens, targets)`` of a prompt with the answer of another sequence."""
        tokens, targets = super().sequence(sequence)
        answer, answer_targets = super().sequence(int(self.others[sequence]))
        begin, other_begin = self.prompts[sequence], self.prompts[self.others[sequence]]
        joined_tokens = np.concatenate([tokens[:begin], answer[other_begin:]])[: self.max_length]
        flags = np.concatenate([targets[:begin], answer_targets[other_begin:]])[: self.max_length]
        return joined_tokens, flags

    def sequence_targets(self, sequence: int) -> int:
        """Return the number of targets of one sequence."""
        return int(np.count_nonzero(self.sequence(sequence)[1][1:]))


def _choose_others(dataset: TokenDataset, prompts: npt.NDArray[np.int64], key: str) -> npt.NDArray[np.int64]:
    """Return, for every sequence, the one at its position in the next example (cyclically) with another prompt."""
    count, per_example = dataset.sequence_count, dataset.sequences_per_example
    assert dataset.members is None or np.array_equal(dataset.members.ravel(), np.arange(count)), "as it is prepared"
    texts = [dataset.sequence(d)[0][: prompts[d]].tobytes() for d in range(count)]
    partners = np.zeros(count, dtype=np.int64)
    for position in range(per_example):
        column = list(range(position, count, per_example))
        if len({texts[d] for d in column}) < 2:
            raise RequestError(
                f"{key}: dpo.loss kto needs answers to at least two different prompts, because it compares answers "
                "with those to other prompts; add rows, or change dpo.loss"
            )
        # Backwards: if the next example has the same prompt, its own successor is used.
        following = {column[-1]: next(d for d in column if texts[d] != texts[column[-1]])}
        for sequence, after in zip(reversed(column[:-1]), reversed(column[1:]), strict=True):
            following[sequence] = after if texts[after] != texts[sequence] else following[after]
        for sequence, partner in following.items():
            partners[sequence] = partner
    return partners
