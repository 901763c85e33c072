"""Checkpoints of somebody else's: sealed as they should be, and naming what is not theirs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.faults.setting import REFUSAL_BYTES
from trainwright.faults.drills import invariants
from trainwright.faults.drills.invariants import require
from trainwright.faults.drills.kinds import ANY, register_fault
from trainwright.faults.drills.trial_environment import FAILED, FINISHED, MACHINE, REQUEST, Scene

Manifest = dict[str, Any]
_RANK = "rank-00000.safetensors"


def _file(name: str) -> Callable[[Path, Manifest], None]:
    """Have the manifest list another file, and blocks that are in it."""

    def change(path: Path, manifest: Manifest) -> None:
        manifest["files"][name] = manifest["files"].pop(_RANK)
        for blocks in manifest["tensors"].values():
            for block in blocks:
                block["file"] = name if block["file"] == _RANK else block["file"]

    return change


def _block(**values: Any) -> Callable[[Path, Manifest], None]:
    def change(path: Path, manifest: Manifest) -> None:
        name = max(manifest["tensors"], key=lambda name: manifest["tensors"][name][0]["size"])
        block = manifest["tensors"][name][0]
        for key, value in values.items():
            block[key] = [value] * len(block[key]) if isinstance(block[key], list) and key != "file" else value

    return change


def _state(change_state: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Manifest], None]:
    def change(path: Path, manifest: Manifest) -> None:
        state = json.loads((path / "state.json").read_text())
        text = json.dumps(change_state(state) or state)
        (path / "state.json").write_text(text)
        _account(path, manifest, "state.json")

    return change


def _progress(**values: Any) -> Callable[[Path, Manifest], None]:
    return _state(lambda state: state["progress"].update(values))


def _header(change_header: Callable[[bytes], bytes]) -> Callable[[Path, Manifest], None]:
    def change(path: Path, manifest: Manifest) -> None:
        (path / _RANK).write_bytes(change_header((path / _RANK).read_bytes()))
        _account(path, manifest, _RANK)

    return change


def _offsets(begin: int, end: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header[next(name for name in header if name != "__metadata__")]["data_offsets"] = [begin, end]
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return change


def _account(path: Path, manifest: Manifest, name: str) -> None:
    data = (path / name).read_bytes()
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _link(path: Path, manifest: Manifest) -> None:
    """A tensor file that is a link to one outside."""
    outside = path.parents[2] / "outside.safetensors"
    if not outside.exists():
        shutil.copy(path / _RANK, outside)
    (path / _RANK).unlink()
    (path / _RANK).symlink_to(outside)


def _pipe(path: Path, manifest: Manifest) -> None:
    (path / _RANK).unlink()
    os.mkfifo(path / _RANK)


def _outside(path: Path, manifest: Manifest) -> None:
    """A file of the right contents, outside of the run."""
    outside = path.parents[2] / "outside.safetensors"
    if not outside.exists():
        shutil.copy(path / _RANK, outside)
    _file("../../../outside.safetensors")(path, manifest)


def _unlisted(path: Path, manifest: Manifest) -> None:
    manifest["files"].pop(_RANK)


_CHANGES: dict[str, Callable[[Path, Manifest], None]] = {
    "a file that is above": _file("../../../bystander.txt"),
    "a good file that is above": _outside,
    "an absolute path": _file("/etc/hostname"),
    "a device": _file("/dev/zero"),
    "standard input": _file("/dev/stdin"),
    "a link to outside": _link,
    "a pipe": _pipe,
    "a tensor file that is not listed": _unlisted,
    "no state listed": lambda path, manifest: manifest["files"].pop("state.json"),
    "no files": lambda path, manifest: manifest["files"].clear(),
    "no tensors": lambda path, manifest: manifest["tensors"].clear(),
    "files that are a list": lambda path, manifest: manifest.update(files=[_RANK]),
    "tensors that are a text": lambda path, manifest: manifest.update(tensors="x"),
    "an unknown format": lambda path, manifest: manifest.update(format=99),
    "a negative size": lambda path, manifest: manifest["files"][_RANK].update(size=-1),
    "a block at a negative offset": _block(offset=-1),
    "a block of a huge size": _block(size=10**15),
    "a block of a negative size": _block(size=-3),
    "a block without a file": _block(file=None),
    "a step that is a text": _progress(step="many"),
    "a negative step": _progress(step=-7),
    "a huge step": _progress(step=10**30),
    "an unknown field of progress": _progress(strange=1),
    "a state that is a list": _state(lambda state: [state]),
    "a state that is deep": _state(lambda state: json.loads("[" * 900 + "]" * 900)),
    "no progress": _state(lambda state: {key: value for key, value in state.items() if key != "progress"}),
    "a header of 2 GiB": _header(lambda data: (2**31).to_bytes(8, "little") + data[8:]),
    "a header of 2^63 bytes": _header(lambda data: (2**63).to_bytes(8, "little") + data[8:]),
    "negative offsets of data": _header(_offsets(-64, 0)),
    "offsets of data beyond the end": _header(_offsets(0, 2**40)),
    "no header": _header(lambda data: b""),
    "a header that is no JSON": _header(lambda data: data[:8] + b"x" * (len(data) - 8)),
}


@register_fault("a hostile checkpoint", spreads=ANY, variants=list(_CHANGES), share=5)
def hostile_checkpoint(scene: Scene) -> None:
    """Not used, in words, with nothing followed outside the run; one before it is used where there is one."""
    scene.provide_stopped_run()
    steps = invariants.list_checkpoint_steps(scene.run)
    changed = scene.draw.choice([steps[-1:], steps])
    for step in changed:
        _change(scene.run / "checkpoints" / f"step-{step:08d}", _CHANGES[scene.variant])
    scene.accept_changes()
    ended = scene.go_on()
    require(ended.peak < 2 * REFUSAL_BYTES, f"took {ended.peak / 2**20:.0f} MiB")
    if len(changed) == len(steps):
        scene.expect(ended, (REQUEST, MACHINE, FAILED), "checkpoint|step-")
        return
    scene.expect(ended, (FINISHED, REQUEST, FAILED), "checkpoint|step-")
    if ended.code == FINISHED:
        invariants.check_complete_and_same(scene.run, scene.reference(), exact=True)
        resumed = [e.get("resumed_from") for e in invariants.read_lines(scene.run) if e["event"] == "start"][-1]
        require(resumed == steps[-2], f"resumed from {resumed}: the checkpoint of step {steps[-1]} was used")


def _change(path: Path, change: Callable[[Path, Manifest], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    change(path, manifest)
    seal = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": seal}))
