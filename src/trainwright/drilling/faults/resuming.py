"""Runs that are resumed with another number of processes or another strategy, or while another launch trains them."""

from __future__ import annotations

import signal
import time

from trainwright.drilling import phases, promises
from trainwright.drilling.commands import Command
from trainwright.drilling.kinds import ANY, Spread, fault
from trainwright.drilling.scene import FINISHED, REQUEST, STOPPED, Scene
from trainwright.drilling.verdicts import Missed, Skipped, require


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
    found = next(filter(scene.can_train, others), None)
    if found is None:
        raise Skipped("there is no other number of processes or strategy among those that are tried")
    return found


def _as(spread: Spread) -> tuple[str, str]:
    return f"parallel.strategy={spread[0]}", f"parallel.num_processes={spread[1]}"


def _stop(scene: Scene, command: Command, step: int) -> None:
    """Stop the run with a checkpoint once its newest launch has reached the step."""
    starts = sum(event["event"] == "start" for event in promises.lines(scene.run))
    scene.wait_for_step(command, step, starts)
    scene.injected = scene.injected or time.time()
    command.send(signal.SIGTERM)
    ended = scene.wait(command)
    if ended.code == FINISHED:
        raise Missed("the run had finished when the signal came")
    scene.expect(ended, (STOPPED,), "resume")
    promises.none_lost(scene.run)


def _resumed_as(scene: Scene, spread: Spread) -> None:
    ended = scene.go_on(*_as(spread))
    scene.expect(ended, (FINISHED,))
    scene.as_undisturbed(exact=False)
    start = next(event for event in reversed(promises.lines(scene.run)) if event["event"] == "start")
    ran = start["strategy"], start["world_size"]
    require(ran == spread, f"asked for {spread}, ran {ran}")
