"""Errors for users, each with the exit code of the command."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXIT_FINISHED = 0
EXIT_REQUEST = 2
EXIT_MACHINE = 3
EXIT_TRAINING = 4  # it would fail again
EXIT_FAULT = 5  # run it again, elsewhere if it repeats
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again to continue


class TrainwrightError(Exception):
    """An error with a message for the user, shown without a traceback."""

    exit_code = EXIT_TRAINING


class RequestError(TrainwrightError, ValueError):
    """The recipe, the arguments or the data are invalid. The message names the key or file and the fix."""

    exit_code = EXIT_REQUEST


class MachineError(TrainwrightError):
    """The machine does not support what was asked. The message says what it supports."""

    exit_code = EXIT_MACHINE


class TrainingError(TrainwrightError):
    """Training began and failed, and would fail again. The message names the rank and the first error."""

    exit_code = EXIT_TRAINING


class FaultError(TrainingError):
    """A machine, a process or a connection failed, and not the run. The message names the rank or the node."""

    exit_code = EXIT_FAULT


class Stopped(TrainwrightError):
    """A stop was requested. The message says what was saved; ``run`` is the run directory, if there is one."""

    exit_code = EXIT_STOPPED
    run: Path | None = None

    def __init__(self, message: str = "stopped before the first step; nothing was kept") -> None:
        super().__init__(message)


def build_write_error(path: Path, error: OSError) -> TrainwrightError:
    """Return why a run cannot be written: something else in the place of a file is not the machine's fault."""
    why = f"{path}: a run cannot be written there: {error.strerror or error}"
    if isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return RequestError(f"{why}; move what is in the place of the file away")
    return MachineError(why)


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Raise an OSError as what `build_write_error` returns."""
    try:
        yield
    except OSError as error:
        raise build_write_error(path, error) from error


def build_error(exit_code: int, message: str) -> TrainwrightError:
    """Return an error of the class that ``exit_code`` stands for."""
    kinds = {kind.exit_code: kind for kind in (RequestError, MachineError, TrainingError, FaultError, Stopped)}
    error = kinds.get(exit_code, TrainingError)(message)
    error.exit_code = exit_code
    return error


class Interrupted(BaseException):
    """A stop signal before anything could be saved. Not an Exception: libraries that try imports catch those."""
