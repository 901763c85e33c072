"""Damaged, missing and foreign files among a run's checkpoints; and wrong numbers: NaN, flipped bits, a moved clock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from trainwright.faults.drills import invariants, watched_commands
from trainwright.faults.drills.invariants import Skipped, require
from trainwright.faults.drills.kills import start_in_phase
from trainwright.faults.drills.kinds import ANY, COPIES, SEVERAL, register_fault
from trainwright.faults.drills.trial_environment import FAILED, FINISHED, MACHINE, REQUEST, STOPPED, Scene
from trainwright.faults.drills.watched_commands import CommandResult
from trainwright.machine.detect import detect
from trainwright.recipe.loading import load_recipe
from trainwright.utils import text

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of linux/sched.h
_BUSY_SECONDS = 5.0


@functools.cache
def explain_refused_mounts() -> str | None:
    """Return why this process cannot mount file systems of its own; None if it can."""
    try:
        command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
        attempt = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"unshare: {error}"
    return None if attempt.returncode == 0 else f"no mounts of one's own: {attempt.stderr.strip()}"


def unshare_mounts() -> None:
    """Give this process and its future children a mount namespace of their own. It must have one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("--make-rprivate", "/")


def mount_disk(path: Path, size: int) -> None:
    """Mount an empty file system of this size in bytes."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))


def make_read_only(path: Path, read_only: bool = True) -> None:
    """Make the tree at `path` read-only, or writable again."""
    if read_only:
        _mount("--bind", str(path), str(path))
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                return _mount("-o", "remount,bind,ro", str(path))
            except subprocess.CalledProcessError:  # a process that was started meanwhile writes a file
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    else:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


def fill_directory(path: Path, but: int = 0) -> None:
    """Write a file that fills its disk, except for `but` bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 9))
        if but:
            file.truncate(max(0, file.tell() - but))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


_FILES = ("state.json", "manifest.json", "rank-00000.safetensors", "recipe.yaml")
_DAMAGES = ("a bit flipped", "cut in half", "emptied", "deleted", "longer", "a directory", "a link to nothing")


@register_fault(
    "a damaged file of a checkpoint",
    spreads=ANY,
    variants=[f"{file} {damage}" for file in _FILES for damage in _DAMAGES],
    share=5,
)
def damage_checkpoint(scene: Scene) -> None:
    """The newest one or two checkpoints are rejected with the file's name, and the one before is used."""
    scene.provide_stopped_run()
    count = scene.draw.choice([1, 1, 2])
    steps = invariants.list_checkpoint_steps(scene.run)
    file, _, damage = scene.variant.partition(" ")
    if file.startswith("rank-"):
        file = f"rank-{scene.draw.randrange(_count_ranks(scene)):05d}.safetensors"
    bad_steps = steps[-count:]
    for step in bad_steps:
        damage_file(scene.run / "checkpoints" / f"step-{step:08d}" / file, damage, scene.draw)
    scene.injected = time.time()
    result = scene.go_on()
    scene.expect(result, (FINISHED,))
    events = invariants.read_lines(scene.run)
    resume_step = [event.get("resumed_from") for event in events if event["event"] == "start"][-1]
    require(resume_step == steps[-count - 1], f"resumed from {resume_step}; checkpoints of {bad_steps} were damaged")
    report = " ".join(str(event.get("detail")) for event in events if event["event"] == "fault") + result.text
    for step in bad_steps:
        require(f"step-{step:08d}/{file}" in report, f"nothing said of step-{step:08d}/{file}: {report}")
    invariants.check_complete_and_same(scene.run, scene.reference(), exact=True)


@register_fault(
    "every checkpoint damaged", spreads=ANY, variants=[f"{file} cut in half" for file in _FILES[:3]], share=1
)
def damage_every_checkpoint(scene: Scene) -> None:
    """Nothing is trained over it, nothing is deleted, and the message says why."""
    scene.provide_stopped_run()
    file = scene.variant.partition(" ")[0]
    for step in invariants.list_checkpoint_steps(scene.run):
        damage_file(scene.run / "checkpoints" / f"step-{step:08d}" / file, "cut in half", scene.draw)
    before = sorted(map(str, (scene.run / "checkpoints").rglob("*")))
    scene.expect(scene.go_on(), (FAILED, REQUEST), ["checkpoint", "new run"])
    require(sorted(map(str, (scene.run / "checkpoints").rglob("*"))) == before, "files of checkpoints were removed")


