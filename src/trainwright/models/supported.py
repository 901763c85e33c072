"""Determine the kind of a model from its config.json, and whether it can be trained (decoder-only language models
can) and packed.

The names are those of transformers 5. For the architectures listed here, neither torch nor transformers is imported.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.models.gpt.variants import MODEL_TYPE as GPT
from trainwright.recipe.extensions import is_file
from trainwright.recipe.files import read_json
from trainwright.recipe.modalities import select_text_config
from trainwright.recipe.sections.model import OWN

_ENCODER_DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5"),
    *("m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet"),
    *("switch_transformers", "t5", "t5gemma", "t5gemma2", "udop", "umt5", "xlm-prophetnet"),
}
_ENCODERS = {
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
    *("electra", "ernie", "esm", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert", "jina_embeddings_v3"),
    *("layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert"),
    *("nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "tapas"),
    *("xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"),
}
_VISION_LANGUAGE = {
    *("aria", "aya_vision", "blip", "blip-2", "chameleon", "emu3", "florence2", "fuyu", "gemma3", "gemma3n", "gemma4"),
    *("git", "glm4v", "got_ocr2", "idefics", "idefics2", "idefics3", "instructblip", "internvl", "janus", "kosmos-2"),
    *("kosmos-2.5", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "mllama"),
    *("ovis2", "paligemma", "perception_lm", "phi4_multimodal", "pix2struct", "pixtral", "qwen2_5_omni", "qwen2_5_vl"),
    *("qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "trocr", "video_llava", "vipllava"),
    *("vision-encoder-decoder",),
}
_AUDIO = {
    *("bark", "clap", "csm", "dia", "granite_speech", "hubert", "moonshine", "moshi", "musicgen", "musicgen_melody"),
    *("qwen2_audio", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5", "vits", "voxtral", "wav2vec2"),
    *("wav2vec2-bert", "wavlm", "whisper"),
}
_OTHERS = {"xlnet": "a permutation language model", "dpr": "an encoder-only model"}
# Models with little or no attention: they can be loaded and generate text, but not be trained.
_RECURRENT = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "a state-space model"),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), "a recurrent model"),
}
_HEADS = {
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForMultipleChoice": "a model that chooses among answers",
    "ForRewardModel": "a reward model",
    "ForImageClassification": "an image classifier",
    "ForObjectDetection": "an object detector",
}
_DISTANCE = "its attention uses the distance between tokens in the row (ALiBi)"
_WHOLE_ROW = "its attention does not know where sequences begin"
_STATE = "the state of its recurrent layers continues from one sequence into the next"
_OWN_ATTENTION = {
    **dict.fromkeys(("bloom", "mpt"), _DISTANCE),
    **dict.fromkeys(("falcon", "nemotron", "openai-gpt", "stablelm"), _WHOLE_ROW),
}
_RECURRENT_LAYERS = {
    *("bamba", "granitemoehybrid", "jamba", "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "zamba", "zamba2"),
}
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention"}


def check_supported(config: Mapping[str, Any], where: str, known: Container[str] = ()) -> None:
    """Raise RequestError unless a configuration is that of a decoder-only language model, or of a model of several
    modalities that has one.

    Args:
        where: start of the message, such as the key and the directory.
        known: architectures that can be trained, which are accepted without importing transformers.

    Raises:
        RequestError: the message names the kind of model.
    """
    text = select_text_config(config)
    if (kind := _describe_other_kind(config, known)) is not None and (
        text is config or _describe_other_kind(text, known) is not None
    ):
        raise RequestError(f"{where} is {kind}; Trainwright trains decoder-only language models")
    if (quantization := config.get("quantization_config")) is not None:
        # Models in mxfp4 were trained in four bits, so there is no original in bf16, but there are copies.
        mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
        which = "a copy of it in bf16, such as unsloth/gpt-oss-20b-BF16" if mxfp4 else "the model they were made from"
        raise RequestError(
            f"{where} has quantized weights, which cannot be trained or merged into; use {which} "
            "(model.adapter.quantization quantizes it while loading)"
        )


def check_trainable(config: Mapping[str, Any], where: str, known: Container[str] = ()) -> None:
    """Check as ``check_supported``, and raise RequestError for language models that can generate but not be trained."""
    check_supported(config, where, known)
    kind = select_text_config(config).get("model_type")
    if (description := _RECURRENT.get(str(kind))) is not None:
        raise RequestError(f"{where} is {description} ({kind}); Trainwright trains decoder-only transformers")


def _describe_other_kind(config: Mapping[str, Any], known: Container[str]) -> str | None:
    """Describe the kind of model in ``config``, or return None if it is a decoder-only language model."""
    kind = config.get("model_type")
    if isinstance(class_name := config.get("_class_name"), str) or "_diffusers_version" in config:
        return f"a diffusion model ({class_name or 'diffusers'})"
    if kind is None or kind in (GPT, OWN):
        return None  # a missing model_type is reported when the rest is read
    if not isinstance(kind, str):
        return f"a configuration whose model_type is not a name ({str(kind)[:40]})"
    title = _describe_by_name(kind, config) or _describe_by_head(config)
    if title is not None:
        return f"{title} ({kind})"
    return None if kind in known else _describe_by_tables(kind, config)


def _describe_by_name(kind: str, config: Mapping[str, Any]) -> str | None:
    if kind in _AUDIO or "audio_config" in config:
        return "a speech or audio model"
    if kind in _VISION_LANGUAGE or "vision_config" in config:
        return "a vision-language model"
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder model"
    if kind in _ENCODER_DECODERS and config.get("is_encoder_decoder") is not False:
        return "an encoder-decoder model"
    if kind in _ENCODERS and config.get("is_decoder") is not True:
        return "an encoder-only model"
    return _OTHERS.get(kind)


def _describe_by_head(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        for ending, kind in _HEADS.items():
            if isinstance(name, str) and name.endswith(ending):
                return kind
    return None


def _describe_by_tables(kind: str, config: Mapping[str, Any]) -> str | None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if kind in CONFIG_MAPPING_NAMES:
        return f"not a language model ({kind})"
    code = config.get("auto_map")
    if isinstance(code, Mapping):
        return f"a model with custom code, which is never run ({kind})"
    near = difflib.get_close_matches(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
    meant = f", perhaps {near[0]}" if near else ""
    return f"of an architecture that transformers {transformers.__version__} does not have ({kind}{meant})"


def read_class_name(directory: Path) -> str | None:
    """Return the class of a saved module of somebody's own, ``module:Class`` or ``file.py:Class``; None for others."""
    file = directory / "config.json"
    fields = read_json(file) if file.is_file() else None
    if not isinstance(fields, dict) or fields.get("model_type") != OWN:
        return None
    implementation = fields.get("implementation")
    if not isinstance(implementation, str):
        return None
    inside = is_file(implementation) and (directory / implementation.rpartition(":")[0]).is_file()
    return str(directory / implementation) if inside else implementation


