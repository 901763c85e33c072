"""The time that a cluster or torchrun leaves between its signal to a run and the kill."""

from __future__ import annotations

import os

from trainwright.launch.ending.exit_code import SHUTDOWN_TIMEOUT

GRACE = "TRAINWRIGHT_GRACE_SECONDS"
_SHUTDOWN_SECONDS = "30"  # torch/distributed/launcher/api.py, LaunchConfig


def stop_warning(needed: float) -> str | None:
    """Return a warning if the variable GRACE gives this process less time than a stop needs; otherwise None.

    Args:
        needed: the seconds from a signal to the end of the run, with a step and a checkpoint.
    """
    own = os.environ.get(GRACE, "")
    if not own.isdigit() or needed <= int(own):
        return None
    return (
        f"a stop takes about {needed:.0f} s (step, checkpoint, end), and the cluster kills the run {own} s after its "
        "signal: what was done since the last checkpoint is done again; submit with a longer launch.grace, or set "
        "checkpoint.every so that this is little"
    )


def torchrun_warning(needed: float, launcher: str) -> str | None:
    """Return a warning if ``launcher`` is torchrun, or starts it, and gives its processes less time than a stop needs;
    otherwise None.

    Args:
        needed: the seconds from a signal to the end of the run, with a step and a checkpoint.
    """
    own = os.environ.get(SHUTDOWN_TIMEOUT, _SHUTDOWN_SECONDS)
    if launcher not in ("torchrun", "accelerate launch") or not own.isdigit() or needed <= int(own):
        return None
    return (
        f"a stop takes about {needed:.0f} s (step, checkpoint, end), and {launcher} kills the processes {own} s after "
        f"a signal, before the last checkpoint is written; start it with trainwright under, or set {SHUTDOWN_TIMEOUT} "
        "to more seconds"
    )
