"""Too few files or too little shared memory is said before anything starts."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, environment
from tests.support.runs import TINY
from trainwright.run.limits import check_process_limits


def test_what_is_enough() -> None:
    assert check_process_limits(1024, 2**26, 2, 2) is None
    assert check_process_limits(None, None, 64, 512) is None
    assert check_process_limits(65536, 2**26, 8, 1024) is None


def test_too_few_files() -> None:
    said = check_process_limits(24, 2**26, 2, 2)
    assert said is not None and "the limit of open files is 24 (ulimit -n)" in said and "`ulimit -n 1024`" in said
    said = check_process_limits(1024, 2**26, 8, 1024)
    assert said is not None and "a run of 1024 processes needs 8448" in said


def test_shared_memory_that_is_full() -> None:
    said = check_process_limits(1024, 4096, 2, 2)
    assert said is not None and said.startswith("/dev/shm has 4,096 bytes free") and "--shm-size" in said


def trainwright(*before: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "trainwright", "train", str(TINY), "parallel.num_processes=2"]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


def test_a_shell_with_few_files_is_refused_in_words(tmp_path: Path) -> None:
    done = trainwright("sh", "-c", 'ulimit -n 24; exec "$@"', "sh", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: the limit of open files is 24 (ulimit -n)")
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_a_soft_limit_is_raised() -> None:
    program = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))\n"
        "from trainwright.run.limits import check_limits; check_limits(2, 2)\n"
        "assert 24 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= hard"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1024:
        pytest.skip("the hard limit is low here")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting takes a superuser")
def test_a_full_dev_shm_is_refused_in_words(tmp_path: Path) -> None:
    fill = "dd if=/dev/zero of=/dev/shm/full bs=64k count=1 2>/dev/null"
    full = f'mount -t tmpfs -o size=64k none /dev/shm && {fill}; exec "$@"'
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    done = trainwright("unshare", "-m", "sh", "-c", full, "sh", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: /dev/shm has 0 bytes free") and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
