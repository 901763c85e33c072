"""Whether this machine can do what an Accelerate file asks, and what would run here instead."""

from __future__ import annotations

from trainwright.errors import MachineError
from trainwright.launch.accelerate.meaning import Meaning
from trainwright.machine.detect import Machine


def require(meaning: Meaning, machine: Machine) -> None:
    """Raise MachineError, which says what would run here, where the machine lacks what is asked for."""
    reason = lacking(meaning, machine)
    if reason is not None:
        raise MachineError(f"{meaning.source}: {reason}\n{would_run(meaning, machine)}")


def lacking(meaning: Meaning, machine: Machine) -> str | None:
    """What is asked for and not here; None where all of it is. The machine is as it is without the file."""
    processes = meaning.local_processes
    here = " on this machine" if meaning.nodes > 1 else ""
    if meaning.device == "cuda" and not machine.gpus:
        asked = "GPUs" if processes is None else _gpus(processes)
        return f"{meaning.distributed_type} asks for {asked}{here}, and there is none here ({machine.describe()})"
    if meaning.device == "cpu" or not machine.gpus:
        return None
    ids = meaning.gpu_ids.split(",") if meaning.gpu_ids else []
    absent = [name for name in ids if name.isdigit() and int(name) >= len(machine.gpus)]
    if absent:
        return f"gpu_ids names {', '.join(absent)}, but there are {_gpus(len(machine.gpus))}, counted from 0"
    usable = len(ids) or len(machine.gpus)
    if processes is not None and processes > usable:
        said = f"gpu_ids names {_gpus(usable)}" if ids else f"there are {_gpus(usable)} here"
        return f"{processes} processes are asked for{here}, one a GPU, but {said}"
    return None


def would_run(meaning: Meaning, machine: Machine) -> str:
    """One line: how to run on this machine what its file cannot."""
    count = default_processes(machine)
    alone = ", num_machines: 1" if meaning.nodes > 1 else ""
    if machine.gpus:
        return f"here would run: num_processes: {count}{alone}, one for each GPU"
    kind = meaning.distributed_type
    same = kind if kind in ("FSDP", "DEEPSPEED") else "MULTI_CPU"
    return (
        f"here would run: {count} process{'es' * (count > 1)} on the CPU: distributed_type: {same}, use_cpu: true, "
        f"num_processes: {count}{alone}"
    )


def default_processes(machine: Machine) -> int:
    """As many as there are GPUs; on a CPU two, as more gain nothing."""
    return len(machine.gpus) or min(2, machine.cpu_cores)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
