"""The result of merging an adapter. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Merged:
    """A model with a merged adapter.

    Attributes:
        directory: the directory of the model.
        changed: number of weights that differ from the base.
        difference: largest difference of logits to base and adapter, relative to the largest logit.
        sample: text that it generated.
    """

    directory: Path
    changed: int
    difference: float
    sample: str
