"""Continue a run on a machine that has nothing of it, from the copies in its places."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.activity import doing
from trainwright.errors import MachineError, RequestError, unwritable, writes_to
from trainwright.launch import run_directory
from trainwright.machine.sharing.file_lock import lock_file
from trainwright.paths import write_file
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.engine.checkpoints.places import Place
    from trainwright.engine.checkpoints.stored_run import StoredRun

EVENTS = "events.jsonl"
# What a fetch writes before recipe.yaml, which makes the directory a run.
_FETCHED = (EVENTS, run_directory.PLAN)
_WITHOUT_CHECKPOINT = "without_checkpoint"  # in plan.json of a fetched run, until training begins and replaces the plan
_FETCHING = ".fetching"  # its lock is held during a fetch, which may take minutes


def is_url(text: str) -> bool:
    """Return whether ``--resume`` names a run in a place, such as ``s3://bucket/runs/name``."""
    return "://" in text


def place_of(url: str) -> Place:
    """Return the place of the run that a URL names. Raises RequestError."""
    from trainwright.engine.checkpoints.places import Place

    where, _, name = url.rstrip("/").rpartition("/")
    if not name or where.endswith((":/", ":")):
        raise RequestError(f"--resume: {url} names no run; it has the form s3://bucket/runs/NAME")
    return Place(where, name, "--resume")


def places_of(copies: Sequence[str], run: Path) -> list[Place]:
    """Return the places where copies of a run are, by the recipe's ``checkpoint.copies``. Raises RequestError."""
    from trainwright.engine.checkpoints.places import Place
    from trainwright.engine.checkpoints.stored_run import name_in_places

    return [Place(where, name_in_places(run)) for where in copies]


def fetch(places: Sequence[Place], run: Path, name: str | None = None) -> bool:
    """Make ``run`` the run whose copies are in ``places``, by its newest complete copy; its checkpoint comes later.

    Nothing is written if the run is there already. Otherwise its recipe is written last, so a directory without one is
    none.

    Args:
        name: of the run in its places, if its directory may have another one.

    Returns:
        Whether the run was written; False without any copy.

    Raises:
        RequestError, MachineError: a place cannot be read, or another run is in the directory.
    """
    found = next(_stored(places), None)
    if found is None:
        return False
    _, place, stored = found
    if (run / run_directory.RECIPE).is_file():
        _check_same(run, place, stored)
        return False
    try:
        run.mkdir(parents=True, exist_ok=True)
        with lock_file(run / _FETCHING, f"waiting for another process that fetches {run}"):
            return _fetch_alone(run, place, stored, name)
    except OSError as error:
        raise unwritable(run, error) from error


def discard_fetched(run: Path) -> None:
    """Remove a run directory that was fetched and in which nothing has been trained."""
    if (run / "checkpoints").exists():
        return
    for name in (run_directory.RECIPE, *_FETCHED):
        (run / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it
        run.rmdir()


def bring_up_to_date(run: Path, places: Sequence[Place]) -> None:
    """Take the newest copy with its events, if the run has gone on elsewhere. The run has to be locked.

    Raises:
        RequestError, MachineError: no copy can be used, and the run, which was fetched, may not begin again.
    """
    from trainwright.engine.checkpoints.copies import restore
    from trainwright.engine.checkpoints.manifest import CheckpointError, checkpoints_in
    from trainwright.engine.event_log import append_event
    from trainwright.engine.events import Notice

    checkpoints, required = run / "checkpoints", bool(run_directory.plan_of(run).get(_WITHOUT_CHECKPOINT))
    own = max(checkpoints_in(checkpoints), default=0)
    refused = []
    try:
        for name, place, stored in _stored(places):
            if int(name.rpartition("-")[2]) <= own:
                return
            doing(f"reading the copy of {name} in {place.where}")
            try:
                _check_same(run, place, stored)
                with place.in_words():
                    if not stored.begins(run / EVENTS):  # before the checkpoint: if this is killed, it is done again
                        _replace_events(run, place, stored)
                    restore(place, name, checkpoints)
                append_event(run / EVENTS, Notice(message=f"{checkpoints / name} is restored from a copy"))
            except (CheckpointError, MachineError) as error:
                refused.append(f"the copy of {name} in {place.where} cannot be used: {error}")
                say(f"warning: {refused[-1]}", file=sys.stderr)
                continue
            return
    except MachineError as error:
        if required:
            raise
        say(f"warning: {error}; the run goes on from its own checkpoints", file=sys.stderr)
        return
    if required:
        raise RequestError(f"--resume: no copy of {run} can be used: {'; '.join(refused) or 'there is none'}")


def _fetch_alone(run: Path, place: Place, stored: StoredRun, name: str | None) -> bool:
    """Fetch the run, unless another process has done so meanwhile; return whether it was written."""
    if (run / run_directory.RECIPE).is_file():
        _check_same(run, place, stored)
        return False
    for left in _FETCHED:  # by a fetch that was killed
        (run / left).unlink(missing_ok=True)
    run_directory.check_unbegun(run)
    with run_directory.only_launch(run):
        _write(run, place, stored, name)
    (run / _FETCHING).unlink(missing_ok=True)  # whoever waits for it finds the recipe
    return True


def _stored(places: Sequence[Place]) -> Iterator[tuple[str, Place, StoredRun]]:
    """Yield the complete copies that have what a run needs, the newest first. Raises RequestError or MachineError."""
    from trainwright.engine.checkpoints.manifest import CheckpointError
    from trainwright.engine.checkpoints.stored_run import StoredRun

    found: list[tuple[int, str, Place]] = []
    for place in places:
        with place.in_words():
            found += [(step, name, place) for step, name in place.steps().items()]
    for _, name, place in sorted(found, key=lambda each: -each[0]):
        try:
            with place.in_words():
                stored = StoredRun.of(place, name) if place.is_complete(name) else None
        except CheckpointError as error:
            say(f"warning: the copy of {name} in {place.where} cannot be used: {error}", file=sys.stderr)
            continue
        if stored is not None:
            yield name, place, stored


def _check_same(run: Path, place: Place, stored: StoredRun) -> None:
    from trainwright.engine.checkpoints.stored_run import identity_of

    try:
        same = identity_of(run) == stored.run
    except OSError:  # nothing was trained in it
        same = False
    if not same:
        raise RequestError(
            f"{run} is another run than the one in {place.where}; choose another logging.run_directory, or move it away"
        )


def _write(run: Path, place: Place, stored: StoredRun, name: str | None) -> None:
    from trainwright.engine.checkpoints.manifest import CheckpointError
    from trainwright.engine.checkpoints.stored_run import STORED_AS, default_name

    try:
        with place.in_words():
            _replace_events(run, place, stored)
    except CheckpointError as error:
        raise MachineError(f"--resume: {place.where}: {error}") from error
    plan = json.loads(stored.plan)
    plan.pop(STORED_AS, None)
    plan[_WITHOUT_CHECKPOINT] = True
    if name is not None and name != default_name(run):
        plan[STORED_AS] = name
    write_file(run / run_directory.PLAN, json.dumps(plan, indent=2) + "\n")
    write_file(run / run_directory.RECIPE, stored.recipe)


def _replace_events(run: Path, place: Place, stored: StoredRun) -> None:
    scratch = run / f".{EVENTS}"
    try:
        stored.write_events(place, scratch)
        with writes_to(run):
            scratch.replace(run / EVENTS)
    finally:
        scratch.unlink(missing_ok=True)
