"""Check whether this machine supports an Accelerate file, and what would run here instead."""

from __future__ import annotations

from trainwright.compatibility.accelerate.translation import Translation
from trainwright.errors import MachineError, RequestError
from trainwright.machine.machine import Machine
from trainwright.recipe.strategy_spec import check_library

SHARDING = ("FSDP", "DEEPSPEED")


def require(translation: Translation, machine: Machine, *, for_script: bool = False) -> None:
    """Raise MachineError, saying what would run here or what to install, if a requirement is missing.

    ``for_script``: libraries are left to the script.
    """
    if lines := _lacking_gpus(translation, machine) if for_script else lacking(translation, machine):
        raise MachineError(f"{translation.source}: " + "\n".join(lines))


def lacking(translation: Translation, machine: Machine) -> list[str]:
    """Return the missing requirements and their fixes, one line each; empty if none is missing.

    The machine is described without the file's effect on it.
    """
    lines = _lacking_gpus(translation, machine)
    if translation.strategy is not None:
        try:
            check_library(translation.strategy)
        except MachineError as error:
            lines.append(str(error))
    return lines


def refuse_count_of_one_machine(translation: Translation, machine: Machine) -> None:
    """Raise RequestError if the file's number of processes is plainly that of one of its machines.

    Call it for a number that only the file gives.
    """
    count, nodes = translation.processes, translation.nodes
    gpus = len(translation.gpu_ids.split(",")) if translation.gpu_ids else len(machine.gpus)
    if translation.device == "cpu" or nodes == 1 or count is None or not 1 < count == gpus:
        return
    raise RequestError(
        f"{translation.source}: num_processes: {count} counts the processes of all {nodes} machines together, so this "
        f"one would use {translation.local_processes} of its {_gpus(gpus)}; set it to {count * nodes}, or pass "
        f"--num-processes {count} if {count} in all are meant"
    )


def becomes_ddp(translation: Translation, machine: Machine) -> bool:
    """Return whether Accelerate's library would silently run DDP on a CPU where the file asks for sharding."""
    return translation.distributed_type in SHARDING and (translation.device == "cpu" or not machine.gpus)


def _lacking_gpus(translation: Translation, machine: Machine) -> list[str]:
    reason = _too_few_gpus(translation, machine)
    return [] if reason is None else [reason, _would_run(translation, machine)]


def _too_few_gpus(translation: Translation, machine: Machine) -> str | None:
    processes = translation.local_processes
    here = " on this machine" if translation.nodes > 1 else ""
    if translation.device == "cuda" and not machine.gpus:
        required = "GPUs" if processes is None else _gpus(processes)
        return f"{translation.distributed_type} requires {required}{here}, but none is available ({machine.describe()})"
    if translation.device == "cpu" or not machine.gpus:
        return None
    ids = translation.gpu_ids.split(",") if translation.gpu_ids else []
    absent = [name for name in ids if name.isdigit() and int(name) >= len(machine.gpus)]
    if absent:
        return f"gpu_ids names {', '.join(absent)}, but there {_are(len(machine.gpus))}, counted from 0"
    usable = len(ids) or len(machine.gpus)
    if processes is not None and processes > usable:
        available = f"gpu_ids names {_gpus(usable)}" if ids else f"there {_are(usable)} here"
        return f"{processes} processes are requested{here}, one per GPU, but {available}"
    return None


def _would_run(translation: Translation, machine: Machine) -> str:
    """Return one line: how to run here if the file cannot."""
    count = default_processes(machine)
    alone = ", num_machines: 1" if translation.nodes > 1 else ""
    if machine.gpus:
        return f"possible here: num_processes: {count}{alone}, one for each GPU"
    kind = translation.distributed_type
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
