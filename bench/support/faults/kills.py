"""Processes that are killed: a worker, the launcher, everything, the shell above them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time

from support.faults import phases, promises
from support.faults.commands import TRAINWRIGHT, Command
from support.faults.kinds import ANY, WITH_ZERO, fault
from support.faults.scene import FAILED, FINISHED, MACHINE, RUN_SECONDS, Scene
from support.faults.verdicts import Missed, require

# A lost process ends the run as failed; a machine's own failure may have a code of its own.
_LOST = (FAILED, 5)


@fault("SIGKILL of a worker", spreads=ANY, phases=(phases.JOINING, *phases.TRAINING, phases.EXPORT), share=4)
def kill_worker(scene: Scene) -> None:
    """The run fails, names the rank, leaves nobody behind, and goes on from the newest checkpoint."""
    _kill_worker(scene)


@fault("SIGKILL of a worker of DeepSpeed", spreads=WITH_ZERO[-2:], phases=(phases.STEP, phases.CHECKPOINT), share=0.5)
def kill_deepspeed_worker(scene: Scene) -> None:
    """The same under ZeRO."""
    _kill_worker(scene)


def _kill_worker(scene: Scene) -> None:
    command = started(scene)
    workers = command.workers() if scene.phase == phases.JOINING else scene.workers(command)
    if not workers:
        raise Missed("no worker was seen")
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGKILL, workers[rank])
    ended = command.wait(RUN_SECONDS)
    if ended.code == FINISHED and scene.phase == phases.EXPORT:
        raise Missed("the run had finished when the signal came")
    scene.expect(ended, _LOST, rf"rank {rank}\b.*kill")
    promises.none_lost(scene.run)
    scene.resumes()


@fault("SIGKILL of the launcher", spreads=ANY, phases=phases.ALL, share=3)
def kill_launcher(scene: Scene) -> None:
    """Its workers end with it, and the run goes on at once."""
    command = started(scene)
    command.send(signal.SIGKILL)
    _killed_and_resumed(scene, command)


@fault("SIGKILL of everything", spreads=ANY, phases=phases.ALL, share=4)
def kill_everything(scene: Scene) -> None:
    """As when a container or the machine goes."""
    command = started(scene)
    command.kill()
    _killed_and_resumed(scene, command)


@fault("SIGKILL again and again", spreads=ANY, phases=phases.TRAINING, variants=("2", "3"), share=1.5)
def kill_repeatedly(scene: Scene) -> None:
    """Also while a run is being resumed, or before it has got any further."""
    command = started(scene)
    command.kill()
    for _ in range(int(scene.variant) - 1):
        command = scene.trainwright("train", "--resume", str(scene.run))
        starts = sum(event["event"] == "start" for event in promises.lines(scene.run))
        if scene.draw.random() < 0.5:
            time.sleep(scene.draw.uniform(0.5, 4.0))
        else:
            scene.wait_until(command, lambda n=starts: _starts(scene) > n)
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
    """A plain line of a batch script: the run ends in words or goes on to its end; nothing is lost."""
    script = scene.work / "job.sh"
    line = shlex.join([*TRAINWRIGHT, "train", *scene.asked()])
    script.write_text(f"#!/bin/bash\n{line}\necho the script goes on with code $?\n")
    shell = scene.command("bash", str(script))
    scene.reach(shell)
    os.kill(shell.pid, getattr(signal, scene.variant))
    deadline = time.monotonic() + RUN_SECONDS
    while shell.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = shell.wait(RUN_SECONDS)
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
    ended = command.wait(RUN_SECONDS)
    if scene.variant == "moved":
        shutil.rmtree(scene.run, ignore_errors=True)
        scene.run.with_name("elsewhere").rename(scene.run)
    scene.expect(ended, (FAILED, MACHINE, 2), str(scene.run))
    if scene.variant == "moved":
        scene.resumes()


def started(scene: Scene) -> Command:
    """The run, in the phase of the case."""
    if scene.phase == phases.PREPARATION:
        scene.use_own_cache()
    command = scene.train()
    scene.reach(command)
    return command


def _killed_and_resumed(scene: Scene, command: Command) -> None:
    ended = command.wait(RUN_SECONDS)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    require(ended.code == -signal.SIGKILL, f"wanted a killed command, got {ended}")
    promises.none_lost(scene.run)
    scene.resumes()


def _starts(scene: Scene) -> int:
    return sum(event["event"] == "start" for event in promises.lines(scene.run))
