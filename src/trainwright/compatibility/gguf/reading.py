"""Convert a GGUF file to a ``transformers`` directory, once, in the cache.

The keys and tensors that describe rotary embeddings, which exports write too, are those that llama.cpp computes with:
it divides the frequencies of the base by the elements of ``rope_freqs`` (Llama 3), or of one of two tensors that it
chooses by the length of the context (LongRoPE).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import RequestError, TrainingError
from trainwright.machine.cache import cache_in_words, cache_root, digest_of, remembered
from trainwright.machine.sharing import build_once
from trainwright.models.configuration import NOT_MADE
from trainwright.models.supported import check_supported
from trainwright.recipe.sections.model import check_sizes

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CONVERTER = "4"  # part of the fingerprint: raise it when the output changes, so that older conversions are not used
# A quantized value is scale * integer + offset with at least 15 significant bits: fp32 represents it exactly, bf16 (8
# bits) would quantize it again. If the fp32 file exceeds this size, bf16 is stored, and the user is told.
MAX_FP32_BYTES = 32 << 30
# Pre-tokenizers that split digits before words in llama.cpp (llama-vocab.cpp) but not in transformers.
SINGLE_DIGIT_PRE_TOKENIZERS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
GPT2_PRE_TOKENIZERS = {"default", "gpt-2", "gpt2", "phi-2", "jina-en", "mpt", "olmo"}


def convert_gguf(file: Path, key: str, notify: Callable[[str], None]) -> tuple[Path, str]:
    """Convert ``file``; return the directory and the precision of its weights, "fp32" or "bf16".

    The directory is ``<cache>/models/<name>-<fingerprint>`` and is created atomically; concurrent callers wait for the
    first one. ``notify`` receives a line if a conversion is needed.

    Raises:
        RequestError: the file is damaged, or its architecture cannot be converted; the message names ``key``.
    """
    models = cache_root() / "models"
    directory = models / f"{file.stem}-{_fingerprint(file, models)}"

    def make(path: Path) -> None:
        notify(f"converting {file.name} to safetensors, once (20 s for 135M parameters): {directory}")
        write_converted(file, path, key, notify)

    def find() -> str | None:
        return _stored_precision(directory) if (directory / "config.json").exists() else None

    with cache_in_words(models):
        return directory, build_once(directory, find, make)


def sizes_by_type(file: Path) -> dict[int, int]:
    """Return the bytes of the tensors of each type; raise RequestError if ``file`` is damaged."""
    from transformers.integrations.gguf.reader import GgufHeader

    _metadata(file, "model.name")
    sizes: dict[int, int] = {}
    for tensor in GgufHeader.from_file(str(file)).tensors:
        sizes[tensor.ggml_type] = sizes.get(tensor.ggml_type, 0) + tensor.nbytes
    return sizes


def _fingerprint(file: Path, models: Path) -> str:
    def digest() -> str:
        content = digest_of(file, "blake2b")
        return hashlib.blake2b(f"{content}{CONVERTER}".encode(), digest_size=6).hexdigest()

    return remembered(file, models, CONVERTER, digest)


def write_converted(file: Path, directory: Path, key: str, notify: Callable[[str], None] = lambda line: None) -> None:
    """Write the model in ``file`` to ``directory`` in transformers' format; raise RequestError as ``convert_gguf``."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        _write_converted(file, directory, key, notify)
    except RequestError:
        raise
    except (TrainingError, StrictDataclassError, *NOT_MADE) as error:  # sizes and types that do not fit each other
        raise RequestError(f"{key}: {file} cannot be converted ({error}); download it again") from error


