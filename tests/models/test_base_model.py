"""Which weights an adapter was trained on, and what is said where it meets others."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_merging import base, trained
from trainwright.compatibility.gguf.export import export_gguf
from trainwright.errors import RequestError
from trainwright.inference.finding import find_model
from trainwright.models.adapters.files import BaseModel, identify_base_model
from trainwright.models.load import check_adapter
from trainwright.models.merging import merge
from trainwright.models.usage import format_loading_code
from trainwright.planning.facts import read_configuration
from trainwright.recipe.files import read_json
from trainwright.recipe.sections.model import ModelSection

RIGHT = '{"name": "a", "fingerprint": "b", %s}'


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of F16 numbers, beside the model that it was made of: small/, whose numbers are others."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    export_gguf(base(tmp_path / "small", vocab_size=264), tmp_path / "small.gguf", "f16")
    return tmp_path / "small.gguf"


def recorded(adapter: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((adapter / "base_model.json").read_text())
    return values


def warnings(caplog: pytest.LogCaptureFixture, section: ModelSection) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainwright"):
        check_adapter(section, 0)
        check_adapter(section, 0)
    return [record.getMessage() for record in caplog.records]


def on(model: Path, adapter: Path, **more: Any) -> ModelSection:
    return ModelSection.model_validate(
        {"name": str(model), "adapter": {"start_from": str(adapter), "type": "lora"} | more}
    )


def test_a_gguf_base_is_named_with_its_file_digest_and_precision(gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained(gguf, tmp_path / "adapter")
    found = recorded(tmp_path / "adapter")
    assert (found["name"], found["file"], found["precision"]) == (str(gguf), "small.gguf", "F16")
    assert found["sha256"] == hashlib.sha256(gguf.read_bytes()).hexdigest()
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], dtype=torch.float32)
    rounded = {
        name: tensor.half().float() for name, tensor in load_file(tmp_path / "small" / "model.safetensors").items()
    }
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in theirs.state_dict().items() if name in rounded)
    assert find_model(str(tmp_path / "adapter")).section.name == str(gguf)


def test_a_plain_and_a_quantized_base_are_named_with_their_precision(gguf: Path, tmp_path: Path) -> None:
    plain = tmp_path / "small"
    for name, adapter, quantization in (("lora", {}, "none"), ("qlora", {"quantization": "nf4"}, "nf4")):
        trained(plain, tmp_path / name, **adapter)
        found = recorded(tmp_path / name)
        assert (found["name"], found["file"], found["precision"]) == (str(plain), None, "fp32")
        assert found["quantization"] == quantization and found["double_quantization"] == (name == "qlora")


def test_other_weights_of_the_model_are_warned_of_and_another_model_is_refused(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(gguf, tmp_path / "on-gguf")
    assert warnings(caplog, on(gguf, tmp_path / "on-gguf")) == []
    (said,) = warnings(caplog, on(tmp_path / "small", tmp_path / "on-gguf"))
    assert (
        "file small.gguf, SHA-256 " in said
        and "dequantized from F16" in said
        and f"here it is on {tmp_path}/small" in said
    )
    trained(tmp_path / "small", tmp_path / "on-plain")
    (said,) = warnings(caplog, on(gguf, tmp_path / "on-plain"))
    assert "dequantized from F16" in said.partition("here it is on")[2]
    trained(tmp_path / "small", tmp_path / "on-nf4", quantization="nf4")
    (said,) = warnings(caplog, on(tmp_path / "small", tmp_path / "on-nf4"))
    assert "quantized to nf4" in said
    assert warnings(caplog, on(tmp_path / "small", tmp_path / "on-nf4", quantization="nf4")) == []
    other = Path(shutil.copytree(tmp_path / "small", tmp_path / "retrained" / "small"))
    weights = {name: tensor + 0.01 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"is an adapter of .*small .*but model.name is .*retrained/small"):
        check_adapter(on(other, tmp_path / "on-plain"), 0)


def test_it_is_warned_of_where_it_is_merged_and_generated_with(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from trainwright.inference.loading import load

    trained(gguf, tmp_path / "adapter")
    found = find_model(str(tmp_path / "small"), str(tmp_path / "adapter"))
    with caplog.at_level(logging.WARNING, "trainwright"):
        merge(found.section, 0, tmp_path / "merged")
        trained(gguf, tmp_path / "another")
        load(find_model(str(tmp_path / "small"), str(tmp_path / "another")), torch.float32, torch.device("cpu"))
    said = [record.getMessage() for record in caplog.records if "other weights" in record.getMessage()]
    assert [line.partition(" was trained on")[0] for line in said] == [
        str(tmp_path / name) for name in ("adapter", "another")
    ]


def test_an_adapter_of_elsewhere_that_names_a_model_is_warned_of_on_a_gguf_file_of_it(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "small", tmp_path / "adapter")
    (tmp_path / "adapter" / "base_model.json").unlink()
    section = on(tmp_path / "files" / "small", tmp_path / "adapter")
    (tmp_path / "files" / "small").mkdir(parents=True)
    shutil.copy(gguf, tmp_path / "files" / "small" / "small-f16.gguf")
    (said,) = warnings(caplog, section.model_copy(update={"gguf_file": "small-f16.gguf"}))
    assert f"names {tmp_path}/small as its base" in said and "file small-f16.gguf" in said


@pytest.mark.parametrize(
    "content",
    [
        "[1",
        "[]",
        "3",
        '{"name": 3}',
        '{"name": "a", "fingerprint": null}',
        RIGHT % '"file": 3',
        RIGHT % '"quantization": "x"',
    ],
)
def test_a_damaged_record_is_refused_by_its_name(gguf: Path, tmp_path: Path, content: str) -> None:
    trained(gguf, tmp_path / "adapter")
    (tmp_path / "adapter" / "base_model.json").write_text(content)
    for look in (
        lambda: check_adapter(on(gguf, tmp_path / "adapter"), 0),
        lambda: find_model(str(tmp_path / "adapter")),
    ):
        with pytest.raises(RequestError, match=r"base_model\.json:"):
            look()


def test_an_adapter_whose_base_is_gone_says_which_it_was(gguf: Path, tmp_path: Path) -> None:
    trained(gguf, tmp_path / "adapter")
    gguf.unlink()
    with pytest.raises(
        RequestError, match=r"is an adapter of .*small.gguf \(.*SHA-256 .*, which was not found; pass the"
    ):
        find_model(str(tmp_path / "adapter"))


def test_a_description_that_the_last_version_wrote_is_read(tmp_path: Path) -> None:
    described = BaseModel("model", "0" * 64, "model", quantization="nf4", double_quantization=True)
    described.write(tmp_path)
    file = tmp_path / "base_model.json"
    file.write_text(file.read_text().replace("quantization", "quantisation"))
    assert BaseModel.read(tmp_path) == described


def test_overrides_of_the_base_belong_to_its_adapter(tmp_path: Path) -> None:
    model, overrides = base(tmp_path / "small"), {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    trained(model, tmp_path / "adapter")
    section = ModelSection(name=str(model), overrides={**overrides, "max_position_embeddings": 512})
    identify_base_model(section, 0).write(tmp_path / "adapter")
    saved = find_model(str(tmp_path / "adapter")).section
    assert saved.overrides == section.overrides and read_configuration(saved)["max_position_embeddings"] == 512
    text = format_loading_code(tmp_path / "adapter", "adapter")
    assert text is not None and "rope_scaling={'rope_type': 'linear', 'factor': 2.0}" in text
    merge(saved, 0, tmp_path / "merged")
    assert read_json(tmp_path / "merged" / "config.json")["max_position_embeddings"] == 512