@register_fault("damaged checkpoints and pruning", spreads=ANY, variants=("1", "2", "3"), share=3)
def damage_while_pruning(scene: Scene) -> None:
    """Old checkpoints are pruned while newer ones cannot be read: a readable one exists at all times."""
    scene.provide_stopped_run()
    steps = invariants.list_checkpoint_steps(scene.run)
    bad = scene.draw.sample(steps[1:], scene.draw.choice([1, 2]))
    for step in bad:
        file = scene.draw.choice(_FILES[:3])
        damage_file(scene.run / "checkpoints" / f"step-{step:08d}" / file, scene.draw.choice(_DAMAGES[:4]), scene.draw)
    for _ in range(2):
        keep = f"checkpoint.keep_last={scene.variant}"
        starts = invariants.count_starts(scene.run)
        command = scene.trainwright("train", "--resume", str(scene.run), keep)
        newest = max(_list_whole_steps(scene), default=0)
        reached_step = scene.draw.randrange(newest + 1, max(newest + 2, min(newest + 7, watched_commands.STEPS - 2)))
        scene.wait_for_step(command, reached_step, starts)
        if scene.draw.random() < 0.7:
            command.send(signal.SIGTERM)
            result = scene.wait(command)
            if result.code != FINISHED:
                scene.expect(result, (STOPPED,), "resume")
        else:
            command.kill()
        remaining = _list_whole_steps(scene)
        require(remaining, f"no whole checkpoint is left; before: {steps}, damaged: {sorted(bad)}")
        require(max(remaining) >= newest, f"the checkpoint of step {newest} is gone, whole ones are of {remaining}")
    scene.expect(scene.go_on(), (FINISHED,))
    invariants.check_complete_and_same(scene.run, scene.reference(), exact=True)


@register_fault(
    "foreign names among checkpoints",
    spreads=ANY,
    variants=(
        "step-7 directory", "step-² directory", "step-00000030 empty", "step-00000030 file", "step-٣ directory",
        "step-00000024 link to nothing", "step-99999999999999999999 directory", "step--0000001 directory",
        ".writing-step-00000024 directory", ".removing-step-00000006 directory", ".writing-step-00000024 file",
        "step-00000018.bak copy", "step-00000018 (copy) copy", "step-0000000x directory", "latest file",
        "step-00000021 copy", "step-00000019 link", "step- directory", "step-1e3 directory",
    ),
    share=3,
)  # fmt: skip
def add_foreign_names(scene: Scene) -> None:
    """Files made by hand or by another program: the run continues from its own newest checkpoint."""
    scene.provide_stopped_run()
    checkpoints = scene.run / "checkpoints"
    name, _, kind = scene.variant.rpartition(" ")
    if kind == "nothing":
        name, kind = name.removesuffix(" link to"), "link to nothing"
    path = checkpoints / name
    if kind == "directory":
        path.mkdir()
        (path / "notes.txt").write_text("by hand\n")
    elif kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("by hand\n")
    elif kind == "copy":
        shutil.copytree(checkpoints / "step-00000018", path)
    else:
        path.symlink_to("nowhere" if kind == "link to nothing" else "step-00000018")
    scene.expect(scene.go_on(), (FINISHED,))
    invariants.check_complete_and_same(scene.run, scene.reference(), exact=True)


@register_fault(
    "a damaged file of a run",
    variants=[f"{file} {damage}" for file in ("plan.json", "events.jsonl", "recipe.yaml") for damage in _DAMAGES],
    share=2,
)
def damage_run(scene: Scene) -> None:
    """The run continues unchanged, or says what is missing."""
    scene.provide_stopped_run()
    file, _, damage = scene.variant.partition(" ")
    before = scene.run / file
    text = before.read_bytes()
    damage_file(before, damage, scene.draw)
    resume = scene.trainwright("train", "--resume", str(scene.run))
    result = scene.wait(resume)
    scene.expect(result, (FINISHED, REQUEST, FAILED), file)
    if result.code == FINISHED and file == "events.jsonl":  # whose steps before are lost
        invariants.check_final(scene.run, scene.reference(), exact=True)
    elif result.code == FINISHED:
        invariants.check_complete_and_same(scene.run, scene.reference(), exact=True)
    else:
        _remove(before)
        before.write_bytes(text)
        scene.resume_and_compare()


def damage_file(path: Path, damage: str, draw: random.Random) -> None:
    """Apply the damage to a file."""
    data = path.read_bytes()
    if damage == "a bit flipped":
        position = draw.randrange(len(data))
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << draw.randrange(8))]) + data[position + 1 :])
    elif damage == "cut in half":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "longer":
        path.write_bytes(data + bytes(draw.randrange(256) for _ in range(100)))
    else:
        path.unlink()
        if damage == "a directory":
            path.mkdir()
        elif damage == "a link to nothing":
            path.symlink_to("nowhere")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _count_ranks(scene: Scene) -> int:
    return len(list((scene.run / "checkpoints" / "step-00000018").glob("rank-*.safetensors")))


