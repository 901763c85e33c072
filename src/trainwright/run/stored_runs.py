"""Continue a run from its copies in stores, on a machine that has nothing of it, or less than they have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from trainwright.engine.checkpoints import remote_store
from trainwright.engine.checkpoints.manifest import CheckpointError, list_checkpoints, step_of
from trainwright.engine.checkpoints.remote_store import EVENTS, RemoteStore, StoredRun
from trainwright.errors import FaultError, RequestError, TrainwrightError, convert_write_errors
from trainwright.machine.sharing import lock_file
from trainwright.run import run_directory
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import write_file
from trainwright.utils.text import say

# What a fetch writes before recipe.yaml, which makes the directory a run.
_FETCHED = (EVENTS, run_directory.PLAN)
_WITHOUT_CHECKPOINT = "without_checkpoint"  # in plan.json of a fetched run, until training begins and replaces the plan
_FETCHING = ".fetching"  # its lock is held during a fetch, which may take minutes


def is_url(text: str) -> bool:
    """Return whether ``--resume`` names a run in a remote store, such as ``s3://bucket/runs/name``."""
    return "://" in text


def build_store(url: str) -> RemoteStore:
    """Return the store of the run that a URL names. Raises RequestError."""
    base_url, _, name = url.rstrip("/").rpartition("/")
    if not name or base_url.endswith((":/", ":")):
        raise RequestError(f"--resume: {url} names no run; it has the form s3://bucket/runs/NAME")
    return RemoteStore(base_url, name, "--resume")


def list_stores(copies: Sequence[str], run: Path) -> list[RemoteStore]:
    """Return the stores with copies of a run, by the recipe's ``checkpoint.copies``. Raises RequestError."""
    return [RemoteStore(url, remote_store.name_in_stores(run)) for url in copies]


def fetch_run(stores: Sequence[RemoteStore], run: Path, name: str | None = None) -> bool:
    """Make ``run`` the run whose copies are in ``stores``, by its newest complete copy; its checkpoint comes later.

    Nothing is written if the run is there already. Otherwise its recipe is written last, so a directory without one is
    none.

    Args:
        name: of the run in its stores, if its directory may have another one.

    Returns:
        Whether the run was written; False without any copy.

    Raises:
        RequestError: no copy can be used, the keys are refused, or another run is in the directory.
        MachineError: the directory cannot be written.
        FaultError: a store cannot be read now, and no other has a copy.
    """
    written = False

    def take(_: str, store: RemoteStore, stored: StoredRun) -> None:
        nonlocal written
        if (run / run_directory.RECIPE).is_file():
            _check_same(run, store, stored)
            return
        with convert_write_errors(run):
            run.mkdir(parents=True, exist_ok=True)
            with lock_file(run / _FETCHING, f"waiting for another process that fetches {run}"):
                written = _fetch_alone(run, store, stored, name)

    _take_newest(stores, run, take, required=True)
    return written


