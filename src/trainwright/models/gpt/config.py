"""The configuration of the GPT in model.py, as a transformers configuration."""

from __future__ import annotations

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from trainwright.models.gpt.variants import MODEL_TYPE, VARIANTS, expand_config


@strict
class GPTConfig(PreTrainedConfig):
    """Sizes and components of a GPT; defaults come from ``variant``, or from the smallest GPT-2.

    ``position_embedding``, ``norm``, ``mlp``: learned, layer and gelu_tanh (or gelu without the tanh approximation,
    which is faster on a CPU: arXiv 1606.08415) are those of GPT-2; rotary, rms and swiglu those of Llama, and with
    ``qk_norm`` (normalization of every query and key head) of Qwen3. ``bias``: in linear layers and norms.
    ``num_key_value_heads``: for grouped-query attention, if fewer than heads (arXiv 2305.13245).

    Raises:
        ValueError: transformers has no architecture with these components, so the model could not be saved.
    """

    model_type = MODEL_TYPE

    variant: str | None = None
    vocab_size: int = 50257
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    intermediate_size: int = 0
    max_position_embeddings: int = 0
    position_embedding: Literal["learned", "rotary"] | None = None
    norm: Literal["layer", "rms"] | None = None
    mlp: Literal["gelu_tanh", "gelu", "swiglu"] | None = None
    bias: bool | None = None
    qk_norm: bool | None = None
    tie_word_embeddings: bool | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    dropout: float = 0.0
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.variant is not None and self.variant not in VARIANTS:
            raise ValueError(f"unknown variant {self.variant}; choose from {', '.join(VARIANTS)}")
        # 0 and None mean that the key was omitted; a dropout of 0 is the default.
        fields = {name: value for name, value in vars(self).items() if value is False or value}
        for name, value in expand_config(fields).items():
            setattr(self, name, value)
        self.variant = None  # all values are set explicitly now
        self._check()
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        """Return the number of key-value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    def _check(self) -> None:
        hidden, heads, groups = self.hidden_size, self.num_attention_heads, self.groups
        sizes = (hidden, heads, groups, self.num_hidden_layers, self.intermediate_size, self.max_position_embeddings)
        if min(sizes) < 1:
            raise ValueError("sizes are whole numbers of at least 1")
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
        kinds = (self.position_embedding, self.norm, self.mlp)
        if kinds[:2] == ("learned", "layer") and self.mlp != "swiglu":
            if self.qk_norm or groups != heads:
                raise ValueError("qk_norm and num_key_value_heads need position_embedding rotary and norm rms")
        elif kinds == ("rotary", "rms", "swiglu"):
            if self.bias:
                raise ValueError("bias needs norm layer; set it to false")
            if hidden // heads % 2:
                raise ValueError(f"rotary positions need an even head size, not {hidden // heads}")
        else:
            raise ValueError(
                f"no architecture of transformers has {', '.join(map(str, kinds))}; set position_embedding, norm and "
                "mlp to learned, layer and gelu_tanh or gelu, or to rotary, rms and swiglu"
            )