def _list_whole_steps(scene: Scene) -> list[int]:
    steps = invariants.list_checkpoint_steps(scene.run)
    return [
        s for s in steps if invariants.explain_broken_checkpoint(scene.run / "checkpoints" / f"step-{s:08d}") is None
    ]


_POLICIES = "trainwright.faults.drills.planted"
# A check that finds nothing comes first, so that there is a checkpoint to go back to.
_CHECKED_EVERY = 4
_CHECKS = (f"faults.replay_every={_CHECKED_EVERY}", "faults.on_corruption=rewind", "checkpoint.every=2")
_BITS = 23


@register_fault("NaN in a pass", spreads=ANY, variants=("at a step before a checkpoint", "after one"), share=2)
def plant_nan(scene: Scene) -> None:
    """The run fails at that step, is not restarted, stores no such number, and continues without the cause."""
    first = 2 if scene.variant.startswith("at") else watched_commands.SAVES_EVERY + 1
    step = scene.draw.randrange(first, first + watched_commands.SAVES_EVERY - 2)
    rank = scene.draw.randrange(scene.case.spread[1])
    plain = _disable_compilation(scene)
    result = _train(scene, "NotANumber", {"rank": rank, "step": step, "pass": 0}, *plain)
    scene.expect(result, (FAILED,), ["step", "not finite|nan|inf"])
    reached_step = invariants.find_last_step(scene.run)
    require(reached_step == step - 1, f"step {step} was NaN, and the last one is {reached_step}")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare(overrides=plain)


@register_fault("a flipped bit of a weight", spreads=COPIES, share=2)
def flip_weight(scene: Scene) -> None:
    """The next check finds it and names the rank, and the run rewinds to before it."""
    _flip_bit(scene, "FlippedWeight", scene.draw.randrange(_CHECKED_EVERY + 1, 2 * _CHECKED_EVERY))


@register_fault("a flipped bit of an activation", spreads=SEVERAL, share=2)
def flip_activation(scene: Scene) -> None:
    """The check of that step finds it and names the rank."""
    _flip_bit(scene, "Activation", 2 * _CHECKED_EVERY, _disable_compilation(scene))


@register_fault("a clock that jumps", spreads=ANY, variants=("+3600", "-3600", "+86400", "-1"), share=1)
def move_clock(scene: Scene) -> None:
    """Nothing changes."""
    rank, step = scene.draw.randrange(scene.case.spread[1]), scene.draw.randrange(1, watched_commands.STEPS - 1)
    result = _train(scene, "Clock", {"rank": rank, "step": step, "seconds": float(scene.variant)})
    scene.check_finished_undisturbed(result)


def _flip_bit(scene: Scene, policy: str, step: int, overrides: Sequence[str] = ()) -> None:
    rank = scene.draw.randrange(scene.case.spread[1])
    flip = {"rank": rank, "step": step, "place": scene.draw.random(), "bit": scene.draw.randrange(_BITS), "pass": 0}
    scene.check_finished_undisturbed(_train(scene, policy, flip, *_CHECKS, *overrides), overrides)
    ranks = [event["rank"] for event in invariants.read_faults(scene.run, "corrupted_weights", "corrupted_computation")]
    require(ranks, f"{flip} was not noticed")
    require(ranks[-1] == rank, f"a bit was flipped on rank {rank} at step {step}, named are {ranks}")


def _disable_compilation(scene: Scene) -> tuple[str, ...]:
    """Return overrides of a run whose blocks can be changed: compiled ones do not see hooks that are added later."""
    compiled = load_recipe(scene.reference() / "recipe.yaml").train.compile
    return ("train.compile=false",) if compiled else ()


def _train(scene: Scene, policy: str, where: dict[str, float], *overrides: str) -> CommandResult:
    """Train the run with an additional step policy."""
    recipe_policies = load_recipe(scene.recipe).train.step_policies
    policies = f"train.step_policies={json.dumps([*recipe_policies, f'{_POLICIES}:{policy}'])}"
    return scene.wait(scene.train(policies, *overrides, variables={"TRAINWRIGHT_FAULT": json.dumps(where)}))


_SMALLEST_DISK = 96 * 2**20
_FULL = os.strerror(errno.ENOSPC)
_LATE = (watched_commands.JOINING, *watched_commands.TRAINING, watched_commands.EXPORT)


