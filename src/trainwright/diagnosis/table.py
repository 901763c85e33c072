"""All known errors. The order matters where one line matches several: the first one counts."""

from __future__ import annotations

from trainwright.diagnosis.entries import (
    communication,
    devices,
    files,
    libraries,
    memory,
    processes,
    rendezvous,
    training,
)
from trainwright.diagnosis.known_error import KnownError

KNOWN_ERRORS: tuple[KnownError, ...] = (
    *memory.ERRORS,
    *devices.ERRORS,
    *training.ERRORS,
    *libraries.ERRORS,
    *communication.ERRORS,
    *rendezvous.ERRORS,
    *files.ERRORS,
    *processes.ERRORS,
)


def known_error(line: str, *, is_notice: bool = False) -> KnownError | None:
    """Return the known error that a line of a log reports: a cause before a symptom, a symptom before a follow-up.

    Args:
        line: one line, without the prefix of a launcher.
        is_notice: whether the line has the level of a warning or below.
    """
    found = (error for error in KNOWN_ERRORS if (error.in_notices or not is_notice) and error.matches(line))
    return min(found, key=lambda error: error.role, default=None)


def is_machine_fault(message: str) -> bool:
    """Return whether the message of an exception says that hardware, or the connection to another rank, failed."""
    error = known_error(" ".join(message.split()))
    return is_lost_connection(message) or (error is not None and error.name == "gpu-hardware")


def is_lost_connection(message: str) -> bool:
    """Return whether the message of an exception only says that another rank cannot be reached any more."""
    error = known_error(" ".join(message.split()))
    return error is not None and error.name in ("rank-lost", "rendezvous", "gloo-connect", "nccl-timeout")
