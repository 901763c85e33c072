"""Killed processes; runs that are resumed with other processes or twice; and a worker whose memory is limited."""

from __future__ import annotations

import functools
import os
import re
import resource
import shlex
import shutil
import signal
import time

from trainwright.faults.drills import invariants, phases
from trainwright.faults.drills.invariants import Missed, Skipped, require
from trainwright.faults.drills.kinds import ANY, Spread, fault
from trainwright.faults.drills.trial_environment import FAILED, FAULT, FINISHED, MACHINE, REQUEST, STOPPED, Scene
from trainwright.faults.drills.watched_commands import TRAINWRIGHT, Command

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
    restarts = [event for event in invariants.lines(scene.run) if event["event"] == "restart"]
    if ended.code == FINISHED and not restarts and scene.phase == phases.EXPORT:
        raise Missed("the run had finished when the signal came")
    if scene.variant == "restarted":
        scene.stays_undisturbed(ended)
        named = [event for event in restarts if f"rank {rank} " in event["detail"]]
        require(len(restarts) == len(named) == 1, f"rank {rank} was killed, restarts are {restarts}")
        return
    scene.expect(ended, _LOST, rf"rank {rank}\b.*kill")
    invariants.none_lost(scene.run)
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
        starts = sum(event["event"] == "start" for event in invariants.lines(scene.run))
        if scene.draw.random() < 0.5:
            time.sleep(scene.draw.uniform(0.5, 4.0))
        else:
            scene.wait_until(command, functools.partial(_has_restarted, scene, starts))
            time.sleep(scene.draw.uniform(0, 0.4))
        command.kill()
        invariants.none_lost(scene.run)
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
    finished = any(
        event["event"] == "finish" and event["status"] == "finished" for event in invariants.lines(scene.run)
    )
    if finished:
        scene.as_undisturbed()
        return
    reached, saved = invariants.last_step(scene.run), invariants.checkpoint_steps(scene.run)
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
    invariants.none_lost(scene.run)
    scene.resumes()


def _has_restarted(scene: Scene, starts: int) -> bool:
    return _starts(scene) > starts


def _starts(scene: Scene) -> int:
    return sum(event["event"] == "start" for event in invariants.lines(scene.run))


@fault("another strategy or number of processes", spreads=ANY, variants=("after SIGKILL", "after SIGTERM"), share=5)
def another_world(scene: Scene) -> None:
    """The same losses to rounding, the same examples exactly."""
    other = _other(scene, [spread for spread in scene.setting.spreads if spread != scene.case.spread])
    if scene.variant == "after SIGKILL":
        scene.stopped_run()
    else:
        _stop(scene, scene.train(), phases.STEPS // 2)
    _resumed_as(scene, other)


@fault("processes that leave and come back", spreads=ANY, share=3)
def leave_and_come_back(scene: Scene) -> None:
    """Another number of processes for some steps, then the original: the same losses up to rounding."""
    own = scene.case.spread
    other = _other(scene, [spread for spread in scene.setting.spreads if spread[1] != own[1]])
    _stop(scene, scene.train(), phases.SAVES_EVERY + 1)
    _stop(scene, scene.trainwright("train", "--resume", str(scene.run), *_as(other)), 2 * phases.SAVES_EVERY + 1)
    _resumed_as(scene, own)


@fault("a run that is being trained is resumed too", spreads=ANY, phases=(phases.STEP,), share=1)
def resumed_twice(scene: Scene) -> None:
    """The second command is refused with a clear message, and the first, suspended meanwhile, is not disturbed."""
    first = scene.train()
    scene.wait_until(first, lambda: phases.has_event(scene.run, "step", 1))
    suspended = first.processes()
    for process in suspended:
        first.send(signal.SIGSTOP, process)
    if first.ended or phases.has_event(scene.run, "finish"):
        raise Missed("the first had finished")
    second = scene.wait(scene.trainwright("train", "--resume", str(scene.run)))
    for process in suspended:
        first.send(signal.SIGCONT, process)
    scene.expect(second, (REQUEST,), "being trained")
    scene.stays_undisturbed(scene.wait(first))


def _other(scene: Scene, others: list[Spread]) -> Spread:
    """Return one of the spreads that the recipe can be trained with."""
    scene.draw.shuffle(others)
    spread = next(filter(scene.can_train, others), None)
    if spread is None:
        raise Skipped("there is no other number of processes or strategy among those that are tried")
    return spread


def _as(spread: Spread) -> tuple[str, str]:
    return f"parallel.strategy={spread[0]}", f"parallel.num_processes={spread[1]}"


def _stop(scene: Scene, command: Command, step: int) -> None:
    """Stop the run with a checkpoint once its newest launch has reached the step."""
    starts = sum(event["event"] == "start" for event in invariants.lines(scene.run))
    scene.wait_for_step(command, step, starts)
    scene.injected = scene.injected or time.time()
    command.send(signal.SIGTERM)
    ended = scene.wait(command)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    scene.expect(ended, (STOPPED,), "resume")
    invariants.none_lost(scene.run)


def _resumed_as(scene: Scene, spread: Spread) -> None:
    ended = scene.go_on(*_as(spread))
    scene.expect(ended, (FINISHED,))
    scene.as_undisturbed(exact=False)
    start = next(event for event in reversed(invariants.lines(scene.run)) if event["event"] == "start")
    ran = start["strategy"], start["world_size"]
    require(ran == spread, f"asked for {spread}, ran {ran}")


@fault(
    "an address space that is limited later", spreads=ANY, phases=phases.TRAINING, variants=("0", "1", "8"), share=1.5
)
def limited_addresses(scene: Scene) -> None:
    """A worker's memory is limited to what it has plus some MiB: smaller micro-batches, or a clear error."""
    halvable = scene.setting.halvable
    command = started(scene, *halvable)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    with open(f"/proc/{workers[rank]}/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize() + int(scene.variant) * 2**20
    resource.prlimit(workers[rank], resource.RLIMIT_AS, (size, size))
    ended = scene.wait(command)
    scene.expect(ended, (FINISHED, FAILED, MACHINE), "memory")
    invariants.checkpoints_complete(scene.run)
    if ended.code == FINISHED:
        scene.as_undisturbed(halvable, exact=False)
    else:
        scene.resumes(overrides=halvable, exact=False)
