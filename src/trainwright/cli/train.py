"""``trainwright train``: from a recipe to a finished run on this machine."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from trainwright.errors import EXIT_REQUEST, EXIT_STOPPED, RequestError

if TYPE_CHECKING:
    from trainwright.machine.detect import Machine
    from trainwright.planning.resolve import Resolved
    from trainwright.recipe.schema import Recipe

# What makes a run the run it is: with another value of these, its checkpoints would continue something else.
_FIXED = ("task", "model", "data", "train.seed", "train.global_batch_size", "logging.run_directory")


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
        typer.Option(
            metavar="[RUN]", help="Continue this run; without a directory, the recipe's newest one."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run and why, and write nothing.")
    ] = False,
) -> None:
    """Train as a recipe says.

    Ends with 0: finished, 2: wrong request, 3: unfit machine, 4: failed, 75: stopped by a signal.
    """
    request = _read_request(arguments or [], resume)
    from trainwright.machine.detect import detect
    from trainwright.planning.resolve import resolve

    machine = detect()
    resolved = resolve(request.recipe, machine)
    _check(request, resolved.recipe)
    if dry_run:
        _show(resolved)
        return
    raise typer.Exit(_run(request, resolved, machine))


@dataclass(frozen=True)
class Request:
    """What the command line asks for. `run` is the run to continue, None for a new one."""

    recipe: Recipe
    stem: str
    run: Path | None


def _read_request(arguments: list[str], resume: str | None) -> Request:
    from trainwright.launch import run_directory
    from trainwright.recipe.loading import load_recipe

    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(files) > 1:
        raise RequestError(
            f"one recipe a run, not {len(files)} ({', '.join(files)}); overrides are section.key=value"
        )
    if not files and not resume:
        raise RequestError("no recipe given; for instance: trainwright train recipes/sft/tiny.yaml")
    path = Path(files[0]) if files else None
    if resume is None:
        assert path is not None
        return Request(load_recipe(path, overrides), path.stem, None)
    asked = load_recipe(path, overrides) if path else None
    stem = path.stem if path else ""
    run = run_directory.find(resume, asked.logging.run_directory if asked else "auto", stem)
    before = load_recipe(run / run_directory.RECIPE)
    recipe = load_recipe(run / run_directory.RECIPE, _with_consequences(overrides))
    _check_same_run(before, recipe)
    return Request(recipe, stem, run)


def _with_consequences(overrides: list[str]) -> list[str]:
    """The run's recipe is resolved: what its number of processes decided is decided anew."""
    keys = {override.split("=", 1)[0] for override in overrides}
    if "parallel.num_processes" not in keys:
        return overrides
    dependent = ("parallel.strategy", "train.gradient_accumulation_steps")
    return [*(f"{key}=auto" for key in dependent if key not in keys), *overrides]


def _check_same_run(before: Recipe, after: Recipe) -> None:
    for key in _FIXED:
        old, new = (functools.reduce(getattr, key.split("."), recipe) for recipe in (before, after))
        if old != new:
            raise RequestError(
                f"override '{key}': cannot change when a run is resumed; start a new run for that"
            )


def _check(request: Request, recipe: Recipe) -> None:
    """Refuse what can be refused without torch, before anything is written."""
    from importlib.util import find_spec

    from trainwright.data.sources import check_source
    from trainwright.launch import run_directory

    if recipe.logging.tensorboard and find_spec("tensorboard") is None:
        raise RequestError(
            "logging.tensorboard: tensorboard is not installed; pip install tensorboard, or set false"
        )
    if request.run is None and recipe.logging.run_directory != "auto":
        run_directory.check_new(Path(recipe.logging.run_directory))
    check_source(recipe.data.train)
    if isinstance(recipe.data.validation, str):
        check_source(recipe.data.validation, "data.validation")


def _processes(recipe: Recipe) -> int:
    processes = recipe.parallel.num_processes
    assert isinstance(processes, int), "a resolved recipe has no auto left"
    return processes


def _show(resolved: Resolved) -> None:
    from trainwright.recipe.loading import dump_recipe

    print(dump_recipe(resolved.recipe), end="")
    for reason in resolved.reasons:
        print(f"# {reason}")


def _run(request: Request, resolved: Resolved, machine: Machine) -> int:
    from importlib import import_module

    from trainwright.launch import run_directory
    from trainwright.launch.process import Stopped, limit_threads, preload_libraries, run_in_child
    from trainwright.launch.stop import Stopping
    from trainwright.recipe.loading import dump_recipe

    processes = _processes(resolved.recipe)
    limit_threads(machine.cpu_cores, processes)
    with Stopping() as stopping:
        run = request.run or run_directory.create(resolved.recipe.logging.run_directory, request.stem)
        with run_directory.only_launch(run):
            with run_directory.undone_on_error(run, created=request.run is None):
                run_directory.record(run, dump_recipe(resolved.recipe), resolved.reasons)
                logs = run / "logs"
                logs.mkdir(exist_ok=True)
                preload_libraries()
                # Imported here, to be forked: each worker would import them again otherwise.
                import_module("trainwright.launch.worker")
                import_module(f"trainwright.tasks.{resolved.recipe.task}.task")
                from trainwright.launch.local import launch
                from trainwright.worker import prepare, work

                run_in_child(functools.partial(prepare, run), logs / "prepare.log", stopping)
                if stopping.requested:
                    raise Stopped("stopped before the first step; nothing was kept")
            entry = functools.partial(work, run, request.run is not None)
            code = launch(entry, processes=processes, logs=logs, stopping=stopping)
    if code == EXIT_STOPPED:
        killed = (
            "killed; the newest whole checkpoint is kept" if stopping.killed else "stopped after a checkpoint"
        )
        print(f"{killed}; continue with: trainwright train --resume {run}", file=sys.stderr)
    elif code == EXIT_REQUEST and request.run is None and not (run / "events.jsonl").exists():
        _discard(run)
    return code


def _discard(run: Path) -> None:
    """A request that only a worker could refuse leaves nothing behind either."""
    import shutil

    shutil.rmtree(run, ignore_errors=True)


def _bare_resume(args: list[str], i: int) -> str:
    """`--resume` followed by nothing, an option, an override or a recipe file means: the newest run."""
    if args[i] != "--resume":
        return args[i]
    following = args[i + 1] if i + 1 < len(args) else "-"
    bare = following.startswith("-") or "=" in following or Path(following).is_file()
    return "--resume=" if bare else "--resume"
