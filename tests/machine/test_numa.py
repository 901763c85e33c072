"""Processes are bound to the node of their GPU, unless something has bound them: by trees as the kernel shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.machine.test_cgroups import V2, plant
from tests.support.commands import environment
from trainwright.machine.detect import _read_address
from trainwright.machine.processor import bind, find_node_to_bind

GPU = "0000:3B:00.0"  # as NVML writes it; sysfs has lower case
EVERY = set(range(16))


def machine(root: Path, node: str = "1", nodes: int = 2, cores: str = "0-15") -> Path:
    """A machine of 16 cores, dealt over its nodes in turns of four, and the GPU's node."""
    plant(root, V2, "0::/job\n", job={"cpuset.cpus.effective": cores})
    device = root / "sys/bus/pci/devices" / GPU.lower()
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for number in range(nodes):
        place = root / f"sys/devices/system/node/node{number}"
        place.mkdir(parents=True)
        quarters = range(number, 4, nodes)
        (place / "cpulist").write_text(",".join(f"{4 * q}-{4 * q + 3}" for q in quarters) + "\n")
    (root / "sys/devices/system/node/online").write_text(f"0-{nodes - 1}\n" if nodes > 1 else "0\n")
    (root / "sys/devices/system/cpu").mkdir()
    (root / "sys/devices/system/cpu/online").write_text("0-15\n")
    return root


def cores_of(root: Path, allowed: set[int]) -> set[int] | None:
    node = find_node_to_bind(GPU, allowed, root)
    return None if node is None else set(node.cores)


def test_a_process_gets_the_cores_of_its_gpus_node(tmp_path: Path) -> None:
    found = find_node_to_bind(GPU, EVERY, machine(tmp_path))
    assert found is not None and found.number == 1
    assert found.cores == {4, 5, 6, 7, 12, 13, 14, 15}


def test_cores_outside_the_control_group_are_left_out(tmp_path: Path) -> None:
    allowed = {0, 1, 2, 3, 4, 5}
    assert cores_of(machine(tmp_path, cores="0-5"), allowed) == {4, 5}


def test_a_control_group_without_cores_has_those_of_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, cores="")
    assert cores_of(root, EVERY) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores_of(root, EVERY - {0}) is None


@pytest.mark.parametrize("allowed", [{4, 5, 6, 7}, {0, 1}, set(range(8)), EVERY - {15}])
def test_a_process_that_is_bound_stays_so(tmp_path: Path, allowed: set[int]) -> None:
    """Slurm's --cpu-bind, torchrun's --numa-binding, numactl and taskset leave it fewer cores than its group has."""
    assert cores_of(machine(tmp_path), allowed) is None


@pytest.mark.parametrize(
    ("node", "nodes", "cores", "allowed"),
    [
        ("-1", 2, "0-15", EVERY),  # a virtual machine that does not say
        ("", 2, "0-15", EVERY),
        ("0", 1, "0-15", EVERY),
        ("1", 2, "0-3", {0, 1, 2, 3}),  # none of its cores may be used
        ("1", 2, "4-7", {4, 5, 6, 7}),  # no others may be
    ],
)
def test_there_may_be_nothing_to_choose(tmp_path: Path, node: str, nodes: int, cores: str, allowed: set[int]) -> None:
    assert cores_of(machine(tmp_path, node, nodes, cores), allowed) is None


def test_an_unknown_device_changes_nothing(tmp_path: Path) -> None:
    machine(tmp_path)
    assert find_node_to_bind("0000:99:00.0", EVERY, tmp_path) is None
    assert bind(None, tmp_path) is None


def test_the_process_is_moved_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: EVERY, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: moved.append(set(cores)), raising=False)
    # Memory of the first process of the tests stays where it is.
    monkeypatch.setattr("platform.machine", lambda: "unknown")
    assert bind(GPU, machine(tmp_path)) == "bound to 8 cores of NUMA node 1, its GPU's"
    assert moved == [{4, 5, 6, 7, 12, 13, 14, 15}]


@pytest.mark.parametrize(("bus", "address"), [("00000000:3B:00.0", GPU.lower()), (b"00000001:01:00.0", "0001:01:00.0")])
def test_the_address_is_the_one_of_sysfs(monkeypatch: pytest.MonkeyPatch, bus: object, address: str) -> None:
    monkeypatch.setattr("pynvml.nvmlDeviceGetPciInfo", lambda handle: SimpleNamespace(busId=bus))
    assert _read_address(None) == address


def test_memory_is_taken_from_the_node() -> None:
    """Every system has a node 0; some forbid to choose it."""
    code = (
        "from trainwright.machine.processor import prefer_memory\n"
        "chosen, policies = prefer_memory(0), open('/proc/self/numa_maps').read()\n"
        "assert not chosen or 'prefer' in policies, policies\n"
        "assert not prefer_memory(1023), 'there is no such node'\n"
    )
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel does not know NUMA")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
