"""Numbers that go wrong inside a worker: NaN, flipped bits, and a clock that jumps."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainwright.drilling import phases, promises
from trainwright.drilling.commands import Ended
from trainwright.drilling.kinds import ANY, COPIES, SEVERAL, fault
from trainwright.drilling.scene import FAILED, Scene
from trainwright.drilling.verdicts import require
from trainwright.recipe.loading import load_recipe

_POLICIES = "trainwright.drilling.faults.planted"
# A check that finds nothing comes first, so that there is a checkpoint to go back to.
_CHECKED_EVERY = 4
_CHECKS = (f"faults.replay_every={_CHECKED_EVERY}", "faults.on_corruption=rewind", "checkpoint.every=2")
_BITS = 23


@fault("NaN in a pass", spreads=ANY, variants=("at a step before a checkpoint", "after one"), share=2)
def not_a_number(scene: Scene) -> None:
    """The run fails at that step, is not restarted, stores no such number, and continues without the cause."""
    first = 2 if scene.variant.startswith("at") else phases.SAVES_EVERY + 1
    step = scene.draw.randrange(first, first + phases.SAVES_EVERY - 2)
    rank = scene.draw.randrange(scene.case.spread[1])
    plain = _uncompiled(scene)
    ended = _train(scene, "NotANumber", {"rank": rank, "step": step, "pass": 0}, *plain)
    scene.expect(ended, (FAILED,), ["step", "not finite|nan|inf"])
    reached = promises.last_step(scene.run)
    require(reached == step - 1, f"step {step} was NaN, and the last one is {reached}")
    promises.none_lost(scene.run)
    scene.resumes(overrides=plain)


@fault("a flipped bit of a weight", spreads=COPIES, share=2)
def flipped_weight(scene: Scene) -> None:
    """The next check finds it and names the rank, and the run rewinds to before it."""
    _flipped(scene, "Weight", scene.draw.randrange(_CHECKED_EVERY + 1, 2 * _CHECKED_EVERY))


@fault("a flipped bit of an activation", spreads=SEVERAL, share=2)
def flipped_activation(scene: Scene) -> None:
    """The check of that step finds it and names the rank."""
    _flipped(scene, "Activation", 2 * _CHECKED_EVERY, _uncompiled(scene))


@fault("a clock that jumps", spreads=ANY, variants=("+3600", "-3600", "+86400", "-1"), share=1)
def clock(scene: Scene) -> None:
    """Nothing changes."""
    rank, step = scene.draw.randrange(scene.case.spread[1]), scene.draw.randrange(1, phases.STEPS - 1)
    scene.stays_undisturbed(_train(scene, "Clock", {"rank": rank, "step": step, "seconds": float(scene.variant)}))


def _flipped(scene: Scene, policy: str, step: int, overrides: Sequence[str] = ()) -> None:
    rank = scene.draw.randrange(scene.case.spread[1])
    where = {"rank": rank, "step": step, "place": scene.draw.random(), "bit": scene.draw.randrange(_BITS), "pass": 0}
    scene.stays_undisturbed(_train(scene, policy, where, *_CHECKS, *overrides), overrides)
    told = [event["rank"] for event in promises.faults(scene.run, "corrupted_weights", "corrupted_computation")]
    require(told, f"{where} was not noticed")
    require(told[-1] == rank, f"a bit was flipped on rank {rank} at step {step}, named are {told}")


def _uncompiled(scene: Scene) -> tuple[str, ...]:
    """Return overrides of a run whose blocks can be changed: compiled ones do not see hooks that are added later."""
    compiled = load_recipe(scene.reference() / "recipe.yaml").train.compile
    return ("train.compile=false",) if compiled else ()


def _train(scene: Scene, policy: str, where: dict[str, float], *overrides: str) -> Ended:
    """Train the run with an additional step policy."""
    own = load_recipe(scene.recipe).train.step_policies
    policies = f"train.step_policies={json.dumps([*own, f'{_POLICIES}:{policy}'])}"
    return scene.wait(scene.train(policies, *overrides, variables={"TRAINWRIGHT_FAULT": json.dumps(where)}))
