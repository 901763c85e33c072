"""Files of tensors that nobody should read: refused in words, at once, and without waiting for anybody."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainwright.errors import RequestError
from trainwright.models.resolve_model import check_directory
from trainwright.models.safetensors_files import DamagedFile, read_header


def stored(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def written(file: Path, header: object, data: bytes = b"\0" * 64, size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return file


def sparse(file: Path, length: int, size: int) -> Path:
    with file.open("wb") as opened:
        opened.write(length.to_bytes(8, "little"))
        opened.truncate(size)
    return file


BAD: dict[str, Any] = {
    "negative offsets": lambda file: written(file, {"a": stored([8], -32, 0), "b": stored([16], 0, 64)}),
    "overlap": lambda file: written(file, {"a": stored([8], 0, 32), "b": stored([12], 16, 64)}),
    "a gap": lambda file: written(file, {"a": stored([4], 0, 16), "b": stored([8], 32, 64)}),
    "beyond the file": lambda file: written(file, {"a": stored([32], 0, 128)}),
    "bytes left over": lambda file: written(file, {"a": stored([8], 0, 32)}),
    "another size than the shape": lambda file: written(file, {"a": stored([2**40, 2**40], 0, 64)}),
    "an unknown type": lambda file: written(file, {"a": stored([16], 0, 64, "F31")}),
    "nesting": lambda file: written(file, b"[" * 1_000_000),
    "no JSON": lambda file: written(file, b"\x80" * 100),
    "a list": lambda file: written(file, []),
    "a header of 2 GiB": lambda file: sparse(file, 2**31, 2**31 + 100),
    "a header longer than the file": lambda file: sparse(file, 2**40, 1000),
    "a header of 2**64 - 1": lambda file: sparse(file, 2**64 - 1, 1000),
    "nothing": lambda file: file.write_bytes(b""),
    "seven bytes": lambda file: file.write_bytes(b"\1" * 7),
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a directory": lambda file: file.mkdir(),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize("bad", BAD)
def test_it_is_refused_by_name(model: Path, bad: str) -> None:
    file = model / "model.safetensors"
    BAD[bad](file)
    with pytest.raises(DamagedFile):
        read_header(file)
    with pytest.raises(RequestError) as caught:
        check_directory(model, "model.name")
    assert str(caught.value).startswith(f"model.name: {file} is damaged or not safetensors (")


def test_names_and_shapes_of_a_whole_file(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.tensor(1), "c": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_header(tmp_path / "model.safetensors") == {"a": (2, 3), "b": (), "c": (0, 4)}


@pytest.mark.parametrize("name", ["../outside.safetensors", "/dev/zero", "sub/x.safetensors", "..", 7, None, ["x"]])
def test_an_index_names_files_of_its_own_directory(model: Path, name: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(
        RequestError, match=r"names files that are not in its directory|does not name a file for each tensor"
    ):
        check_directory(model, "model.name")


def test_an_index_that_is_a_pipe_is_not_waited_for(model: Path) -> None:
    os.mkfifo(model / "model.safetensors.index.json")
    with pytest.raises(RequestError, match="is not a file"):
        check_directory(model, "model.name")
