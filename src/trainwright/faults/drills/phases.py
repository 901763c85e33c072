"""The moments of a run that a fault can be put in at, seen from outside: files that appear, events that are written."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.faults.drills.invariants import InvariantBroken, Missed
from trainwright.faults.drills.watched_commands import LOOK_SECONDS, Command

IMPORTS, PREPARATION, JOINING = "imports", "preparation", "joining"
FIRST_STEP, STEP, EVALUATION, GENERATION = "first step", "step", "evaluation", "generation"
CHECKPOINT, EXPORT = "checkpoint", "export"
BEFORE_STEPS = (IMPORTS, PREPARATION, JOINING)
TRAINING = (FIRST_STEP, STEP, EVALUATION, GENERATION, CHECKPOINT)
ALL = (*BEFORE_STEPS, *TRAINING, EXPORT)

# How long after the sight of it, at most, in seconds.
_AFTER = {IMPORTS: 0.8, PREPARATION: 0.1, JOINING: 0.2, EVALUATION: 0.02, GENERATION: 0.02, CHECKPOINT: 0.01}
# What every recipe is shortened to.
STEPS, EVALUATES_EVERY, SAVES_EVERY = 24, 12, 6


def reach(command: Command, sight: Callable[[], Any], phase: str, draw: random.Random, patience: float) -> None:
    """Return in the phase, a moment drawn after the sight of it. Missed when the command ended before."""
    wait_until(command, sight, patience)
    time.sleep(draw.uniform(0, _AFTER.get(phase, 0.005)))


def wait_until(command: Command, condition: Callable[[], Any], patience: float) -> None:
    """Return as soon as `seen()`. Missed when the command has ended, InvariantBroken when neither comes."""
    deadline = time.monotonic() + patience
    while not condition():
        if command.ended:
            raise Missed(f"the command ended before the moment came: {command.wait(1)}")
        if time.monotonic() > deadline:
            command.kill()
            raise InvariantBroken(
                f"no sign of the moment in {patience:.0f} s: {command.output.read_text(errors='replace')}"
            )
        time.sleep(LOOK_SECONDS / 2)


def has_event(run: Path, kind: str, step: int | None = None) -> bool:
    """Whether the events have one of the kind (of that step or a later one)."""
    try:
        text = (run / "events.jsonl").read_text(errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if f'"event": "{kind}"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if step is None or event.get("step", 0) >= step:
                return True
    return False


def sight(run: Path, phase: str, draw: random.Random, *, evaluates: bool = True) -> Callable[[], Any]:
    """Return a function that tells whether the phase has begun.

    Args:
        evaluates: whether texts are generated after an evaluation; else, at the same steps, after the step.
    """
    evaluated = draw.choice([0, EVALUATES_EVERY])
    saved = draw.choice([SAVES_EVERY, 2 * SAVES_EVERY, 3 * SAVES_EVERY])
    step = draw.randrange(2, STEPS - 3)
    checkpoints = run / "checkpoints"

    def stepped() -> bool:
        return has_event(run, "step", evaluated) if evaluated else has_event(run, "start")

    return {
        IMPORTS: lambda: (run / "recipe.yaml").exists(),
        PREPARATION: lambda: (run / "logs" / "prepare.log").exists(),
        JOINING: lambda: (run / "logs" / "rank-0.log").exists(),
        FIRST_STEP: lambda: has_event(run, "start"),
        STEP: lambda: has_event(run, "step", step),
        EVALUATION: stepped,
        GENERATION: (lambda: has_event(run, "evaluate", evaluated)) if evaluates else stepped,
        CHECKPOINT: lambda: any(
            checkpoints.glob(f".writing-step-{n:08d}") for n in range(saved, STEPS + 1) if checkpoints.is_dir()
        ),
        EXPORT: lambda: any(run.glob(".final.*")) or (run / "final").exists(),
    }[phase]
