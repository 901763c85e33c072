"""Prompts with answers to other prompts, for KTO's estimate of the divergence from the reference.

KTO compares answers with KL(pi || pi_ref). Its estimate is the mean log-ratio over answers that do not belong to their
prompt (arXiv 2402.01306, section 4.2); the paper takes each from another example of the batch. Here it is always the
answer of the next example of the dataset with another prompt, so its reference log-probability is known before
training, and the estimate does not depend on ranks or micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Mismatched(TokenDataset):
    """The examples of a dataset, every sequence with the answer of another one; created on access."""

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
