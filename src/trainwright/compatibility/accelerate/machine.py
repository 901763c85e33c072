"""Check whether this machine supports an Accelerate file, and what would run here instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trainwright.compatibility.accelerate.reading import AccelerateConfig
from trainwright.compatibility.accelerate.translation import Translation, build_rendezvous_error, format_override_value
from trainwright.errors import MachineError, RequestError
from trainwright.machine.machine import Machine
from trainwright.recipe.strategy_spec import check_library, look_up_strategy
from trainwright.utils.text import format_plural, quote_word

SHARDING = ("FSDP", "DEEPSPEED")


def require(translation: Translation, machine: Machine, *, for_script: bool = False) -> None:
    """Raise MachineError, saying what would run here or what to install, if a requirement is missing.

    ``for_script``: libraries are left to the script.
    """
    if lines := _list_lacking_gpus(translation, machine) if for_script else list_lacking(translation, machine):
        raise MachineError(f"{translation.source}: " + "\n".join(lines))


def list_lacking(translation: Translation, machine: Machine) -> list[str]:
    """Return the missing requirements and their fixes, one line each; empty if none is missing.

    The machine is described without the file's effect on it.
    """
    lines = _list_lacking_gpus(translation, machine)
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
        f"one would use {translation.local_processes} of its {_format_gpu_count(gpus)}; set it to {count * nodes}, or "
        "pass "
        f"--num-processes {count} if {count} in all are meant"
    )


def is_run_as_ddp(translation: Translation, machine: Machine) -> bool:
    """Return whether Accelerate's library would silently run DDP on a CPU where the file asks for sharding."""
    return translation.distributed_type in SHARDING and (translation.device == "cpu" or not machine.gpus)


def _list_lacking_gpus(translation: Translation, machine: Machine) -> list[str]:
    reason = _explain_too_few_gpus(translation, machine)
    return [] if reason is None else [reason, _describe_alternative(translation, machine)]


def _explain_too_few_gpus(translation: Translation, machine: Machine) -> str | None:
    processes = translation.local_processes
    suffix = " on this machine" if translation.nodes > 1 else ""
    if translation.device == "cuda" and not machine.gpus:
        demand = "GPUs" if processes is None else _format_gpu_count(processes)
        return f"{translation.distributed_type} requires {demand}{suffix}, but none is available ({machine.describe()})"
    if translation.device == "cpu" or not machine.gpus:
        return None
    ids = translation.gpu_ids.split(",") if translation.gpu_ids else []
    absent = [name for name in ids if name.isdigit() and int(name) >= len(machine.gpus)]
    if absent:
        return f"gpu_ids names {', '.join(absent)}, but there {_are(len(machine.gpus))}, counted from 0"
    usable = len(ids) or len(machine.gpus)
    if processes is not None and processes > usable:
        available = f"gpu_ids names {_format_gpu_count(usable)}" if ids else f"there {_are(usable)} here"
        return f"{processes} processes are requested{suffix}, one per GPU, but {available}"
    return None


def _describe_alternative(translation: Translation, machine: Machine) -> str:
    """Return one line: how to run here if the file cannot."""
    count = choose_processes(machine)
    alone = ", num_machines: 1" if translation.nodes > 1 else ""
    if machine.gpus:
        return f"possible here: num_processes: {count}{alone}, one for each GPU"
    kind = translation.distributed_type
    same = kind if kind in SHARDING else "MULTI_CPU"
    return (
        f"possible here: {count} process{'es' * (count > 1)} on the CPU: distributed_type: {same}, use_cpu: true, "
        f"num_processes: {count}{alone}"
    )


def choose_processes(machine: Machine) -> int:
    """Return the number of GPUs; two on a CPU, as more gain nothing."""
    return len(machine.gpus) or min(2, machine.cpu_cores)


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {_format_gpu_count(count)}"


