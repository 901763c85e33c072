"""A run of one simulated rank: the worker that every run has, on a device that is not there.

Imports torch, so the shim must be loaded before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainwright.planning.simulation import mode
from trainwright.planning.simulation.device import Rank, install_card, install_files, install_groups
from trainwright.planning.simulation.recorders import Logs

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


def install(rank: Rank) -> Logs:
    """Replace what of torch would ask a driver or another process; once, before models and strategies are imported.

    The size of the world may be set in ``rank`` later, before a process group exists.
    """
    logs = Logs()
    install_groups(rank)
    install_card(rank.card, logs.memory, logs.waits)
    mode.install(logs)
    torch.autograd.set_multithreading_enabled(False)
    # Libraries ask where data is to compare it; no data is read.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor is deprecated", UserWarning)
    install_files()
    mode.install_kernels(rank.card.capability)
    return logs


@contextmanager
def simulated(rank: Rank, logs: Logs) -> Iterator[None]:
    """Make all tensors within the context fake, and note what is done with them."""
    from trainwright.parallel.zero import deepspeed_engine
    from trainwright.tasks import reference

    fake, noted = FakeTensorMode(allow_non_fake_inputs=True), mode.Simulated(logs, rank.card.capability)

    @contextmanager
    def only_these() -> Iterator[None]:
        with _disable_current_modes(), fake, noted:
            yield

    # ZeRO-3 hides what it gathers from other modes, and would from these.
    hides: Any = deepspeed_engine
    hides._disable_current_modes = only_these
    # What other ranks compute is not known, and its values do not matter.
    others: Any = reference
    others.combined = lambda world, own: np.nan_to_num(own)
    with fake, noted:
        yield


def prepare(recipe: RecipeSchema, cache: Path) -> None:
    """Prepare the data and check the model, as before every run."""
    from trainwright.engine.task import task_module

    task_module(recipe).prepare_once(recipe, cache)


def train(directory: Path, cache: Path, rank: Rank, logs: Logs) -> None:
    """Train the run in ``directory`` as rank 0, to its export.

    Raises:
        TrainwrightError: as for a run.
        RuntimeError: an operation mixes devices or dtypes, or a kernel refuses its arguments.
    """
    from trainwright.parallel.world import RankInfo
    from trainwright.run.run_worker import Worker, run_worker

    rank_info = RankInfo(rank=0, size=rank.world, local_rank=0, local_size=rank.local, gpu=0, alone=True)
    run_worker(Worker(directory, rank_info=rank_info, cache=cache), watch=logs.phases.watch)
