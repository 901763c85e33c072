"""The time that a cluster leaves between its signal to a run and the kill."""

from __future__ import annotations

import os

GRACE = "TRAINWRIGHT_GRACE_SECONDS"


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
