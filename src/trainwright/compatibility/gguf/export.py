"""Export a model directory as a GGUF file, as llama.cpp reads it.

The names, keys and tensor conversions are the inverse of what transformers applies when it reads such a file
(transformers.modeling_gguf_pytorch_utils), which is also used to verify the result.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainwright.compatibility.gguf.reading import compute_query_scalar, has_space_prefix, write_converted
from trainwright.compatibility.gguf.rope import write_rope
from trainwright.errors import MachineError, RequestError, TrainingError
from trainwright.models.configuration import read_config
from trainwright.models.tokenization import load_tokenizer_from, turn_end
from trainwright.utils.activity import begin_activity

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


GgufPrecision = Literal["f32", "f16"]

# Maps model_type of transformers to the architecture name in the file.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "starcoder2": "starcoder2",
}
_TEXTS = (
    "Hello, world! It's 2024, and 3.14 isn't 22/7.",
    "def f(x):\n    return x ** 2  # squared\n\n\n",
    "Ünïcödé: 你好, мир, 🙂🚀 — naïve café\t\ttabs",
    "   leading and    inner   spaces  ",
)


def export_gguf(directory: Path, out: Path, precision: GgufPrecision = "f16") -> int:
    """Write the model in ``directory`` to the file ``out`` atomically, verify it, and return its size in bytes.

    Tensors are read and written one by one. Matrices are stored in ``precision``, vectors in fp32.

    Raises:
        RequestError: GGUF does not support the architecture or tokenizer, or ``out`` exists.
        MachineError: the file cannot be written.
        TrainingError: the file does not read back as the same model.
    """
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new file")
    config, tokenizer = read_config(directory), load_tokenizer_from(directory, "MODEL")
    if config.model_type not in _ARCHITECTURES:
        supported_types = ", ".join(_ARCHITECTURES)
        raise RequestError(f"{directory} is {config.model_type}; GGUF export supports {supported_types}")
    temporary = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        begin_activity(f"writing {out}")
        _write(directory, config, tokenizer, temporary, precision)
        begin_activity(f"reading {out} back")
        _read_back(directory, temporary, tokenizer, precision)
        temporary.rename(out)
    except OSError as error:
        raise MachineError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return out.stat().st_size


def _write(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, out: Path, precision: GgufPrecision
) -> None:
    import gguf
    import torch

    from trainwright.models.files import build_skeleton

    _check_fixed(config, directory)
    tensors = dict(_iterate_tensors(directory))
    model = build_skeleton(config)
    for copy, source in (model.all_tied_weights_keys or {}).items():
        if source not in tensors and copy in tensors:
            tensors[source] = tensors[copy]
        elif copy in tensors and not torch.equal(tensors[copy](), tensors[source]()):
            config.tie_word_embeddings = False  # as transformers loads it
    if not config.tie_word_embeddings:
        model = build_skeleton(config)
    names = _map_names(model)
    settings, scaling = write_rope(config, _ARCHITECTURES[config.model_type])
    writer = gguf.GGUFWriter(out, _ARCHITECTURES[config.model_type])
    writer.add_name(directory.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if precision == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    for key, value in {**_build_settings(config), **settings}.items():
        _add(writer, f"{_ARCHITECTURES[config.model_type]}.{key}", value)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    shapes = [(names[name], tensor) for name, tensor in tensors.items() if name in names]
    shapes += [(name, functools.partial(scaling.__getitem__, name)) for name in scaling]
    missing = set(names.values()) - {name for name, _ in shapes}
    if missing:
        raise RequestError(f"{directory} lacks {', '.join(sorted(missing)[:3])}")
    change = _CHANGES.get(_ARCHITECTURES[config.model_type], _keep_unchanged)
    # The file starts with a table of all tensors, so they are read twice.
    for name, read in shapes:
        values = _convert_values(change(name, read(), config), precision)
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, read in shapes:
        writer.write_tensor_data(_convert_values(change(name, read(), config), precision))
    writer.close()


def _map_names(model: PreTrainedModel) -> dict[str, str]:
    """Return a mapping from names in transformers to names in the file, without tied copies."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    kind = "llama" if model.config.model_type == "mistral" else None
    processor = TENSOR_PROCESSORS.get(_ARCHITECTURES[model.config.model_type], TensorProcessor)(model.config.to_dict())
    tied_names = set(model.all_tied_weights_keys or {})
    name_map = get_gguf_hf_weights_map(model, processor, model_type=kind)
    return {theirs: ours for ours, theirs in name_map.items() if theirs not in tied_names}