@register_fault(
    "a disk that fills up",
    spreads=ANY,
    phases=_LATE,
    variants=("until the end", "for a moment", "but for 300 KiB", "and SIGTERM"),
    share=5,
    needs=explain_refused_mounts,
)
def fill_disk(scene: Scene) -> None:
    """The run reports it and continues; if it cannot finish it says what to do, and is resumed once there is space."""
    unshare_mounts()
    scene.run = scene.work / "disk" / "run"
    mount_disk(scene.run.parent, compute_disk_size(scene))
    command = start_in_phase(scene)
    filler = scene.run.parent / "filler"
    fill_directory(filler, but=300 * 1024 if scene.variant.startswith("but") else 0)
    if scene.variant == "for a moment":
        time.sleep(scene.draw.uniform(0.05, 0.8))
        filler.unlink()
    elif scene.variant == "and SIGTERM":
        time.sleep(scene.draw.uniform(0.0, 0.3))
        command.send(signal.SIGTERM)
    result = scene.wait(command)
    filler.unlink(missing_ok=True)
    scene.expect(result, (FINISHED, FAILED, MACHINE, STOPPED), "resume" if result.code == STOPPED else _FULL)
    if scene.run.exists():
        invariants.check_checkpoints_complete(scene.run)
    scene.resume_and_compare() if result.code else scene.check_undisturbed()


@register_fault(
    "files limited in size",
    spreads=ANY,
    phases=watched_commands.TRAINING,
    variants=("to the end", "for a moment"),
    share=1.5,
)
def limit_files(scene: Scene) -> None:
    """A quota or `ulimit -f`: a checkpoint that does not fit is not left half-written, and earlier ones stay."""
    command = start_in_phase(scene)
    pids = [command.pid, *scene.list_workers(command).values()]
    _limit_files(pids, 100_000)
    if scene.variant == "for a moment":
        time.sleep(scene.draw.uniform(0.05, 0.6))
        _limit_files(pids, resource.RLIM_INFINITY)
    result = scene.wait(command)
    scene.expect(result, (FINISHED, FAILED, MACHINE), os.strerror(errno.EFBIG))
    invariants.check_checkpoints_complete(scene.run)
    scene.resume_and_compare() if result.code else scene.check_undisturbed()


@register_fault(
    "a run directory that becomes read-only", spreads=ANY, phases=_LATE, share=1.5, needs=explain_refused_mounts
)
def turn_read_only(scene: Scene) -> None:
    """Failed checkpoints are reported, the run does not end as if it were saved, and it can be resumed."""
    unshare_mounts()
    command = start_in_phase(scene)
    make_read_only(scene.run)
    result = scene.wait(command)
    make_read_only(scene.run, False)
    scene.expect(result, (FINISHED, FAILED, MACHINE), "read-only")
    invariants.check_checkpoints_complete(scene.run)
    scene.resume_and_compare() if result.code else scene.check_undisturbed()


@register_fault(
    "a place that cannot be written to",
    spreads=ANY,
    variants=("new", "resumed", "full"),
    share=1,
    needs=explain_refused_mounts,
)
def start_read_only(scene: Scene) -> None:
    """Refused with a clear message before training starts."""
    unshare_mounts()
    if scene.variant == "resumed":
        scene.provide_stopped_run()
        make_read_only(scene.run)
        result = scene.go_on()
        make_read_only(scene.run, False)
        scene.expect(result, (REQUEST, MACHINE, FAILED), "read-only")
        scene.resume_and_compare()
        return
    scene.run = scene.work / "disk" / "run"
    if scene.variant == "full":
        mount_disk(scene.run.parent, 1 << 20)
        fill_directory(scene.run.parent / "filler")
    else:
        scene.run.parent.mkdir()
        make_read_only(scene.run.parent)
    result = scene.wait(scene.train())
    scene.expect(result, (REQUEST, MACHINE, FAILED), "read-only" if scene.variant == "new" else _FULL)
    require(not scene.run.exists(), "a run is there")


def compute_disk_size(scene: Scene) -> int:
    """Return the bytes of a disk, in memory, on which the run has room for one more checkpoint than it keeps.

    Raises Skipped if there is not so much memory.
    """
    run = sum(file.stat().st_size for file in scene.reference().rglob("*") if file.is_file())
    size, free = max(_SMALLEST_DISK, 2 * run), detect().usable_bytes
    if size > free:
        raise Skipped(
            f"a disk of {text.format_bytes(size)} for the run, in memory, of which {text.format_bytes(free)} are free"
        )
    return size


def _limit_files(pids: list[int], size: int) -> None:
    for pid in pids:
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        except ProcessLookupError:
            continue
