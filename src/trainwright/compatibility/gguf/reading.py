"""Convert a GGUF file to a ``transformers`` directory, once, in the cache."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.compatibility.gguf.rope import FREQUENCIES, LONG, SHORT, read_rope
from trainwright.errors import RequestError, TrainingError
from trainwright.machine.cache import explain_cache_errors, find_cache_root, hash_file, look_up_digest
from trainwright.machine.sharing import build_once
from trainwright.models.configuration import NOT_MADE
from trainwright.models.supported import check_supported
from trainwright.recipe.sections.model import check_sizes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


_MAGIC = b"GGUF"
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
        RequestError: the file cannot be read or is damaged, or its architecture cannot be converted; the message names
            ``key``.
    """
    _check_magic(file, key)
    models = find_cache_root() / "models"
    directory = models / f"{file.stem}-{_compute_fingerprint(file, models)}"

    def make(path: Path) -> None:
        notify(f"converting {file.name} to safetensors, once (20 s for 135M parameters): {directory}")
        write_converted(file, path, key, notify)

    def find() -> str | None:
        return _read_stored_precision(directory) if (directory / "config.json").exists() else None

    with explain_cache_errors(models):
        return directory, build_once(directory, find, make)


def sum_sizes_by_type(file: Path) -> dict[int, int]:
    """Return the bytes of the tensors of each type; raise RequestError if ``file`` is damaged."""
    from transformers.integrations.gguf.reader import GgufHeader

    _read_metadata(file, "model.name")
    sizes: dict[int, int] = {}
    for tensor in GgufHeader.from_file(str(file)).tensors:
        sizes[tensor.ggml_type] = sizes.get(tensor.ggml_type, 0) + tensor.nbytes
    return sizes


def _compute_fingerprint(file: Path, models: Path) -> str:
    def digest() -> str:
        content = hash_file(file, "blake2b")
        return hashlib.blake2b(f"{content}{CONVERTER}".encode(), digest_size=6).hexdigest()

    return look_up_digest(file, models, CONVERTER, digest)


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

    facts = _read_metadata(file, key)
    config = _build_config(file, facts)
    check_supported(config.to_dict(), f"{key}: {file}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fp32_bytes = 4 * sum(p.numel() for p in model.parameters())
    dtype = torch.float32 if fp32_bytes <= MAX_FP32_BYTES else torch.bfloat16
    if dtype is torch.bfloat16:
        notify(f"{file.name} is stored as bf16: as fp32 it would take {fp32_bytes >> 30} GiB")
    tokenizer = _load_tokenizer(file, facts, notify)
    if positions := getattr(config, "max_position_embeddings", None):
        tokenizer.model_max_length = positions
    generation = GenerationConfig.from_model_config(config)
    save_model(directory, config, _iterate_tensors(file, model), tokenizer, generation, dtype)


def _check_magic(file: Path, key: str) -> None:
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise RequestError(f"{key}: {file} cannot be read: {error.strerror}") from None
    if magic != _MAGIC:
        raise RequestError(
            f"{key}: {file} is not a GGUF file; pass a GGUF file, a model's directory or its name on the Hub"
        )


def _read_metadata(file: Path, key: str) -> dict[str, Any]:
    """Return the file's metadata; raise RequestError if it is damaged or its architecture cannot be converted."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    _check_magic(file, key)
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
        architectures = ", ".join(sorted(k for k in GGUF_CONFIG_MAPPING if k not in ("general", "tokenizer")))
        raise RequestError(
            f"{key}: {file} is of architecture {architecture}, which cannot be converted ({architectures} can); "
            "use the model's safetensors weights"
        )
    return facts


# Keys that transformers does not read for every architecture that has them.
_ALSO_READ = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _build_config(file: Path, facts: dict[str, Any]) -> Any:
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
        fields["rope_parameters"] = read_rope(facts, _read_scaling(file), fields["max_position_embeddings"])
    if "query_pre_attn_scalar" in names:
        sizes = (fields[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim"))
        fields["query_pre_attn_scalar"] = compute_query_scalar(facts["general.architecture"], *sizes)

    def intended(value: Any) -> Any:
        """Return the shortest decimal with the same fp32 value (1e-05): the file stores fp32 numbers."""
        if isinstance(value, dict):
            return {key: intended(item) for key, item in value.items()}
        if isinstance(value, list):
            return [intended(item) for item in value]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    return AutoConfig.for_model(**intended(fields))


def _read_scaling(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that scale the frequencies of rotary embeddings."""
    import torch
    from gguf import GGUFReader

    names = (FREQUENCIES, LONG, SHORT)
    return {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(file).tensors if tensor.name in names}


def _load_tokenizer(file: Path, facts: dict[str, Any], notify: Callable[[str], None]) -> PreTrainedTokenizerFast:
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    tokenizer = _remove_extra_tokens(tokenizer, facts["tokenizer.ggml.tokens"])
    if facts.get("tokenizer.ggml.add_space_prefix") is False and has_space_prefix(tokenizer):
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


def _remove_extra_tokens(tokenizer: PreTrainedTokenizerFast, size: int) -> PreTrainedTokenizerFast:
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


def _iterate_tensors(file: Path, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
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
    parsed_parameters: dict[str, Any] = {"tensors": {}}  # processors of mixtures of experts stack the experts here
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        result = processor.process(
            weights=values, name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed_parameters
        )
        if result.name in names:
            yield names[result.name], torch.from_numpy(np.array(result.weights, dtype=np.float32))
    yield from parsed_parameters["tensors"].items()


def _read_stored_precision(directory: Path) -> str:
    import json

    dtype = json.loads((directory / "config.json").read_text(encoding="utf-8"))["dtype"]
    return {"float32": "fp32", "bfloat16": "bf16"}[dtype]


# The numbers of layers of the largest Gemma 2 and Gemma 3, which scale queries by the width of the model.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def compute_query_scalar(architecture: str, layers: int, heads: int, width: int, head: int) -> float:
    """Return what llama.cpp takes for Gemma's ``query_pre_attn_scalar``."""
    return width / heads if layers == _LARGEST[architecture] else head


def has_space_prefix(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a SentencePiece tokenizer adds a space before a text."""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False).input_ids)
    return str(tokens[0]).startswith("\u2581")
