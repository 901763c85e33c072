"""Contradictions: values of a recipe that are valid alone but not together."""

from __future__ import annotations

from typing import NamedTuple


class Contradiction(NamedTuple):
    """``keys``: the contradicting dotted keys, the most relevant first."""

    keys: tuple[str, ...]
    message: str


class Contradictions(ValueError):
    """All contradictions of a recipe; raised inside pydantic's validation, which wraps it."""

    def __init__(self, items: list[Contradiction]) -> None:
        super().__init__("; ".join(f"{item.keys[0]}: {item.message}" for item in items))
        self.items = items
