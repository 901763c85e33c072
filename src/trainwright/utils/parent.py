"""Tie a process to the one that has started it (prctl(2))."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def signal_after_parent(number: signal.Signals) -> None:
    """Have the kernel send this signal to this process when its parent dies in any way; on Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
