"""Runs that go on with another number of processes or another strategy, or that others are training."""

from __future__ import annotations

from support.faults import phases, promises
from support.faults.kinds import ANY, SINGLE, fault
from support.faults.scene import FINISHED, REQUEST, RUN_SECONDS, Scene
from support.faults.verdicts import require

_OTHERS = ("single 1", "ddp 2", "fsdp 2", "ddp 3", "fsdp 3")


@fault("resumed on another world", spreads=ANY, variants=_OTHERS, share=4)
def another_world(scene: Scene) -> None:
    """The same losses to rounding, the same examples exactly; bit for bit where it is the same world after all."""
    _resumed_as(scene, scene.variant)


@fault("resumed with DeepSpeed", spreads=(SINGLE, ("fsdp", 2)), variants=("zero1 2", "zero2 2", "zero3 2"), share=1)
def to_deepspeed(scene: Scene) -> None:
    """From torch's strategies to ZeRO."""
    _resumed_as(scene, scene.variant)


@fault(
    "resumed from DeepSpeed",
    spreads=(("zero1", 2), ("zero2", 2), ("zero3", 2)),
    variants=("ddp 2", "fsdp 2", "single 1", "same"),
    share=1,
)
def from_deepspeed(scene: Scene) -> None:
    """From ZeRO to torch's strategies, and to itself."""
    _resumed_as(scene, scene.variant)


def _resumed_as(scene: Scene, variant: str) -> None:
    scene.stopped_run()
    strategy, processes = scene.case.spread if variant == "same" else variant.split()
    ended = scene.go_on(f"parallel.strategy={strategy}", f"parallel.num_processes={processes}")
    scene.expect(ended, (FINISHED,))
    exact = (strategy, int(processes)) == scene.case.spread
    scene.as_undisturbed(exact=exact)
    starts = [event for event in promises.lines(scene.run) if event["event"] == "start"]
    ran = starts[-1]["strategy"], starts[-1]["world_size"]
    require(ran == (strategy, int(processes)), f"asked for {strategy} on {processes}, ran {ran}")


@fault("a run that is being trained is resumed too", spreads=ANY, phases=phases.TRAINING, share=1)
def resumed_twice(scene: Scene) -> None:
    """The second command is refused in words, and the first one is not disturbed."""
    first = scene.train("train.max_steps=400", "checkpoint.every=50", "evaluate.every=null")
    phases.wait_until(first, lambda: phases.has_event(scene.run, "step", 1))
    second = scene.trainwright("train", "--resume", str(scene.run)).wait(RUN_SECONDS)
    if first.ended:
        raise phases.Missed("the first had finished")
    scene.expect(second, (REQUEST,), "being trained")
    first.kill()
    promises.none_lost(scene.run)
