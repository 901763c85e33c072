"""What interrupts a job of a real Slurm: the scheduler, its users, its nodes, and their daemons."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

import psutil

from tests.support.commands import wait_for
from tests.support.slurm import CONTROLLER, Slurm

Undo = Callable[[], None]
# The limit of jobs; so short that Slurm sends no signal before it.
MINUTES = 19


@dataclass(frozen=True)
class Interruption:
    """``act`` interrupts a job and returns what puts the cluster back in order once the job is done.

    ``grace``: whether the run is given any time to stop, so that it may lose one step at most. ``ends``: how the job
    may end where the run finished in that time.
    """

    act: Callable[[Slurm, str, random.Random], Undo]
    grace: bool
    ends: tuple[str, ...] = ("COMPLETED",)


def _nothing() -> None:
    pass


def _requeue(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    slurm.run("scontrol", "requeue", job)
    return _nothing


def _preempt(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    words = ("--partition=high", "--nodes=2", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1")
    slurm.run("sbatch", "--parsable", *words)
    return _nothing


def _time_limit(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    """A limit that the run does not know of, unless it begins after the change."""
    end = datetime.now() + timedelta(seconds=draw.uniform(1, 4))
    slurm.run("scontrol", "update", f"JobId={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
    wait_for(lambda: slurm.state(job) != "RUNNING", every=0.3)
    with suppress(AssertionError):  # it is over
        slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={MINUTES}")
    return _nothing


def _signal(name: str, *to: str) -> Callable[[Slurm, str, random.Random], Undo]:
    def act(slurm: Slurm, job: str, draw: random.Random) -> Undo:
        slurm.run("scancel", f"--signal={name}", *to, job)
        return _nothing

    return act


def _drain(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    """The job goes on elsewhere or, if it needs all nodes, when the node is back."""
    nodes = slurm.nodes_of(job)
    node = draw.choice(nodes)
    slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    slurm.run("scontrol", "requeue", job)
    if len(nodes) > 1:
        time.sleep(draw.uniform(0, 10))
        slurm.resume_nodes()
    return slurm.resume_nodes


def _down(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    node = draw.choice(slurm.nodes_of(job))
    for state in ("DRAIN", "DOWN"):  # otherwise Slurm takes it back by itself, with the job's processes still there
        slurm.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
    wait_for(lambda: not slurm.processes(job, node), every=0.3)
    slurm.resume_nodes()
    return _nothing


def _dead_node(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    """It comes back after Slurm has missed it."""
    node = draw.choice(slurm.nodes_of(job))
    slurm.kill_node(node)
    wait_for(lambda: slurm.node_state(node).startswith("down"), every=0.3)
    slurm.start_daemon(node)
    return _nothing


def _daemon_of_node(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    node = draw.choice(slurm.nodes_of(job))
    slurm.kill_daemon(node)
    time.sleep(draw.uniform(0, 6))
    slurm.start_daemon(node)
    return _nothing


def _controller(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    """Killed, with a request to stop while it is away."""
    slurm.run("scancel", "--signal=USR1", job)
    slurm.kill_daemon(CONTROLLER)
    time.sleep(draw.uniform(0, 10))
    slurm.start_daemon(CONTROLLER)
    wait_for(slurm.answers, every=0.3)
    return _nothing


def _cancel_step(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    with suppress(AssertionError):  # there is no step yet, or none any more
        slurm.run("scancel", f"{job}.0")
    return _nothing


def _kill_step(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    """What supervises the tasks of a node; Slurm then kills what it had started there."""
    node = draw.choice(slurm.nodes_of(job))
    steps = [each for each in slurm.step_daemons(node) if f"[{job}.0]" in " ".join(each.cmdline())]
    _kill(steps or slurm.tasks(job, node))
    return _nothing


def _kill_task(slurm: Slurm, job: str, draw: random.Random) -> Undo:
    """One process of the run: its command, or a worker."""
    tasks = slurm.tasks(job)
    _kill([draw.choice(tasks)] if tasks else [])
    return _nothing


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


KINDS = {
    "requeue": Interruption(_requeue, grace=True),
    "preemption": Interruption(_preempt, grace=True),
    "time limit": Interruption(_time_limit, grace=True, ends=("COMPLETED", "TIMEOUT")),
    "USR1 to the steps": Interruption(_signal("USR1"), grace=True),
    "TERM to the steps": Interruption(_signal("TERM"), grace=True),
    "USR1 to everything": Interruption(_signal("USR1", "--full"), grace=True),
    # srun gets it too, and then has its tasks killed at once.
    "TERM to everything": Interruption(_signal("TERM", "--full"), grace=False),
    "drained node": Interruption(_drain, grace=True),
    "node set down": Interruption(_down, grace=False),
    "dead node": Interruption(_dead_node, grace=False),
    "killed slurmd": Interruption(_daemon_of_node, grace=True),
    "killed slurmctld": Interruption(_controller, grace=True),
    "canceled step": Interruption(_cancel_step, grace=False),  # Slurm kills its tasks at once
    "killed slurmstepd": Interruption(_kill_step, grace=False),
    "killed task": Interruption(_kill_task, grace=False),
}
