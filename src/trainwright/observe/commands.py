"""``trainwright runs``, ``report``, ``compare``, ``watch``, ``gpus``, ``tensorboard`` and ``ablate``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trainwright.cli.command import command
from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import MachineError, RequestError
from trainwright.utils.paths import run_path
from trainwright.utils.text import choose_table_width, clear, is_terminal, say


def runs(
    directory: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
    status: Annotated[
        str | None, typer.Option(help="Only these: training, finished, stopped, failed or ended.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only runs of this task.")] = None,
    name: Annotated[str | None, typer.Option(help="Only runs whose path contains this.")] = None,
    sort: Annotated[
        str, typer.Option(help="By begun, run, status, step, best, tokens_per_second, goodput, task or model.")
    ] = "begun",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the runs under a directory, the newest first.

    failed: the last event is a fault. ended: the run was killed, or failed without an event. Goodput is the time in
    steps that count, of all time since the run began. On a narrow terminal the last columns are left out.
    """
    import trainwright as tw
    from trainwright.observe.runs import format_runs

    summaries = tw.runs(directory, status=status, task=task, name=name, sort=sort)
    if as_json:
        say(json.dumps([summary.values() for summary in summaries], indent=1), wrap=False)
        return
    if not summaries:
        say(f"no such runs under {directory}")
        return
    for line in format_runs(summaries, choose_table_width(sys.stdout)):
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
    for line in comparison.lines(choose_table_width(sys.stdout)):
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
    from trainwright.observe.watching.app import serve

    serve(run_path(directory), host, port)


_SECONDS = 2.0  # between tables
_SAMPLE_SECONDS = 0.2  # over which CPU use is measured once
_HOST, _END_SECONDS = "127.0.0.1", 5.0  # of TensorBoard


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
    from trainwright.machine.counters import read_all_gpus
    from trainwright.machine.detect import detect
    from trainwright.observe.gpus import MachineUse, measure_machine_use

    if seconds is not None and not watch:
        raise RequestError(f"{seconds:g}: a time between tables needs --watch; add it, or leave the time out")
    interval = _SAMPLE_SECONDS
    with suppress(KeyboardInterrupt):
        if not watch and not as_json:  # the GPUs are shown while the processes are measured
            first = MachineUse(read_all_gpus(), ())
            for line in first.format_gpu_lines(width := choose_table_width(sys.stdout)):
                say(line)
            for line in measure_machine_use(interval, first.gpus).format_process_lines(width):
                say(line)
        while watch or as_json:
            use = measure_machine_use(interval)
            if as_json:
                say(json.dumps(use.values(), indent=None if watch else 1), wrap=False)
            else:
                if is_terminal(sys.stdout):
                    clear(sys.stdout)
                width = choose_table_width(sys.stdout)
                for line in (*use.format_gpu_lines(width), *use.format_process_lines(width)):
                    say(line)
            if not watch:
                break
            interval = seconds or _SECONDS
    refuse_unusable(detect())


class TensorboardCommand(TyperCommand):
    """Take the options between the directory and the other command too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the options before the directory."""
        end = 1
        while args[:1] and not args[0].startswith("-") and args[end : end + 1] and args[end].startswith("-"):
            end += 2 if args[end] == "--port" else 1
        return super().parse_args(ctx, [*args[1:end], *args[:1], *args[end:]])


# What follows the directory belongs to the other command.
@command(cls=TensorboardCommand, context_settings={"allow_interspersed_args": False})
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
    raise typer.Exit(_serve_tensorboard(directory, command, port))


def _serve_tensorboard(directory: Path, command: Sequence[str] | None, port: int) -> int:
    """Show the runs in ``directory`` until ``command``, or without one TensorBoard, ends; return the exit code.

    Args:
        port: of this machine's local address; 0: any free one.

    Raises:
        RequestError: there is no such directory or program.
        MachineError: the port is taken, or TensorBoard fails.
    """
    from trainwright.run.program import run_program, start_program

    if command is None and not directory.is_dir():
        raise RequestError(
            f"RUNS: {directory} is not a directory; pass the runs/ directory of the working directory of training"
        )
    port = _find_free_port(port)
    at = ("--host", _HOST, "--port", str(port))
    server = start_program(
        [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(directory), *at],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a stop is for the command; the server is ended after it
    )
    say(f"curves: http://{_HOST}:{port}/", file=sys.stderr)
    try:
        code = _wait(server) if command is None else run_program(command)
    except FileNotFoundError:
        assert command is not None
        raise RequestError(f"COMMAND: {command[0]}: program not found") from None
    except KeyboardInterrupt:  # for the server only
        code = 130
    finally:
        _end(server)
    return code if code >= 0 else 128 - code


def _end(server: subprocess.Popen[bytes]) -> None:
    """End TensorBoard, which may miss SIGTERM while it starts; it has nothing to save."""
    server.terminate()
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes]) -> int:
    code = server.wait()
    if code > 0:
        raise MachineError(f"TensorBoard exited with code {code}; run python -m tensorboard.main to see why")
    return 0


def _find_free_port(port: int) -> int:
    """Return a port that is currently free: ``port``, or any for 0."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
        except OSError as error:
            raise MachineError(f"--port {port}: {error.strerror}; choose another port, or 0 for any free one") from None
        return int(listener.getsockname()[1])


def ablate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE,VALUE…", help="A key to vary and its values; repeatable.")
    ] = None,
    combinations: Annotated[
        bool | None,
        typer.Option(
            "--grid/--one-at-a-time",
            help="All combinations of the values (the default), or the unchanged recipe and once every value.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--sample", min=1, metavar="N", help="Train N random combinations; 1e-5..1e-3 is a range."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --sample.")] = 0,
    halving: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Continue only the best of every N, for N times as many steps."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Validation metric to compare by. Default: loss, if it shows how good a model is."),
    ] = None,
    highest: Annotated[
        bool | None,
        typer.Option("--highest/--lowest", help="Which value of the metric is the best. Default: by its name."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at once. Default: as many as there are GPUs for, on a CPU one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Directory of the runs. Default: runs/<recipe>-sweep.")
    ] = None,
) -> None:
    """Train a recipe with other values of its keys; compare the final metrics.

    Without --one-at-a-time or --sample: all combinations of the values. Variants with the same values are trained once.
    If stopped, the same command continues: finished runs are kept, and an unfinished one is resumed. Ends like the
    first run that does not finish.
    """
    import trainwright as tw

    if combinations is not None and number is not None:
        option = "--grid" if combinations else "--one-at-a-time"
        raise RequestError(f"{option} and --sample choose the combinations in different ways; pass one of them")
    ablation = tw.ablate(
        recipe,
        *(overrides or []),
        over=_parse_values(over or []),
        combine="sample" if number is not None else "one at a time" if combinations is False else "grid",
        number=number or 1,
        seed=seed,
        halving=halving,
        metric=metric,
        highest=highest,
        jobs=jobs,
        out=out,
        progress=True,
    )
    say(f"{ablation}\n\n{ablation.directory}/")


def _parse_values(over: Sequence[str]) -> dict[str, list[str]]:
    if not over:
        raise RequestError("--over: pass a key and its values, such as --over train.seed=0,1,2")
    values_by_key: dict[str, list[str]] = {}
    for variation in over:
        key, equals, values = variation.partition("=")
        if not equals or not key or not values:
            raise RequestError(f"--over {variation}: expected KEY=VALUE,VALUE…")
        values_by_key.setdefault(key, []).extend(_split(values))
    return values_by_key


def _split(values: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
