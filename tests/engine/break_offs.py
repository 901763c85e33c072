"""A run that is stopped at every moment at which it looks, and resumed: what each of its processes does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.runs import ON_ROWS, TINY
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED
from trainwright.machine.detect import detect
from trainwright.parallel.world import RankInfo
from trainwright.recipe.loading import load_recipe
from trainwright.run import run_directory
from trainwright.run.resolve import resolve
from trainwright.run.run_worker import Worker, run_worker


def stopped_everywhere(directory: str, overrides: list[str], every: int) -> None:
    """Runs ``whole`` and, for each ``every``-th moment n, ``stopped-n``, which the last rank alone is asked to stop at.

    Rank 0 leaves ``moments.json``: the exit code of each and the number of moments that the whole run has.
    """
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, size, rank == 0, timedelta(seconds=60), multi_tenant=True)
    launches = 0

    def launch(run: Path, resume: bool, stop: Callable[[], bool]) -> int:
        nonlocal launches
        launches += 1
        if rank == 0 and not resume:
            fixed = [ON_ROWS, f"parallel.num_processes={size}", "logging.observers.tensorboard=false"]
            resolved = resolve(load_recipe(TINY, [*fixed, *overrides]), detect())
            run.mkdir()
            run_directory.record(run, run_directory.format_recipe(resolved.recipe), "tiny", [])
        own = dist.PrefixStore(f"launch-{launches}", store)
        own.set(f"ready-{rank}", "")
        own.wait([f"ready-{each}" for each in range(size)])
        _reset_groups()
        rank_info = RankInfo(rank, size, rank, size, rank, own)
        return run_worker(Worker(run, resume, rank_info), stop_requested=stop)

    def never() -> bool:
        nonlocal moments
        moments += 1
        return False

    def at(moment: int) -> Callable[[], bool]:
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return rank == size - 1 and asked > moment

        return stop

    moments, codes = 0, {}
    assert launch(Path(directory, "whole"), False, never) == EXIT_FINISHED
    whole = moments
    for moment in range(0, whole, every):
        run = Path(directory, f"stopped-{moment}")
        codes[moment] = launch(run, False, at(moment))
        if codes[moment] == EXIT_STOPPED:
            assert launch(run, True, never) == EXIT_FINISHED
    if rank == 0:
        Path(directory, "moments.json").write_text(json.dumps({"moments": whole, "codes": codes}))


def _reset_groups() -> None:
    """DeepSpeed keeps the process groups of its first start in modules, for which the next one is none."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in list(vars(groups).items()):
        if name.isupper() and name.startswith("_") and name.endswith("GROUP"):
            setattr(groups, name, {} if isinstance(value, dict) else None)
