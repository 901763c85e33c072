"""Machines that are short of something: open files, shared memory, memory."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path

from trainwright.faults.drills import invariants, watched_commands
from trainwright.faults.drills.damage import (
    explain_refused_mounts,
    fill_directory,
    make_read_only,
    mount_disk,
    unshare_mounts,
)
from trainwright.faults.drills.kills import start_in_phase
from trainwright.faults.drills.kinds import ANY, register_fault
from trainwright.faults.drills.trial_environment import FAILED, FAULT, FINISHED, MACHINE, REQUEST, STOPPED, Scene

_CGROUPS = Path("/sys/fs/cgroup")
_TOO_FEW = r"open files|files open|ulimit -n"
_SHORT = (FINISHED, REQUEST, MACHINE, FAILED)


@register_fault(
    "few open files", spreads=ANY, variants=("16", "20", "24", "32", "48", "96", "150", "170", "256"), share=3
)
def few_files(scene: Scene) -> None:
    """`ulimit -n`: the run finishes, or says that this is too few."""
    number = int(scene.variant)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (number, number))
    ended = scene.wait(scene.train(before=limit))
    scene.expect(ended, _SHORT, _TOO_FEW)
    if ended.code == FINISHED:
        scene.check_undisturbed()
    else:
        scene.resume_and_compare()


@register_fault("no more open files", spreads=ANY, phases=watched_commands.TRAINING, share=1)
def no_more_files(scene: Scene) -> None:
    """Another program of the user has opened them all: checkpoints fail in words, and the run is not lost."""
    command = start_in_phase(scene)
    for pid in scene.list_workers(command).values():
        number = len(os.listdir(f"/proc/{pid}/fd")) + scene.draw.randrange(2)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, number))
    ended = scene.wait(command)
    scene.expect(ended, _SHORT, _TOO_FEW)
    invariants.check_checkpoints_complete(scene.run)
    scene.check_undisturbed() if ended.code == FINISHED else scene.resume_and_compare()


@register_fault(
    "a full /dev/shm",
    spreads=ANY,
    variants=("full", "64 KiB", "read-only"),
    share=1.5,
    needs=explain_refused_mounts,
)
def full_shared_memory(scene: Scene) -> None:
    """The run finishes, or says that there is no shared memory."""
    unshare_mounts()
    shared = Path("/dev/shm")
    mount_disk(shared, 64 * 1024)
    if scene.variant == "full":
        fill_directory(shared / "filler")
    if scene.variant == "read-only":
        make_read_only(shared)
    ended = scene.wait(scene.train())
    scene.expect(ended, _SHORT, "/dev/shm|shared memory")
    if ended.code == FINISHED:
        scene.check_undisturbed()


def memory_cgroup_refused() -> str | None:
    """Return why a cgroup cannot limit memory here; None if it can."""
    for top, file in ((_CGROUPS / "memory", "memory.limit_in_bytes"), (_CGROUPS, "memory.max")):
        probe = top / f"faults-{uuid.uuid4().hex[:8]}"
        try:
            probe.mkdir()
        except OSError:
            continue
        try:
            if (probe / file).exists():
                return None
        finally:
            probe.rmdir()
    return "no cgroup for memory can be made"


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[Path]:
    """Make a cgroup with this memory limit in bytes; a process joins it when its pid is written to the yielded file."""
    old = (_CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    group = (_CGROUPS / "memory" if old else _CGROUPS) / f"faults-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(size))
        yield group / "cgroup.procs"
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def join(group: Path) -> None:
    """Move this process into a cgroup."""
    group.write_text(str(os.getpid()))


@register_fault(
    "a cgroup with less memory than the run takes",
    spreads=ANY,
    variants=("120", "160", "220", "280", "340", "400", "500", "700"),
    share=3,
    needs=memory_cgroup_refused,
)
def small_cgroup(scene: Scene) -> None:
    """In MiB. The launcher lives to say that memory ran out; a run that can be made smaller is."""
    with limited_memory(int(scene.variant) * 2**20) as group:
        ended = scene.wait(scene.train(*scene.setting.halvable, before=functools.partial(join, group)))
    scene.expect(ended, _SHORT, "memory|does not fit.* of .*MiB")
    if ended.code == FINISHED:
        scene.check_undisturbed(scene.setting.halvable, exact=False)
    elif scene.run.exists():
        invariants.check_checkpoints_complete(scene.run)
        scene.resume_and_compare(overrides=scene.setting.halvable, exact=False)


@register_fault("CPU time that runs out", spreads=ANY, variants=("soft", "hard"), share=0.7)
def no_more_time(scene: Scene) -> None:
    """`ulimit -t`: the kernel ends a worker in mid-run."""
    command = scene.train("train.max_steps=4000", "checkpoint.every=20", "evaluate.every=null")
    scene.wait_until(command, lambda: watched_commands.has_event(scene.run, "checkpoint"))
    rank, worker = scene.draw_worker(command)
    limits = (0, resource.RLIM_INFINITY) if scene.variant == "soft" else (0, 0)
    resource.prlimit(worker, resource.RLIMIT_CPU, limits)
    ended = scene.wait(command)
    scene.expect(ended, (FAILED, FAULT, STOPPED), "resume" if ended.code == STOPPED else f"rank {rank}")
    invariants.check_none_lost(scene.run)