def _format_gpu_count(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


_LABEL = 12
_SHOWN_BY_THEMSELVES = ("parallel.strategy", "parallel.num_processes", "train.mixed_precision")


def show(source: AccelerateConfig, translation: Translation, machine: Machine, width: int = 100) -> str:
    """Return the text, wrapped to at most ``width`` characters per line where possible."""
    lines = [source.name, ""]
    for label, text in _iterate_rows(source, translation, machine):
        wrapped_lines = textwrap.wrap(text, max(40, width - _LABEL), break_long_words=False, break_on_hyphens=False)
        for index, line in enumerate(wrapped_lines):
            lines.append(f"{label if index == 0 else '':<{_LABEL}}{line}".rstrip())
    return "\n".join(lines)


def list_remarks(source: AccelerateConfig, translation: Translation) -> list[str]:
    """Return where `accelerate launch` 1.15 interprets the file differently from what it says."""
    remarks = [f"accelerate launch rejects this file: {remark}" for remark in source.remarks]
    several = translation.processes is not None and translation.processes > 1
    if translation.distributed_type == "MULTI_CPU" and several and not _has_mpi(source):
        remarks.append("accelerate launch starts only one process; trainwright train and launch start all")
    if translation.device == "cpu" and translation.distributed_type in SHARDING:
        remarks.append("Accelerate runs this as ddp on a CPU; trainwright train shards")
    return remarks


def list_commands(translation: Translation, machine: Machine) -> list[str]:
    """Return the commands that start it here; none of them rejects the file."""
    lines: list[str] = []
    if list_lacking(translation, machine):
        return lines
    if not translation.problems and build_rendezvous_error(translation) is None:
        lines.append(f"trainwright train RECIPE --accelerate-config {quote_word(translation.source)}")
    of_scripts = any(problem.for_script for problem in translation.problems)
    if not of_scripts and translation.nodes == 1 and not is_run_as_ddp(translation, machine):
        lines.append(f"trainwright launch --config-file {quote_word(translation.source)} SCRIPT")
    return lines


def _iterate_rows(source: AccelerateConfig, translation: Translation, machine: Machine) -> Iterator[tuple[str, str]]:
    yield "processes", _describe_processes(translation)
    strategy = translation.strategy
    yield "strategy", f"{strategy}: {look_up_strategy(strategy).summary}" if strategy else "not known"
    yield "precision", str(translation.value("train.mixed_precision") or "set by the recipe")
    other_settings = [
        f"{key}={format_override_value(setting.value)}"
        for key, setting in translation.settings.items()
        if key not in _SHOWN_BY_THEMSELVES
    ]
    yield from _label_lines("also sets", other_settings)
    reasons = list_lacking(translation, machine)
    if translation.problems:
        yield "here", "refused:"
        for problem in translation.problems:
            yield "", f"- {problem.text}"
    elif not reasons:
        yield "here", f"runs: {_describe_local(translation, machine)}"
    for index, reason in enumerate(reasons):
        label = "here" if index == 0 and not translation.problems else ""
        yield label, f"cannot run: {reason}" if index == 0 else reason
    yield from _label_lines("ignored", [f"{', '.join(note.keys)}: {note.reason}" for note in translation.notes])
    yield from _label_lines("accelerate", list_remarks(source, translation))
    yield from _label_lines("use", list_commands(translation, machine))


def _label_lines(label: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(lines):
        yield label if index == 0 else "", line


def _describe_processes(translation: Translation) -> str:
    count = "set by the recipe" if translation.processes is None else str(translation.processes)
    placement = {"cuda": "on GPUs", "cpu": "on the CPU", "any": "on a GPU if there is one, else the CPU"}[
        translation.device
    ]
    if translation.gpu_ids is not None:
        placement += f" {translation.gpu_ids}"
    if translation.nodes == 1:
        return f"{count} {placement}, one machine"
    meeting = f", meeting at {translation.rendezvous}" if translation.rendezvous else ""
    return (
        f"{count} {placement}, {format_plural(translation.nodes, 'machine')}, this is number "
        f"{translation.node_rank}{meeting}"
    )


def _describe_local(translation: Translation, machine: Machine) -> str:
    count = translation.local_processes
    device = "the CPU" if translation.device == "cpu" or not machine.gpus else "GPUs"
    number = "processes" if count is None else f"{count} process{'es' * (count != 1)}"
    return f"{number} on {device} ({machine.describe()})"


def _has_mpi(source: AccelerateConfig) -> bool:
    part = source.values.get("mpirun_config")
    return isinstance(part, dict) and bool(part.get("mpirun_hostfile"))
