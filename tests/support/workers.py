"""Workers of a run, started one by one with the variables that a launcher would set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.runs import TINY, Runs, Started


def worker(*arguments: str) -> None:
    """`python -m trainwright.worker ARGUMENTS`, in a process that was forked for it."""
    from trainwright.worker import main

    sys.argv = ["trainwright.worker", *arguments]
    main()


def start_workers(
    runs: Runs,
    environments: Sequence[dict[str, str]],
    *arguments: str,
    recipe: Path = TINY,
    run: Path | None = None,
    cwd: Path | None = None,
) -> list[Started]:
    """A worker for each environment, of a run in a new directory, `run` of each."""
    run = run or runs.new_directory("run")
    fixed = (str(recipe), f"logging.run_directory={run}", "logging.observers.tensorboard=false")
    workers = []
    for variables in environments:
        function = {"function": "tests.support.workers:worker", "arguments": [*fixed, *arguments]}
        found = runs._start({**function, "environment": variables}, cwd)
        found.run = run
        workers.append(found)
    return workers


def srun(processes: int, job: str) -> list[dict[str, str]]:
    """What Slurm's srun sets for the processes of a step on one machine."""
    return [
        {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": str(processes),
            "SLURM_STEP_NUM_TASKS": str(processes),
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": str(processes),
            "SLURM_STEP_NODELIST": "node01",
        }
        for rank in range(processes)
    ]


def open_mpi(processes: int, job: str) -> list[dict[str, str]]:
    """What Open MPI's mpirun sets on one machine."""
    return [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(processes),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(processes),
            "PMIX_NAMESPACE": job,
        }
        for rank in range(processes)
    ]


def by_hand(processes: int, port: int) -> list[dict[str, str]]:
    """torch's variables without torchrun: rank 0 hosts the store."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(processes)
    ]
