"""The lengths of a source's examples, which a plan needs. Imports no torch.

Exact lengths are known after a source was tokenized and are saved in the cache under a key that needs no tokenizer;
before that they are estimated from the characters of its first rows.
"""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainwright.data.tokens.packing import best_fit_decreasing, count_examples_within, pack_in_order
from trainwright.errors import RequestError
from trainwright.machine.cache import try_write
from trainwright.utils.text import format_plural, format_ratio

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trainwright.data.tokens.dataset import TokenDataset
    from trainwright.recipe.schema import RecipeSchema
    from trainwright.recipe.sections.data import DataSection
    from trainwright.recipe.sections.model import ModelSection


_QUANTILES = 1024
_SAMPLED_BATCHES = 24
_MAX_SAMPLED = 4096  # examples
_DRAWN = 16_384  # examples, to find the largest batch of a run
_PLACES = 64
_LONGEST = 64  # examples, whose targets are counted
# For English text and code with vocabularies of 30,000 to 150,000 tokens; and the tokens a chat template adds per turn.
_CHARACTERS_PER_TOKEN = 3.8
_TOKENS_PER_TURN = 6


@dataclass(frozen=True)
class Lengths:
    """Example lengths in tokens; ``quantiles`` are equally spaced from the shortest to the longest.

    ``examples``: number of training examples, or None if not counted. ``target_fraction``: fraction of tokens that are
    targets. ``exact``: counted, not estimated. ``max_target_fraction``: that of the longest examples, if it is larger:
    a prompt is a smaller part of a long example.
    """

    quantiles: tuple[int, ...]
    examples: int | None
    target_fraction: float
    exact: bool = True
    max_target_fraction: float = 0.0

    @property
    def mean(self) -> float:
        """Return the mean length."""
        return sum(self.quantiles) / len(self.quantiles)

    @property
    def longest(self) -> int:
        """Return the longest length."""
        return self.quantiles[-1]

    def rows(self, global_batch_size: int, pack_length: int | None) -> tuple[float, int]:
        """Return the mean number of rows and the most tokens in a row, over random global batches."""
        if pack_length is None:
            return float(global_batch_size), self.longest
        counts, fullest = 0, 0
        sample = list(self._batches(global_batch_size))
        for lengths in sample:
            packs = best_fit_decreasing(lengths, pack_length)
            counts += len(packs)
            fullest = max(fullest, *(sum(lengths[i] for i in pack) for pack in packs))
        return counts / len(sample) * max(1.0, global_batch_size / _MAX_SAMPLED), fullest

    def estimate_pack_examples(self, packs: int, capacity: int) -> int:
        """Return the mean number of examples of random global batches of ``packs``."""
        draw, some = random.Random(0), max(1, min(packs, _MAX_SAMPLED // 64))
        counts = []
        for _ in range(_SAMPLED_BATCHES):
            lengths = iter(lambda: draw.choice(self.quantiles), None)
            counts.append(sum(map(len, pack_in_order(lengths, some, capacity))))
        return max(1, round(fmean(counts) * packs / some))

    def estimate_token_examples(self, tokens: int) -> int:
        """Return the mean number of examples of random global batches of at most ``tokens``."""
        draw, some = random.Random(0), min(tokens, max(self.longest, round(_MAX_SAMPLED * self.mean)))
        lengths = iter(lambda: draw.choice(self.quantiles), None)
        mean = fmean(count_examples_within(lengths, some) for _ in range(_SAMPLED_BATCHES))
        return max(1, round(mean * tokens / some))

    def estimate_max_batch_tokens(self, global_batch_size: int, steps: int | None = None) -> float:
        """Return the most tokens of a global batch, over as many random batches as a run has steps, if it is short."""
        count = max(_SAMPLED_BATCHES, min(steps or _DRAWN, _DRAWN // global_batch_size))
        batches = self._batches(global_batch_size, count)
        return max(map(sum, batches)) * max(1.0, global_batch_size / _MAX_SAMPLED)

    def list_longest_first(self, global_batch_size: int) -> tuple[int, ...]:
        """Return the longest example lengths over random global batches, at up to 64 ranks in descending order.

        Lengths of a batch are sorted, and ranks are equally spaced; the maximum of each rank is over the batches. Empty
        if all lengths are equal.
        """
        if self.quantiles[0] == self.longest:
            return ()
        sample = [sorted(lengths, reverse=True) for lengths in self._batches(global_batch_size)]
        met = [max(lengths) for lengths in zip(*sample, strict=True)]
        count = min(_PLACES, len(met))
        return tuple(met[index * len(met) // count] for index in range(count))

    def spread(self) -> tuple[int, ...]:
        """Return the mean lengths of up to 64 equal parts of the sorted examples. Empty if all lengths are equal."""
        if self.quantiles[0] == self.longest:
            return ()
        total = len(self.quantiles)
        count = min(_PLACES, total)
        edges = [index * total // count for index in range(count + 1)]
        return tuple(round(fmean(self.quantiles[begin:end])) for begin, end in pairwise(edges))

    def _batches(self, global_batch_size: int, count: int | None = None) -> Iterator[list[int]]:
        """Yield the example lengths of ``count`` random global batches; by default large ones are fewer."""
        draw = random.Random(0)
        for _ in range(count or max(2, min(_SAMPLED_BATCHES, _MAX_SAMPLED // global_batch_size))):
            yield draw.choices(self.quantiles, k=min(global_batch_size, _MAX_SAMPLED))


def find_longest(parts: Sequence[Lengths], global_batch_size: int) -> tuple[int, ...]:
    """Return the longest example lengths, as ``Lengths.list_longest_first``, over the batches of all parts of a run."""
    if len(parts) == 1:
        return parts[0].list_longest_first(global_batch_size)
    count = min(_PLACES, global_batch_size, _MAX_SAMPLED)
    lengths = [part.list_longest_first(global_batch_size) or (part.longest,) * count for part in parts]
    return tuple(map(max, zip(*lengths, strict=True)))


def count_lengths(dataset: TokenDataset) -> Lengths:
    """Count the lengths of tokenized examples, in the shares of their sources."""
    from trainwright.data.tokens.dataset import draw_examples

    lengths = dataset.example_lengths()
    longest = _find_longest(lengths)
    if dataset.mixture is not None:
        lengths = lengths[draw_examples(dataset.mixture, 0, "lengths")]
    return _build_lengths(lengths, dataset.target_fraction(), dataset.target_fraction(longest))


def _find_longest(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    count = min(_LONGEST, len(lengths))
    return lengths.argpartition(len(lengths) - count)[len(lengths) - count :]


def _build_lengths(lengths: npt.NDArray[np.int64], *fractions: float) -> Lengths:
    import numpy as np

    lengths = np.sort(lengths)
    indices = np.linspace(0, len(lengths) - 1, min(_QUANTILES, len(lengths))).round().astype(int)
    quantiles = tuple(int(n) for n in lengths[indices])
    return Lengths(quantiles, len(lengths), fractions[0], max_target_fraction=max(fractions))


def count_source_lengths(dataset: TokenDataset) -> list[Lengths]:
    """Count the lengths of the examples of each source."""
    import numpy as np

    lengths = dataset.example_lengths()
    ends = np.cumsum([part.examples for part in dataset.mixture or ()])[:-1]
    fractions = dataset.target_fraction(), dataset.target_fraction(_find_longest(lengths))
    return [_build_lengths(part, *fractions) for part in np.split(lengths, ends)]


def mix_lengths(parts: Sequence[tuple[Lengths, float]]) -> Lengths:
    """Return the lengths of a mixture of parts, each with its share of the examples; how many it has is not known."""
    parts = [(lengths, share) for lengths, share in parts if share]
    points = sorted((n, share / len(lengths.quantiles)) for lengths, share in parts for n in lengths.quantiles)
    values, total = [value for value, _ in points], sum(share for _, share in parts)
    until = list(accumulate(weight for _, weight in points))
    indices = [bisect_left(until, total * (index + 0.5) / _QUANTILES) for index in range(_QUANTILES - 1)]
    quantiles = (*(values[min(index, len(values) - 1)] for index in indices), values[-1])
    fractions = parts[0][0].target_fraction, all(lengths.exact for lengths, _ in parts)
    return Lengths(quantiles, None, *fractions, max(lengths.max_target_fraction for lengths, _ in parts))


def describe_rows(recipe: RecipeSchema) -> str:
    """Return what the examples of a recipe's task are made of, which decides their lengths; empty: of one row."""
    from trainwright.data.rows.formats import EXAMPLES, look_up_reader

    if recipe.spec.corpus:
        return ""
    kinds = {look_up_reader(recipe, key).name for key in recipe.data.source_keys}
    count = recipe.spec.needs(recipe).sequences_per_example
    return "" if count == 1 and kinds == {EXAMPLES.name} else f"{count} of {', '.join(sorted(kinds))}"


def save_lengths(
    model: ModelSection, data: DataSection, seed: int, dataset: TokenDataset, cache: Path, rows: str = ""
) -> None:
    """Save the lengths of a source for ``load_lengths``.

    Args:
        rows: see ``describe_rows``.
    """
    file = _locate_lengths_file(model, data, seed, cache, rows)
    if not file.exists():
        staged = data.stages is not None
        about = list(map(asdict, count_source_lengths(dataset))) if staged else asdict(count_lengths(dataset))
        if isinstance(about, dict) and data.streaming is not None:
            about["examples"] = None  # those counted are the first ones
        try_write(file, json.dumps(about))


def load_lengths(model: ModelSection, data: DataSection, seed: int, cache: Path, rows: str = "") -> Lengths | None:
    """Return the saved lengths of a source for this model, or None if it was not tokenized yet or has changed."""
    parts = recall_source_lengths(model, data, seed, cache, rows)
    return None if parts is None else parts[0]


def recall_source_lengths(
    model: ModelSection, data: DataSection, seed: int, cache: Path, rows: str = ""
) -> list[Lengths] | None:
    """Return the saved lengths of each source of a recipe with stages; see ``load_lengths``."""
    try:
        cached_lengths = json.loads(_locate_lengths_file(model, data, seed, cache, rows).read_text(encoding="utf-8"))
        parts = cached_lengths if isinstance(cached_lengths, list) else [cached_lengths]
        return [Lengths(**{**part, "quantiles": tuple(part["quantiles"])}) for part in parts]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_repetition(global_batch_size: int, examples: int) -> str | None:
    """Return a warning if a step uses examples more than once, or None if there are enough examples."""
    if global_batch_size <= examples:
        return None
    return (
        f"train.global_batch_size {global_batch_size:,} exceeds the {format_plural(examples, 'example')} to train on: "
        "each "
        f"step uses every example about {format_ratio(global_batch_size / examples)} times"
    )


def check_length(data: DataSection, model_max_length: int | None) -> None:
    """Raise RequestError if examples are longer than the maximum number of positions of the model."""
    if model_max_length is not None and data.max_length > model_max_length:
        raise RequestError(
            f"data.max_length: {data.max_length} exceeds the model's {model_max_length} positions; set it to "
            f"{model_max_length} or less"
        )


def estimate(examples: Sequence[Sequence[object]], max_length: int, bytewise: bool) -> Lengths | None:
    """Estimate lengths from the text of the sequences of a source's first examples; return None without examples.

    ``bytewise``: each token is a byte.
    """

    def length(sequence: object) -> int:
        texts = list(_iterate_texts(sequence))
        count = sum(len(t.encode()) if bytewise else len(t) / _CHARACTERS_PER_TOKEN for t in texts)
        if isinstance(sequence, tuple):  # the parts of a row that marks its targets: texts or token ids
            count += sum(len(part) for part, _ in sequence if not isinstance(part, str))
        return min(max_length, max(2, round(count + _TOKENS_PER_TURN * len(texts))))

    lengths = sorted(sum(map(length, sequences)) for sequences in examples)
    return Lengths(tuple(lengths), None, 1.0, exact=False) if lengths else None


def _iterate_texts(value: object) -> Iterator[str]:
    """Yield every text in a sequence, except role names, ids and types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("role", "from", "id", "type"):
                yield from _iterate_texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _iterate_texts(part)


def _locate_lengths_file(model: ModelSection, data: DataSection, seed: int, cache: Path, rows: str) -> Path:
    from trainwright.data.sources.key import build_source_key

    tokenizer = [model.name if model.tokenizer is None else model.tokenizer, model.gguf_file, model.chat_template]
    added_tokens = [model.added_tokens.names] if model.added_tokens.names else []
    key: dict[str, Any] = build_source_key(data, seed, json.dumps([*tokenizer, *added_tokens]))
    if rows:
        key["rows"] = rows
    key["about"] = [field.name for field in fields(Lengths)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return cache / "datasets" / "lengths" / f"{digest}.json"
