"""Model and adapter directories of anybody: what is wrong in them is a wrong request in words, and nothing of them is
followed outside or run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.test_merging import base, trained
from trainwright.api.publishing import export_in_process
from trainwright.errors import RequestError
from trainwright.inference.finding import find_model
from trainwright.inference.loading import check_fits
from trainwright.machine.machine import Machine
from trainwright.models.adapters import config as adapters_config
from trainwright.models.adapters.attaching import attach_adapter
from trainwright.models.load import check_adapter, load_config, load_model, load_tokenizer
from trainwright.models.resolve_model import resolve
from trainwright.models.truncate_config import count_parameters
from trainwright.models.weights import load_empty
from trainwright.planning.facts import read_configuration
from trainwright.recipe.sections.model import ModelSection

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("models") / "good")


@pytest.fixture(scope="module")
def adapter(good: Path) -> Path:
    trained(good, good.parent / "adapter")
    return good.parent / "adapter"


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refusals(model: Path) -> list[str]:
    """What is said where the model is planned, looked at and loaded; empty where it is taken."""
    section, said = ModelSection(name=str(model)), []
    for look in (
        lambda: read_configuration(section),
        lambda: load_empty(section, 0),
        lambda: load_model(section, torch.float32),
    ):
        try:
            look()
        except RequestError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "wide"},
        {"vocab_size": -1},
        {"head_dim": -4},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"rope_parameters": 3},
        {"rope_scaling": {"type": "x"}},
        {"hidden_act": "os.system"},
        {"pad_token_id": 10**9},
        {"dtype": "evil"},
        {"layer_types": ["x"]},
        {"vision_config": 3},
        {"quantization_config": "x"},
    ],
    ids=str,
)
def test_wrong_values_of_a_configuration_are_told(model: Path, values: dict[str, Any]) -> None:
    change_json(model / "config.json", **values)
    assert refusals(model)


def test_a_model_without_a_width_is_not_planned(model: Path) -> None:
    change_json(model / "config.json", hidden_size=0)
    with pytest.raises(RequestError, match=r"config\.json: hidden_size: 0 is no width of a model"):
        read_configuration(ModelSection(name=str(model)))


@pytest.mark.parametrize("content", ["[]", "null", "", "[" * 100_000, '{"a": ' * 200 + "1" + "}" * 200])
def test_a_configuration_that_is_none_is_told(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    assert len(refusals(model)) == 3


def test_what_is_not_of_the_model_itself_is_left_out_of_its_configuration(model: Path, good: Path) -> None:
    """Otherwise transformers would fetch kernels from the Hub, read other weights, or fill memory with labels."""
    expected = load_config(ModelSection(name=str(good))).to_dict()
    change_json(
        model / "config.json",
        attn_implementation="somebody/kernels",
        _attn_implementation_internal="somebody/kernels",
        experts_implementation="somebody/experts",
        transformers_weights="../other/model.safetensors",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        num_labels=10**12 // 2,
        id2label=3,
        base_model_tp_plan=3,
        output_attentions=True,
    )
    assert load_config(ModelSection(name=str(model))).to_dict() == {**expected, "_name_or_path": str(model)}
    assert refusals(model) == []


@pytest.mark.parametrize("content", ["[]", "3"])
def test_generation_settings_that_are_none_are_told(model: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    assert len(refusals(model)) == 2


@pytest.mark.parametrize(
    "content",
    ['{"a": ' * 100_000 + "1" + "}" * 100_000, *(json.dumps({"eos_token_id": each}) for each in ("x", [1, None], {}))],
    ids=["deep", "text", "null in a list", "object"],
)
def test_generation_settings_that_cannot_be_read_are_told(model: Path, tmp_path: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    with pytest.raises(RequestError, match=r"generation_config\.json: (nested more than|eos_token_id should be)"):
        export_in_process(str(model), tmp_path / "model.gguf", "gguf", None, None)
    assert all("generation_config.json: " in line for line in refusals(model)) and len(refusals(model)) == 2


def test_a_rotary_embedding_that_does_not_exist_is_told_where_parameters_are_counted(model: Path) -> None:
    change_json(model / "config.json", rope_parameters={"rope_type": "x", "rope_theta": 1e4})
    with pytest.raises(RequestError, match="cannot create"):
        count_parameters(load_config(ModelSection(name=str(model))))


@pytest.mark.parametrize("values", [{"num_hidden_layers": 99}, {"intermediate_size": 10**6}], ids=str)
def test_a_configuration_of_a_larger_model_than_its_weights_takes_no_memory(
    model: Path, values: dict[str, int]
) -> None:
    change_json(model / "config.json", **values, layer_types=None)
    with pytest.raises(RequestError, match=r"has weights of .* numbers, and its config.json is that of a model of"):
        check_fits(find_model(str(model)), torch.float32, Machine("here", "a CPU", 2, 2**40, ()), 1)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64], ids=["empty", "no header"])
def test_weights_without_a_header_are_told_where_they_are_counted(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(RequestError, match=r"MODEL: .*model\.safetensors is damaged or not safetensors"):
        check_fits(find_model(str(model)), torch.float32, Machine("here", "a CPU", 2, 2**40, ()), 1)


@pytest.mark.parametrize("template", [5, [{"name": "default", "template": 5}], {"default": 5}], ids=str)
def test_a_chat_template_that_is_no_text_is_told(model: Path, template: Any) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    change_json(model / "tokenizer_config.json", chat_template=template)
    with pytest.raises(RequestError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(ModelSection(name=str(model)))


def test_sizes_that_a_gguf_file_cannot_hold_are_told(model: Path, tmp_path: Path) -> None:
    change_json(model / "config.json", max_position_embeddings=2**33)
    with pytest.raises(RequestError, match="context_length: 8589934592 cannot be written"):
        export_in_process(str(model), tmp_path / "model.gguf", "gguf", None, None)


def sharded(model: Path, files: Callable[[dict[str, str]], Any]) -> None:
    """One shard, and an index with what ``files`` makes of its map."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="numpy") as opened:
        names = dict.fromkeys(opened.keys(), "model-00001-of-00001.safetensors")
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files(names)}))


