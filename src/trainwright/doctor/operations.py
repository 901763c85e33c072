"""What is broken, why it matters, and what to do: checks of this machine, of a failed run's log, and of its plans."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.api.recipe import Recipe, extract_source
from trainwright.api.separate_process import run_in_process
from trainwright.doctor.checks.check import CheckContext, MachineReport, run_checks, select_checks
from trainwright.doctor.diagnosis import Diagnosis, LogText, read_file, read_run
from trainwright.doctor.diagnosis import explain as diagnose
from trainwright.errors import MachineError, RequestError
from trainwright.machine.accelerators import restrict_to_device
from trainwright.machine.detect import detect
from trainwright.recipe.arguments import check_argument
from trainwright.recipe.registries import LAUNCHERS
from trainwright.recipe.sections.fields import Count
from trainwright.run.shutdown.stop import Stopping
from trainwright.utils.activity import Activity, begin_activity
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from trainwright.api.run import Run
    from trainwright.doctor.verify import Comparison
    from trainwright.recipe.yaml_text import Tree
    from trainwright.run.request import LauncherSettings


def check_machine(
    *checks: str, ports: Sequence[int] = (), directories: Sequence[str | PathLike[str]] = (), progress: bool = False
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
    paths = tuple(os.fspath(directory) for directory in directories)
    return run_in_process(examine_machine, MachineRequest(checks, tuple(ports), paths), progress=progress)


@dataclass(frozen=True)
class MachineRequest:
    """A request to check this machine; empty: all checks, and the default ports and directories."""

    checks: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    directories: tuple[str, ...] = ()


def examine_machine(request: MachineRequest) -> MachineReport:
    """Run the checks in this process, whose standard output gets nothing. Changes this process."""
    checks = select_checks(request.checks)
    directories = tuple(_check_directory(name) for name in request.directories) or tuple(_iterate_usual_directories())
    with (
        tempfile.TemporaryDirectory(prefix="trainwright-doctor-", ignore_cleanup_errors=True) as work,
        Stopping("stopping after this check") as stopping,
        _redirect_output(),
    ):
        variables = dict(os.environ)
        context = CheckContext(detect(), directories, request.ports, Path(work), stopping, variables=variables)
        return run_checks(checks, context)


def _check_directory(name: str) -> Path:
    path = expand_user_path(name)
    if not os.path.isdir(path):
        raise RequestError(f"--directory: {name} is not a directory, or this user cannot enter it")
    return path.resolve()


def _iterate_usual_directories() -> Iterator[Path]:
    from trainwright.machine.cache import find_cache_root

    yield Path.cwd()
    with suppress(MachineError):  # no home directory
        yield find_cache_root().absolute()
    yield Path(tempfile.gettempdir()).resolve()


@contextmanager
def _redirect_output() -> Iterator[None]:
    """Send what child processes print to standard error, as standard output is for the report."""
    sys.stdout.flush()
    original = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(original, 1)
        os.close(original)


def explain(log: Run | str | PathLike[str]) -> Diagnosis:
    """Find in the log of a failed run what the cause was; what ``trainwright doctor --explain`` does.

    Args:
        log: a log file of any program, or a run (or its directory), of which all logs are read.

    Returns:
        The cause, what only followed from it, and facts of the log about the cause; line numbers count through all
        logs of a run.

    Raises:
        RequestError: the log cannot be read.

    Examples:
        >>> import trainwright as tw
        >>> tw.explain("runs/tiny").cause is None
        True
    """
    return diagnose(read_log(log).text)


def read_log(log: Run | str | PathLike[str]) -> LogText:
    """Return the text of a log file, or of all logs of a run directory.

    Raises:
        RequestError: it cannot be read.
    """
    path = expand_user_path(log)
    try:
        return read_run(path) if path.is_dir() else LogText(read_file(Path(path)))
    except OSError as error:
        fix = "pass the log file or the directory of a run"
        raise RequestError(f"--explain: {log}: {error.strerror or error}; {fix}") from None


def verify(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    steps: int = 5,
    accelerate_config: str | PathLike[str] | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare a few steps on one process with the recipe's strategy and processes; what ``trainwright verify`` does.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        steps: optimizer steps to compare.
        accelerate_config: a file of ``accelerate config``, for the number of processes, the strategy and so on.
        progress: show both runs and the table.

    Returns:
        The steps of both: `Comparison.is_same`, and as text `Comparison.verdict`.

    Raises:
        RequestError: the recipe is invalid, or runs on one process.
        MachineError: the machine does not support one of the two runs.
        TrainingError: one of the two runs failed.

    Examples:
        >>> import trainwright as tw
        >>> tw.verify("tiny.yaml", "parallel.strategy=single")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: parallel.strategy: this recipe runs on one process here (single), ...
    """
    config = None if accelerate_config is None else Path(accelerate_config)
    check_argument("steps", Count, steps)
    return run_in_process(compare, VerifyRequest(extract_source(recipe), overrides, steps, config), progress=progress)


@dataclass(frozen=True)
class VerifyRequest:
    """A request to compare, with the number of steps."""

    recipe: Path | Tree
    overrides: tuple[str, ...] = ()
    steps: Count = 5
    accelerate_config: Path | None = None


def compare(options: VerifyRequest) -> Comparison:
    """Run both sides and show them on standard output. Changes this process."""
    from trainwright.run.group.environment import refuse_worker
    from trainwright.run.request import build_request, check_request, resolve_request

    refuse_worker("verify")
    file = options.accelerate_config
    settings = None if file is None else _read_launcher_settings(file, options.overrides)
    with Activity(sys.stderr, "planning"):
        request = build_request(options.recipe, list(options.overrides), None, settings)
        # Check the second side before the first one runs, so that the user does not wait in vain.
        check_request(request, creates=False)
        machine = restrict_to_device(detect(), request.recipe.parallel.device)
        recipe = resolve_request(request, machine).recipe
        begin_activity("importing torch and transformers")
        from trainwright.doctor.verify import verify as compared

    return compared(recipe, machine, options.steps, sys.stdout)


def _read_launcher_settings(file: Path, overrides: tuple[str, ...]) -> LauncherSettings:
    alone = any(word.startswith("parallel.num_processes=") for word in overrides)
    settings: LauncherSettings = LAUNCHERS.get("accelerate").of_file(file, overrides, nodes=1 if alone else None)
    if settings.nodes > 1:
        raise RequestError(
            f"{file}: num_machines is {settings.nodes}, but verify uses this machine only; set the number of "
            "processes: parallel.num_processes=2"
        )
    return settings
