"""Show an Accelerate file on one screen: its translation, and whether it runs here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trainwright.compatibility.accelerate.machine import SHARDING, becomes_ddp, lacking
from trainwright.compatibility.accelerate.reading import AccelerateConfig
from trainwright.compatibility.accelerate.translation import Translation, as_yaml, missing_rendezvous
from trainwright.machine.machine import Machine
from trainwright.recipe.strategy_spec import spec_of
from trainwright.utils.text import plural, quoted

_LABEL = 12
_SHOWN_BY_THEMSELVES = ("parallel.strategy", "parallel.num_processes", "train.mixed_precision")


def show(source: AccelerateConfig, translation: Translation, machine: Machine, width: int = 100) -> str:
    """Return the text, wrapped to at most ``width`` characters per line where possible."""
    lines = [source.name, ""]
    for label, text in _rows(source, translation, machine):
        wrapped = textwrap.wrap(text, max(40, width - _LABEL), break_long_words=False, break_on_hyphens=False)
        for index, line in enumerate(wrapped):
            lines.append(f"{label if index == 0 else '':<{_LABEL}}{line}".rstrip())
    return "\n".join(lines)


def accelerate_remarks(source: AccelerateConfig, translation: Translation) -> list[str]:
    """Return where `accelerate launch` 1.15 interprets the file differently from what it says."""
    remarks = [f"accelerate launch rejects this file: {remark}" for remark in source.remarks]
    several = translation.processes is not None and translation.processes > 1
    if translation.distributed_type == "MULTI_CPU" and several and not _has_mpi(source):
        remarks.append("accelerate launch starts only one process; trainwright train and launch start all")
    if translation.device == "cpu" and translation.distributed_type in SHARDING:
        remarks.append("Accelerate runs this as ddp on a CPU; trainwright train shards")
    return remarks


def commands(translation: Translation, machine: Machine) -> list[str]:
    """Return the commands that start it here; none of them rejects the file."""
    lines: list[str] = []
    if lacking(translation, machine):
        return lines
    if not translation.problems and missing_rendezvous(translation) is None:
        lines.append(f"trainwright train RECIPE --accelerate-config {quoted(translation.source)}")
    of_scripts = any(problem.for_script for problem in translation.problems)
    if not of_scripts and translation.nodes == 1 and not becomes_ddp(translation, machine):
        lines.append(f"trainwright launch --config-file {quoted(translation.source)} SCRIPT")
    return lines


def _rows(source: AccelerateConfig, translation: Translation, machine: Machine) -> Iterator[tuple[str, str]]:
    yield "processes", _processes(translation)
    strategy = translation.strategy
    yield "strategy", f"{strategy}: {spec_of(strategy).summary}" if strategy else "not known"
    yield "precision", str(translation.value("train.mixed_precision") or "set by the recipe")
    others = [
        f"{key}={as_yaml(setting.value)}"
        for key, setting in translation.settings.items()
        if key not in _SHOWN_BY_THEMSELVES
    ]
    yield from _listed("also sets", others)
    reasons = lacking(translation, machine)
    if translation.problems:
        yield "here", "refused:"
        for problem in translation.problems:
            yield "", f"- {problem.text}"
    elif not reasons:
        yield "here", f"runs: {_local(translation, machine)}"
    for index, reason in enumerate(reasons):
        label = "here" if index == 0 and not translation.problems else ""
        yield label, f"cannot run: {reason}" if index == 0 else reason
    yield from _listed("ignored", [f"{', '.join(note.keys)}: {note.reason}" for note in translation.notes])
    yield from _listed("accelerate", accelerate_remarks(source, translation))
    yield from _listed("use", commands(translation, machine))


def _listed(label: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(lines):
        yield label if index == 0 else "", line


def _processes(translation: Translation) -> str:
    count = "set by the recipe" if translation.processes is None else str(translation.processes)
    where = {"cuda": "on GPUs", "cpu": "on the CPU", "any": "on a GPU if there is one, else the CPU"}[
        translation.device
    ]
    if translation.gpu_ids is not None:
        where += f" {translation.gpu_ids}"
    if translation.nodes == 1:
        return f"{count} {where}, one machine"
    meeting = f", meeting at {translation.rendezvous}" if translation.rendezvous else ""
    return f"{count} {where}, {plural(translation.nodes, 'machine')}, this is number {translation.node_rank}{meeting}"


def _local(translation: Translation, machine: Machine) -> str:
    count = translation.local_processes
    device = "the CPU" if translation.device == "cpu" or not machine.gpus else "GPUs"
    number = "processes" if count is None else f"{count} process{'es' * (count != 1)}"
    return f"{number} on {device} ({machine.describe()})"


def _has_mpi(source: AccelerateConfig) -> bool:
    part = source.values.get("mpirun_config")
    return isinstance(part, dict) and bool(part.get("mpirun_hostfile"))
