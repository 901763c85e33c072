"""Checkpoints that somebody else has made to be followed out of their directory, or to be read without an end."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainwright.errors import RequestError
from trainwright.inference.finding import find_model
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
TENSORS = "rank-00000.safetensors"
Change = Callable[[Path, dict[str, Any]], None]
_opened: list[str] | None = None


def _record(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(os.path.abspath(os.fsdecode(arguments[0])) if isinstance(arguments[0], (str, bytes)) else "")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    made = Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_best=False)
    shards = {"model.weight": Shard.full(torch.ones(6, 4)), "model.bias": Shard.full(torch.zeros(6))}
    return made.save(WORLD, 7, shards, {"progress": {"step": 7}}, "task: sft\n").path


@pytest.fixture
def outside(tmp_path: Path, checkpoint: Path) -> Path:
    """A directory of the victim's, with a file of tensors and a secret in it."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / TENSORS).write_bytes((checkpoint / TENSORS).read_bytes())
    (directory / "state.json").write_text('{"progress": {"step": 7}}')
    return directory


def sealed(checkpoint: Path, change: Change) -> None:
    """Change the checkpoint, and seal it as its author would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest.pop("sha256")
    change(checkpoint, manifest)
    for name in manifest["files"] if isinstance(manifest["files"], dict) else ():
        file = checkpoint / name
        if isinstance(name, str) and file.is_file() and not file.is_symlink() and "/" not in name:
            content = file.read_bytes()
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))


def refusal(checkpoint: Path) -> str:
    """Why the checkpoint is refused, in whichever way it is reached; nothing outside of it is opened."""
    global _opened
    sys.addaudithook(_record)
    _opened = []
    try:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(checkpoint)
        # As the other ranks read it.
        with pytest.raises(CheckpointError), Checkpoint.open(checkpoint, verify=False).open_reader() as read:
            read("model.weight", Shard.full(torch.empty(6, 4)))
            read("model.bias", Shard.full(torch.empty(6)))
        read_from = {path for path in _opened if "outside" in path or path.startswith("/dev")}
    finally:
        _opened = None
    assert not read_from
    if (checkpoint / "manifest.json").is_file():
        with pytest.raises(RequestError) as told:  # exit code 2
            find_model(str(checkpoint))
        assert str(told.value) == str(caught.value)
    assert str(checkpoint) in str(caught.value)
    return str(caught.value)


def moved(name: str) -> Change:
    """The tensors lie in another file, which the manifest names."""

    def change(checkpoint: Path, manifest: dict[str, Any]) -> None:
        content = (checkpoint / TENSORS).read_bytes()
        stated = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"] = {key: value for key, value in manifest["files"].items() if key != TENSORS}
        manifest["files"][name.format(outside=checkpoint.parents[1] / "outside")] = stated
        for blocks in manifest["tensors"].values():
            blocks[0]["file"] = name.format(outside=checkpoint.parents[1] / "outside")

    return change


@pytest.mark.parametrize(
    "name", ["{outside}/" + TENSORS, "../../outside/" + TENSORS, "/dev/zero", "sub/" + TENSORS, ".."]
)
def test_a_name_that_leads_elsewhere_is_refused(checkpoint: Path, outside: Path, name: str) -> None:
    sealed(checkpoint, moved(name))
    assert "is not the name of a checkpoint's file" in refusal(checkpoint)


def test_a_file_of_tensors_that_the_manifest_leaves_out_is_refused(checkpoint: Path) -> None:
    sealed(checkpoint, lambda path, manifest: manifest["files"].pop(TENSORS))
    assert "not among its files" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["state.json", "recipe.yaml"])
def test_a_manifest_without_a_file_that_will_be_read_is_refused(checkpoint: Path, name: str) -> None:
    sealed(checkpoint, lambda path, manifest: manifest["files"].pop(name))
    assert f"{name} is not in it" in refusal(checkpoint)


@pytest.mark.parametrize("name", [TENSORS, "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "device"])
def test_what_is_no_file_is_refused_without_waiting(checkpoint: Path, outside: Path, name: str, kind: str) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    file.unlink()
    if kind == "link":
        (outside / name).write_bytes(content)
        file.symlink_to(outside / name)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    assert str(file) in refusal(checkpoint)


def header(tensors: object, size: int | None = None, data: bytes = b"\0" * 120) -> Change:
    """A tensor file with this header."""

    def change(checkpoint: Path, manifest: dict[str, Any]) -> None:
        text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
        (checkpoint / TENSORS).write_bytes((size or len(text)).to_bytes(8, "little") + text + data)

    return change


def stored(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "change",
    [
        header({"model.weight": stored([6, 4], 0, 96), "model.bias": stored([6], -24, 0)}),
        header({"model.weight": stored([6, 4], 0, 96), "model.bias": stored([6], 72, 96)}),
        header({"model.weight": stored([6, 4], 0, 96), "model.bias": stored([6], 2**62, 2**62 + 24)}),
        header({"model.weight": stored([6, 4], 0, 96), "model.other": stored([6], 96, 120)}),
        header({"model.weight": stored([4, 6], 0, 96), "model.bias": stored([6], 96, 120)}),
        header(b"[" * 100_000),
        header(b"{}", size=2**31),
        header(b"{}", size=2**63 + 5),
    ],
    ids=["negative", "overlapping", "beyond", "other name", "other shape", "nested", "2 GiB", "overflow"],
)
def test_a_header_that_is_not_what_the_manifest_says_is_refused(checkpoint: Path, change: Change) -> None:
    sealed(checkpoint, change)
    assert TENSORS in refusal(checkpoint)


def test_a_file_with_a_real_header_of_two_gigabytes_is_refused_at_once(checkpoint: Path) -> None:
    length = 2**31
    with (checkpoint / TENSORS).open("wb") as file:  # sparse
        file.write(length.to_bytes(8, "little"))
        file.truncate(length + 128)
    with pytest.raises(CheckpointError, match="size or checksum differs"):
        Checkpoint.open(checkpoint)
    with pytest.raises(CheckpointError, match=TENSORS), Checkpoint.open(checkpoint, verify=False).open_reader() as read:
        read("model.weight", Shard.full(torch.empty(6, 4)))


def blocks(*changes: dict[str, Any]) -> Change:
    def change(path: Path, manifest: dict[str, Any]) -> None:
        block = manifest["tensors"]["model.weight"][0]
        manifest["tensors"]["model.weight"] = [{**block, **each} for each in changes]

    return change


@pytest.mark.parametrize(
    "change",
    [
        blocks(),
        blocks({"offset": [-1, 0]}),
        blocks({"offset": [2, 0]}),
        blocks({"size": [6, 4.0]}),
        blocks({"size": [6]}),
        blocks({}, {}),
        blocks({"size": [3, 4]}, {"size": [3, 4], "offset": [4, 0]}),
        blocks({"file": "state.json"}),
        blocks({"file": ["state.json"]}),
        lambda path, manifest: manifest["tensors"].update({"model.weight": "everything"}),
        lambda path, manifest: manifest.update(tensors=[]),
        lambda path, manifest: manifest.update(files=[]),
    ],
)
def test_blocks_that_make_no_tensor_are_refused(checkpoint: Path, change: Change) -> None:
    sealed(checkpoint, change)
    assert "manifest.json" in refusal(checkpoint)


@pytest.mark.parametrize(
    "content", ["[]", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "7"]
)
def test_a_manifest_or_a_state_of_another_kind_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / "state.json").write_text(content, encoding="latin-1")
    sealed(checkpoint, lambda path, manifest: None)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        Checkpoint.open(checkpoint)
    (checkpoint / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Checkpoint.open(checkpoint)


def test_a_text_that_is_too_long_to_be_one_of_ours_is_not_read(checkpoint: Path) -> None:
    with (checkpoint / "manifest.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: it has"):
        Checkpoint.open(checkpoint)


def test_a_manifest_takes_the_memory_of_its_file_and_not_of_the_largest_allowed(checkpoint: Path) -> None:
    tracemalloc.start()
    try:
        Checkpoint.open(checkpoint)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24
