"""Check whether this machine supports an Accelerate file, and what would run here instead."""

from __future__ import annotations

from trainwright.errors import MachineError
from trainwright.launch.accelerate.meaning import Meaning
from trainwright.machine.machine import Machine
from trainwright.recipe.strategy_spec import check_library

SHARDING = ("FSDP", "DEEPSPEED")


def require(meaning: Meaning, machine: Machine, *, for_script: bool = False) -> None:
    """Raise MachineError, saying what would run here or what to install, if a requirement is missing.

    ``for_script``: libraries are left to the script.
    """
    if lines := _lacking_gpus(meaning, machine) if for_script else lacking(meaning, machine):
        raise MachineError(f"{meaning.source}: " + "\n".join(lines))


def lacking(meaning: Meaning, machine: Machine) -> list[str]:
    """Return the missing requirements and their fixes, one line each; empty if none is missing.

    The machine is described without the file's effect on it.
    """
    lines = _lacking_gpus(meaning, machine)
    if meaning.strategy is not None:
        try:
            check_library(meaning.strategy)
        except MachineError as error:
            lines.append(str(error))
    return lines


def becomes_ddp(meaning: Meaning, machine: Machine) -> bool:
    """Return whether Accelerate's library would silently run DDP on a CPU where the file asks for sharding."""
    return meaning.distributed_type in SHARDING and (meaning.device == "cpu" or not machine.gpus)


def _lacking_gpus(meaning: Meaning, machine: Machine) -> list[str]:
    reason = _too_few_gpus(meaning, machine)
    return [] if reason is None else [reason, _would_run(meaning, machine)]


def _too_few_gpus(meaning: Meaning, machine: Machine) -> str | None:
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
        return f"gpu_ids names {', '.join(absent)}, but there {_are(len(machine.gpus))}, counted from 0"
    usable = len(ids) or len(machine.gpus)
    if processes is not None and processes > usable:
        said = f"gpu_ids names {_gpus(usable)}" if ids else f"there {_are(usable)} here"
        return f"{processes} processes are asked for{here}, one a GPU, but {said}"
    return None


def _would_run(meaning: Meaning, machine: Machine) -> str:
    """Return one line: how to run here if the file cannot."""
    count = default_processes(machine)
    alone = ", num_machines: 1" if meaning.nodes > 1 else ""
    if machine.gpus:
        return f"possible here: num_processes: {count}{alone}, one for each GPU"
    kind = meaning.distributed_type
    same = kind if kind in SHARDING else "MULTI_CPU"
    return (
        f"possible here: {count} process{'es' * (count > 1)} on the CPU: distributed_type: {same}, use_cpu: true, "
        f"num_processes: {count}{alone}"
    )


def default_processes(machine: Machine) -> int:
    """Return the number of GPUs; two on a CPU, as more gain nothing."""
    return len(machine.gpus) or min(2, machine.cpu_cores)


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {_gpus(count)}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
