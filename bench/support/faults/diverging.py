"""Training that diverges: numbers that are none never reach a checkpoint, and the message says where it began."""

from __future__ import annotations

from trainwright.faults.drills import invariants
from trainwright.faults.drills.invariants import require
from trainwright.faults.drills.kinds import ANY, register_fault
from trainwright.faults.drills.trial_environment import FAILED, Scene


@register_fault(
    "training that diverges",
    spreads=ANY,
    variants=(
        "optimizer.learning_rate=1e25",
        "optimizer.learning_rate=1e38",
        "optimizer.learning_rate=1e30 optimizer.max_grad_norm=null",
        "optimizer.name=muon optimizer.learning_rate=1e30",
    ),
    share=1.5,
)
def diverging(scene: Scene) -> None:
    """It fails at once, naming the step and examples, and again when it is resumed."""
    overrides = [*scene.variant.split(), "checkpoint.every=1", "optimizer.warmup_steps=0"]
    ended = scene.wait(scene.train(*overrides))
    scene.expect(ended, (FAILED,), ["step", "not finite|nan|inf"])
    reached = invariants.find_last_step(scene.run)
    saved = invariants.check_checkpoints_complete(scene.run)
    require(not saved or saved[-1] <= reached, f"checkpoints of {saved}, and only {reached} steps were taken")
    again = scene.go_on(first=overrides)
    scene.expect(again, (FAILED,), ["step", "not finite|nan|inf"])
    require(invariants.find_last_step(scene.run) == reached, "the second attempt got elsewhere")
