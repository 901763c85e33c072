"""Metrics on a few rows of a benchmark, measured repeatedly during unlearning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.inference.scoring import score
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.world import World
from trainwright.tasks.unlearn.benchmarks import Benchmark
from trainwright.tasks.unlearn.evaluation import statistics
from trainwright.tasks.unlearn.evaluation.encoding import PARAPHRASE, WRONG, ItemEncoder, ItemSequences
from trainwright.tasks.unlearn.evaluation.items import read_sets
from trainwright.tasks.unlearn.evaluation.report import by_set

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AGGREGATES = {"forget": statistics.forget_truth_ratio, "retain": statistics.utility_truth_ratio}


class TruthRatios:
    """Truth ratios on the first rows of the forget and of the retain set."""

    def __init__(self, sequences: ItemSequences) -> None:
        self._sequences = sequences

    @classmethod
    def of(
        cls,
        benchmark: Benchmark,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rows: int,
        positions: int | None,
        key: str,
    ) -> TruthRatios | None:
        """Return those of a benchmark; None if its rows have no wrong answers.

        Args:
            rows: of each set.
            positions: of the model; longer rows are truncated.
            key: the recipe's key that names the benchmark, for messages.

        Raises:
            RequestError: a row is invalid, with its file and line.
        """
        sets = {name: each for name, each in read_sets(benchmark, _AGGREGATES, rows, key).items() if each.has_wrong}
        if not sets:
            return None
        return cls(ItemEncoder(tokenizer, positions, key).sequences(sets, (PARAPHRASE, WRONG)))

    def metrics(self, lm: CausalLM, world: World, *, together: bool = False) -> dict[str, float]:
        """Return ``forget_truth_ratio`` and ``retain_truth_ratio``, the same on every rank. Every rank must call.

        Args:
            lm: the full model.
            together: whether every rank scores everything, because each pass of the model involves all ranks.
        """
        scores = by_set(self._sequences, score(lm, self._sequences.dataset, world, together=together))
        return {f"{name}_truth_ratio": _AGGREGATES[name](each.truth_ratios) for name, each in scores.items()}
