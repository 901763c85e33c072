"""Convert the GPT of model.py from and to architectures of transformers: GPT-2, Llama and Qwen3.

The weights are the same under other names: GPT-2 stores matrices transposed, and the others store queries, keys and
values, and the two input matrices of the MLP, separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.errors import RequestError
from trainwright.models.gpt.config import GPTConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from trainwright.models.gpt.model import GPT

Named = Iterator[tuple[str, torch.Tensor]]
_IDS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "tie_word_embeddings")
# Maps module names to those in transformers; Llama stores the parts of a combined matrix separately, in this order.
_GPT2_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_NAMES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_GPT2_ENDS = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f"}
_LLAMA_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm"}


def convert_to_published(
    config: PretrainedConfig, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> tuple[PretrainedConfig, Iterable[tuple[str, torch.Tensor]]]:
    """Convert the config and tensors of a GPT to the architecture of transformers that it is saved as.

    Other models are returned unchanged.

    Args:
        tensors: the state dict, or its items one by one.
    """
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(config, GPTConfig):
        return config, items
    convert = _convert_to_gpt2 if config.norm == "layer" else _convert_to_llama
    return _convert_config_to_published(config), convert(config, items)


@torch.no_grad()
def from_transformers(model: PreTrainedModel, config: GPTConfig | None = None) -> GPT:
    """Return a GPT with the weights of a GPT-2, Llama or Qwen3, in their dtype; it computes the same logits.

    Args:
        config: the GPT's configuration, with the changes of a recipe; None: ``convert_config`` of the model's.

    Raises:
        RequestError: the architecture is another one, or uses a feature that the GPT does not have; the message names
            it.
    """
    from trainwright.models.gpt.model import GPT

    gpt = GPT(convert_config(model.config) if config is None else config)
    nn.Module.to(gpt, dtype=model.dtype)
    theirs = model.state_dict()
    collect = _convert_from_gpt2 if gpt.config.norm == "layer" else _convert_from_llama
    for name, parameter in gpt.named_parameters():
        parameter.copy_(collect(name, theirs.__getitem__))
    gpt.generation_config = model.generation_config
    return gpt.train(model.training)


def convert_config(theirs: PretrainedConfig) -> GPTConfig:
    """Return the configuration of the GPT that is equivalent to a GPT-2, Llama or Qwen3 of transformers.

    Raises:
        RequestError: see ``from_transformers``.
    """
    kind = theirs.model_type
    common = {name: getattr(theirs, name) for name in _IDS}
    if kind == "gpt2":
        _refuse_other(theirs, {"activation_function": ("gelu", "gelu_pytorch_tanh", "gelu_new")})
        _refuse_other(theirs, {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)})
        mlp = "gelu" if theirs.activation_function == "gelu" else "gelu_tanh"
        kinds = {"position_embedding": "learned", "norm": "layer", "mlp": mlp, "bias": True, "qk_norm": False}
        eps, more = theirs.layer_norm_epsilon, {"dropout": theirs.resid_pdrop, "intermediate_size": theirs.n_inner}
    elif kind in ("llama", "qwen3"):
        _refuse_other(theirs, {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False, None)})
        _refuse_other(theirs, {"use_sliding_window": (False, None)})
        rope = theirs.rope_parameters or {}
        if rope.get("rope_type", "default") != "default":
            raise RequestError(f"implementation gpt does not support rope_type {rope['rope_type']}")
        if getattr(theirs, "head_dim", None) not in (None, theirs.hidden_size // theirs.num_attention_heads):
            raise RequestError("implementation gpt only supports head_dim = hidden_size / num_attention_heads")
        kinds = {"position_embedding": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False}
        eps = theirs.rms_norm_eps
        more = {
            "qk_norm": kind == "qwen3",
            "num_key_value_heads": theirs.num_key_value_heads,
            "intermediate_size": theirs.intermediate_size,
            "rope_theta": rope.get("rope_theta", 10000.0),
        }
    else:
        raise RequestError(f"implementation gpt supports gpt2, llama and qwen3, not {kind}")
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    fields: dict[str, Any] = {name: getattr(theirs, name) for name in sizes} | common | kinds | more
    return GPTConfig(**fields, norm_eps=eps)


def _refuse_other(config: PretrainedConfig, supported: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in supported.items():
        if getattr(config, name, values[-1]) not in values:
            raise RequestError(
                f"implementation gpt does not support a {config.model_type} with {name} {getattr(config, name)}"
            )


def _convert_config_to_published(config: GPTConfig) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen3Config

    common: dict[str, Any] = {name: getattr(config, name) for name in _IDS}
    if config.norm == "layer":
        dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
        return GPT2Config(
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            n_inner=config.intermediate_size,
            activation_function="gelu" if config.mlp == "gelu" else "gelu_new",
            layer_norm_epsilon=config.norm_eps,
            **common,
            **dropouts,
        )
    modern: dict[str, Any] = {
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **common,
    }
    return Qwen3Config(**modern) if config.qk_norm else LlamaConfig(**modern, attention_dropout=config.dropout)


def _split_name(name: str) -> tuple[str, str, str]:
    """Split a parameter name into the block number ("" outside blocks), the module, and the kind (weight or bias)."""
    module, _, kind = name.rpartition(".")
    module = module.removeprefix("decoder.")
    if not module.startswith("blocks."):
        return "", module, kind
    _, number, module = module.split(".", 2)
    return number, module, kind


def _convert_to_gpt2(config: GPTConfig, items: Iterable[tuple[str, torch.Tensor]]) -> Named:
    for name, tensor in items:
        theirs = _build_gpt2_name(name)
        yield theirs, tensor.t() if _is_matrix_of_a_block(name) else tensor
        number, module, kind = _split_name(name)
        if not config.bias and kind == "weight" and (number or module == "norm"):  # GPT-2 always has one
            yield theirs.removesuffix("weight") + "bias", tensor.new_zeros(len(tensor))


def _convert_from_gpt2(name: str, theirs: Callable[[str], torch.Tensor]) -> torch.Tensor:
    tensor = theirs(_build_gpt2_name(name))
    return tensor.t() if _is_matrix_of_a_block(name) else tensor


def _build_gpt2_name(name: str) -> str:
    number, module, kind = _split_name(name)
    if number:
        return f"transformer.h.{number}.{_GPT2_NAMES[module]}.{kind}"
    return f"{'lm_head' if module == 'head' else _GPT2_ENDS[module]}.{kind}"


def _is_matrix_of_a_block(name: str) -> bool:
    number, module, kind = _split_name(name)
    return bool(number) and kind == "weight" and not module.endswith("norm")


def _convert_to_llama(config: GPTConfig, items: Iterable[tuple[str, torch.Tensor]]) -> Named:
    for name, tensor in items:
        names = _list_llama_names(name)
        yield from zip(names, tensor.split(_list_part_rows(config, name)) if len(names) > 1 else (tensor,), strict=True)


def _convert_from_llama(name: str, theirs: Callable[[str], torch.Tensor]) -> torch.Tensor:
    return torch.cat([theirs(part) for part in _list_llama_names(name)])


def _list_llama_names(name: str) -> list[str]:
    number, module, kind = _split_name(name)
    if number:
        return [f"model.layers.{number}.{part}.{kind}" for part in _LLAMA_NAMES[module]]
    return [f"{'lm_head' if module == 'head' else _LLAMA_ENDS[module]}.{kind}"]


def _list_part_rows(config: GPTConfig, name: str) -> list[int]:
    """Return the number of rows of each part of a combined matrix."""
    if _split_name(name)[1] == "mlp.up":
        return [config.intermediate_size] * 2
    return [count * config.head_dim for count in (config.num_attention_heads, config.groups, config.groups)]
