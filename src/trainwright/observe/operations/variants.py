"""Variants of a recipe: one key at a time, all combinations of several keys, or a random sample of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError

if TYPE_CHECKING:
    from trainwright.recipe import schema


_LONGEST_NAME = 120
_RANGE = re.compile(r"([-+.\deE]+)\.\.([-+.\deE]+)")
# A range is sampled by its logarithm if its ends differ by at least this factor.
_LOGARITHMIC = 10.0
_DRAWS = 100  # per variant, until one is new


@dataclass(frozen=True)
class Variant:
    """A recipe with other values of some keys; without changes, the recipe as it is."""

    changes: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        if not self.changes:
            return "as-it-is"
        parts = []
        for key, value in self.changes:
            safe_value = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in value)
            parts.append(f"{key.rpartition('.')[2]}={safe_value}")
        name = ",".join(parts)
        if len(name) <= _LONGEST_NAME:
            return name
        return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    @property
    def overrides(self) -> list[str]:
        """Return the overrides that make this variant."""
        return [f"{key}={value}" for key, value in self.changes]


def one_at_a_time(over: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return the recipe as it is, and each value of each key."""
    return [Variant(), *(Variant(((key, value),)) for key, values in _texts(over).items() for value in values)]


def grid(over: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return all combinations of the values."""
    texts = _texts(over)
    return [Variant(tuple(zip(texts, values, strict=True))) for values in itertools.product(*texts.values())]


def sample(over: Mapping[str, Sequence[Any]], number: int, seed: int) -> list[Variant]:
    """Return different random combinations; all of them if there are no more than ``number``.

    A value ``LOW..HIGH`` is a range to draw from, by its logarithm if its ends differ by a factor of 10 or more.
    """
    texts, draw = _texts(over, ranges=True), random.Random(seed)
    if not any(_RANGE.fullmatch(value) for values in texts.values() for value in values):
        every = grid(over)
        return every if len(every) <= number else draw.sample(every, number)
    variants: dict[Variant, None] = {}
    for _ in range(number * _DRAWS):
        variants[Variant(tuple((key, _drawn(draw.choice(values), draw)) for key, values in texts.items()))] = None
        if len(variants) == number:
            break
    return list(variants)


def _drawn(value: str, draw: random.Random) -> str:
    if (ends := _RANGE.fullmatch(value)) is None:
        return value
    low, high = (float(end) for end in ends.groups())
    if low > 0 and high / low >= _LOGARITHMIC:
        number = math.exp(draw.uniform(math.log(low), math.log(high)))
    else:
        number = draw.uniform(low, high)
    is_whole = all(re.fullmatch(r"[-+]?\d+", end) for end in ends.groups())
    return str(round(number)) if is_whole else f"{number:.4g}"


def _texts(over: Mapping[str, Sequence[Any]], *, ranges: bool = False) -> dict[str, list[str]]:
    """Return the values of every key in YAML; texts are YAML already. Raises RequestError for a wrong range."""
    texts = {key: [v if isinstance(v, str) else json.dumps(v) for v in values] for key, values in over.items()}
    for key, values in texts.items():
        for value in values:
            if (ends := _RANGE.fullmatch(value)) is None:
                continue
            if not ranges:
                raise RequestError(f"--over {key}={value}: a range is for a random sample; pass --sample NUMBER")
            try:
                ordered = float(ends[1]) < float(ends[2])
            except ValueError:
                ordered = False
            if not ordered:
                raise RequestError(f"--over {key}={value}: expected LOW..HIGH, such as 1e-5..1e-3")
    return texts


def runs_of(recipes: Mapping[Variant, schema.Recipe]) -> dict[Variant, Variant]:
    """Return for each variant the one whose run it shares: the first with the same values, however they are written.

    Raises:
        RequestError: two different ones would be trained in one directory.
    """
    runs: dict[Variant, Variant] = {}
    for variant, recipe in recipes.items():
        distinct = dict.fromkeys(runs.values())
        same = next((run for run in distinct if recipes[run] == recipe), None)
        clash = next((run for run in distinct if run.name == variant.name), None)
        if same is None and clash is not None:
            names = f"{' '.join(clash.overrides)} and {' '.join(variant.overrides)}"
            raise RequestError(f"--over: {names} would both be {variant.name}/; vary them in two ablations")
        runs[variant] = same or variant
    return runs
