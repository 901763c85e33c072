"""The same run under torchrun, which has messages and exit codes of its own."""

from __future__ import annotations

import signal
import sys

from trainwright.faults.drills import invariants, phases
from trainwright.faults.drills.invariants import Missed, require
from trainwright.faults.drills.kinds import SEVERAL, fault
from trainwright.faults.drills.trial_environment import FINISHED, Scene
from trainwright.faults.drills.watched_commands import Command


@fault("a stop under torchrun", spreads=SEVERAL, phases=phases.TRAINING, variants=("SIGTERM", "SIGINT"), share=1)
def stop_torchrun(scene: Scene) -> None:
    """Its workers write a checkpoint of the current step."""
    command = _started(scene)
    command.send(getattr(signal, scene.variant))
    ended = scene.wait(command)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    reached, saved = invariants.last_step(scene.run), invariants.checkpoint_steps(scene.run)
    require(not reached or (saved and saved[-1] == reached), f"stopped at {reached}, checkpoints of {saved}: {ended}")
    scene.resumes()


@fault("a worker killed under torchrun", spreads=SEVERAL, phases=phases.TRAINING, share=0.7)
def kill_under_torchrun(scene: Scene) -> None:
    """The other rank ends by itself and names the killed one."""
    command = _started(scene)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGKILL, workers[rank])
    ended = scene.wait(command)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    require(f"error: rank {rank}" in ended.text, f"rank {rank} is not named: {ended}")
    invariants.none_lost(scene.run)
    scene.resumes()


@fault("SIGKILL of the node agent", spreads=SEVERAL, phases=phases.TRAINING, share=0.7)
def kill_agent(scene: Scene) -> None:
    """The workers of torchrun end with it, and the run goes on."""
    command = _started(scene)
    command.send(signal.SIGKILL)
    ended = scene.wait(command)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    invariants.none_lost(scene.run)
    scene.resumes()


def _started(scene: Scene) -> Command:
    """The run under torchrun, in the phase of the case."""
    processes = str(scene.case.spread[1])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    command = scene.command(sys.executable, *launcher, "-m", "trainwright.worker", *scene.asked())
    scene.reach(command)
    return command
