"""Signals that ask a run to stop, sent to the launcher, a worker, the process group, and suspended processes."""

from __future__ import annotations

import signal
import time

from trainwright.drilling import phases, promises
from trainwright.drilling.commands import Ended
from trainwright.drilling.faults.kills import started
from trainwright.drilling.kinds import ANY, SEVERAL, fault
from trainwright.drilling.scene import FAILED, FAULT, FINISHED, STOPPED, Scene
from trainwright.drilling.verdicts import Missed, require

_STOPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@fault("stop signal to the launcher", spreads=ANY, phases=phases.ALL, variants=_STOPS, share=4)
def stop_launcher(scene: Scene) -> None:
    """The run stops after a checkpoint, or before the first step without one, and can be continued."""
    command = started(scene)
    command.send(getattr(signal, scene.variant))
    _stopped_and_resumed(scene, scene.wait(command))


@fault("stop signal to the whole group", spreads=ANY, phases=phases.ALL, variants=_STOPS, share=3)
def stop_group(scene: Scene) -> None:
    """Like Ctrl-C in a terminal, or a scheduler that signals every process."""
    command = started(scene)
    command.send_group(getattr(signal, scene.variant))
    _stopped_and_resumed(scene, scene.wait(command))


@fault("stop signal to one worker", spreads=ANY, phases=phases.TRAINING, variants=_STOPS, share=3)
def stop_worker(scene: Scene) -> None:
    """The run stops, fails and names that rank, or ignores it; continued, it equals the undisturbed run."""
    command = started(scene)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(getattr(signal, scene.variant), workers[rank])
    ended = scene.wait(command)
    scene.expect(ended, (FINISHED, STOPPED, FAILED), f"rank {rank}" if ended.code == FAILED else "resume")
    promises.none_lost(scene.run)
    scene.resumes() if ended.code else scene.as_undisturbed()


@fault("stop signal before the imports are done", variants=_STOPS, share=1)
def stop_start(scene: Scene) -> None:
    """During start-up the interpreter itself may end it; nothing half-written is left."""
    command = scene.train()
    time.sleep(scene.draw.uniform(0.0, 1.2))
    number = getattr(signal, scene.variant)
    command.send(number)
    ended = scene.wait(command)
    by_default = ended.seconds < 1.2 and ended.code in (-number, 128 + number)
    if not by_default:
        scene.expect(ended, (STOPPED,), "stopp")
    scene.resumes()


@fault("a second ctrl-C", spreads=ANY, phases=phases.TRAINING, share=1)
def second_interrupt(scene: Scene) -> None:
    """The second signal kills; complete checkpoints stay."""
    command = started(scene)
    for worker in command.workers().values():
        command.send(signal.SIGSTOP, worker)  # it would be done before the second
    command.send(signal.SIGINT)
    time.sleep(1.3)
    command.send(signal.SIGINT)
    ended = scene.wait(command)
    scene.expect(ended, (STOPPED, FAILED), "resume" if ended.code == STOPPED else "killed|ctrl-C")
    promises.checkpoints_complete(scene.run)
    scene.resumes()


@fault(
    "a stopped worker, then SIGTERM", spreads=ANY, phases=(phases.STEP, phases.FIRST_STEP, phases.CHECKPOINT), share=1
)
def frozen_worker(scene: Scene) -> None:
    """A worker that does not respond does not prevent the run from ending."""
    command = started(scene)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGSTOP, workers[rank])
    time.sleep(0.3)
    command.send(signal.SIGTERM)
    ended = scene.wait(command)
    scene.expect(ended, (STOPPED, FAILED), "resume" if ended.code == STOPPED else f"rank {rank}")
    promises.checkpoints_complete(scene.run)
    scene.resumes()


@fault("a worker stopped for ever", spreads=ANY, phases=phases.TRAINING, variants=("restart", "stop"), share=1.5)
def hanging_worker(scene: Scene) -> None:
    """The rank is named within seconds, and the run continues by itself or, with on_hang: stop, when it is resumed."""
    command = started(scene, f"faults.on_hang={scene.variant}", "faults.restarts=3 per hour")
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGSTOP, workers[rank])
    ended = scene.wait(command)
    told = [event["rank"] for event in promises.faults(scene.run, "hang")]
    require(told == [rank], f"rank {rank} was stopped, the faults are of ranks {told}: {ended}")
    if scene.variant == "restart":
        scene.stays_undisturbed(ended)
        return
    scene.expect(ended, (FAILED, FAULT), rf"rank {rank}\b")
    promises.none_lost(scene.run)
    scene.resumes()


@fault("a worker stopped for a while", spreads=SEVERAL, phases=phases.TRAINING, share=1)
def paused_worker(scene: Scene) -> None:
    """SIGSTOP and SIGCONT change nothing."""
    command = started(scene)
    workers = scene.workers(command)
    victim = scene.draw.choice(list(workers.values()))
    command.send(signal.SIGSTOP, victim)
    time.sleep(scene.draw.uniform(0.2, 2.0))
    command.send(signal.SIGCONT, victim)
    scene.stays_undisturbed(scene.wait(command))


def _stopped_and_resumed(scene: Scene, ended: Ended) -> None:
    if ended.code == FINISHED:
        # Only a run whose last step was done when the signal came may finish.
        promises.complete_and_same(scene.run, scene.reference(), exact=True)
        if scene.phase != phases.EXPORT:
            raise Missed("the run had finished when the signal came")
        return
    scene.expect(ended, (STOPPED,), "stop")
    if any(event["event"] == "step" for event in promises.lines(scene.run)):
        reached, saved = promises.last_step(scene.run), promises.checkpoint_steps(scene.run)
        require(saved and saved[-1] == reached, f"stopped at step {reached}, checkpoints are of steps {saved}")
        promises.none_lost(scene.run)
    scene.resumes()
