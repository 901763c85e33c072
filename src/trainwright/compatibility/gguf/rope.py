"""Write and read the keys and tensors of GGUF files that describe rotary embeddings, as llama.cpp computes them.

llama.cpp divides the frequencies of the base by the elements of ``rope_freqs`` (Llama 3), or of one of two tensors that
it chooses by the length of the context (LongRoPE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_DEFAULT_BASE = 10_000.0  # llama.cpp's, if the file has none
# The architectures whose frequencies llama.cpp divides.
_LLAMA3, _LONGROPE = {"llama"}, {"llama", "phi3"}
_SAME = 1e-4


def write_rope(config: PretrainedConfig, architecture: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the keys, without the architecture, and the tensors that describe the model's rotary embeddings.

    Raises:
        RequestError: the format or llama.cpp's ``architecture`` does not have them; names the rope_type.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if not rope:
        return {}, {}
    nested = "full_attention" in rope
    full = rope["full_attention"] if nested else rope
    kind = full.get("rope_type", "default")
    settings: dict[str, Any] = {"rope.freq_base": float(full["rope_theta"])}
    if nested:
        local = rope["sliding_attention"]
        settings["rope.freq_base_swa"] = float(local["rope_theta"])
        if local.get("rope_type", "default") != "default" or kind not in ("default", "linear"):
            raise _build_rope_error(config, kind if kind not in ("default", "linear") else local["rope_type"])
    if kind == "default":
        return settings, {}
    if kind == "linear":
        return settings | {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}, {}
    if kind == "yarn":
        return settings | _build_yarn(config, full), {}
    if kind == "llama3" and architecture in _LLAMA3:
        return settings, {FREQUENCIES: _compute_llama3_factors(full, _count_rotated(config, full))}
    if kind == "longrope" and architecture in _LONGROPE:
        return _build_longrope(config, full, settings)
    raise _build_rope_error(config, kind)


def _build_rope_error(config: PretrainedConfig, kind: str) -> RequestError:
    return RequestError(f"rope_type {kind} of a {config.model_type} cannot be written to a GGUF file")


def _count_rotated(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head * rope.get("partial_rotary_factor", 1.0))


def _build_yarn(config: PretrainedConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    attention = rope.get("attention_factor")
    if rope.get("mscale") or rope.get("mscale_all_dim") or not rope.get("truncate", True):
        raise _build_rope_error(config, "yarn with mscale or without truncate")
    if attention is not None and abs(attention - usual) > _SAME:
        raise _build_rope_error(config, f"yarn with attention_factor {attention}")
    settings = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
    }
    betas = {name: rope.get(name) for name in ("beta_fast", "beta_slow")}
    return settings | {f"rope.scaling.yarn_{name}": float(value) for name, value in betas.items() if value is not None}


def _build_longrope(
    config: PretrainedConfig, rope: Mapping[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    long, short = (torch.tensor(rope[name], dtype=torch.float32) for name in ("long_factor", "short_factor"))
    original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    factor = rope.get("factor") or config.max_position_embeddings / original
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if torch.equal(long, short) and attention == 1.0:
        return settings, {FREQUENCIES: long}
    settings |= {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": int(original),
        "rope.scaling.attn_factor": float(attention),
    }
    return settings, {LONG: long, SHORT: short}


def _compute_llama3_factors(rope: Mapping[str, Any], rotated: int) -> torch.Tensor:
    """Return what Llama 3's scaling divides each frequency of the base by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = SimpleNamespace(rope_parameters=dict(rope), head_dim=rotated, standardize_rope_params=lambda: None)
    config.rope_parameters["partial_rotary_factor"] = 1.0
    scaled_frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated))
    return plain / scaled_frequencies


def read_rope(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], positions: int) -> dict[str, Any]:
    """Return transformers' ``rope_parameters``.

    Args:
        facts: the keys of the file.
        tensors: those of its tensors that scale frequencies.
        positions: the model's maximum number of positions.
    """
    architecture = facts["general.architecture"]

    def get(name: str) -> Any:
        return facts.get(f"{architecture}.rope.{name}")

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get("freq_base") or _DEFAULT_BASE)}
    head = facts.get(f"{architecture}.attention.key_length")
    if head is None:
        head = facts[f"{architecture}.embedding_length"] // facts[f"{architecture}.attention.head_count"]
    rotary_dim = get("dimension_count") or head
    if rotary_dim < head:
        rope["partial_rotary_factor"] = rotary_dim / head
    kind, original = get("scaling.type"), get("scaling.original_context_length")
    if LONG in tensors:
        scaling: dict[str, Any] = {"long_factor": tensors[LONG].tolist(), "short_factor": tensors[SHORT].tolist()}
        scaling |= {"attention_factor": get("scaling.attn_factor") or 1.0}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original or positions, **scaling}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": get("scaling.factor")}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": get("scaling.factor")}
        rope["original_max_position_embeddings"] = original or positions
        betas = {name: get(f"scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope |= {name: value for name, value in betas.items() if value is not None}
    elif FREQUENCIES in tensors:
        rope |= _find_scaling(tensors[FREQUENCIES], rope, rotary_dim, positions)
    if architecture != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": float(get("freq_base_swa") or _DEFAULT_BASE)}
    return {"full_attention": rope, "sliding_attention": local}


def _find_scaling(factors: torch.Tensor, rope: Mapping[str, Any], rotated: int, positions: int) -> dict[str, Any]:
    """Return Llama 3's scaling if it gives these factors, otherwise LongRoPE with the factors themselves."""
    usual: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max())}
    usual |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for exponent in range(6, 20):
        usual["original_max_position_embeddings"] = 2**exponent
        if torch.allclose(_compute_llama3_factors({**rope, **usual}, rotated), factors, rtol=_SAME):
            return usual
    same = {"long_factor": factors.tolist(), "short_factor": factors.tolist()}
    return {
        "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
        "original_max_position_embeddings": positions, **same,
    }  # fmt: skip
