"""Killed processes: a worker, the launcher, all of them, the parent shell."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import time

from trainwright.drilling import phases, promises
from trainwright.drilling.commands import TRAINWRIGHT, Command
from trainwright.drilling.kinds import ANY, fault
from trainwright.drilling.scene import FAILED, FAULT, FINISHED, MACHINE, REQUEST, Scene
from trainwright.drilling.verdicts import Missed, require

# A lost process ends the run as failed; a machine's own failure may have a code of its own.
_LOST = (FAILED, FAULT)
# Whether the run is restarted automatically.
RESTARTS = {"restarted": "faults.restarts=3 per hour", "resumed": "faults.restarts=off"}


@fault(
    "SIGKILL of a worker",
    spreads=ANY,
    phases=(phases.JOINING, *phases.TRAINING, phases.EXPORT),
    variants=RESTARTS,
    share=4,
)
def kill_worker(scene: Scene) -> None:
    """The rank is named, no process is left behind, and the run continues from its checkpoint, restarted or resumed."""
    command = started(scene, RESTARTS[scene.variant])
    workers = command.workers() if scene.phase == phases.JOINING else scene.workers(command)
    if not workers:
        raise Missed("no worker was seen")
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGKILL, workers[rank])
    ended = scene.wait(command)
    restarts = [event for event in promises.lines(scene.run) if event["event"] == "restart"]
    if ended.code == FINISHED and not restarts and scene.phase == phases.EXPORT:
        raise Missed("the run had finished when the signal came")
    if scene.variant == "restarted":
        scene.stays_undisturbed(ended)
        named = [event for event in restarts if f"rank {rank} " in event["detail"]]
        require(len(restarts) == len(named) == 1, f"rank {rank} was killed, restarts are {restarts}")
        return
    scene.expect(ended, _LOST, rf"rank {rank}\b.*kill")
    promises.none_lost(scene.run)
    scene.resumes()


@fault("SIGKILL of the launcher", spreads=ANY, phases=phases.ALL, share=3)
def kill_launcher(scene: Scene) -> None:
    """Its workers end with it, and the run can be resumed at once."""
    command = started(scene)
    command.send(signal.SIGKILL)
    _killed_and_resumed(scene, command)


@fault("SIGKILL of everything", spreads=ANY, phases=phases.ALL, share=4)
def kill_everything(scene: Scene) -> None:
    """As when a container or the machine is lost."""
    command = started(scene)
    command.kill()
    _killed_and_resumed(scene, command)


@fault("SIGKILL again and again", spreads=ANY, phases=phases.TRAINING, variants=("2", "3"), share=1.5)
def kill_repeatedly(scene: Scene) -> None:
    """Also while a run is being resumed, or before it has progressed."""
    command = started(scene)
    command.kill()
    for _ in range(int(scene.variant) - 1):
        command = scene.trainwright("train", "--resume", str(scene.run))
        starts = sum(event["event"] == "start" for event in promises.lines(scene.run))
        if scene.draw.random() < 0.5:
            time.sleep(scene.draw.uniform(0.5, 4.0))
        else:
            scene.wait_until(command, functools.partial(_started_again, scene, starts))
            time.sleep(scene.draw.uniform(0, 0.4))
        command.kill()
        promises.none_lost(scene.run)
    scene.resumes()


@fault(
    "the shell that runs the command is killed",
    spreads=ANY,
    phases=(phases.IMPORTS, *phases.TRAINING),
    variants=("SIGTERM", "SIGHUP", "SIGKILL"),
    share=1.5,
)
def kill_shell(scene: Scene) -> None:
    """A plain line of a batch script: the run ends with a clear message or finishes; nothing is lost."""
    script = scene.work / "job.sh"
    line = shlex.join([*TRAINWRIGHT, "train", *scene.asked()])
    script.write_text(f"#!/bin/bash\n{line}\necho the script goes on with code $?\n")
    shell = scene.command("bash", str(script))
    scene.reach(shell)
    os.kill(shell.pid, getattr(signal, scene.variant))
    deadline = time.monotonic() + scene.setting.patience
    while shell.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = scene.wait(shell)
    require("Traceback" not in ended.text, f"a traceback: {ended}")
    finished = any(event["event"] == "finish" and event["status"] == "finished" for event in promises.lines(scene.run))
    if finished:
        scene.as_undisturbed()
        return
    reached, saved = promises.last_step(scene.run), promises.checkpoint_steps(scene.run)
    require(not reached or (saved and saved[-1] == reached), f"ended at step {reached}, checkpoints are of {saved}")
    scene.resumes()


@fault("a run directory that is deleted", spreads=ANY, phases=phases.TRAINING, variants=("deleted", "moved"), share=1)
def delete_run(scene: Scene) -> None:
    """The run does not end as if it had been saved."""
    command = started(scene)
    if scene.variant == "moved":
        scene.run.rename(scene.run.with_name("elsewhere"))
    else:
        shutil.rmtree(scene.run, ignore_errors=True)
        if scene.run.exists():  # it wrote meanwhile
            shutil.rmtree(scene.run, ignore_errors=True)
    ended = scene.wait(command)
    if scene.variant == "moved":
        shutil.rmtree(scene.run, ignore_errors=True)
        scene.run.with_name("elsewhere").rename(scene.run)
    scene.expect(ended, (FAILED, MACHINE, REQUEST), re.escape(str(scene.run)))
    if scene.variant == "moved":
        scene.resumes()


def started(scene: Scene, *overrides: str) -> Command:
    """Start the run; return in the phase of the case."""
    if scene.phase == phases.PREPARATION:
        scene.use_own_cache()
    command = scene.train(*overrides)
    scene.reach(command)
    return command


def _killed_and_resumed(scene: Scene, command: Command) -> None:
    ended = scene.wait(command)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    require(ended.code == -signal.SIGKILL, f"wanted a killed command, got {ended}")
    promises.none_lost(scene.run)
    scene.resumes()


def _started_again(scene: Scene, starts: int) -> bool:
    return _starts(scene) > starts


def _starts(scene: Scene) -> int:
    return sum(event["event"] == "start" for event in promises.lines(scene.run))
