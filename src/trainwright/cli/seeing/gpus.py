"""``trainwright gpus``: the GPUs of this machine, and the processes that train on it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Annotated

import typer

from trainwright.errors import RequestError
from trainwright.text import clear, is_terminal, say, table_width

_SECONDS = 2.0  # between tables
_SAMPLE_SECONDS = 0.2  # over which CPU use is measured once


def gpus(
    seconds: Annotated[
        float | None,
        typer.Argument(metavar="SECONDS", min=0.1, help="With --watch, the time between tables. Default: 2."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, an object a line.")] = False,
) -> None:
    """Show use, memory, power and temperature of the GPUs, and the processes on them; without GPUs the ranks of runs.

    Each process has the cores of the CPU that it uses, its resident memory, and its rank and run if it trains.

    Ends with 0, or 3: there is a GPU that cannot be used.
    """
    from trainwright.api.seeing.gpus import MachineUse, machine_use
    from trainwright.machine.accelerators import refuse_unusable
    from trainwright.machine.detect import detect
    from trainwright.machine.usage.gpu import all_gpus

    if seconds is not None and not watch:
        raise RequestError(f"{seconds:g}: a time between tables needs --watch; add it, or leave the time out")
    interval = _SAMPLE_SECONDS
    with suppress(KeyboardInterrupt):
        if not watch and not as_json:  # the GPUs are shown while the processes are measured
            first = MachineUse(all_gpus(), ())
            for line in first.gpu_lines(width := table_width(sys.stdout)):
                say(line)
            for line in machine_use(interval, first.gpus).process_lines(width):
                say(line)
        while watch or as_json:
            use = machine_use(interval)
            if as_json:
                say(json.dumps(use.values(), indent=None if watch else 1), wrap=False)
            else:
                if is_terminal(sys.stdout):
                    clear(sys.stdout)
                width = table_width(sys.stdout)
                for line in (*use.gpu_lines(width), *use.process_lines(width)):
                    say(line)
            if not watch:
                break
            interval = seconds or _SECONDS
    refuse_unusable(detect())