def check_packable(config: Mapping[str, Any], pack_length: int | None) -> None:
    """Raise RequestError if the model of ``config`` cannot be trained on packs of ``pack_length`` tokens."""
    if pack_length is not None and (why := explain_unpackable(config, pack_length)) is not None:
        raise RequestError(
            f"data.pack_length: a model of the architecture {config.get('implementation') or config.get('model_type')} "
            f"does not keep packed sequences apart: {why}; set it to null"
        )


def explain_unpackable(config: Mapping[str, Any], pack_length: int) -> str | None:
    """Return why packs of ``pack_length`` tokens would mix sequences, or None if no reason is known."""
    config = select_text_config(config)
    kind = str(config.get("model_type"))
    if kind in _OWN_ATTENTION:
        return _OWN_ATTENTION[kind]
    if kind == OWN and config.get("implementation") is not None:
        from trainwright.models.own_module import import_class

        takes = inspect.signature(import_class(config["implementation"]).forward).parameters
        return None if "cu_seq_lens_q" in takes else "its forward has no argument cu_seq_lens_q, where sequences begin"
    if kind in _RECURRENT_LAYERS:
        layers = config.get("layer_types")
        return None if isinstance(layers, list) and layers and set(layers) <= _ATTENTION_LAYERS else _STATE
    if kind == "llama4_text" and config.get("attn_temperature_tuning", True):
        limit = config.get("floor_scale", 8192)
        if isinstance(limit, int) and pack_length >= limit:
            return f"from token {limit} of a row on its attention is scaled by the place in the row"
    return None