def _iterate_tensors(directory: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield each name with a function that reads the tensor."""
    from safetensors import safe_open

    from trainwright.models.text_part import convert_to_causal_name

    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            names = list(reader.keys())
        for name in names:
            yield convert_to_causal_name(name), functools.partial(_read, file, name)


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as reader:
        tensor: torch.Tensor = reader.get_tensor(name)
        return tensor.float()


def _build_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys that transformers reads for this architecture, and additional ones that llama.cpp needs."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    mapping: Any = GGUF_CONFIG_MAPPING[_ARCHITECTURES[config.model_type]]
    settings: dict[str, Any] = {}
    for key, name in mapping.items():
        value = None if name is None else getattr(config, name, None)
        if value is not None:
            settings[key] = value
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if rope:
        settings["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    settings["attention.key_length"] = settings["attention.value_length"] = head
    settings["context_length"] = config.max_position_embeddings
    if config.model_type == "gpt2":
        settings["feed_forward_length"] = config.n_inner or 4 * config.n_embd
    for key, name in (("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping",) * 2):
        if getattr(config, name, None) is not None:
            settings[key] = float(getattr(config, name))
    return settings


def _check_fixed(config: PretrainedConfig, directory: Path) -> None:
    """Raise RequestError if the model differs in what the format has no keys for, and readers therefore assume."""
    if config.model_type not in ("gemma2", "gemma3_text"):
        return
    sizes = config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.head_dim
    assumed_scalar = compute_query_scalar(_ARCHITECTURES[config.model_type], *sizes)
    if config.query_pre_attn_scalar != assumed_scalar:
        raise RequestError(
            f"{directory} has query_pre_attn_scalar {config.query_pre_attn_scalar:g}, which a GGUF file cannot say: "
            f"its readers take {assumed_scalar:g} for this model, so they would compute something else"
        )
    period = 2 if config.model_type == "gemma2" else 6
    usual = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(sizes[0])]
    if config.layer_types != usual:
        raise RequestError(
            f"{directory} has layer_types that a GGUF file cannot say: its readers take every {period}th layer for one "
            "of full attention"
        )


def _add(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if not 0 <= value < 2**32:
            raise RequestError(f"{key}: {value} cannot be written to a GGUF file")
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, str(value))


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Add the vocabulary and the merges, which are pairs of tokens in the order they were learned."""
    import gguf

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"]["type"] != "BPE":
        raise RequestError(f"a {backend['model']['type']} tokenizer cannot be written to a GGUF file; only BPE can")
    by_bytes = not backend["model"].get("byte_fallback")
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    added_tokens = {token["id"]: token for token in backend["added_tokens"]}
    tokens: list[str] = []
    types: list[int] = []
    for index in range(size):
        token = vocabulary.get(index)
        if token is None:
            tokens.append(f"[PAD{index}]")
            types.append(gguf.TokenType.UNUSED)
            continue
        tokens.append(token)
        types.append(_choose_token_type(token, added_tokens.get(index), by_bytes))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    writer.add_tokenizer_model("gpt2" if by_bytes else "llama")
    if by_bytes:
        writer.add_tokenizer_pre(_find_pre_tokenizer(backend.get("pre_tokenizer")))
    else:
        writer.add_add_space_prefix(has_space_prefix(tokenizer))
    if not by_bytes or not merges:  # an empty list cannot be written; readers then use the scores
        writer.add_token_scores([-float(index) for index in range(size)])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None and index < size:  # tokens beyond the model's embeddings never occur
            getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(tokenizer("x").input_ids[:1] == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
        stop, _ = turn_end(tokenizer)
        if stop is not None and stop < size:
            writer.add_eot_token_id(stop)


def _choose_token_type(token: str, added: Mapping[str, Any] | None, by_bytes: bool) -> int:
    import gguf

    if added is not None:
        return int(gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED)
    is_byte = not by_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return int(gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL)


def _find_pre_tokenizer(settings: Any) -> str:
    """Return llama.cpp's name of the pre-tokenizer, found by its pattern; the default is GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    text = json.dumps(settings)
    if '"individual_digits": true' in text:
        return "smollm"
    patterns = [part["pattern"].get("Regex") for part in _list_parts(settings) if part.get("type") == "Split"]
    for name, split in GGUF_PRE_TOKENIZER_SPLITS.items():
        if patterns and patterns[0] == getattr(split, "pattern", split):
            return str(name)
    return "gpt-2"


def _list_parts(settings: Any) -> list[dict[str, Any]]:
    if not isinstance(settings, dict):
        return []
    return list(settings["pretokenizers"]) if settings.get("type") == "Sequence" else [settings]


def _convert_values(values: torch.Tensor, precision: GgufPrecision) -> np.ndarray[Any, Any]:
    import numpy as np

    kind = np.float16 if precision == "f16" and values.dim() > 1 else np.float32
    return values.contiguous().numpy().astype(kind)


def _keep_unchanged(name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    return values


def _interleave_halves(name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Interleave the two halves of each head of queries and keys, as in the original Llama weights."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return values
    heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).transpose(1, 2).reshape_as(values)


def _add_one_to_norms(name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Add one to the norm weights of Gemma, which transformers stores without it."""
    return values + 1 if name.endswith("norm.weight") else values


def _transpose_linear(name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Transpose the matrices of GPT-2, whose Conv1D layers store them transposed."""
    transposed_names = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")
    return values.t() if name.endswith(transposed_names) else values


_CHANGES: dict[str, Callable[[str, torch.Tensor, PretrainedConfig], torch.Tensor]] = {
    "llama": _interleave_halves,
    "gemma2": _add_one_to_norms,
    "gemma3": _add_one_to_norms,
    "gpt2": _transpose_linear,
}


def _read_back(directory: Path, file: Path, tokenizer: PreTrainedTokenizerBase, precision: GgufPrecision) -> None:
    """Raise an error if transformers reads a different model or tokenization from the file than from the directory."""
    import tempfile

    import torch

    from trainwright.models.files import compute_logit_difference, compute_logits, has_experts
    from trainwright.models.text_part import read_causal

    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".gguf-") as scratch:
        write_converted(file, Path(scratch) / "model", "--out")
        file_tokenizer = load_tokenizer_from(Path(scratch) / "model", "MODEL")
        for text in _TEXTS:
            file_ids = file_tokenizer(text, add_special_tokens=False).input_ids
            if file_ids != tokenizer(text, add_special_tokens=False).input_ids:
                raise RequestError(
                    f"the tokenizer of {directory} splits text in a way that GGUF export does not support: {text!r} "
                    "would become other tokens; nothing was written"
                )
        pair, rotations = [], []
        for place_of in (directory, Path(scratch) / "model"):
            model = read_causal(place_of, dtype=torch.float32)
            pair.append(compute_logits(model.eval(), torch.arange(1, 17)[None]))
            rotations.append(_compute_rotations(model))
            mixture = has_experts(model)
            del model
        if rotations[0].keys() != rotations[1].keys() or not all(
            torch.allclose(values, rotations[1][name], rtol=1e-4) for name, values in rotations[0].items()
        ):
            raise TrainingError(f"{file} reads back with other rotary embeddings")
        difference = compute_logit_difference(pair[1], pair[0], mixture=mixture)
        if not difference <= (1e-4 if precision == "f32" else 2e-2):
            raise TrainingError(f"{file} reads back as a different model: logits differ by {difference:.2g}")


def _compute_rotations(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return cosines and sines of the rotary embeddings at positions up to the model's last one.

    A short sequence shows little of a wrong base or scaling.
    """
    import torch

    config = model.config.get_text_config()
    last = config.max_position_embeddings
    positions = torch.tensor([[0, 1, 16, 100, last // 4, last - 1]])
    kinds = (
        sorted(set(config.layer_types)) if "full_attention" in (getattr(config, "rope_parameters", None) or {}) else []
    )
    rotations: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            for kind in kinds or [None]:
                more = () if kind is None else (kind,)
                rotations[f"{name} {kind}"] = torch.cat(module(torch.zeros(1), positions, *more))
    return rotations
