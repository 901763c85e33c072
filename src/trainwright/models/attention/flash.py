"""The variable-length kernels of flash attention: one launch for all sequences of a pack. NVIDIA and AMD GPUs.

Each function takes padded heads and returns [1, T, H, D]. A window of transformers includes the current token; that of
flash attention counts the tokens before it.
"""

from __future__ import annotations

from typing import Any

import torch

from trainwright.models.attention.call import Call


def of_torch(call: Call) -> torch.Tensor:
    """Run torch's flash attention. It is deterministic while torch.use_deterministic_algorithms is on."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        *call.flat(),
        call.boundaries,
        call.boundaries,
        call.longest,
        call.longest,
        scale=call.scale,
        window_size=(_before(call), 0),
        enable_gqa=call.grouped,
    )
    assert isinstance(output, torch.Tensor)
    return output.unsqueeze(0)


def second(call: Call) -> torch.Tensor:
    """Run flash-attn 2."""
    from flash_attn import flash_attn_varlen_func

    return _first(
        flash_attn_varlen_func(
            *call.flat(),
            call.boundaries,
            call.boundaries,
            call.longest,
            call.longest,
            dropout_p=call.dropout,
            softmax_scale=call.scale,
            causal=True,
            window_size=(_before(call), 0),
            softcap=call.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    )


def third(call: Call) -> torch.Tensor:
    """Run FlashAttention-3."""
    from flash_attn_interface import flash_attn_varlen_func

    return _first(
        flash_attn_varlen_func(
            *call.flat(),
            call.boundaries,
            call.boundaries,
            call.longest,
            call.longest,
            softmax_scale=call.scale,
            causal=True,
            window_size=(_before(call), 0),
            softcap=call.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    )


def _before(call: Call) -> int:
    """Return how many tokens before itself a token attends to; -1: all of its sequence."""
    return -1 if call.window is None else call.window - 1


def _first(result: Any) -> torch.Tensor:
    """Return the output [1, T, H, D]; some versions return the log-sum-exp with it."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output.unsqueeze(0)
