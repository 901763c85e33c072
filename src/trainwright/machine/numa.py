"""Bind a process to the cores and the memory of its GPU's NUMA node. Imports no torch.

Copies between a GPU and memory of another node pass the link between processors, which all GPUs there share. See
Documentation/ABI/testing/sysfs-bus-pci and Documentation/ABI/stable/sysfs-devices-node of the kernel.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from trainwright.machine.cgroups import groups
from trainwright.machine.system_files import read
from trainwright.utils.text import plural

_NODES = "sys/devices/system/node"
# Number of set_mempolicy(2), which the C library does not wrap, and its policy to prefer a node but use others if it is
# full: offloaded states may be larger than one node.
_SET_MEMORY_POLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
_PREFERRED = 1
_MOST_NODES = 1024


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node and those of its cores that this process may use."""

    number: int
    cores: frozenset[int]


def bind(address: str | None, root: Path = Path("/")) -> str | None:
    """Bind this process to the node of the device at PCI ``address``; return what was done, None if nothing.

    Call this before threads are started, which inherit it, and before memory is used, which stays where it is.

    Args:
        root: the directory of /proc and /sys.
    """
    if address is None or not hasattr(os, "sched_setaffinity"):
        return None
    node = node_to_bind(address, os.sched_getaffinity(0), root)
    if node is None:
        return None
    try:
        os.sched_setaffinity(0, node.cores)
    except OSError:  # the control group has changed since
        return None
    memory = " and its memory" if prefer_memory(node.number) else ""
    return f"bound to {plural(len(node.cores), 'core')} of NUMA node {node.number}, its GPU's{memory}"


def node_to_bind(address: str, allowed: Set[int], root: Path = Path("/")) -> NumaNode | None:
    """Return the node of the device at PCI ``address``, or None if the process should stay as it is.

    That is the case if the node is not known or the only one; if the process may not use its cores; and if it is bound
    already, by a launcher or by its user: to fewer cores than its control group has.

    Args:
        allowed: the cores that the process may run on.
    """
    number = read(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    if not number.isdigit() or len(_numbers(read(root / _NODES / "online"))) < 2:
        return None
    cores = _numbers(read(root / _NODES / f"node{number}/cpulist")) & allowed
    if not cores or cores == allowed or allowed < _available(root):
        return None
    return NumaNode(int(number), frozenset(cores))


def prefer_memory(node: int) -> bool:
    """Have the kernel allocate this process's memory on ``node`` while it has any; return whether it does."""
    number = _SET_MEMORY_POLICY.get(platform.machine())
    if number is None or not sys.platform.startswith("linux") or node >= _MOST_NODES:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    # Fails where it is not permitted, as in some containers.
    return ctypes.CDLL(None, use_errno=True).syscall(number, _PREFERRED, mask, _MOST_NODES + 1) == 0


def _available(root: Path) -> set[int]:
    """Return the cores that processes of this control group may use, those of the machine if it sets none."""
    for group, version in groups("cpuset", root):
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        if cores := next(filter(None, (_numbers(read(group / name)) for name in names)), None):
            return cores
    return _numbers(read(root / "sys/devices/system/cpu/online"))


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
