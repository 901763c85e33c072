"""Run directories: named, created, found again, and locked by one launch at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.engine.checkpoints.remote_store import EVENTS, STORED_AS
from trainwright.errors import FaultError, MachineError, RequestError, Stopped, build_write_error
from trainwright.machine.sharing import Locked, lock_directory
from trainwright.recipe.files import parse_json
from trainwright.recipe.yaml_text import parse_value
from trainwright.run.shutdown.stop import is_restart
from trainwright.utils.activity import Activity
from trainwright.utils.paths import expand_user_path, open_inside, wait_for_text, write_file
from trainwright.utils.text import quote_word

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

RUNS = Path("runs")
RECIPE = "recipe.yaml"
PLAN = "plan.json"
_PLAN_BYTES, _EVENT_BYTES = 2**24, 2**20
DIRECTORY_KEY = "logging.run_directory"
SUBMITTED = "slurm"  # what `trainwright submit` keeps in a run directory

ARRAY_ELEMENT = "SLURM_ARRAY_TASK_ID"

# What may be in a directory before its run begins.
_BEFORE = ("logs", SUBMITTED)

_STAMP_FORMAT, _STAMP_LENGTH = "%Y%m%d-%H%M%S", 15
_LEAVING_SECONDS = 3.0  # of the workers of a run that was just killed, which hold its lock until they are gone
# Longer than an NFS server keeps the locks of a machine that is lost: with Linux, 90 seconds.
_LEASE_SECONDS, _LOOK_SECONDS = 120.0, 0.5
_STAMP = r"\d{8}-\d{6}(-\d+)?"


def choose_folder(key: str) -> Path:
    """Return the folder of the directory that `logging.run_directory` asks for."""
    return RUNS if key == "auto" else expand_user_path(key).absolute().parent


def create(key: str, stem: str, *, in_place: bool = False) -> Path:
    """Create the directory that `logging.run_directory` asks for; auto: runs/<stem>-<date>-<time>.

    Raises RequestError if it exists; with `in_place`, if there is something other than a run in it.
    """
    if key != "auto":
        directory = expand_user_path(key)
        (check_not_started if in_place else check_new)(directory)
        try:
            directory.mkdir(parents=True, exist_ok=in_place)
        except OSError as error:
            raise RequestError(f"logging.run_directory: {directory} cannot be created: {error.strerror}") from error
        return directory
    name = f"{stem}-{time.strftime(_STAMP_FORMAT)}"
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        directory = RUNS / f"{name}{suffix}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise RequestError(f"logging.run_directory: no free name under {RUNS / name}")


def check_new(directory: Path) -> None:
    """Raise RequestError if the directory of a new run already exists."""
    if directory.exists():
        hint = (
            f"; continue that run with --resume {quote_word(directory)}, or" if (directory / RECIPE).exists() else ";"
        )
        raise RequestError(f"logging.run_directory: {directory} exists{hint} choose another directory")


def format_directory_override(directory: Path) -> str:
    """Return the override that names the directory of a run. In YAML, ``a #b`` and ``a: b`` are not read as written."""
    value = str(directory)
    try:
        is_text = parse_value(value, DIRECTORY_KEY, ())[0] == value
    except RequestError:
        is_text = False
    return f"{DIRECTORY_KEY}={value if is_text else json.dumps(value, ensure_ascii=False)}"


def set_directory(overrides: Iterable[str], directory: Path) -> list[str]:
    """Return overrides with the directory of a run in place of the one that they name."""
    others = [override for override in overrides if not override.startswith(f"{DIRECTORY_KEY}=")]
    return [*others, format_directory_override(directory)]


def check_files(run: Path) -> None:
    """Raise RequestError if a file or folder that a resumed run reads or writes to is a link, a pipe or a device.

    The run may be anybody's: its events would be added to the file that a link leads to, and the checkpoints of another
    run removed as old ones of this. ``checkpoints`` may be a link to a folder that is in no run, on another disk.
    """
    for folder in (run, run / "logs", run / "ledger"):
        if not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            special = [entry.name for entry in entries if entry.is_symlink() or not (entry.is_file() or entry.is_dir())]
        for name in sorted(special):
            if name == "checkpoints" and not (Path(os.path.realpath(folder / name)).parent / "recipe.yaml").exists():
                continue
            try:
                open_inside(folder, name).close()
            except OSError as error:
                raise RequestError(
                    f"--resume: {folder / name} {error.strerror}; a run writes to its own files only: put the "
                    "original there, or remove it"
                ) from None


def choose_own_directory(key: str, stem: str) -> Path:
    """Return the directory of the only run that `--resume auto` begins and resumes: `logging.run_directory`, or
    runs/<stem>; in an array of jobs the directory in it that is named by the job's index.
    """
    directory = RUNS / stem if key == "auto" else expand_user_path(key)
    element = os.environ.get(ARRAY_ELEMENT, "")
    return directory / element if element.isdigit() else directory


