"""What merging an adapter has made. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Merged:
    """A model that an adapter was worked into.

    Attributes:
        directory: where it was written.
        changed: matrices that are not those of the base.
        difference: of its logits to those of base and adapter, as a part of the largest.
        sample: something that it wrote.
    """

    directory: Path
    changed: int
    difference: float
    sample: str
