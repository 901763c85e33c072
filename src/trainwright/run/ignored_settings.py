"""Settings around `trainwright train` that it does not follow: reported, or rejected if they ask for more.

`train` starts its processes itself, on this machine and those that --nodes names. It follows its recipe and its
options; variables and files that mean another run must not be ignored silently.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.run.group.addresses import in_words
from trainwright.run.group.environment import Variables, in_slurm_step, number_of
from trainwright.utils.text import quoted

_WORKER = "python -m trainwright.worker"


def refuse_more_nodes(arguments: Sequence[str], nodes: int | None, variables: Mapping[str, str] | None = None) -> None:
    """Reject a plain command line in a Slurm allocation of several nodes, because the other nodes would be idle.

    Args:
        arguments: of the command line, to suggest one that uses all nodes.
        nodes: the value of --nodes, or None.

    Raises:
        RequestError: with the command that uses all of them, and the option that excludes them on purpose.
    """
    env = Variables(os.environ if variables is None else variables)
    there = number_of(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if nodes is not None or there < 2 or in_slurm_step(env):
        return
    raise RequestError(
        f"this Slurm allocation has {there} nodes, but this command trains on one; start one process per device on "
        f"all nodes with `{srun_line(env, there, arguments)}`, or pass --nodes 1 to leave the others idle"
    )


def srun_line(env: Variables, nodes: int, arguments: Sequence[str]) -> str:
    """Return the command that starts workers on all nodes of the allocation."""
    tasks = number_of(env, "SLURM_NTASKS")
    each = number_of(env, "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE") or max(1, tasks // nodes)
    # srun sets the number of processes; one that was meant for this machine would contradict it.
    arguments = [word for word in arguments if not word.startswith("parallel.num_processes=")]
    return f"srun --nodes={nodes} --ntasks-per-node={each} {_WORKER} {shlex.join(arguments)}".rstrip()


def ignored_settings(
    nodes: int | None, processes: int, accelerate_file: Path | None, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield a line for each setting that is not followed, if ignoring it is harmless.

    Args:
        accelerate_file: Accelerate's default file, if it exists and no other was named.
    """
    env = Variables(os.environ if variables is None else variables)
    if accelerate_file is not None:
        yield (
            f"{accelerate_file}, Accelerate's default file, is not used: --accelerate-config {quoted(accelerate_file)} "
            "takes processes, strategy and precision from it"
        )
    alone = number_of(env, "WORLD_SIZE") <= 1
    if nodes is None and alone and not env.has("RANK") and (address := env.text("MASTER_ADDR")) is not None:
        port = env.text("MASTER_PORT") or "29500"
        yield (
            f"MASTER_ADDR is {address}, which is not used: this command trains on this machine only; for several, "
            f"pass on each --nodes N --node-rank R --rendezvous {in_words(address, port)}"
        )
    tasks = number_of(env, "SLURM_NTASKS")
    if env.has("SLURM_JOB_ID") and not in_slurm_step(env) and tasks > 1 and tasks != processes:
        yield (
            f"this Slurm allocation is for {tasks} tasks, and {processes} process{'es' * (processes > 1)} "
            f"start{'s' * (processes == 1)} here: parallel.num_processes sets their number"
        )
