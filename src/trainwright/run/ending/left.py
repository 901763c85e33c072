"""What a stopped launch has left behind, in words."""

from __future__ import annotations

from pathlib import Path

from trainwright.run.ending.stop import CHECKPOINT, NEWEST


def describe_stop(run: Path, resumes_from: str = CHECKPOINT) -> str:
    """Return how a stopped run ended, and what it can be resumed from.

    Args:
        resumes_from: what the launch says of its end, see ``Stopping.left``.
    """
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_best=False)
    steps = checkpoints.steps()
    if not steps:
        return "stopped before the first checkpoint; nothing was kept"
    if resumes_from == CHECKPOINT:
        return "stopped after a checkpoint"
    outcome = "killed" if resumes_from == NEWEST else "stopped before another step"
    return f"{outcome}; the newest complete checkpoint is kept ({checkpoints.path(steps[-1])})"