def check_not_started(directory: Path) -> None:
    """Raise RequestError if there is no run in the directory, and more than what is there before one begins."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    except OSError as error:
        raise RequestError(f"logging.run_directory: {directory} cannot be read: {error.strerror}") from error
    files = [name for name in names if name not in _BEFORE and not name.startswith(".")]
    if files and RECIPE not in names:
        raise RequestError(
            f"logging.run_directory: {directory} has no run, but other files ({', '.join(files[:3])}); choose another "
            "directory"
        )


def check_visible(directory: Path, recipe: str, member: str, first: str) -> None:
    """Raise MachineError if ``member``, this process, does not see a run's directory, which ``first`` has created, with
    this text of its recipe.
    """
    if not wait_for_text(directory / RECIPE, recipe):
        raise MachineError(
            f"{member} does not see the run directory {directory}, which {first} created; set logging.run_directory to "
            "a file system that all machines share"
        )


def find(resume: str, run_directory: str, stem: str) -> Path:
    """Return the run that --resume refers to: the directory `resume`, or, if empty, the recipe's newest run.

    The newest is the one that began last, of runs/<stem>-<date>-<time> and runs/<stem>, where `--resume auto` and
    `submit` begin it. `run_directory` is the recipe's logging.run_directory. Raises RequestError if there is no such
    run.
    """
    if resume or run_directory != "auto":
        directory = expand_user_path(resume or run_directory)
        if not (directory / RECIPE).is_file():
            raise RequestError(f"--resume: {directory} is not a run: it has no {RECIPE}")
        return directory
    pattern = re.compile(re.escape(stem) + "-" + _STAMP)
    runs = RUNS.iterdir() if RUNS.is_dir() else ()
    stamped_runs = [run for run in runs if pattern.fullmatch(run.name)]
    candidates = [run for run in (*stamped_runs, choose_own_directory("auto", stem)) if (run / RECIPE).is_file()]
    if not candidates:
        raise RequestError(f"--resume: no run of this recipe under {RUNS}/ ({stem} or {stem}-<date>-<time>)")
    began = {run: run.name.removeprefix(f"{stem}-")[:_STAMP_LENGTH] for run in stamped_runs}
    return max(candidates, key=lambda run: (began.get(run) or _read_begin(run), run.stat().st_mtime))


def _read_begin(run: Path) -> str:
    """Return when a run began, as names of runs have it: the time of its first event, or else of its recipe."""
    seconds = (run / RECIPE).stat().st_mtime
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), open_inside(run, EVENTS) as events:
        seconds = float(json.loads(events.readline(_EVENT_BYTES))["time"])
    return time.strftime(_STAMP_FORMAT, time.localtime(seconds))


def format_recipe(recipe: RecipeSchema) -> str:
    """Return a resolved recipe as YAML for its run directory, from which it can be trained again unchanged.

    It does not name its own directory, because another run needs another one.
    """
    from trainwright.recipe.loading import dump_recipe  # commands that only read runs need no recipe

    logging = recipe.logging.model_copy(update={"run_directory": "auto"})
    return dump_recipe(recipe.model_copy(update={"logging": logging}))


def keep_modules(directory: Path, paths: Iterable[Path]) -> None:
    """Copy modules and packages beside the run's recipe, where they are found if the run goes on elsewhere."""
    for path in paths:
        try:
            if path.is_dir():
                shutil.copytree(
                    path, directory / path.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
                )
            elif not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)
        except OSError as error:
            raise build_write_error(directory / path.name, error) from error


def record(
    directory: Path,
    recipe: str,
    stem: str,
    reasons: Sequence[str],
    plan: Mapping[str, Any] | None = None,
    chosen: Sequence[str] = (),
) -> None:
    """Write the resolved recipe (YAML), its name, and the reason for each choice.

    Args:
        plan: further predictions, serializable as JSON.
        chosen: the keys of the recipe whose values the user did not write.

    Each file is written completely or not at all. Raises MachineError if the disk is full or not writable,
    RequestError if a directory is in the place of a file.
    """
    content = {**(plan or {}), "recipe": stem, "reasons": list(reasons)}
    content["chosen_keys"] = list(chosen)
    if (stored_name := read_plan(directory).get(STORED_AS)) is not None:
        content[STORED_AS] = stored_name
    try:
        write_file(directory / RECIPE, recipe)
        _write_plan(directory, content)
    except OSError as error:
        raise build_write_error(Path(error.filename2 or directory), error) from error


def read_reasons(directory: Path) -> list[str]:
    """Return the recorded reasons for the values of a run's recipe."""
    return list(read_plan(directory).get("reasons", ()))


def read_chosen_keys(directory: Path) -> tuple[str, ...]:
    """Return the keys (``section.key``) of a run's recipe whose values were chosen for the user, as recorded."""
    return tuple(map(str, read_plan(directory).get("chosen_keys", ())))


