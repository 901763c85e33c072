"""``trainwright train``: from a recipe to a finished run on this machine."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from trainwright.activity import Activity, doing
from trainwright.errors import EXIT_FINISHED, EXIT_REQUEST, EXIT_STOPPED, RequestError, TrainingError
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.launch.nodes import Nodes
    from trainwright.launch.request import Request
    from trainwright.launch.stop import Stopping
    from trainwright.machine.detect import Machine
    from trainwright.planning.resolve import Resolved


class TrainCommand(TyperCommand):
    """Lets --resume stand without a value, which typer's options cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_bare_resume(args, i) for i in range(len(args))])


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE [SECTION.KEY=VALUE]...",
            help="The recipe's YAML file, and values that replace its own. With --resume RUN that run's.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[RUN]", help="Continue this run; without a directory, the recipe's newest one."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and why, and write nothing.")] = False,
    num_processes: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes, of all nodes together: parallel.num_processes in short."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Machines that train together; run this on each of them.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Which of the nodes this one is, counted from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: an address of node 0.")
    ] = None,
    rendezvous_timeout: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="How long the nodes wait for each other (600).")
    ] = None,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take processes, strategy and the like from this Accelerate file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start even where the plan says it does not fit.")] = False,
) -> None:
    """Train as a recipe says.

    Ends with 0: finished, 2: wrong request, 3: unfit machine, 4: failed, 75: stopped by a signal.
    """
    from trainwright.launch.environment import refuse_worker
    from trainwright.launch.request import check_request, for_nodes, read_request, resolve_request
    from trainwright.launch.surroundings import not_followed, refuse_more_nodes
    from trainwright.machine.accelerators import with_device
    from trainwright.machine.detect import detect

    meaning, words = None, _with_number(arguments or [], num_processes)
    if accelerate_config is not None:
        from trainwright.launch.accelerate.recipe import meaning_here

        meaning = meaning_here(accelerate_config, words, nodes=nodes, node_rank=node_rank, rendezvous=rendezvous)
        if meaning.nodes > 1:
            nodes, node_rank, rendezvous = meaning.nodes, meaning.node_rank, meaning.rendezvous
    count = nodes or 1
    refuse_worker("train", count)
    refuse_more_nodes(words, nodes)
    place = _meeting_place(count, node_rank, rendezvous, rendezvous_timeout)
    with Activity(sys.stderr, "reading the recipe"):
        request = read_request(words, resume, meaning)
        machine = with_device(detect(), request.recipe.parallel.device)
        request = for_nodes(request, machine, count)
        doing("planning")
        resolved = resolve_request(request, machine, count)
        check_request(request, resolved.recipe, creates=not node_rank)
    if not node_rank:
        processes = resolved.recipe.parallel.num_processes
        assert isinstance(processes, int), "a resolved recipe has no auto left"
        for line in not_followed(nodes, processes, _default_file(accelerate_config)):
            say(f"note: {line}", file=sys.stderr)
    if dry_run:
        _show(resolved)
    if not force:
        resolved.plan.refuse_shortage()
    if dry_run:
        return
    raise typer.Exit(_run(request, resolved, machine, count, node_rank or 0, place, rendezvous_timeout or 600.0))


def _default_file(named: Path | None) -> Path | None:
    """Accelerate's default file, where it is there and no file was ``named``."""
    from trainwright.launch.accelerate.reading import default_path

    return default_path() if named is None and default_path().is_file() else None


def _meeting_place(
    nodes: int, node_rank: int | None, rendezvous: str | None, seconds: float | None
) -> tuple[str, int] | None:
    """Host and port where several nodes meet; None for one. Raises RequestError."""
    if nodes == 1:
        options = {"--rendezvous": rendezvous, "--node-rank": node_rank, "--rendezvous-timeout": seconds}
        if given := [name for name, value in options.items() if value is not None]:
            verb = "are" if len(given) > 1 else "is"
            raise RequestError(f"{' and '.join(given)} {verb} for several nodes; say how many with --nodes")
        return None
    if rendezvous is None:
        raise RequestError(
            f"--nodes {nodes} needs --rendezvous host:port, an address of node 0; the same on every node"
        )
    if node_rank is None:
        raise RequestError(f"--nodes {nodes} needs --node-rank: 0 to {nodes - 1}, another one on every node")
    if node_rank >= nodes:
        raise RequestError(f"--node-rank: nodes are counted from 0, so of {nodes} the last is {nodes - 1}")
    from trainwright.launch.request import parse_place

    return parse_place(rendezvous)


def _with_number(arguments: list[str], num_processes: int | None) -> list[str]:
    if num_processes is None:
        return arguments
    written = next((a for a in arguments if a.startswith("parallel.num_processes=")), None)
    if written is not None and written.partition("=")[2].strip() != str(num_processes):
        raise RequestError(f"--num-processes {num_processes} contradicts {written}; give one of the two")
    return [*arguments, f"parallel.num_processes={num_processes}"]


def _show(resolved: Resolved) -> None:
    from trainwright.recipe.loading import dump_recipe

    say(dump_recipe(resolved.recipe), end="")
    from trainwright.planning.table import summary

    for reason in (*resolved.reasons, summary(resolved.plan)):
        say(f"# {reason}", wrap=False)


