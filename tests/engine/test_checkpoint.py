from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainwright.engine.checkpoints import checkpoint as module
from trainwright.engine.checkpoints import manifest, writer
from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainwright.engine.checkpoints.manifest import compute_checksum
from trainwright.engine.checkpoints.writer import write_tensors
from trainwright.errors import RequestError
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.weight": torch.randn(6, 4, generator=generator),
        "model.bias": torch.randn(3, generator=generator).bfloat16(),
        "optimizer.step.weight": torch.tensor(7.0),
        "model.counts": torch.arange(5),
        "model.flags": torch.tensor([True, False]),
    }


def shards() -> dict[str, Shard]:
    return {name: Shard.full(tensor) for name, tensor in tensors().items()}


def checkpoints(directory: Path, **settings: Any) -> Checkpoints:
    return Checkpoints(directory / "checkpoints", **({"keep_last": 2, "keep_best": True} | settings))


def save(directory: Path, *steps: int, what: Mapping[str, Shard] | None = None) -> Checkpoints:
    made = checkpoints(directory)
    for step in steps:
        made.save(WORLD, step, what or shards(), {"progress": {"step": step}}, "task: sft\n")
    return made


def test_tensor_files_are_safetensors_with_the_checksum_of_their_bytes(tmp_path: Path) -> None:
    size, digest = write_tensors(tmp_path / "x.safetensors", tensors())
    with (tmp_path / "x.safetensors").open("rb") as file:
        assert (size, digest) == compute_checksum(file)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


def test_what_a_slow_disk_has_not_written_yet_is_little_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = [0]

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(writer, "PIECE", 256)
    monkeypatch.setattr(manifest, "PIECE", 256)
    monkeypatch.setattr(manifest, "_UNSYNCED", 1024)
    many = {"small": torch.ones(3), "large": torch.arange(2000), "last": torch.ones(100)}
    size, _ = write_tensors(tmp_path / "x.safetensors", many)
    assert synced[-1] == size > 16_000
    assert all(0 <= now - before < 1024 + 256 for before, now in itertools.pairwise(synced))
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in many.items())


def test_what_was_saved_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    found, refused = save(tmp_path, 10).find_latest()
    assert found is not None and refused == []
    assert found.state == {"progress": {"step": 10}}
    with found.open_reader() as read:
        for name, tensor in tensors().items():
            assert torch.equal(read(name, Shard.full(torch.empty_like(tensor))), tensor)
    assert not any(path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())


def test_blocks_of_one_split_are_read_in_another(tmp_path: Path) -> None:
    whole = torch.arange(30.0).reshape(10, 3)
    directory, parts = tmp_path, []
    for rank, (begin, end) in enumerate([(0, 4), (4, 8), (8, 10)]):
        block = Shard(whole[begin:end], (10, 3), (begin, 0))
        parts.append(module._write_part(directory / "parts", rank, {"w": block}))
    manifest.finish(directory / "parts", directory / "done", parts, "{}", "")
    with Checkpoint.open(directory / "done").open_reader() as read:
        for begin, end in [(0, 10), (0, 5), (5, 10), (3, 9), (7, 8)]:
            wanted = Shard(torch.empty(end - begin, 3), (10, 3), (begin, 0))
            assert torch.equal(read("w", wanted), whole[begin:end])


def test_replicas_share_the_writing_and_leave_nothing_out(tmp_path: Path) -> None:
    owned = []
    for rank in range(3):
        mine = {name: Shard.full(tensor, rank, 3) for name, tensor in tensors().items()}
        owned.append(list(module.own_blocks(mine)))
    assert sorted(name for names in owned for name in names) == sorted(tensors())
    assert all(owned)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", "recipe.yaml"])
@pytest.mark.parametrize("place", [0, 0.5, 0.999])
def test_a_flipped_byte_is_refused_by_name_and_the_one_before_is_used(tmp_path: Path, name: str, place: float) -> None:
    made = save(tmp_path, 10, 20)
    file = made.path(20) / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1
    file.write_bytes(content)
    found, refused = made.find_latest()
    assert found is not None and found.path == made.path(10)
    assert len(refused) == 1 and str(file) in str(refused[0])