def discard_fetched(run: Path) -> None:
    """Remove a run directory that was fetched and in which nothing has been trained."""
    if (run / "checkpoints").exists():
        return
    for name in (run_directory.RECIPE, *_FETCHED):
        (run / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it
        run.rmdir()


def bring_up_to_date(run: Path, stores: Sequence[RemoteStore]) -> None:
    """Take the newest copy with its events, if the run has gone on elsewhere. The run has to be locked.

    Raises:
        RequestError: no copy can be used, and the run, which was fetched, may not begin again.
        MachineError: the run's directory cannot be written.
        FaultError: the newest copy cannot be read now, or no store can, and the run has no checkpoint of its own.
    """
    from trainwright.engine.checkpoints.uploader import Abandoned, forget_abandoned, restore
    from trainwright.engine.events import Notice, append_event

    checkpoints, required = run / "checkpoints", bool(run_directory.read_plan(run).get(_WITHOUT_CHECKPOINT))

    def take(name: str, store: RemoteStore, stored: StoredRun) -> None:
        begin_activity(f"reading the copy of {name} in {store.where}")
        _check_same(run, store, stored)
        with store.in_words(FaultError):
            if not stored.begins(run / EVENTS):  # before the checkpoint: if this is killed, it is done again
                forget_abandoned(checkpoints)
                _replace_events(run, store, stored)
            elif Abandoned(checkpoints, store).has(step_of(name), stored):
                raise CheckpointError("the run went back to before it")
            restore(store, name, checkpoints)
        append_event(run / EVENTS, Notice(message=f"{checkpoints / name} is restored from a copy"))

    newest = max(list_checkpoints(checkpoints), default=0)
    if not _take_newest(stores, run, take, required=required, after=newest) and required:
        raise RequestError(f"--resume: no copy of {run} can be used: there is none")


def _take_newest(
    stores: Sequence[RemoteStore],
    run: Path,
    take: Callable[[str, RemoteStore, StoredRun], None],
    *,
    required: bool,
    after: int = -1,
) -> bool:
    """Pass the newest complete copy that has what a run needs to ``take``, and the next one if it is damaged.

    If the newest one cannot be read now, no older one is used instead: training would repeat what is done.

    Args:
        required: whether an error of the stores is raised; otherwise the run goes on from its own checkpoints.
        after: the step of the newest of these.

    Returns:
        Whether one was taken, or the run's own checkpoints are as new.

    Raises:
        RequestError, FaultError: a store cannot be read, or no copy can be used.
        Exception: whatever ``take`` raises other than a CheckpointError, for a damaged copy, or a FaultError.
    """
    copies, unreadable = _list_copies(stores)
    errors: list[str] = []
    unread: tuple[int, str] | None = None  # the newest copy that cannot be read now, and why
    is_new = False
    for step, name, store in copies:
        if unread is not None and step < unread[0]:
            break
        if step <= after:
            is_new = True
            break
        try:
            with store.in_words(FaultError):
                stored_run = StoredRun.of(store, name) if store.is_complete(name) else None
            if stored_run is not None:
                take(name, store, stored_run)
                _warn(f"{why}; a copy in another place is used" for why in unreadable)
                return True
        except CheckpointError as error:
            errors.append(f"the copy of {name} in {store.where} cannot be used: {error}")
            _warn(errors[-1:])
        except FaultError as error:
            unread = unread or (step, f"the copy of {name} cannot be read now: {error}; run the same command again")
    if unread is not None:
        raise FaultError(unread[1])
    for why in unreadable:
        if required or isinstance(why, RequestError):
            raise why
        _warn([f"{why}; the run goes on from its own checkpoints"])
    if required and errors and not is_new:
        raise RequestError(f"--resume: no copy of {run} can be used: {'; '.join(errors)}")
    return is_new


def _list_copies(stores: Sequence[RemoteStore]) -> tuple[list[tuple[int, str, RemoteStore]], list[TrainwrightError]]:
    """Return step, name and store of every copy, the newest first, and why stores cannot be read."""
    steps: list[tuple[int, str, RemoteStore]] = []
    unreadable: list[TrainwrightError] = []
    for store in stores:
        try:
            with store.in_words(FaultError):
                steps += [(step, name, store) for step, name in store.steps().items()]
        except (RequestError, FaultError) as error:
            unreadable.append(error)
    return sorted(steps, key=lambda each: -each[0]), unreadable


def _warn(messages: Iterable[str]) -> None:
    for message in messages:
        say(f"warning: {message}", file=sys.stderr)


def _fetch_alone(run: Path, store: RemoteStore, stored: StoredRun, name: str | None) -> bool:
    """Fetch the run, unless another process has done so meanwhile; return whether it was written."""
    if (run / run_directory.RECIPE).is_file():
        _check_same(run, store, stored)
        return False
    for remnant in _FETCHED:  # by a fetch that was killed
        (run / remnant).unlink(missing_ok=True)
    run_directory.check_not_started(run)
    with run_directory.lock_run(run):
        _write(run, store, stored, name)
    (run / _FETCHING).unlink(missing_ok=True)  # a process that waits for it finds the recipe
    return True


def _check_same(run: Path, store: RemoteStore, stored: StoredRun) -> None:
    try:
        same = remote_store.read_identity(run) == stored.run
    except OSError:  # nothing was trained in it
        same = False
    if not same:
        raise RequestError(
            f"{run} is another run than the one in {store.where}; choose another logging.run_directory, or move it away"
        )


def _write(run: Path, store: RemoteStore, stored: StoredRun, name: str | None) -> None:
    with store.in_words(FaultError):
        _replace_events(run, store, stored)
    plan = json.loads(stored.plan)
    plan.pop(remote_store.STORED_AS, None)
    plan[_WITHOUT_CHECKPOINT] = True
    if name is not None and name != remote_store.choose_default_name(run):
        plan[remote_store.STORED_AS] = name
    write_file(run / run_directory.PLAN, json.dumps(plan, indent=2) + "\n")
    write_file(run / run_directory.RECIPE, stored.recipe)


def _replace_events(run: Path, store: RemoteStore, stored: StoredRun) -> None:
    scratch = run / f".{EVENTS}"
    try:
        stored.write_events(store, scratch)
        with convert_write_errors(run):
            scratch.replace(run / EVENTS)
    finally:
        scratch.unlink(missing_ok=True)
