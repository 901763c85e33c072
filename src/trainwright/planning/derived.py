"""What the operations that are written by hand need of a workload in place of its trace. Goes with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from trainwright.errors import RequestError
from trainwright.planning.trace.request import TracedModel
from trainwright.recipe.files import read_json
from trainwright.utils.paths import user_path

if TYPE_CHECKING:
    from trainwright.planning.architectures.architecture import Architecture
    from trainwright.planning.operations.inventory import Weight

# "nf4_single": with scales in fp32, without double quantization.
Quantization = Literal["none", "nf4", "nf4_single", "int8"]
# The linear modules of a block, by purpose; a family may fuse several into one matrix.
Target = Literal["query", "key", "value", "output", "gate", "up", "down"]
ALL_LINEAR: tuple[Target, ...] = ("query", "key", "value", "output", "gate", "up", "down")
_RANK = 16  # rank of an adapter when the recipe does not set one
# Names of modules in the supported families, by purpose.
_TARGETS: dict[str, tuple[Target, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("output",),
    "out_proj": ("output",),
    "dense": ("output",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    "qkv_proj": ("query", "key", "value"),
    "query_key_value": ("query", "key", "value"),
    "gate_up_proj": ("gate", "up"),
    "c_attn": ("query", "key", "value"),
    "c_fc": ("up",),
    "fc1": ("up",),
    "fc2": ("down",),
    "dense_h_to_4h": ("up",),
    "dense_4h_to_h": ("down",),
}


@dataclass(frozen=True)
class AdapterShape:
    """Trainable matrices of rank ``rank`` next to frozen weights. ``dropout``: of their input."""

    kind: Literal["lora", "dora"]
    rank: int
    targets: tuple[Target, ...] = ALL_LINEAR
    dropout: float = 0.0


@dataclass(frozen=True)
class ReferenceWork:
    """A frozen model that runs forward in every micro-batch in addition to the trained one.

    ``blocks``: number of its first blocks that run; with all of them its head runs too. ``share``: share of the tokens.
    ``copied``: it has its own weights; otherwise it is the model with its adapter disabled.
    """

    blocks: int
    share: float
    copied: bool


class Derived:
    """What a workload was before it had a ``model``."""

    model: TracedModel

    @property
    def architecture(self) -> Architecture:
        """The sizes of the model."""
        return architecture_of(self.model.configuration)

    @property
    def adapter(self) -> AdapterShape | None:
        """The adapter that is trained, or None if the model itself is."""
        return adapter_of(self.model.adapter)

    @property
    def quantization(self) -> Quantization:
        """The quantization of the frozen base model."""
        section = json.loads(self.model.adapter or "{}")
        kind: Quantization = section.get("quantization", "none")
        return "nf4_single" if kind == "nf4" and not section["double_quantization"] else kind

    @property
    def trained(self) -> frozenset[tuple[int, str]] | None:
        """The trained parameters, by unit and name of an inventory; None if all are."""
        return _trained(self.architecture, self.model) if self.adapter is None else None

    @property
    def first_blocks(self) -> int | None:
        """The number of blocks that run, if the loss is computed from a block's output."""
        return None if self.model.last_block is None else self.model.last_block + 1

    @property
    def reference(self) -> ReferenceWork | None:
        """The frozen model that runs beside the trained one."""
        model, layers = self.model, self.architecture.layers
        if model.reference == "none":
            return None
        blocks = layers if model.reference_block is None else min(model.reference_block + 1, layers)
        return ReferenceWork(blocks, model.reference_share, model.reference == "copied")


@lru_cache(maxsize=64)
def architecture_of(configuration: str) -> Architecture:
    """Return the architecture of a configuration."""
    from trainwright.planning.architectures.configured import architecture_of_config

    return architecture_of_config(json.loads(configuration), "model.config")


@lru_cache(maxsize=64)
def adapter_of(text: str) -> AdapterShape | None:
    """Return the shape of an adapter that a model's trace is requested with."""
    if not text:
        return None
    section = json.loads(text)
    started = _started(section.get("start_from"))
    targets = section.get("targets") or started.get("target_modules") or "all-linear"
    return AdapterShape(
        kind="dora" if section["type"] == "dora" else "lora",
        rank=section.get("rank") or started.get("r") or _RANK,
        targets=ALL_LINEAR if isinstance(targets, str) else _by_purpose(targets),
        dropout=section.get("dropout", 0.0),
    )


def _started(directory: str | None) -> dict[str, Any]:
    """Return the configuration of the adapter that training starts from."""
    if directory is None:
        return {}
    file = user_path(directory) / "adapter_config.json"
    try:
        content = read_json(file)
        return content if isinstance(content, dict) else {}
    except RequestError:
        return {}  # the error is reported when the adapter is loaded


def _by_purpose(names: Sequence[str]) -> tuple[Target, ...]:
    targets = dict.fromkeys(target for name in names for target in _TARGETS.get(name.rpartition(".")[2], ALL_LINEAR))
    return tuple(targets)


# Parameter names of most families, by purpose.
_IN_BLOCKS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_key_value": "self_attn.qkv_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


@lru_cache(maxsize=64)
def _trained(architecture: Architecture, model: TracedModel) -> frozenset[tuple[int, str]] | None:
    from trainwright.planning.operations.inventory import inventory

    if model.last_block is None and model.trainable is None:
        return None
    weights = inventory(architecture, 4, True).weights
    return frozenset((w.unit, w.name) for w in weights if _wanted(w, model.trainable, model.last_block)) or None


def _wanted(weight: Weight, patterns: Sequence[str] | None, last: int | None) -> bool:
    if last is not None and (weight.unit > last or weight.name.startswith("head")):
        return False
    return patterns is None or any(re.fullmatch(pattern, name) for name in _names(weight) for pattern in patterns)


def _names(weight: Weight) -> Iterator[str]:
    name, part = weight.name, "weight"
    if name.endswith(".bias"):
        name, part = name.removesuffix(".bias"), "bias"
    if weight.unit == -1:
        yield f"{_OUTSIDE.get(name, name)}.{part}"
    else:
        yield f"model.layers.{weight.unit}.{_IN_BLOCKS.get(name, name)}.{part}"
