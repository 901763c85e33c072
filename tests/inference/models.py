"""Small models with random weights, and questions to them."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.models.tokenization import build_bytes_tokenizer

TOKENIZER = build_bytes_tokenizer()
PROMPTS = [
    list(text.encode()) for text in ("hello there, how are you", "a", "the quick brown fox jumps over", "xyz 123")
]
_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_WINDOW = {**_SHAPE, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "mistral": {**_SHAPE, "sliding_window": 16},
    "gemma2": _WINDOW,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "lfm2": _SHAPE,
}


def model_of(kind: str, positions: int = 256) -> Any:
    """A model whose next token is not always the same: weights are thrice as large as fresh ones."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {"vocab_size": len(TOKENIZER), "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None}
    if kind in ("llama", "mistral", "gemma2", "lfm2"):
        fields["max_position_embeddings"] = positions
    config = CONFIG_MAPPING[kind](**fields, **ARCHITECTURES[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model
