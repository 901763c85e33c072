"""Small models of several modalities with random weights, written as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512, "pad_token_id": 0},
    **{"bos_token_id": 257, "eos_token_id": 258},
}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
_MAMBA_LIKE = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 32, "query_pre_attn_scalar": 16},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 299,
    },
    "gemma4": {
        "text_config": {
            **{**TEXT, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
            **{"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
        },
        "vision_config": VISION,
        "audio_config": None,
    },
    "llama4": {
        "text_config": {
            **{**TEXT, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96},
            "attention_chunk_size": 64,
        },
        "vision_config": {
            **{**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            "pixel_shuffle_ratio": 0.5,
        },
        "image_token_index": 299,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": 299,
    },
    "qwen3_5": {
        "text_config": {**TEXT, **_MAMBA_LIKE, "num_hidden_layers": 4},
        "vision_config": {
            **{"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
            **{"out_hidden_size": 64, "patch_size": 14},
        },
        "image_token_id": 297,
        "video_token_id": 298,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": 299,
    },
    "idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": 299,
        "scale_factor": 1,
    },
}


def write_whole(kind: str, directory: Path) -> Path:
    """Write a model of several modalities, its tokenizer and a file of its processor; return the directory."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    from trainwright.models.tokenization import build_bytes_tokenizer

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**CONFIGS[kind]))
        for parameter in model.parameters():  # some are initialized to zero or one
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    build_bytes_tokenizer().save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}\n')
    return directory
