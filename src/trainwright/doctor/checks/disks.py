"""Check the disks of checkpoints, caches and temporary files: their speed, and the space on them."""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.machine.cgroups import read_text
from trainwright.machine.links import build_pcie_link
from trainwright.utils.text import format_bytes, format_seconds

_SECONDS = 0.8  # of writing, and of reading
_CHUNK, _MOST = 2**20, 2**26  # bytes
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
_SLOW = 100e6  # bytes a second, which a single hard disk has
_LEAST_FREE = 5 * 2**30
# A checkpoint of a model of a billion parameters: fp32 weights and AdamW's two moments.
_CHECKPOINT = 12 * 10**9
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s of a lane


@dataclass(frozen=True)
class Speed:
    """Bytes per second; None if nothing could be read back."""

    write: float
    read: float | None


def check(context: CheckContext) -> CheckResult:
    """Write and read a temporary file in every directory, past the page cache where the file system can."""
    facts: list[str] = []
    findings: list[Finding] = []
    for device, (directory, directories) in _group_by_file_system(context.directories).items():
        text = " and ".join(map(str, directories))
        try:
            speed = measure_speed(directory)
        except OSError as error:
            findings.append(_describe_failed_write(text, error))
            continue
        read_back = "" if speed.read is None else f", read {speed.read / 1e6:,.0f} MB/s"
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        facts.append(
            f"{text}: write {speed.write / 1e6:,.0f} MB/s{read_back}, {format_bytes(free)} free; "
            f"{_describe_device(device, directory)}"
        )
        findings += [*_check_speed(text, speed), *_check_space(text, free)]
    return CheckResult(tuple(facts), tuple(findings))


def measure_speed(directory: Path) -> Speed:
    """Return the speed of sequential writes, flushed to the disk, and of reads.

    Raises:
        OSError: the directory cannot be written.
    """
    file = directory / f".trainwright-doctor-{secrets.token_hex(6)}"
    chunk = mmap.mmap(-1, _CHUNK)  # aligned to a page, as direct I/O requires
    chunk.write(secrets.token_bytes(_CHUNK))
    descriptor = _open_direct(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            total, start = 0, time.perf_counter()
            while total < _MOST and time.perf_counter() - start < _SECONDS:
                total += os.write(descriptor, chunk)
            os.fsync(descriptor)
            write = total / (time.perf_counter() - start)
        finally:
            os.close(descriptor)
        return Speed(write, _read_rate(file, chunk))
    finally:
        file.unlink(missing_ok=True)


def _read_rate(file: Path, chunk: mmap.mmap) -> float | None:
    if not _DIRECT:
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY | _DIRECT)
    except OSError:  # the file would be read from memory
        return None
    try:
        total, start = 0, time.perf_counter()
        while time.perf_counter() - start < _SECONDS and (count := os.readv(descriptor, [chunk])):
            total += count
        return total / (time.perf_counter() - start)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _open_direct(file: Path, flags: int) -> int:
    """Open for direct I/O, or for buffered I/O on file systems without it (tmpfs, some network file systems)."""
    try:
        return os.open(file, flags | _DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    file.unlink(missing_ok=True)  # some file systems have created the file already
    return os.open(file, flags, 0o600)


def _group_by_file_system(directories: tuple[Path, ...]) -> dict[int, tuple[Path, list[Path]]]:
    """Return for each file system, by its device, a directory that exists and the directories that are asked for."""
    by_device: dict[int, tuple[Path, list[Path]]] = {}
    for directory in dict.fromkeys(directories):
        existing = next(path for path in (directory, *directory.parents) if os.path.isdir(path))
        by_device.setdefault(existing.stat().st_dev, (existing, []))[1].append(directory)
    return by_device


def _describe_failed_write(shown: str, error: OSError) -> Finding:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "remove old checkpoints and caches, or set logging.run_directory and TRAINWRIGHT_CACHE to another disk"
    else:
        fix = "give this user write permission, or set logging.run_directory and TRAINWRIGHT_CACHE elsewhere"
    what = f"{shown}: cannot be written: {error.strerror or error}"
    return Finding(Severity.BROKEN, what, "checkpoints, caches and temporary files are written there", fix)


def _check_speed(shown: str, speed: Speed) -> Iterator[Finding]:
    slowest = min(rate for rate in (speed.write, speed.read) if rate is not None)
    if slowest < _SLOW:
        which = "written" if slowest == speed.write else "read"
        yield Finding(
            Severity.WARNING,
            f"slow disk: {shown}: {slowest / 1e6:,.1f} MB/s are {which}, less than a single hard disk "
            f"({_SLOW / 1e6:.0f} MB/s)",
            f"a checkpoint of a billion parameters with AdamW takes {format_seconds(_CHECKPOINT / slowest)}",
            "set logging.run_directory, TRAINWRIGHT_CACHE and TMPDIR to a local disk; on a virtual machine check the "
            "limits of the volume (its throughput, its burst credit, io.max of the control group)",
        )


def _check_space(shown: str, free: int) -> Iterator[Finding]:
    if free < _LEAST_FREE:
        what = f"{shown}: only {format_bytes(free)} are free"
        why = f"a checkpoint of a billion parameters with AdamW has {format_bytes(_CHECKPOINT)}"
        fix = "remove old checkpoints and caches; checkpoint.keep_last limits how many are kept"
        yield Finding(Severity.WARNING, what, why, fix)


def _describe_device(device: int, directory: Path) -> str:
    """Return the kind of the disk, with the rate of its link if it is an NVMe disk."""
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    kind = _find_file_system(directory)
    if not block.exists():
        return kind
    path = block.resolve()
    disk = path if (path / "queue").is_dir() else path.parent  # a partition is below its disk
    name = f"{kind} on {disk.name}"
    if disk.name.startswith("nvme"):
        rate = _read_link_rate(disk / "device" / "device")
        return f"{name}, NVMe" + ("" if rate is None else f", its link has {rate / 1e6:,.0f} MB/s")
    if disk.name.startswith(("vd", "xvd", "loop", "dm-", "md", "zram")):
        return name  # what is behind it is unknown
    return f"{name}, {'a hard disk' if read_text(disk / 'queue' / 'rotational').strip() == '1' else 'an SSD'}"


def _find_file_system(directory: Path) -> str:
    mounts = [m for m in psutil.disk_partitions(all=True) if directory.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown file system"


def _read_link_rate(device: Path) -> float | None:
    """Return bytes per second of the PCIe link of a device."""
    speed, lanes = read_text(device / "current_link_speed"), read_text(device / "current_link_width").strip()
    match = re.match(r"[\d.]+", speed)
    generation = _GENERATIONS.get(match[0]) if match else None
    if generation is None or not lanes.isdigit():
        return None
    return build_pcie_link(generation, int(lanes)).bandwidth
