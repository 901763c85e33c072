"""``trainwright runs``, ``report``, ``compare``, ``watch``, ``gpus`` and ``tensorboard``: look at runs."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trainwright.errors import RequestError
from trainwright.utils.text import clear, is_terminal, say, table_width


def runs(
    directory: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
    status: Annotated[
        str | None, typer.Option(help="Only these: training, finished, stopped, failed or ended.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only runs of this task.")] = None,
    name: Annotated[str | None, typer.Option(help="Only runs whose path contains this.")] = None,
    sort: Annotated[
        str,
        typer.Option(help="By begun, run, status, step, best, tokens_per_second, goodput, task or model."),
    ] = "begun",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the runs under a directory, the newest first.

    failed: the last event is a fault. ended: the run was killed, or failed without an event. Goodput is the time in
    steps that count, of all time since the run began. On a narrow terminal the last columns are left out.
    """
    import trainwright as tw
    from trainwright.observe.operations.runs import table

    summaries = tw.runs(directory, status=status, task=task, name=name, sort=sort)
    if as_json:
        say(json.dumps([each.values() for each in summaries], indent=1), wrap=False)
        return
    if not summaries:
        say(f"no such runs under {directory}")
        return
    for line in table(summaries, table_width(sys.stdout)):
        say(line, wrap=False)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write. Default: report.html in the run's directory.")
    ] = None,
) -> None:
    """Write a run as one HTML page: curves, samples, plan and measurements, faults, recipe.

    The page needs no network. The run may still be training.
    """
    import trainwright as tw

    say(f"written: {tw.report(run, out)}")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Run directories, or directories of runs.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with the curves.")] = None,
) -> None:
    """Compare runs: the keys in which their recipes differ, their evaluations paired by step, and their curves."""
    import trainwright as tw

    comparison = tw.compare(*runs, out=out)
    for line in comparison.lines(table_width(sys.stdout)):
        say(line, wrap=False)
    if comparison.page is not None:
        say(f"written: {comparison.page}")


def watch(
    directory: Annotated[Path, typer.Argument(metavar="[RUN|DIRECTORY]", help="A run, or where to look.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port. 0: any free port.")] = 0,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; others than this machine's can reach it.")
    ] = "127.0.0.1",
) -> None:
    """Show runs on a live page until Ctrl-C: curves over each other, recipes, samples, faults, logs, a stop button.

    The address that is printed has a token, without which nothing is shown.
    """
    from trainwright.observe.watching.serving import serve
    from trainwright.utils.paths import run_path

    serve(run_path(directory), host, port)


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
    from trainwright.machine.accelerators import refuse_unusable
    from trainwright.machine.detect import detect
    from trainwright.machine.usage.gpu import all_gpus
    from trainwright.observe.operations.gpus import MachineUse, machine_use

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


CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the directory belongs to the other command


class TensorboardCommand(TyperCommand):
    """Take the options between the directory and the other command too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the options before the directory."""
        end = 1
        while args[:1] and not args[0].startswith("-") and args[end : end + 1] and args[end].startswith("-"):
            end += 2 if args[end] == "--port" else 1
        return super().parse_args(ctx, [*args[1:end], *args[:1], *args[end:]])


def tensorboard(
    directory: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Directory of runs.")] = Path("runs"),
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...", help="Command to run; TensorBoard stops when it ends.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port. 0: any free port.")] = 0,
) -> None:
    """Show curves on a local address; with a command, until it ends, and with its exit code."""
    from trainwright.observe.tensorboard_server import serve

    raise typer.Exit(serve(directory, command, port))
