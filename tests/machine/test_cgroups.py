"""What control groups leave a process: by trees as the kernel shows them, and by real ones where they can be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.commands import PATIENCE, environment
from tests.support.control_groups import real_group
from trainwright.machine.cgroups import read_cpu_limit, read_free_memory, read_memory_limit

GIB = 2**30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "34 31 0:31 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
V1_CPU = "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


def plant(root: Path, mounts: str, own: str, **groups: dict[str, object]) -> Path:
    """Files below a root: the mounts, this process's groups, and the files of each group by its path."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    (root / "proc/self/cgroup").write_text(own)
    for path, files in groups.items():
        directory = root / "sys/fs/cgroup" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name).write_text(f"{value}\n")
    return root


def v2(limit: object, current: int = 0, files: int = 0) -> dict[str, object]:
    statistics = f"anon {current}\ninactive_file {files}\nactive_file 0"
    return {"memory.max": limit, "memory.current": current, "memory.stat": statistics}


def v1(limit: object, usage: int = 0, files: int = 0) -> dict[str, object]:
    statistics = f"inactive_file 1\ntotal_inactive_file {files}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": statistics}


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    groups = {"a": v2(8 * GIB, 5 * GIB), "a/b": v2(6 * GIB, GIB), "a/b/c": v2("max", GIB)}
    root = plant(tmp_path, V2, "0::/a/b/c\n", **groups)
    assert read_memory_limit(root) == 6 * GIB
    assert read_free_memory(root) == 3 * GIB  # of the outer one, which others use too


def test_pages_of_files_are_given_up(tmp_path: Path) -> None:
    root = plant(tmp_path, V2, "0::/a\n", a=v2(4 * GIB, 3 * GIB, 2 * GIB))
    assert read_free_memory(root) == 3 * GIB


def test_version_1(tmp_path: Path) -> None:
    unlimited = v1(2**63 - 4096, GIB)
    groups = {"memory": unlimited, "memory/slurm": unlimited, "memory/slurm/job": v1(4 * GIB, 2 * GIB, GIB)}
    groups["memory/slurm/job/step"] = v1(9 * GIB, GIB)
    root = plant(tmp_path, V1, "4:memory:/slurm/job/step\n0::/\n", **groups)
    assert (read_memory_limit(root), read_free_memory(root)) == (4 * GIB, 3 * GIB)


def test_a_container_that_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = plant(tmp_path, V2, "0::/docker/0123\n", **{".": v2(2 * GIB, GIB)})
    assert (read_memory_limit(root), read_free_memory(root)) == (2 * GIB, GIB)


def test_a_mount_of_a_part_of_the_tree(tmp_path: Path) -> None:
    """As Docker mounts version 1: the container's group is the mount's root."""
    mounts = V1.replace(" / /sys", " /docker/0123 /sys")
    root = plant(tmp_path, mounts, "4:memory:/docker/0123/job\n", **{"memory": v1(3 * GIB), "memory/job": v1(2 * GIB)})
    assert read_memory_limit(root) == 2 * GIB


def test_nothing_limits_where_there_are_no_groups(tmp_path: Path) -> None:
    assert read_memory_limit(tmp_path) is read_free_memory(tmp_path) is read_cpu_limit(tmp_path) is None
    root = plant(tmp_path, V2, "0::/a\nnonsense\n", a={"memory.max": "max", "cpu.max": "max 100000"})
    assert read_memory_limit(root) is read_free_memory(root) is read_cpu_limit(root) is None


def test_cores_of_all_groups_above(tmp_path: Path) -> None:
    root = plant(tmp_path / "2", V2, "0::/a/b\n", **{"a": {"cpu.max": "200000 100000"}, "a/b": {"cpu.max": "max 1"}})
    assert read_cpu_limit(root) == 2
    files = {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000}
    root = plant(tmp_path / "1", V1_CPU, "2:cpu,cpuacct:/a\n", **{"cpu,cpuacct/a": files})
    assert read_cpu_limit(root) == 1.5


def test_a_real_group(tmp_path: Path) -> None:
    with real_group(3 * GIB) as group:
        program = (
            "import json, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
            "from trainwright.machine.cgroups import read_free_memory, read_memory_limit\n"
            "print(json.dumps([read_memory_limit(), read_free_memory()]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(group)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stderr
    limit, free = json.loads(done.stdout)
    assert limit == 3 * GIB and 0 < free <= limit
