"""In which order a checkpoint reaches the disk: a loss of power between any two steps leaves it whole or not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
_WRITING = os.O_WRONLY | os.O_RDWR
_recording: list[tuple[str, str]] | None = None


def _record(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook (it cannot be removed): what is opened for writing, and what is renamed to what."""
    if _recording is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
        _recording.append(("write", str(arguments[0])))
    elif event == "os.rename":
        _recording.append(("rename", str(arguments[1])))


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The writes, syncs and renames of this process meanwhile, each with the path, in order."""
    global _recording
    sys.addaudithook(_record)
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        assert _recording is not None
        _recording.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    _recording = []
    try:
        yield _recording
    finally:
        _recording = None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the names of descriptors from Linux")
def test_everything_is_synced_before_the_rename_and_nothing_is_written_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_best=False)
    tensors = {"model.weight": Shard.full(torch.ones(4, 3))}
    with recorded(monkeypatch) as events:
        made.save(WORLD, 7, tensors, {}, "task: sft\n")
    scratch, final = tmp_path / "checkpoints" / ".writing-step-00000007", made.path(7)
    files = {"rank-00000.safetensors", "state.json", "recipe.yaml", "manifest.json"}
    assert {file.name for file in final.iterdir()} == files

    renamed = events.index(("rename", str(final)))
    before, after = events[:renamed], events[renamed + 1 :]
    for name in files:
        path = str(scratch / name)
        assert before.index(("write", path)) < before.index(("sync", path)), name
    manifest = before.index(("write", str(scratch / "manifest.json")))
    assert all(before.index(("sync", str(scratch / name))) < manifest for name in files - {"manifest.json"})
    assert before[-1] == ("sync", str(scratch)), "the names in it, last of all"
    assert after == [("sync", str(tmp_path / "checkpoints"))]
    assert not any(str(final) in path for _, path in before), "nothing of it is under its own name before it is whole"