def _write_converted(file: Path, directory: Path, key: str, notify: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from trainwright.models.files import save_model

    facts = _metadata(file, key)
    config = _config(file, facts)
    check_supported(config.to_dict(), f"{key}: {file}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fp32_bytes = 4 * sum(p.numel() for p in model.parameters())
    dtype = torch.float32 if fp32_bytes <= MAX_FP32_BYTES else torch.bfloat16
    if dtype is torch.bfloat16:
        notify(f"{file.name} is stored as bf16: as fp32 it would take {fp32_bytes >> 30} GiB")
    tokenizer = _tokenizer(file, facts, notify)
    if positions := getattr(config, "max_position_embeddings", None):
        tokenizer.model_max_length = positions
    generation = GenerationConfig.from_model_config(config)
    save_model(directory, config, _tensors(file, model), tokenizer, generation, dtype)


def _metadata(file: Path, key: str) -> dict[str, Any]:
    """Return the file's metadata; raise RequestError if it is damaged or its architecture cannot be converted."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    try:
        facts, _ = read_gguf_metadata(str(file))
        header = GgufHeader.from_file(str(file))
        end = max(header.data_start + tensor.offset + tensor.nbytes for tensor in header.tensors)
        if file.stat().st_size < end:
            raise ValueError(f"{file.stat().st_size:,} bytes of {end:,}")
    except Exception as error:  # a truncated file causes struct, index, decoding or value errors
        raise RequestError(f"{key}: {file} is damaged or not a GGUF file ({error}); download it again") from error
    architecture = facts["general.architecture"]
    if architecture not in GGUF_CONFIG_MAPPING:
        supported = ", ".join(sorted(k for k in GGUF_CONFIG_MAPPING if k not in ("general", "tokenizer")))
        raise RequestError(
            f"{key}: {file} is of architecture {architecture}, which cannot be converted ({supported} can); "
            "use the model's safetensors weights"
        )
    return facts


# Keys that transformers does not read for every architecture that has them.
_ALSO_READ = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _config(file: Path, facts: dict[str, Any]) -> Any:
    import numpy as np
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields = load_gguf_checkpoint(str(file), return_tensors=False)["config"]
    for leftover in ("_model_name_or_path", "unk_token_id"):
        fields.pop(leftover, None)
    if "n_ctx" in fields:  # GPT-2's older name, which its configuration no longer reads
        fields["n_positions"] = fields.pop("n_ctx")
    check_sizes(fields, str(file))
    config_class = type(AutoConfig.for_model(fields["model_type"]))
    names = {field.name for field in dataclasses.fields(config_class)}
    for key, name in _ALSO_READ.items():
        value = facts.get(f"{facts['general.architecture']}.{key}")
        if value is not None and name in names:
            fields.setdefault(name, value)
    if "rope_parameters" in names:
        fields.pop("rope_theta", None)
        fields["rope_parameters"] = read_rope(facts, _scaling(file), fields["max_position_embeddings"])
    if "query_pre_attn_scalar" in names:
        sizes = (fields[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim"))
        fields["query_pre_attn_scalar"] = query_scalar(facts["general.architecture"], *sizes)

    def intended(value: Any) -> Any:
        """Return the shortest decimal with the same fp32 value (1e-05): the file stores fp32 numbers."""
        if isinstance(value, dict):
            return {key: intended(item) for key, item in value.items()}
        if isinstance(value, list):
            return [intended(item) for item in value]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    return AutoConfig.for_model(**intended(fields))


def _scaling(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that scale the frequencies of rotary embeddings."""
    import torch
    from gguf import GGUFReader

    names = (FREQUENCIES, LONG, SHORT)
    return {each.name: torch.tensor(each.data) for each in GGUFReader(file).tensors if each.name in names}


def _tokenizer(file: Path, facts: dict[str, Any], notify: Callable[[str], None]) -> PreTrainedTokenizerFast:
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    tokenizer = _of_the_file(tokenizer, facts["tokenizer.ggml.tokens"])
    if facts.get("tokenizer.ggml.add_space_prefix") is False and adds_space(tokenizer):
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "never", split=False)
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    kind = facts.get("tokenizer.ggml.pre", "default")
    if facts.get("tokenizer.ggml.model") != "gpt2" or kind in GGUF_PRE_TOKENIZER_SPLITS:
        return tokenizer
    if kind in SINGLE_DIGIT_PRE_TOKENIZERS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif kind not in GPT2_PRE_TOKENIZERS:
        notify(f"{file.name}: its pre-tokenizer {kind!r} is unknown, GPT-2's is used; set model.tokenizer to be sure")
    return tokenizer


def _of_the_file(tokenizer: PreTrainedTokenizerFast, size: int) -> PreTrainedTokenizerFast:
    """Remove tokens that transformers adds beyond the ``size`` of the file: the model has no embeddings for them."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    foreign = {token["content"] for token in state["added_tokens"] if token["id"] >= size}
    if not foreign:
        return tokenizer
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if token not in foreign}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), chat_template=tokenizer.chat_template, **special
    )


def _tensors(file: Path, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and fp32 values of each tensor, so that the whole model is never in memory.

    This is the loop of transformers' ``load_gguf_checkpoint``, which keeps all tensors in memory. Its
    ``from_pretrained`` returns a model that cannot be saved, and needs accelerate.
    """
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    gathered: dict[str, Any] = {"tensors": {}}  # processors of mixtures of experts stack the experts here
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        result = processor.process(
            weights=values, name=tensor.name, tensor_key_mapping=names, parsed_parameters=gathered
        )
        if result.name in names:
            yield names[result.name], torch.from_numpy(np.array(result.weights, dtype=np.float32))
    yield from gathered["tensors"].items()


def _stored_precision(directory: Path) -> str:
    import json

    dtype = json.loads((directory / "config.json").read_text(encoding="utf-8"))["dtype"]
    return {"float32": "fp32", "bfloat16": "bf16"}[dtype]


# The numbers of layers of the largest Gemma 2 and Gemma 3, which scale queries by the width of the model.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def query_scalar(architecture: str, layers: int, heads: int, width: int, head: int) -> float:
    """Return what llama.cpp takes for Gemma's ``query_pre_attn_scalar``."""
    return width / heads if layers == _LARGEST[architecture] else head


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a SentencePiece tokenizer adds a space before a text."""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False).input_ids)
    return str(tokens[0]).startswith("\u2581")


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
            raise _refused(config, kind if kind not in ("default", "linear") else local["rope_type"])
    if kind == "default":
        return settings, {}
    if kind == "linear":
        return settings | {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}, {}
    if kind == "yarn":
        return settings | _yarn(config, full), {}
    if kind == "llama3" and architecture in _LLAMA3:
        return settings, {FREQUENCIES: _llama3_factors(full, _rotated(config, full))}
    if kind == "longrope" and architecture in _LONGROPE:
        return _longrope(config, full, settings)
    raise _refused(config, kind)


def _refused(config: PretrainedConfig, kind: str) -> RequestError:
    return RequestError(f"rope_type {kind} of a {config.model_type} cannot be written to a GGUF file")


def _rotated(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    """Return the number of dimensions of a head that are rotated."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head * rope.get("partial_rotary_factor", 1.0))


def _yarn(config: PretrainedConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    attention = rope.get("attention_factor")
    if rope.get("mscale") or rope.get("mscale_all_dim") or not rope.get("truncate", True):
        raise _refused(config, "yarn with mscale or without truncate")
    if attention is not None and abs(attention - usual) > _SAME:
        raise _refused(config, f"yarn with attention_factor {attention}")
    settings = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
    }
    betas = {name: rope.get(name) for name in ("beta_fast", "beta_slow")}
    return settings | {f"rope.scaling.yarn_{name}": float(value) for name, value in betas.items() if value is not None}


def _longrope(
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


def _llama3_factors(rope: Mapping[str, Any], rotated: int) -> torch.Tensor:
    """Return what Llama 3's scaling divides each frequency of the base by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = SimpleNamespace(rope_parameters=dict(rope), head_dim=rotated, standardize_rope_params=lambda: None)
    config.rope_parameters["partial_rotary_factor"] = 1.0
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated))
    return plain / scaled


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
    rotated = get("dimension_count") or head
    if rotated < head:
        rope["partial_rotary_factor"] = rotated / head
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
        rope |= _divided(tensors[FREQUENCIES], rope, rotated, positions)
    if architecture != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": float(get("freq_base_swa") or _DEFAULT_BASE)}
    return {"full_attention": rope, "sliding_attention": local}


def _divided(factors: torch.Tensor, rope: Mapping[str, Any], rotated: int, positions: int) -> dict[str, Any]:
    """Return Llama 3's scaling if it gives these factors, otherwise LongRoPE with the factors themselves."""
    usual: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max())}
    usual |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for exponent in range(6, 20):
        usual["original_max_position_embeddings"] = 2**exponent
        if torch.allclose(_llama3_factors({**rope, **usual}, rotated), factors, rtol=_SAME):
            return usual
    same = {"long_factor": factors.tolist(), "short_factor": factors.tolist()}
    return {
        "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
        "original_max_position_embeddings": positions, **same,
    }  # fmt: skip