@pytest.mark.parametrize("place", ["../good/model.safetensors", "/etc/passwd", "a/../../good/model.safetensors", ".."])
def test_an_index_that_names_files_outside_is_told(model: Path, place: str) -> None:
    sharded(model, lambda names: {**names, "model.norm.weight": place})
    said = refusals(model)
    assert len(said) == 2 and all(f"names files that are not in its directory ({place})" in line for line in said)


def test_shards_and_weights_that_are_links_are_read_as_those_of_the_hubs_cache(model: Path, tmp_path: Path) -> None:
    sharded(model, lambda names: names)
    (tmp_path / "blobs").mkdir()
    shard = model / "model-00001-of-00001.safetensors"
    shard.rename(tmp_path / "blobs" / "0123")
    shard.symlink_to(tmp_path / "blobs" / "0123")
    assert refusals(model) == []


@pytest.mark.parametrize("files", [lambda names: [], lambda names: {}, lambda names: dict.fromkeys(names, 3), str])
def test_an_index_that_is_none_is_told(model: Path, files: Callable[[dict[str, str]], Any]) -> None:
    sharded(model, files)
    assert len(said := refusals(model)) == 2 and all("is damaged" in line for line in said)


def rewritten(file: Path, **values: Any) -> None:
    """Its first tensor described by other values."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= values
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def with_header_of_two_gib(file: Path) -> None:
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 2**31))
        opened.truncate(2**31 + 100)  # sparse


def in_place_of_a_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Change] = {
    "2 GiB": with_header_of_two_gib,
    "negative offsets": lambda file: rewritten(file, data_offsets=[-8, 4]),
    "overlapping": lambda file: rewritten(file, data_offsets=[0, 4]),
    "texts for offsets": lambda file: rewritten(file, data_offsets=["a", "b"]),
    "parts of bytes": lambda file: rewritten(file, data_offsets=[0.0, 4.5]),
    "unknown type": lambda file: rewritten(file, dtype="X7"),
    "negative shape": lambda file: rewritten(file, shape=[-1, 5]),
    "huge shape": lambda file: rewritten(file, shape=[2**62, 2**62]),
    "no header": lambda file: file.write_bytes(struct.pack("<Q", 2) + b"[]"),
    "deep": lambda file: file.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000),
    "directory": in_place_of_a_file,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_told(model: Path, adapter: Path, tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](model / "model.safetensors")
    assert len(said := refusals(model)) == 2
    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    DAMAGES[damage](copy / "adapter_model.safetensors")
    with pytest.raises(RequestError) as raised:
        section = on(copy.parent.parent, copy)
        attach_adapter(load_model(ModelSection(name=section.name), torch.float32), section, 0)
    assert all("adapter_model.safetensors" in line or "safetensors" in line for line in (*said, str(raised.value)))


def on(place: Path, adapter: Path) -> ModelSection:
    """The adapter on the model that it was trained on."""
    name = json.loads((adapter / "base_model.json").read_text())["name"]
    return ModelSection.model_validate({"name": name, "adapter": {"type": "lora", "start_from": str(adapter)}})


@pytest.mark.parametrize(
    "values",
    [
        {"r": "x"},
        {"r": 10**9},
        {"lora_alpha": None},
        {"lora_dropout": 3},
        {"rank_pattern": 3},
        {"alpha_pattern": {"q_proj": "x"}},
        {"target_modules": 3},
        {"exclude_modules": [3]},
        {"modules_to_save": 3},
        {"layers_to_transform": "x"},
        {"use_dora": "x"},
        {"task_type": 3},
        {"base_model_name_or_path": 3},
        {"corda_config": 3},
        {"eva_config": {"x": 1}},
        {"peft_type": ["LORA"]},
    ],
    ids=str,
)
def test_wrong_settings_of_an_adapter_are_told(adapter: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    change_json(copy / "adapter_config.json", **values)
    with pytest.raises(RequestError, match=next(iter(values))):
        check_adapter(on(tmp_path, copy), 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"target_modules": "([a-z_.0-9]+)+!"}, "take more than 1 s to compare"),
        ({"rank_pattern": {"(([a-z_.0-9]+)+)+!": 4}}, "take more than 1 s to compare"),
        ({"target_modules": "(q_proj"}, "cannot be compared"),
        (
            {"target_modules": r"(?:.*(?:self_attn|mlp).*?(?:q_proj|v_proj).*)|(?:\bmodel\.layers\.[\d]{1,}\.up_proj)"},
            "does not fit",  # compared with the modules; its weights are of others
        ),
    ],
)
def test_patterns_of_modules_that_do_not_end_are_told(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], said: str
) -> None:
    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    change_json(copy / "adapter_config.json", **values)
    if "more than" in said:
        monkeypatch.setattr(adapters_config, "_COMPARISON_SECONDS", 1)
    with pytest.raises(RequestError, match=said):
        check_adapter(on(tmp_path, copy), 0)


class Bomb:
    """Would leave a file where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def test_nothing_that_is_pickled_is_loaded(good: Path, adapter: Path, tmp_path: Path) -> None:
    import pickle

    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    only = Path(shutil.copytree(good, tmp_path / "only-pickles"))
    (only / "model.safetensors").rename(only / "pytorch_model.bin")
    (only / "pytorch_model.bin").write_bytes(bomb)
    with pytest.raises(RequestError, match=r"weights only as pickles \(pytorch_model\.bin\), which can run any code"):
        resolve(ModelSection(name=str(only)))
    beside = Path(shutil.copytree(good, tmp_path / "beside"))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "vocab.pkl"):
        (beside / name).write_bytes(bomb)
    assert refusals(beside) == []
    (beside / "tokenizer.json").unlink()
    with pytest.raises(
        RequestError, match=r"its tokenizer is a pickle \(tokenizer\.pkl, vocab\.pkl\), which can run any"
    ):
        load_tokenizer(ModelSection(name=str(beside)))
    pickled = Path(shutil.copytree(adapter, tmp_path / "pickled"))
    (pickled / "adapter_model.safetensors").unlink()
    (pickled / "adapter_model.bin").write_bytes(bomb)
    with pytest.raises(RequestError, match="pickled weights can run any code"):
        find_model(str(good), str(pickled))
    assert not exploded.exists()


def test_a_tensor_whose_name_has_escapes_is_told_without_them(model: Path) -> None:
    weights = load_model(ModelSection(name=str(model)), torch.float32).state_dict()
    weights["\x1b]52;c;aGk=\x07"] = weights.pop("model.norm.weight").clone()
    save_file({name: tensor.clone() for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    (said,) = refusals(model)
    assert "model.norm.weight" in said
