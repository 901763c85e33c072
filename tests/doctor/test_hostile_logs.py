"""Logs made to take long or to break the reader: explained in seconds, like any other."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.slow import slow_but
from trainwright.doctor.diagnosis import explain

MEGABYTE = 1_000_000
SECONDS = 20.0  # of one core; here five or less
_CHANCE = random.Random(0)
_WORDS = (
    "error",
    "failed",
    "loss",
    "rank",
    "timeout",
    "nccl",
    "could",
    "not",
    "open",
    "file",
    "cuda",
    "socket",
    "exit",
)


def _words(length: int) -> str:
    line = " ".join(_CHANCE.choices(_WORDS, k=length // 4))
    return line[:length]


LINES = {
    "different lines": lambda i: _words(90),
    "long different lines": lambda i: _words(9_000),
    "short different lines": lambda i: f"{i % 9}: error {i}",
    "a beginning repeated": lambda i: f"error {i} " + "/dev/shm/" * 1_000,
    "a run in a beginning": lambda i: f"error {i} wandb.errors." * 400,
    "spaces after a beginning": lambda i: f"error {i} shm_open failed" + " " * 9_000,
    "digits": lambda i: f"error {i} [W " + "1" * 9_000,
    "a word": lambda i: f"error {i} " + "a1" * 4_500,
    "colons": lambda i: f"error {i} " + "a:1:1" * 1_800,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but("different lines", "a run in a beginning", "digits", among=LINES))
def test_a_megabyte_is_explained_in_seconds(kind: str) -> None:
    lines, size = [], 0
    while size < MEGABYTE:
        lines.append(LINES[kind](len(lines)))
        size += len(lines[-1]) + 1
    begun = time.process_time()
    explain("\n".join(lines))
    assert time.process_time() - begun < SECONDS


def test_one_line_of_a_megabyte_is_explained_in_seconds() -> None:
    begun = time.process_time()
    explain("error /trainwright" + "/trainwright" * (MEGABYTE // 12))
    assert time.process_time() - begun < SECONDS


@pytest.mark.slow
def test_an_error_is_found_in_a_long_log_and_what_was_not_compared_is_counted() -> None:
    cause = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    short = explain("\n".join([cause, *(f"error {i}" for i in range(100)), *["error 1"] * 50_000]))
    assert short.cause is not None and short.cause.error.name == "gpu-out-of-memory" and not short.skipped
    long = explain("\n".join([cause, *(f"error {i}" for i in range(50_000))]))
    assert long.cause is not None and long.cause.error.name == "gpu-out-of-memory" and 0 < long.skipped < 50_000


@pytest.mark.parametrize("number", ["9" * 12, "9" * 5_000])
def test_numbers_without_bounds_are_no_ranks(number: str) -> None:
    timeout = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1)"
    )
    lines = [f"[rank{rank}]: [Rank {rank}] {timeout.format(7)}" for rank in (0, 1)]
    lines += [
        f"[rank{number}]: [Rank {number}] {timeout.format(number)}",
        f"rank {number} failed",
        f"[1,{number}]<stderr>: x",
    ]
    lines += [
        f"  rank      : {number} (local_rank: 0)",
        f"Rank 1] last enqueued work: {number}, last completed work: 1",
    ]
    found = explain("\n".join(lines))
    assert found.cause is not None and found.details[0].startswith("waited: ranks 0, 1 in collective 7")
