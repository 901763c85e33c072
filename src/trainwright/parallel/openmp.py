"""Threads of a process that compute together and wait for one another, on cores that other programs use too.

A thread of GNU's OpenMP, which torch computes with on CPUs, looks 300,000 times whether the others are ready before it
sleeps, up to 20 ms. On a quiet machine this is fastest. Where another program uses a core, the thread that waits takes
the time of the one that it waits for: steps of 1 s took 60 s. While a process has more threads than there are cores,
OpenMP looks only 1,000 times (GOMP_SPINCOUNT in the manual of libgomp), so threads are added while others use cores.

Threads that sleep take time to wake: passes of a 135M-parameter model on two quiet cores were up to a sixth slower.
Beside a program that used half of a core, for which a thread waited 26 % of the time, they were as fast, and beside one
that used all of it (41 %) 1.5 to 1.7 times as fast.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

import torch

from trainwright.machine.measured.contention import CpuContention, count_usable_cores

_SET_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_INTERVAL = 1.0  # seconds
_BUSY = 0.3  # share of its runnable time that a thread spends waiting for a core
_QUIET_SECONDS = 10.0  # after which the added threads end
_PARALLEL_ELEMENTS = 2**20  # torch shares an operation on at least this number among its threads


def limit_spinning() -> None:
    """Watch from now on whether other programs use the cores of this process, and limit spinning while they do."""
    if torch.get_num_threads() > 1 and not any(name in os.environ for name in _SET_BY_USER):
        closing = threading.Event()
        watch = threading.Thread(target=_watch, args=(closing,), name="openmp", daemon=True)
        watch.start()
        # A thread that still computes when the interpreter ends would end the process with an error.
        atexit.register(_end, closing, watch)


def _end(closing: threading.Event, watch: threading.Thread) -> None:
    closing.set()
    watch.join()


def _watch(closing: threading.Event) -> None:
    added_threads: _Added | None = None
    before, busy_at = CpuContention.now(), 0.0
    while not closing.wait(_INTERVAL):
        now = CpuContention.now()
        if now.find_longest_wait(before) > _BUSY:
            busy_at = time.monotonic()
            added_threads = added_threads or _Added()
        elif added_threads is not None and time.monotonic() - busy_at > _QUIET_SECONDS:
            added_threads.end()
            added_threads = None
        before = now
    if added_threads is not None:
        added_threads.end()


class _Added:
    """OpenMP threads that sleep: with those that compute, more than there are cores."""

    def __init__(self) -> None:
        self._ending, threads = threading.Event(), torch.get_num_threads()
        count = max(0, count_usable_cores() - threads) // (threads - 1) + 1
        self._threads = [threading.Thread(target=self._run, name="openmp", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        torch.zeros(_PARALLEL_ELEMENTS).add_(1.0)  # the first operation of a thread makes those that it computes with
        self._ending.wait()

    def end(self) -> None:
        """End the threads, and with each those of OpenMP that it has made."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
