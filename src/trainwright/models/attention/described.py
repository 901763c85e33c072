"""The attention kernels of a model in words, for the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainwright.models.attention.kernels import AttentionNeeds, Chosen, Platform, describe_kernels, list_kernels
from trainwright.models.attention.packs import DTYPES
from trainwright.models.configuration import list_layer_configs
from trainwright.models.gpt.variants import MODEL_TYPE as GPT
from trainwright.recipe.sections.model import OWN

if TYPE_CHECKING:
    from trainwright.models.causal_lm import CausalLM

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout")


def describe_attention(model: CausalLM, dtype: torch.dtype, longest: int, platform: Platform) -> list[str]:
    """Return a line for each kernel that computes the attention of ``model`` in training, with the reasons.

    ``longest``: the most tokens of a sequence.
    """
    if model.packed and model.config.model_type != OWN:
        return describe_kernels(needs_of(model, dtype, longest), platform)
    if model.config.model_type == OWN:
        return [f"computed by {model.config.implementation} itself"]
    name = model.config._attn_implementation  # chosen by transformers, whatever the heads are
    kernel = next((kernel for kernel in list_kernels() if kernel.name == name), None)
    needs = AttentionNeeds(
        0, 0, DTYPES[dtype], packed=False, deterministic=torch.are_deterministic_algorithms_enabled()
    )
    line = f"{name}, over padded rows" if kernel is None else Chosen(kernel, ()).line(needs, platform)
    return [line if platform.attention == "auto" else f"{line} (model.attention is {platform.attention})"]


def needs_of(model: CausalLM, dtype: torch.dtype, longest: int) -> Iterator[AttentionNeeds]:
    """Yield what the layers of ``model`` need on packs of sequences: one for each kind of layer."""
    config: Any = model.config.get_text_config()
    dropouts = (*_DROPOUTS, "dropout") if config.model_type == GPT else _DROPOUTS
    for windowed, size, value_size in _list_layer_kinds(config):
        yield AttentionNeeds(
            size,
            value_size,
            DTYPES[dtype],
            softcap=getattr(config, "attn_logit_softcapping", None) is not None,
            sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
            dropout=any(getattr(config, name, None) for name in dropouts),
            window=windowed and config.sliding_window < longest,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


def _list_layer_kinds(config: Any) -> list[tuple[bool, int, int]]:
    """Return whether layers have windows, and the widths of a head's keys and values: one for each kind of layer."""
    configs = list_layer_configs(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(configs)
    has_windows = (
        getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", None) is not False
    )
    windows = [has_windows and kind == "sliding_attention" for kind in kinds]
    layers = zip(windows, configs if len(configs) > 1 else configs * len(kinds), strict=True)
    return sorted({(windowed, *_find_head_widths(layer, windowed=windowed)) for windowed, layer in layers})


def _find_head_widths(config: Any, *, windowed: bool) -> tuple[int, int]:
    """Return the widths of a head's keys and values."""
    if getattr(config, "qk_nope_head_dim", None) is not None:  # multi-head latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    wider = None if windowed else getattr(config, "global_head_dim", None)  # Gemma 4, in layers without windows
    size = wider or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size, size