@pytest.mark.parametrize("damage", ["cut", "missing file", "missing manifest", "empty manifest", "empty directory"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    made = save(tmp_path, 10, 20)
    file, manifest = made.path(20) / "rank-00000.safetensors", made.path(20) / "manifest.json"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing file":
        file.unlink()
    elif damage == "missing manifest":
        manifest.unlink()
    elif damage == "empty manifest":
        manifest.write_text("")
    else:
        for path in made.path(20).iterdir():
            path.unlink()
    found, refused = made.find_latest()
    assert found is not None and found.path == made.path(10) and len(refused) == 1


def test_a_checkpoint_cut_short_by_a_kill_is_not_seen_and_is_cleared_away(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    half = tmp_path / "checkpoints" / ".writing-step-00000020"
    module._write_part(half, 0, shards())
    assert made.steps() == [10]
    save(tmp_path, 30)
    assert not half.exists()


def test_a_full_disk_leaves_the_earlier_checkpoints_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = save(tmp_path, 10)

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        made.save(WORLD, 20, shards(), {}, "")
    assert made.steps() == [10]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_disk_that_keeps_other_bytes_is_noticed_before_older_checkpoints_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sync = save(tmp_path, 10), os.fsync

    def corrupting(descriptor: int) -> None:
        sync(descriptor)
        if os.fstat(descriptor).st_size > 100:
            os.truncate(f"/proc/self/fd/{descriptor}", 100)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", corrupting)
        with pytest.raises(CheckpointError, match="reads back differently"):
            made.save(WORLD, 20, shards(), {}, "")
    assert made.steps() == [10]


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    made = save(tmp_path, 10, 20, 30, 40)
    made.prune(best=10)
    assert made.steps() == [10, 30, 40]
    checkpoints(tmp_path, keep_best=False, keep_last=1).prune(best=10)
    assert made.steps() == [40]


def test_another_models_checkpoint_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    found, _ = save(tmp_path, 10).find_latest()
    assert found is not None
    with found.open_reader() as read:
        with pytest.raises(RequestError, match=r"model\.other"):
            read("model.other", Shard.full(torch.empty(2)))
        with pytest.raises(RequestError, match=r"model.weight has shape \[6, 4\].*\[6, 5\]"):
            read("model.weight", Shard.full(torch.empty(6, 5)))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    (made.path(10) / "state.json").write_text("broken")
    assert made.find_latest()[0] is None
    save(tmp_path, 10)
    found, _ = made.find_latest()
    assert found is not None and json.loads((found.path / "state.json").read_text()) == {"progress": {"step": 10}}


def damage(made: Checkpoints, step: int) -> None:
    (made.path(step) / "state.json").write_text("broken")


def test_checkpoints_that_cannot_be_used_do_not_count_among_the_last(tmp_path: Path) -> None:
    made = save(tmp_path, 5, 10, 15, 20)
    damage(made, 15)
    damage(made, 20)
    resumed = checkpoints(tmp_path)
    assert resumed.find_latest()[0] is not None
    resumed.save(WORLD, 13, shards(), {}, "")
    resumed.prune(best=None)
    assert resumed.steps() == [10, 13, 15, 20]
    found, _ = checkpoints(tmp_path).find_latest()
    assert found is not None and found.path == made.path(13)


@pytest.mark.parametrize("best", [None, 10, 20])
def test_the_newest_that_can_be_used_is_never_removed(tmp_path: Path, best: int | None) -> None:
    made = save(tmp_path, 10, 20, 30)
    damage(made, 20)
    damage(made, 30)  # after this process has written it
    made.prune(best=best)
    assert made.steps() == [10, 20, 30]
    fresh = checkpoints(tmp_path, keep_last=1)
    fresh.prune(best=best)
    assert made.path(10).exists()


def test_pruning_reads_nothing_of_what_this_process_has_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    made = checkpoints(tmp_path)
    assert made.find_latest()[0] is not None
    read: list[object] = []
    original = module.Checkpoint.open
    monkeypatch.setattr(
        module.Checkpoint, "open", lambda *given, **more: (read.append(given), original(*given, **more))
    )
    for step in (20, 30, 40):
        made.save(WORLD, step, shards(), {}, "")
        made.prune(best=None)
    assert made.steps() == [30, 40] and read == []


def test_pruning_reads_no_tensors_of_checkpoints_that_an_earlier_process_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10, 20, 30, 40)
    made = checkpoints(tmp_path, keep_last=4)
    (made.path(30) / "rank-00000.safetensors").write_bytes(b"cut")
    found, _ = made.find_latest()
    assert found is not None and found.step == 40
    made.save(WORLD, 50, shards(), {}, "")
    read: list[str] = []
    original = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *more, **named: (read.append(str(path)), original(path, *more, **named))[1]
    )
    made.prune(best=None)
    assert made.steps() == [10, 20, 30, 40, 50], "the one that is cut does not count"
    made.save(WORLD, 60, shards(), {}, "")
    read.clear()
    made.prune(best=None)
    assert made.steps() == [20, 30, 40, 50, 60]
    assert not [path for path in read if path.endswith(".safetensors")]


def test_only_names_as_they_are_written_are_checkpoints(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    directory = tmp_path / "checkpoints"
    for name in ("step-7", "step-²", "step-٠٠٠٠٠٠٤٠", "step-0000000011", "step-00000012x", "step--0000013", "step-"):
        (directory / name).mkdir()
    assert made.steps() == [10]
    found, refused = made.find_latest()
    assert found is not None and refused == []
    made.prune(best=None)


def test_what_is_no_directory_is_refused_by_name_and_gives_way(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    (tmp_path / "outside").mkdir()
    outside = save(tmp_path / "outside", 30)
    made.path(20).write_text("a file")
    made.path(30).symlink_to(outside.path(30))
    made.path(40).symlink_to(tmp_path / "nowhere")
    found, refused = made.find_latest()
    assert found is not None and found.path == made.path(10)
    assert [str(made.path(step)) in str(line) for step, line in zip((40, 30, 20), refused, strict=True)] == [True] * 3
    for step in (20, 30, 40):
        made.save(WORLD, step, shards(), {"progress": {"step": step}}, "")
        assert made.path(step).is_dir() and not made.path(step).is_symlink()
    made.prune(best=None)
    assert made.steps() == [30, 40] and made.find_latest()[1] == []
    assert (outside.path(30) / "manifest.json").is_file()
    assert not [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_link_in_the_place_of_a_checkpoint_being_written_is_not_followed(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / ".writing-step-00000020").symlink_to(tmp_path / "elsewhere")
    made.save(WORLD, 20, shards(), {}, "")
    assert list((tmp_path / "elsewhere").iterdir()) == [] and made.steps() == [10, 20]


def test_a_rank_without_tensors_of_its_own_has_a_file_that_verifies(tmp_path: Path) -> None:
    made = save(tmp_path, 10, what={"model.scalar": Shard(torch.tensor(1.0), (), (), 1, 2)})
    assert made.find_latest()[0] is not None


def test_a_tensor_without_elements_is_read_back(tmp_path: Path) -> None:
    made = save(tmp_path, 10, what=shards() | {"model.empty": Shard.full(torch.empty(0, 4, dtype=torch.bfloat16))})
    found, _ = made.find_latest()
    assert found is not None
    with found.open_reader() as read:
        empty = read("model.empty", Shard.full(torch.empty(0, 4, dtype=torch.bfloat16)))
        assert (empty.shape, empty.dtype) == ((0, 4), torch.bfloat16)
        with pytest.raises(RequestError, match=r"model\.other"):
            read("model.other", Shard(torch.empty(0), (4,), (4,)))


def test_a_run_whose_directory_is_gone_does_not_get_it_back(tmp_path: Path) -> None:
    made = checkpoints(tmp_path / "run")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        made.save(WORLD, 10, shards(), {}, "")
    assert not (tmp_path / "run").exists()
