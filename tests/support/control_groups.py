"""Real control groups, where they can be made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[Path]:
    """A group with a limit and one inside of it without, for a process to go into; skips where none can be made."""
    tops = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    outer = next((top for top in tops if (top / "cgroup.procs").exists()), tops[1]) / f"trainwright-test-{os.getpid()}"
    try:
        outer.mkdir()
        name = "memory.limit_in_bytes" if (outer / "memory.limit_in_bytes").exists() else "memory.max"
        (outer / name).write_text(str(limit))
        (outer / "inner").mkdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            outer.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield outer / "inner"
    finally:
        for group in (outer / "inner", outer):
            with contextlib.suppress(OSError):
                group.rmdir()
