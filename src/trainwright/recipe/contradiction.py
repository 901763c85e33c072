"""Values of a recipe that are fine alone and do not go together."""

from __future__ import annotations

from typing import NamedTuple


class Contradiction(NamedTuple):
    """``keys``: the dotted keys that do not go together, the one to look at first in front."""

    keys: tuple[str, ...]
    message: str


class Contradictions(ValueError):
    """Every contradiction of a recipe; raised inside pydantic's validation, which wraps it."""

    def __init__(self, found: list[Contradiction]) -> None:
        super().__init__("; ".join(f"{item.keys[0]}: {item.message}" for item in found))
        self.found = found