def read_predictions(directory: Path) -> dict[str, float]:
    """Return the plan's predictions for a run, named as in `finish` events; empty without a plan."""
    figures = read_plan(directory).get("predicted")
    return dict(figures) if isinstance(figures, dict) else {}


def replace_predictions(directory: Path, predicted: Mapping[str, float], choice: Mapping[str, Any]) -> None:
    """Replace the predictions in the plan of a run that continues with another plan."""
    plan = read_plan(directory)
    changes = {"predicted": {**plan.get("predicted", {}), **predicted}, "own_runs": {}}
    changes["chosen"] = {**plan.get("chosen", {}), **choice}
    _write_plan(directory, {**plan, **changes})


def change_recipe(directory: Path, recipe: str, reason: str) -> None:
    """Write the recipe that a run continues with, and replace the reason for the changed value."""
    plan, key = read_plan(directory), reason.partition(" ")[0]
    other_reasons = [line for line in read_reasons(directory) if line.partition(" ")[0] != key]
    write_file(directory / RECIPE, recipe)
    _write_plan(directory, {**plan, "reasons": [*other_reasons, reason]})


def choose_stem(recipe: Path) -> str:
    """Return the name stem for runs of a recipe file: its own name, or that of the recipe a run was made from."""
    run = find_run(recipe)
    return recipe.stem if run is None else str(read_plan(run).get("recipe") or recipe.stem)


def find_run(recipe: Path) -> Path | None:
    """Return the run whose own recipe this file is; None for any other file."""
    run = recipe.parent
    return run if recipe.name == RECIPE and (run / PLAN).is_file() else None


def read_plan(directory: Path) -> dict[str, Any]:
    """Return the plan of a run as a mapping; empty without a plan."""
    with suppress(OSError, ValueError, RequestError), open_inside(directory, PLAN) as file:
        plan = parse_json(file.read(_PLAN_BYTES).decode(), PLAN)  # nothing that a run depends on
        return plan if isinstance(plan, dict) else {}
    return {}


def _write_plan(directory: Path, plan: Mapping[str, Any]) -> None:
    write_file(directory / PLAN, json.dumps(plan, indent=2) + "\n")


def discard_unstarted(directory: Path, *, keep: bool = False) -> None:
    """Remove the directory of a new run whose request a worker rejected: nothing was trained in it.

    With `keep` the directory itself stays, which another process may wait to lock, and what was there before.
    """
    with suppress(OSError):
        if (directory / EVENTS).lstat().st_size:
            return
    if directory.is_dir():
        _remove(directory, keep)


def _remove(directory: Path, keep: bool) -> None:
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for name in (RECIPE, PLAN):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / "logs", ignore_errors=True)


@contextmanager
def undo_on_error(directory: Path, created: bool, *, keep: bool = False) -> Iterator[None]:
    """On an exception while preparing, remove a new directory as `discard_unstarted`, and restore an existing run."""
    before = {} if created else {name: _read(directory / name) for name in (RECIPE, PLAN)}
    try:
        yield
    except BaseException:
        if created:
            _remove(directory, keep)
        for name, content in before.items():
            # What cannot be written now was not overwritten either, and the first error is the one to report.
            with suppress(OSError):
                if content is not None and content != _read(directory / name):
                    write_file(directory / name, content)
        raise


@contextmanager
def lock_run(directory: Path, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Lock the run. The workers hold the lock until they end.

    Args:
        stopped: whether a stop is requested, while this waits for what an earlier launch has left.

    Raises:
        RequestError: another launch has the lock.
        FaultError: a machine has it that may be lost, and what started this process starts it again.
        Stopped: a stop was requested.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(directory, _describe_refusal(directory), _LEAVING_SECONDS))
        except Locked as error:
            if not error.is_elsewhere and not is_restart():
                raise
            _wait_for(directory, error.holder, stopped, stack)
        yield


def _wait_for(directory: Path, holder: str, stopped: Callable[[], bool], stack: ExitStack) -> None:
    """Lock the run in ``stack`` once its holder is gone: a machine that was lost, or what is left of an attempt."""
    end = time.monotonic() + _LEASE_SECONDS
    with Activity(sys.stderr, f"waiting for the lock of {holder or 'another process'} on {directory}"):
        while True:
            try:
                stack.enter_context(lock_directory(directory, _describe_refusal(directory, holder)))
                return
            except Locked as error:
                if stopped():
                    raise Stopped() from None
                if time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                elif is_restart():
                    raise FaultError(
                        f"{error}; if its machine has failed, its file server may still hold the lock; try again later"
                    ) from None
                else:
                    raise


def _describe_refusal(directory: Path, holder: str = "") -> str:
    return f"--resume: {directory} is being trained by another process{f' on {holder}' if holder else ''}"


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