def _run(
    request: Request,
    resolved: Resolved,
    machine: Machine,
    count: int,
    index: int,
    place: tuple[str, int] | None,
    seconds: float,
) -> int:
    processes = resolved.recipe.parallel.num_processes
    assert isinstance(processes, int), "a resolved recipe has no auto left"
    here = processes // count
    from trainwright.launch.limits import check_limits
    from trainwright.launch.process import limit_threads, outlive_output

    outlive_output()
    check_limits(here, processes)
    limit_threads(machine.cpu_cores, here, resolved.plan.chosen.choice.threads)
    from trainwright.launch.batch import warning

    if (said := warning()) is not None:
        say(f"warning: {said}", file=sys.stderr)
    if place is None:
        from trainwright.launch.stop import Stopping

        with Stopping() as stopping:
            return _train(request, resolved, here, stopping, None)
    # Imports torch, so after the threads are limited.
    from trainwright.launch.nodes import LinkedStopping, Node, Nodes
    from trainwright.recipe.loading import dump_recipe

    mine = Node.here(here, len(machine.gpus), dump_recipe(request.recipe), request.run is not None)
    with LinkedStopping() as linked:
        with Activity(sys.stderr, f"waiting for the other nodes at {place[0]}:{place[1]}"):
            nodes = Nodes.meet(index, count, place, seconds, mine, linked)
        try:
            return _train(request, resolved, here, linked, nodes)
        finally:
            nodes.leave()


def _train(request: Request, resolved: Resolved, processes: int, stopping: Stopping, nodes: Nodes | None) -> int:
    """From the run's directory, new or not, to the end of its workers here."""
    from contextlib import ExitStack
    from importlib import import_module

    from trainwright.launch import run_directory
    from trainwright.launch.process import Stopped, preload_libraries, run_in_child
    from trainwright.planning.table import summary

    text = run_directory.recipe_text(resolved.recipe)
    node = 0 if nodes is None else nodes.index
    with ExitStack() as held, ExitStack() as until_prepared:

        def make() -> tuple[Path, str]:
            run = request.run or run_directory.create(resolved.recipe.logging.run_directory, request.stem)
            held.enter_context(run_directory.only_launch(run))
            until_prepared.enter_context(run_directory.undone_on_error(run, created=request.run is None))
            run_directory.record(run, text, request.stem, resolved.reasons, resolved.plan.as_json(), resolved.chosen)
            (run / "logs").mkdir(exist_ok=True)
            return run, text

        def get_ready() -> None:
            with Activity(sys.stderr, "importing torch and transformers"):
                preload_libraries()
                # Imported here, to be forked: each worker would import them again otherwise.
                import_module("trainwright.launch.worker")
                from trainwright.tasks.registry import task_module

                task_module(resolved.recipe)
            log = run / "logs" / (f"prepare-node-{node}.log" if node else "prepare.log")
            run_in_child(functools.partial(prepare, run), log, stopping)
            if stopping.requested:
                raise Stopped()

        from trainwright.worker import prepare, work

        if nodes is None:
            run = make()[0]
            get_ready()
            if request.run is None and resolved.plan.is_close:
                from trainwright.launch.probe import fit

                fit(run, stopping)
        else:
            run = nodes.open(make)
            nodes.telling(get_ready)
            nodes.all_ready()
        until_prepared.close()
        if node == 0:
            say(summary(resolved.plan))
        from trainwright.launch.local import launch
        from trainwright.launch.relaunch import Relaunch
        from trainwright.launch.replan import take

        again = functools.partial(work, run, True, may_change=nodes is None)
        relaunch = Relaunch(run, lambda fault: functools.partial(again, fault=fault))
        more: dict[str, Any] = {"logs": run / "logs", "stopping": stopping, "nodes": nodes, "relaunch": relaunch}
        entry = functools.partial(work, run, request.run is not None, may_change=nodes is None)
        code = launch(entry, processes=processes, **more)
        while code == EXIT_STOPPED and not stopping.requested and (changed := take(run)) is not None:
            recipe, threads = changed
            say(f"going on as {recipe.parallel.strategy} on {recipe.parallel.num_processes}")
            _set_threads(resolved, threads)
            code = launch(again, processes=int(recipe.parallel.num_processes), **more)
    if code == EXIT_STOPPED:
        say(f"{_left(run, stopping)}; continue with: trainwright train --resume {run}", file=sys.stderr)
    elif code == EXIT_FINISHED and not (run / "final").is_dir():
        raise TrainingError(f"{run} is gone: the run's directory was deleted or moved after the training was done")
    elif code == EXIT_REQUEST and node == 0 and request.run is None and not (run / "events.jsonl").exists():
        _discard(run)
    return code


def _set_threads(resolved: Resolved, threads: int | None) -> None:
    """Of each process of another launch, unless the user says how many."""
    import os

    if threads is not None and os.environ.get("OMP_NUM_THREADS") == str(resolved.plan.chosen.choice.threads):
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _left(run: Path, stopping: Stopping) -> str:
    """How a run ended that was stopped, and what it can go on from."""
    from trainwright.engine.checkpoint import Checkpoints
    from trainwright.launch.stop import CHECKPOINT, NEWEST

    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_best=False)
    steps = checkpoints.steps()
    if not steps:
        return "stopped before the first checkpoint; nothing was kept"
    if stopping.left == CHECKPOINT:
        return "stopped after a checkpoint"
    said = "killed" if stopping.left == NEWEST else "stopped before another step"
    return f"{said}; the newest whole checkpoint is kept ({checkpoints.path(steps[-1])})"


def _discard(run: Path) -> None:
    """A request that only a worker could refuse leaves nothing behind either."""
    import shutil

    shutil.rmtree(run, ignore_errors=True)


def _bare_resume(args: list[str], i: int) -> str:
    """`--resume` followed by nothing, an option, an override or a recipe file means: the newest run."""
    if args[i] != "--resume":
        return args[i]
    from trainwright.launch.request import is_bare_resume

    return "--resume=" if is_bare_resume(args[i + 1] if i + 1 < len(args) else None) else "--resume"
