"""Checks of this machine: what is broken, why it matters, and what to do."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from trainwright.api.processes.separate import run_in_process
from trainwright.doctor.checks.report import MachineReport
from trainwright.errors import MachineError, RequestError
from trainwright.paths import user_path


def check_machine(
    *checks: str,
    ports: Sequence[int] = (),
    directories: Sequence[str | PathLike[str]] = (),
    progress: bool = False,
) -> MachineReport:
    """Check whether this machine is fit for training; what ``trainwright doctor`` does.

    Args:
        checks: names of checks; all without any.
        ports: ports that have to be free; by default the one of ``MASTER_PORT``, or torchrun's default.
        directories: where disks are measured; by default the working directory, the cache and the temporary directory.
        progress: show what takes long.

    Returns:
        A report: `MachineReport.findings`, each with its fix, and the page of the command as ``str()``.

    Raises:
        RequestError: there is no such check or directory.
        Stopped: it was stopped by a signal.

    Examples:
        >>> import trainwright as tw
        >>> report = tw.check_machine("limits", "shared-memory")
        >>> [outcome.name for outcome in report.outcomes]
        ['limits', 'shared-memory']
    """
    places = tuple(os.fspath(directory) for directory in directories)
    return run_in_process(examine_machine, MachineRequest(checks, tuple(ports), places), progress=progress)


@dataclass(frozen=True)
class MachineRequest:
    """A request to check this machine; empty: all checks, and the default ports and directories."""

    checks: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    directories: tuple[str, ...] = ()


def examine_machine(request: MachineRequest) -> MachineReport:
    """Run the checks in this process, whose standard output gets nothing. Changes this process."""
    from trainwright.doctor.checks.check import CheckContext
    from trainwright.doctor.checks.running import checks_named, examine
    from trainwright.launch.ending.stop import Stopping
    from trainwright.machine.detect import detect

    checks = checks_named(request.checks)
    directories = tuple(_directory(name) for name in request.directories) or tuple(_usual_directories())
    with (
        tempfile.TemporaryDirectory(prefix="trainwright-doctor-", ignore_cleanup_errors=True) as work,
        Stopping("stopping after this check") as stopping,
        _output_to_errors(),
    ):
        variables = dict(os.environ)
        context = CheckContext(detect(), directories, request.ports, Path(work), stopping, variables=variables)
        return examine(checks, context)


def _directory(name: str) -> Path:
    path = user_path(name)
    if not os.path.isdir(path):
        raise RequestError(f"--directory: {name} is not a directory, or this user cannot enter it")
    return path.resolve()


def _usual_directories() -> Iterator[Path]:
    from trainwright.machine.cache import cache_root

    yield Path.cwd()
    with suppress(MachineError):  # no home directory
        yield cache_root().absolute()
    yield Path(tempfile.gettempdir()).resolve()


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Send what child processes print to standard error, as standard output is for the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
