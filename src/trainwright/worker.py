"""What a process of a run executes, with the run's observers; and a front for launchers that are not ours.

    torchrun --nproc-per-node 4 -m trainwright.worker runs/my-run [--resume]

The directory must hold a resolved `recipe.yaml`; the launcher gives RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_FINISHED, EXIT_REQUEST, TrainwrightError
from trainwright.launch.process import console, enter_process, stop_requested
from trainwright.launch.run_directory import PLAN, RECIPE
from trainwright.launch.stop import follow_signals

if TYPE_CHECKING:
    from trainwright.engine.events import Observer


def prepare(run: Path) -> None:
    """Do once what every worker of the run needs: data and weights in the cache. Raises RequestError."""
    from trainwright.machine.cache import cache_root
    from trainwright.recipe.loading import load_recipe
    from trainwright.tasks.registry import prepare_task

    if (stream := console()) is not None:  # what takes long says so
        logging.getLogger("trainwright").addHandler(logging.StreamHandler(stream))
        logging.getLogger("trainwright").setLevel(logging.INFO)
    prepare_task(load_recipe(run / RECIPE), cache_root())


def work(run: Path, resume: bool) -> int:
    """Train this process's share of the run; returns EXIT_FINISHED or EXIT_STOPPED."""
    from trainwright.launch.worker import run_worker
    from trainwright.machine.cache import cache_root

    return run_worker(
        run,
        cache=cache_root(),
        resume=resume,
        reasons=_reasons(run),
        observers=functools.partial(_observers, run),
        stop_requested=stop_requested,
    )


def main() -> None:
    """Run one worker and exit with its code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainwright.worker", description=(__doc__ or "").split("\n")[0]
    )
    # Not an option --run: torchrun would take that for an abbreviation of its own --run-path.
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    arguments = parser.parse_args()
    if not (arguments.run / RECIPE).is_file():
        print(f"error: {arguments.run} has no {RECIPE}; `trainwright train` makes one", file=sys.stderr)
        sys.exit(EXIT_REQUEST)
    rank = int(os.environ.get("RANK", "0"))
    terminal = os.fdopen(os.dup(2), "w")
    logs = arguments.run / "logs"
    logs.mkdir(exist_ok=True)
    enter_process(logs / f"rank-{rank}.log", parent=os.getppid(), keep_console=rank == 0)
    follow_signals()

    from torch.distributed.elastic.multiprocessing.errors import record

    from trainwright.launch.failure import RankErrorHandler

    try:
        code = record(work, RankErrorHandler())(arguments.run, arguments.resume) or EXIT_FINISHED
    except TrainwrightError as error:
        print(f"error: {error}", file=terminal, flush=True)
        code = error.exit_code
    sys.exit(code)


def _observers(run: Path) -> list[Observer]:
    from trainwright.observe.console import ConsoleObserver
    from trainwright.observe.tensorboard import TensorBoardObserver
    from trainwright.recipe.loading import load_recipe

    observers: list[Observer] = []
    if (stream := console()) is not None:
        observers.append(ConsoleObserver(stream))
    if load_recipe(run / RECIPE).logging.tensorboard:
        # First, so that the console's last word comes when the curves are written.
        observers.insert(0, TensorBoardObserver(run / "tensorboard"))
    return observers


def _reasons(run: Path) -> list[str]:
    plan = run / PLAN
    return list(json.loads(plan.read_text(encoding="utf-8"))["reasons"]) if plan.is_file() else []


if __name__ == "__main__":
    main()
