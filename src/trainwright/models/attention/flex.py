"""Attention with soft caps, sinks and windows by torch's flex_attention, which keeps no scores in memory.

It computes blocks of allowed pairs only (arXiv 2412.05496). Outside of compiled code it has to be compiled by itself:
uncompiled it creates all scores (torch/nn/attention/flex_attention.py). It has no dropout: scores can be changed before
the softmax, weights not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainwright.models.attention.call import Call

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attend(call: Call, mask: BlockMask) -> torch.Tensor:
    """Compute attention with the allowed pairs of ``mask``; return [1, T, H, V]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    run: Any = flex_attention if torch.compiler.is_compiling() else compiled()
    options: dict[str, Any] = {"block_mask": mask, "scale": call.scale, "enable_gqa": call.grouped}
    if call.softcap is not None:
        options["score_mod"] = _capped(call.softcap)
    if call.sinks is None:
        output = run(call.query, call.key, call.value, **options)
    else:
        output, more = run(call.query, call.key, call.value, return_aux=AuxRequest(lse=True), **options)
        # A sink adds its exponential to the sum that the exponentials of all scores are divided by.
        share = torch.sigmoid(more.lse - call.sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2)


@cache
def compiled() -> Callable[..., Any]:
    """Return flex_attention compiled; from a second length of packs on, for any length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # without dynamic=True, so that scales and soft caps stay constants


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
