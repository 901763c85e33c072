"""Processes that have less memory than their run asks for: real limits of the kernel, set where a test names them."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn


def limit(mebibytes: int) -> None:
    """Let this process, and those that it starts, have so much more private memory than it has now (setrlimit(2))."""
    used = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + mebibytes * 2**20,) * 2)


def trainwright(mebibytes: int, *arguments: str) -> None:
    """`trainwright ARGUMENTS` where every process is limited."""
    from trainwright.cli.main import main

    limit(mebibytes)
    sys.argv = ["trainwright", *arguments]
    main()


def trainwright_in_cgroup(group: str, *arguments: str) -> None:
    """`trainwright ARGUMENTS` in this cgroup (its directory)."""
    from trainwright.cli.main import main

    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    sys.argv = ["trainwright", *arguments]
    main()


def worker(rank: int, mebibytes: int, *arguments: str) -> None:
    """`python -m trainwright.worker ARGUMENTS` where the process of one rank is limited."""
    from trainwright.worker import main

    if os.environ["RANK"] == str(rank):
        limit(mebibytes)
    sys.argv = ["trainwright.worker", *arguments]
    main()


def work(run: str) -> int:
    """What a launcher has its workers do."""
    from trainwright.run.run_worker import Worker, run_worker

    return run_worker(Worker(Path(run)))


class _Fails(torch.autograd.Function):
    """Nothing forward; memory runs out backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError


def abandon(where: str) -> None:
    """Rank 1 fails in a step of two micro-batches and abandons it; the next step must be right on both ranks."""
    from trainwright.parallel.replicated.replicated import Replicated
    from trainwright.parallel.strategy import StrategyConfig
    from trainwright.parallel.world import join, leave
    from trainwright.recipe.sections.parallel import ParallelSection

    torch.manual_seed(0)
    world = join("cpu")
    # Each layer is more than a bucket, so that some are exchanged when a later one fails.
    module = nn.Sequential(*(nn.Linear(2600, 2600, bias=False) for _ in range(3)))
    parallel = ParallelSection(strategy="ddp")
    make = lambda named: torch.optim.SGD([p for _, p in named])  # noqa: E731
    strategy = Replicated(StrategyConfig(parallel, world, module, make, torch.float32))

    def step(fails: str | None) -> None:
        for micro in range(2):
            value = torch.full((2, 2600), float(world.rank + 1))
            for layer, part in enumerate(module):
                value = part(value)
                if fails == f"micro-batch {micro}, layer {layer}":
                    value = _Fails.apply(value)  # type: ignore[no-untyped-call]
            strategy.backward(value.sum(), last=micro == 1)

    if world.rank == 1:
        try:
            step(where)
        except MemoryError:
            pass
        else:
            assert where == "after the exchange"
        strategy.abandon_step()
    else:
        step(None)
    dist.barrier()
    strategy.discard_gradients()
    step(None)
    found = [strategy._gradients.of(part.weight) for part in module]
    value, expected = torch.ones(2, 2600) * 2 * (1 + 2), []
    # The model is linear: two micro-batches of each rank make one of their sum.
    value.requires_grad_()
    module(value).sum().backward()
    expected = [part.weight.grad for part in module]
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    leave()


def try_largest_step(recipe: str, mebibytes: int | None, answer: str) -> None:
    """Try the largest step of a resolved recipe, limited if so; how it failed goes to the file `answer`."""
    from trainwright.run.process import preload_libraries
    from trainwright.run.shutdown.stop import Stopping
    from trainwright.run.start import try_largest_step

    preload_libraries()
    if mebibytes is not None:
        limit(mebibytes)
    with Stopping() as stopping:
        failure = try_largest_step(recipe, stopping, yaml.safe_load(recipe)["parallel"]["num_processes"])
    result = {"out_of_memory": failure.ran_out is not None, "error": failure.message} if failure is not None else None
    Path(answer).write_text(json.dumps(result))
