"""Disks that are full, read-only, or limit the size of files."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time

from trainwright.faults.drills import invariants, phases
from trainwright.faults.drills.faults.kills import started
from trainwright.faults.drills.invariants import Skipped, require
from trainwright.faults.drills.kinds import ANY, fault
from trainwright.faults.drills.mounts import fill, make_read_only, mount_disk, mounts_refused, own_mounts
from trainwright.faults.drills.trial_environment import FAILED, FINISHED, MACHINE, REQUEST, STOPPED, Scene
from trainwright.machine.detect import detect
from trainwright.utils import text

_SMALLEST_DISK = 96 * 2**20
_FULL = os.strerror(errno.ENOSPC)
_LATE = (phases.JOINING, *phases.TRAINING, phases.EXPORT)


@fault(
    "a disk that fills up",
    spreads=ANY,
    phases=_LATE,
    variants=("until the end", "for a moment", "but for 300 KiB", "and SIGTERM"),
    share=5,
    needs=mounts_refused,
)
def full_disk(scene: Scene) -> None:
    """The run reports it and continues; if it cannot finish it says what to do, and is resumed once there is space."""
    _on_own_disk(scene)
    command = started(scene)
    filler = scene.run.parent / "filler"
    fill(filler, but=300 * 1024 if scene.variant.startswith("but") else 0)
    if scene.variant == "for a moment":
        time.sleep(scene.draw.uniform(0.05, 0.8))
        filler.unlink()
    elif scene.variant == "and SIGTERM":
        time.sleep(scene.draw.uniform(0.0, 0.3))
        command.send(signal.SIGTERM)
    ended = scene.wait(command)
    filler.unlink(missing_ok=True)
    scene.expect(ended, (FINISHED, FAILED, MACHINE, STOPPED), "resume" if ended.code == STOPPED else _FULL)
    if scene.run.exists():
        invariants.checkpoints_complete(scene.run)
    if ended.code != FINISHED:
        ended = scene.go_on()
        scene.expect(ended, (FINISHED,))
    scene.as_undisturbed()


@fault("files limited in size", spreads=ANY, phases=phases.TRAINING, variants=("to the end", "for a moment"), share=1.5)
def limited_files(scene: Scene) -> None:
    """A quota or `ulimit -f`: a checkpoint that does not fit is not left half-written, and earlier ones stay."""
    command = started(scene)
    pids = [command.pid, *scene.workers(command).values()]
    _limit_files(pids, 100_000)
    if scene.variant == "for a moment":
        time.sleep(scene.draw.uniform(0.05, 0.6))
        _limit_files(pids, resource.RLIM_INFINITY)
    ended = scene.wait(command)
    scene.expect(ended, (FINISHED, FAILED, MACHINE), os.strerror(errno.EFBIG))
    invariants.checkpoints_complete(scene.run)
    if ended.code != FINISHED:
        ended = scene.go_on()
        scene.expect(ended, (FINISHED,))
    scene.as_undisturbed()


@fault("a run directory that becomes read-only", spreads=ANY, phases=_LATE, share=1.5, needs=mounts_refused)
def read_only_later(scene: Scene) -> None:
    """Failed checkpoints are reported, the run does not end as if it were saved, and it can be resumed."""
    own_mounts()
    command = started(scene)
    make_read_only(scene.run)
    ended = scene.wait(command)
    make_read_only(scene.run, False)
    scene.expect(ended, (FINISHED, FAILED, MACHINE), "read-only")
    invariants.checkpoints_complete(scene.run)
    if ended.code != FINISHED:
        scene.expect(scene.go_on(), (FINISHED,))
    scene.as_undisturbed()


@fault(
    "a place that cannot be written to", spreads=ANY, variants=("new", "resumed", "full"), share=1, needs=mounts_refused
)
def read_only_from_the_start(scene: Scene) -> None:
    """Refused with a clear message before training starts."""
    own_mounts()
    if scene.variant == "resumed":
        scene.stopped_run()
        make_read_only(scene.run)
        ended = scene.go_on()
        make_read_only(scene.run, False)
        scene.expect(ended, (REQUEST, MACHINE, FAILED), "read-only")
        scene.resumes()
        return
    scene.run = scene.work / "disk" / "run"
    if scene.variant == "full":
        mount_disk(scene.run.parent, 1 << 20)
        fill(scene.run.parent / "filler")
    else:
        scene.run.parent.mkdir()
        make_read_only(scene.run.parent)
    ended = scene.wait(scene.train())
    scene.expect(ended, (REQUEST, MACHINE, FAILED), "read-only" if scene.variant == "new" else _FULL)
    require(not scene.run.exists(), "a run is there")


def _on_own_disk(scene: Scene) -> None:
    own_mounts()
    scene.run = scene.work / "disk" / "run"
    mount_disk(scene.run.parent, disk_size(scene))


def disk_size(scene: Scene) -> int:
    """Return the bytes of a disk, in memory, on which the run has room for one more checkpoint than it keeps.

    Raises Skipped if there is not so much memory.
    """
    run = sum(file.stat().st_size for file in scene.reference().rglob("*") if file.is_file())
    size, free = max(_SMALLEST_DISK, 2 * run), detect().usable_bytes
    if size > free:
        raise Skipped(f"a disk of {text.size(size)} for the run, in memory, of which {text.size(free)} are free")
    return size


def _limit_files(pids: list[int], size: int) -> None:
    for pid in pids:
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        except ProcessLookupError:
            continue
