"""The resources of each process on its machine, compared by rank 0 before anything is created; which GPUs answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from trainwright import __version__
from trainwright.errors import MachineError
from trainwright.machine.machine import Machine
from trainwright.run.group.environment import LaunchEnvironment


@dataclass(frozen=True)
class Member:
    """One process. `gpus`: an identity for each GPU it sees; `cores`: the cores it may run on."""

    host: str
    node: int
    local_rank: int
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    version: str = __version__

    @classmethod
    def here(cls, environment: LaunchEnvironment) -> Member:
        """Describe this process."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(socket.gethostname(), environment.node, environment.local_rank, list_visible_gpus(), tuple(cores))

    @classmethod
    def read(cls, posted: Mapping[str, object]) -> Member:
        """Build from the values of ``to_plain``."""
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in posted.items()}
        return cls(**values)  # type: ignore[arg-type]

    def to_plain(self) -> dict[str, object]:
        """Return the member as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class DeviceSlot:
    """The part of its machine that a process uses: which of the visible GPUs, whether it has its cores alone, and how
    many processes of the run share the machine.
    """

    gpu: int
    own_cores: bool
    local_size: int = 1


def assign_device_slots(members: Sequence[Member]) -> list[DeviceSlot]:
    """Return a slot for every rank. Raises MachineError if the processes do not fit on their machines."""
    peer = next((member for member in members if member.version != members[0].version), None)
    if peer is not None:
        raise MachineError(
            f"{members[0].host} has trainwright {members[0].version}, and {peer.host} {peer.version}; install "
            "the same on both"
        )
    slots: dict[int, DeviceSlot] = {}
    for ranks in _iterate_machines(members):
        local_members = [members[rank] for rank in ranks]
        _check_local_ranks(ranks, local_members)
        apart = _has_enough_gpus(members[0], local_members)
        bound = _is_disjoint([member.cores for member in local_members])
        for rank, member in zip(ranks, local_members, strict=True):
            slots[rank] = DeviceSlot(0 if apart else member.local_rank, bound, len(local_members))
    return [slots[rank] for rank in range(len(members))]


def list_first_ranks(members: Sequence[Member]) -> list[int]:
    """Return the first rank of each machine, rank 0 first."""
    return [ranks[0] for ranks in _iterate_machines(members)]


def list_visible_gpus() -> tuple[str, ...]:
    """Return the identities of the GPUs that this process sees, so that processes can tell whether they share one."""
    from trainwright.machine.detect import detect

    gpus = detect().gpus
    if not gpus or gpus[0].vendor != "NVIDIA":
        return tuple(gpu.uuid or gpu.name for gpu in gpus)
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        every = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(every)
    names = [name.strip() for name in visible.split(",")]
    identities = [
        every[int(name)] if name.isdigit() else next((uuid for uuid in every if uuid.startswith(name)), name)
        for name in names
        if not name.isdigit() or int(name) < len(every)
    ]
    return tuple(identities)


def _iterate_machines(members: Sequence[Member]) -> Iterator[list[int]]:
    """Yield the ranks that share a machine, by the machine's name and the launcher's number for it."""
    keys = list(dict.fromkeys((member.host, member.node) for member in members))
    for key in keys:
        yield [rank for rank, member in enumerate(members) if (member.host, member.node) == key]


def _check_local_ranks(ranks: Sequence[int], here: Sequence[Member]) -> None:
    rank_of: dict[int, int] = {}
    for rank, member in zip(ranks, here, strict=True):
        if member.local_rank in rank_of:
            raise MachineError(
                f"ranks {rank_of[member.local_rank]} and {rank} both have local rank {member.local_rank} on "
                f"{member.host}; set LOCAL_RANK to 0, 1, … for the processes of one machine"
            )
        rank_of[member.local_rank] = rank


def _has_enough_gpus(first: Member, here: Sequence[Member]) -> bool:
    """Return whether each process sees GPUs of its own, so that it uses its first one."""
    without = next((member for member in here if bool(member.gpus) != bool(first.gpus)), None)
    if without is not None:
        gpu_host, cpu_host = (first.host, without.host) if first.gpus else (without.host, first.host)
        raise MachineError(
            f"{gpu_host} has GPUs and {cpu_host} has none; all processes must use the same kind of device"
        )
    distinct = {gpu for member in here for gpu in member.gpus}
    if distinct and len(here) > len(distinct):
        raise MachineError(
            f"{len(here)} processes were started on {here[0].host} for {len(distinct)} "
            f"GPU{'s' * (len(distinct) > 1)}; start one per GPU, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    apart = len(here) > 1 and bool(distinct) and _is_disjoint([member.gpus for member in here])
    for member in here:
        if distinct and not apart and member.local_rank >= len(member.gpus):
            raise MachineError(
                f"local rank {member.local_rank} on {member.host} sees only {len(member.gpus)} of the {len(distinct)} "
                "GPUs that its machine's processes see; make each process see its own GPU, or all of them"
            )
    return apart


def _is_disjoint(parts: Sequence[Sequence[object]]) -> bool:
    return len({item for part in parts for item in part}) == sum(map(len, parts))


_VISIBLE = "CUDA_VISIBLE_DEVICES"
_visible_at_start = os.environ.get(_VISIBLE)


def count_devices(machine: Machine) -> int | None:
    """Return how many devices work now; None on a CPU, which has room for any number of processes.

    Processes that are started from now on see only the GPUs that answer, as far as their library is asked: NVIDIA's.
    """
    if not machine.gpus:
        return None
    return _show_answering_gpus() if all(gpu.vendor == "NVIDIA" for gpu in machine.gpus) else len(machine.gpus)


def _show_answering_gpus() -> int:
    answers = _query_gpus()
    answering = [name for name in answers if name is not None]
    if len(answering) < len(answers):
        os.environ[_VISIBLE] = ",".join(answering)
    elif _visible_at_start is None:
        os.environ.pop(_VISIBLE, None)
    else:
        os.environ[_VISIBLE] = _visible_at_start
    return len(answering)


def _query_gpus() -> list[str | None]:
    """Return the UUID of each GPU that was visible at the start, None for one that does not answer."""
    import pynvml

    def uuid(name: str) -> str | None:
        by_index = name.isdigit()
        try:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
            pynvml.nvmlDeviceGetUtilizationRates(gpu)
            return str(pynvml.nvmlDeviceGetUUID(gpu))
        except pynvml.NVMLError_NotSupported:  # a slice of a GPU
            return name
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotFound):  # CUDA also reads the beginning of a UUID
            return None if by_index else name
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [None]
    try:
        if _visible_at_start is not None:
            return [uuid(name.strip()) for name in _visible_at_start.split(",")]
        return [uuid(str(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
