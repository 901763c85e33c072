"""torch.compile by region: one transformer block is compiled, and all blocks of its kind share the result."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trainwright.models import attention


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block in place. The first passes are slow; packs of any length then use the same code."""
    # A loop over documents differs for every batch, so it runs uncompiled between compiled parts.
    attention._each_document = torch.compiler.disable(attention._each_document)
    for block in blocks:
        block.compile(dynamic=True)
