"""Check that the numbers in a model's configuration describe a model that can be built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainwright.errors import RequestError

# Modules are made one by one, so this bounds the time to inspect a model. The deepest published language models have
# 1,000 layers (DeepNet, arXiv 2203.00555).
_COUNTS = (
    (re.compile(r"layers?$|^n_layers?$|blocks?$|^depth$"), 10_000, "layers"),
    (re.compile(r"experts?$"), 100_000, "experts"),
    (re.compile(r"heads?$"), 1_000_000, "heads"),
    (re.compile(r"^vocab_size$"), 100_000_000, "tokens"),
)
_POSITIVE = re.compile(r"^(vocab|hidden|intermediate)_size$|^head_dim$|^num_.*(layers|heads)$")
_LARGEST = 2**40  # of any number: more than the parameters of today's largest models
_DEEPEST = 64


def absurd_sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the problem for every impossible number."""
    stack: list[tuple[str, Any, int]] = [("", config, 0)]
    while stack:
        place, value, depth = stack.pop()
        if isinstance(value, Mapping) and depth < _DEEPEST:
            stack += [(f"{place}.{key}" if place else str(key), item, depth + 1) for key, item in value.items()]
        elif isinstance(value, int) and not isinstance(value, bool) and (reason := _absurd(place, value)):
            yield place, reason


def check_sizes(config: Mapping[str, Any], origin: str) -> None:
    """Check a configuration before anything is built from it. Raises RequestError, which begins with ``origin``."""
    if lines := [f"{origin}: {key}: {reason}" for key, reason in absurd_sizes(config)]:
        raise RequestError("\n".join(lines[:10]))


def _absurd(key: str, value: int) -> str | None:
    name = key.rpartition(".")[2]
    if value < 0 and _POSITIVE.search(name):
        return f"{_shown(value)} is negative"
    if abs(value) > _LARGEST:
        return f"{_shown(value)} is too large for a model's configuration"
    for pattern, most, noun in _COUNTS:
        if pattern.search(name) and value > most:
            return f"{_shown(value)} {noun} are too many (at most {most:,})"
    return None


def _shown(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**30 else f"a number of {value.bit_length() * 3 // 10} digits"
