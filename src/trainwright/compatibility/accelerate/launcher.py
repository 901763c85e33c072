"""Accelerate as another launcher (``recipe/registries.py``, LAUNCHERS): its file, or what it has passed on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainwright.compatibility.accelerate.environment import from_environment
from trainwright.compatibility.accelerate.machine import refuse_count_of_one_machine, require
from trainwright.compatibility.accelerate.reading import default_path
from trainwright.compatibility.accelerate.translation import (
    Translation,
    last_value,
    missing_rendezvous,
    read_translation,
)
from trainwright.errors import MachineError, TrainwrightError
from trainwright.machine.detect import detect


def find_translation(
    file: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> Translation:
    """Return the translation of a file, with the command line's numbers in place of its own, checked for this
    machine.

    ``overrides`` may contain words other than section.key=value, such as the recipe's name. GPUs that the file excludes
    are hidden from this process and its children (CUDA_VISIBLE_DEVICES), so call this before the machine is inspected.

    Raises:
        RequestError: the file cannot be read or is not supported, does not say where its machines meet, or counts the
            processes of one machine only.
        MachineError: this machine lacks the GPUs or the library asked for; the message says what would run here.
    """
    translation = read_translation(file).with_machines(nodes, node_rank, rendezvous)
    processes = last_value(overrides, "parallel.num_processes")
    if processes is not None:
        translation = replace(translation, processes=int(processes) if processes.isdigit() else None)
    translation.refuse_problems()
    if (error := missing_rendezvous(translation)) is not None:
        raise error
    machine = detect()
    if processes is None:
        refuse_count_of_one_machine(translation, machine)
    require(translation, machine)
    os.environ.update(translation.device_environment())
    return translation


def joined_translation() -> Translation | None:
    """Return what `accelerate launch` read from its file, with the reason why this process cannot train, if there is
    one; None if something else started this process. GPUs that the file excludes are hidden, as above.
    """
    translation = from_environment()
    if translation is None:
        return None
    os.environ.update(translation.device_environment())
    try:
        if translation.one_of_several:
            raise MachineError(
                f"{translation.source}: accelerate launch starts one process for {translation.distributed_type} "
                "on a CPU, whatever num_processes says; start the recipe with trainwright train RECIPE "
                "--accelerate-config FILE, or with torchrun --nproc-per-node"
            )
        translation.refuse_problems()
        require(translation, detect())
    except TrainwrightError as error:
        return replace(translation, refusal=error)
    return translation


def default_file() -> Path | None:
    """Return Accelerate's default file, if it exists."""
    path = default_path()
    return path if path.is_file() else None


class Accelerate:
    """The functions that the core calls."""

    of_file = staticmethod(find_translation)
    of_environment = staticmethod(joined_translation)
    default_file = staticmethod(default_file)
