"""The body of a run's processes, with the run's observers; also the entry point for other launchers.

    python -m trainwright.worker RECIPE [SECTION.KEY=VALUE]... [--resume [RUN]]
    torchrun --nproc-per-node 4 -m trainwright.worker RECIPE
    accelerate launch --config_file FILE -m trainwright.worker RECIPE
    srun --ntasks-per-node 4 python -m trainwright.worker RECIPE
    mpirun -np 4 python -m trainwright.worker RECIPE

The recipe must ask for the number of processes that the launcher starts; parallel.num_processes: auto adopts it.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.activity import Activity
from trainwright.errors import EXIT_STOPPED, Interrupted, TrainwrightError
from trainwright.launch import run_directory
from trainwright.launch.ending.stop import interruptible
from trainwright.launch.group.joined import JoinRequest, run_joined
from trainwright.launch.group.report_once import rank_from_variables, should_report
from trainwright.launch.process import console, stop_requested
from trainwright.launch.request import is_bare_resume, split_words
from trainwright.launch.run_directory import RECIPE
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.engine.events import Observer
    from trainwright.parallel.world import RankInfo


def prepare(run: Path) -> None:
    """Prepare once what every worker of the run needs: data and weights in the cache. Raises RequestError."""
    from trainwright.machine.cache import cache_root
    from trainwright.recipe.loading import load_recipe
    from trainwright.tasks.registry import task_module

    with Activity(console(), "preparing the model and the data") as activity:
        if console() is not None:  # long operations are shown
            logging.getLogger("trainwright").addHandler(_ActivityHandler(activity))
            logging.getLogger("trainwright").setLevel(logging.INFO)
        recipe = load_recipe(run / RECIPE)
        task_module(recipe).prepare_once(recipe, cache_root())


class _ActivityHandler(logging.Handler):
    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self._activity = activity

    def emit(self, record: logging.LogRecord) -> None:
        self._activity.say(self.format(record))


def work(
    run: Path,
    resume: bool,
    rank_info: RankInfo | None = None,
    fault: Mapping[str, Any] | None = None,
    may_change: bool = False,
) -> int:
    """Train this process's share of the run; returns EXIT_FINISHED or EXIT_STOPPED.

    `fault`: why the run was relaunched, if it was. `may_change`: whether it can be relaunched with another plan, if its
    plan proves wrong and the recipe asks for that.
    """
    from trainwright.launch.run_worker import run_worker
    from trainwright.machine.cache import cache_root

    return run_worker(
        run,
        cache=cache_root(),
        resume=resume,
        reasons=run_directory.reasons(run),
        predicted=run_directory.predicted(run),
        fault=fault,
        observers=functools.partial(_observers, run),
        stop_requested=stop_requested,
        rank_info=rank_info,
        may_change=may_change,
    )


def main() -> None:
    """Run one worker and exit with its code: those of `trainwright train`."""
    arguments = _parse(sys.argv[1:])
    try:
        with interruptible():
            recipe, overrides = split_words(arguments.recipe)
            seconds, force = arguments.rendezvous_timeout, arguments.force
            asked = JoinRequest(recipe, tuple(overrides), arguments.resume, seconds, force)
            code = run_joined(asked, prepare, work)
    except TrainwrightError as error:
        if should_report(rank_from_variables(os.environ), str(error)):
            say(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except Interrupted:
        code = EXIT_STOPPED
        stopped = "stopped before the first step; nothing was changed; run the same command again"
        if should_report(rank_from_variables(os.environ), stopped):
            say(stopped, file=sys.stderr)
    sys.exit(code)


def _parse(given: list[str]) -> argparse.Namespace:
    explained = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="python -m trainwright.worker",
        description="One process of a training run that another launcher starts.",
        epilog=explained,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # No option may start like one of torchrun's or accelerate's, which would take it for their own.
    parser.add_argument("recipe", nargs="*", metavar="RECIPE [SECTION.KEY=VALUE]...", help="as for trainwright train")
    parser.add_argument("--force", action="store_true", help="start even if the plan does not fit")
    parser.add_argument("--resume", metavar="[RUN]", help="resume this run, or the recipe's newest run")
    parser.add_argument(
        "--rendezvous-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="seconds to wait for the other processes (600)",
    )
    following = [*given[1:], None]
    bare = [a == "--resume" and is_bare_resume(next_) for a, next_ in zip(given, following, strict=True)]
    return parser.parse_args(["--resume=" if is_bare else a for a, is_bare in zip(given, bare, strict=True)])


def _observers(run: Path) -> list[Observer]:
    from trainwright.observe.console import ConsoleObserver
    from trainwright.observe.registry import observers_named
    from trainwright.recipe.loading import load_recipe
    from trainwright.registries import OBSERVERS

    section, stream = load_recipe(run / RECIPE).logging, console()
    observers = observers_named(section.observers, run, lambda line: say(line, file=stream or sys.stderr))
    if section.tensorboard:
        observers.append(OBSERVERS.get("tensorboard")(run))
    if stream is not None:
        observers.append(ConsoleObserver(stream))  # last, so that its final output comes after the others have finished
    return observers


if __name__ == "__main__":
    main()
