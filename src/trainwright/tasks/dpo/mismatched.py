"""Prompts with answers to other prompts, from which KTO estimates how far a model has gone from its reference.

KTO measures answers against KL(pi || pi_ref). Its estimate is the mean log-ratio over answers that were not given to
their prompt (arXiv 2402.01306, section 4.2); there each is taken from another example of the batch. Here it is the
answer of the next example of the data set that has another prompt, always the same: so what the reference makes of it
is known before training, and the estimate depends on neither ranks nor micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.data.stream.dataset import TokenDataset
from trainwright.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Mismatched(TokenDataset):
    """The examples of another data set, every document with the answer of another; made when it is looked at."""

    max_length: int
    prompts: npt.NDArray[np.int64]  # [documents]: tokens before the answer
    others: npt.NDArray[np.int64]  # [documents]: whose answer it has

    @classmethod
    def of(cls, dataset: TokenDataset, max_length: int, key: str) -> Mismatched:
        """Of ``dataset``; documents are cut to ``max_length`` tokens, as its own are.

        Raises:
            RequestError: all its prompts are the same; ``key`` is that of its source.
        """
        prompts = np.asarray([_prompt_length(dataset, d) for d in range(dataset.document_count)], dtype=np.int64)
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

    def document_length(self, document: int) -> int:
        """Return the number of tokens of one document."""
        other = self.others[document]
        answer = super().document_length(int(other)) - self.prompts[other]
        return int(min(self.prompts[document] + answer, self.max_length))

    def document(self, document: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return a prompt with the answer of another row."""
        tokens, targets = super().document(document)
        answer, answer_targets = super().document(int(self.others[document]))
        begin, other_begin = self.prompts[document], self.prompts[self.others[document]]
        joined = np.concatenate([tokens[:begin], answer[other_begin:]])[: self.max_length]
        flags = np.concatenate([targets[:begin], answer_targets[other_begin:]])[: self.max_length]
        return joined, flags

    def document_targets(self, document: int) -> int:
        """Return the number of targets of one document."""
        return int(np.count_nonzero(self.document(document)[1][1:]))


def _prompt_length(dataset: TokenDataset, document: int) -> int:
    """Tokens of a document before the first that is predicted."""
    return 1 + int(np.argmax(dataset.document(document)[1][1:]))


def _others(dataset: TokenDataset, prompts: npt.NDArray[np.int64], key: str) -> npt.NDArray[np.int64]:
    """For every document, the one at its place in the next example, around the end, that has another prompt."""
    count, each = dataset.document_count, dataset.documents_per_example
    assert dataset.members is None or np.array_equal(dataset.members.ravel(), np.arange(count)), "as it is prepared"
    texts = [dataset.document(d)[0][: prompts[d]].tobytes() for d in range(count)]
    others = np.zeros(count, dtype=np.int64)
    for place in range(each):
        column = list(range(place, count, each))
        if len({texts[d] for d in column}) < 2:
            raise RequestError(
                f"{key}: dpo.loss kto needs answers to at least two different prompts, as it measures answers against "
                "those to other prompts; add rows, or set dpo.loss to another"
            )
        # From the end, as the next example with another prompt is the next one's where that has the same.
        following = {column[-1]: next(d for d in column if texts[d] != texts[column[-1]])}
        for document, after in zip(reversed(column[:-1]), reversed(column[1:]), strict=True):
            following[document] = after if texts[after] != texts[document] else following[after]
        for document, other in following.items():
            others[document] = other
    return others
