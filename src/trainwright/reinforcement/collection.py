"""Collecting histories: goals in groups, groups over processes, every finished goal in a file of its own.

A collection that ends before its end goes on where it was: what is finished lies beside the file it is for, in a
directory with the request it was made for, and moves into the file when all is there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright.errors import RequestError, TrainingError
from trainwright.reinforcement.environments import Environment, make
from trainwright.reinforcement.histories import Histories, History, write
from trainwright.reinforcement.random_numbers import mixed
from trainwright.reinforcement.sources import learners

# What a group's networks need at once fits a core's cache; larger groups are slower.
_TOGETHER = 9
_REQUEST = "request.json"


@dataclass(frozen=True)
class Collection:
    """What is to be collected.

    Attributes:
        environment, options: for ``environments.make``.
        goals: rows of its ``tasks()``.
        source: the algorithm's ``name``, ``streams``, ``steps`` and ``seed``, and its own settings.
        path: the file of histories.
    """

    environment: str
    options: dict[str, Any]
    goals: tuple[int, ...]
    source: dict[str, Any]
    path: Path

    @property
    def parts(self) -> Path:
        """Where finished goals are until all are."""
        return self.path.with_name(f"{self.path.name}.parts")

    @property
    def request(self) -> dict[str, Any]:
        """What two collections have in common if one can go on with what the other has."""
        return json.loads(json.dumps({key: value for key, value in asdict(self).items() if key != "path"}))

    def make_environment(self) -> Environment:
        """The environment that is learnt in."""
        return make(self.environment, **self.options)


class Progress(NamedTuple):
    """``goals`` of ``all_goals`` are finished, those under way counted in part as ``done`` (from 0 to 1, of all)."""

    goals: int
    all_goals: int
    done: float


def collect(collection: Collection, processes: int, progress: Callable[[Progress], None]) -> bool:
    """Collect what is not there yet, and write the file.

    Returns:
        False where the whole file was there already.

    Raises:
        RequestError: another file is in its place, or parts of another collection.
        TrainingError: a process ended before its work.
    """
    if _is_there(collection):
        return False
    environment = collection.make_environment()
    # What cannot learn says so here, before anything is written.
    learners(environment, environment.tasks()[list(collection.goals[:1])], torch.zeros(1).long(), collection.source)
    _claim(collection)
    missing = [goal for goal in collection.goals if not _part(collection, goal).exists()]
    groups = _groups(missing, processes)
    if groups:
        _work(collection, groups, processes, progress)
    write(collection.path, environment, collection.source, _Parts(collection))
    shutil.rmtree(collection.parts)
    return True


def _is_there(collection: Collection) -> bool:
    if not collection.path.exists():
        return False
    with Histories(collection.path) as found:
        same = (
            found.environment == {"name": collection.environment, "options": collection.make_environment().options}
            and found.source == collection.source
            and found.goals == sorted(collection.goals)
        )
    if not same:
        raise RequestError(
            f"algorithm_distillation.histories: {collection.path} is there, and of another environment, source or "
            "choice of tasks; name another file, or remove it"
        )
    return True


def _claim(collection: Collection) -> None:
    """Make the directory of parts, or make sure that it is of the same request."""
    marked = collection.parts / _REQUEST
    if marked.exists():
        if json.loads(marked.read_text(encoding="utf-8")) != collection.request:
            raise RequestError(
                f"algorithm_distillation.histories: {collection.parts} has parts of a collection that was asked for "
                "differently; go on with that recipe, name another file, or remove the directory"
            )
        return
    try:
        collection.parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"algorithm_distillation.histories: {collection.parts} cannot be made: {error}") from None
    temporary = collection.parts / f"{_REQUEST}.part"
    temporary.write_text(json.dumps(collection.request, indent=2), encoding="utf-8")
    temporary.replace(marked)


def _groups(goals: list[int], processes: int) -> list[list[int]]:
    """Groups of at most ``_TOGETHER`` goals, as even as can be, of a number that keeps all processes busy."""
    if not goals:
        return []
    count = -(-len(goals) // _TOGETHER)
    count = min(-(-count // processes) * processes, len(goals))
    return [goals[group::count] for group in range(count)]


class _Parts(Mapping[int, History]):
    """Finished goals, read when they are asked for."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection

    def __getitem__(self, goal: int) -> History:
        with Histories(_part(self._collection, goal)) as part:
            return part.goal(0)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._collection.goals))

    def __len__(self) -> int:
        return len(self._collection.goals)


def _part(collection: Collection, goal: int) -> Path:
    return collection.parts / f"{goal}.h5"


def _work(
    collection: Collection, groups: list[list[int]], processes: int, progress: Callable[[Progress], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    done = context.Array("d", len(groups))
    before = len(collection.goals) - sum(len(group) for group in groups)

    def tell() -> None:
        under_way = sum(part * len(group) for part, group in zip(done[:], groups, strict=True))
        finished = before + sum(len(group) for part, group in zip(done[:], groups, strict=True) if part == 1)
        progress(Progress(finished, len(collection.goals), (before + under_way) / len(collection.goals)))

    with ProcessPoolExecutor(
        min(processes, len(groups)), mp_context=context, initializer=_enter, initargs=(done, os.getpid())
    ) as pool:
        waiting: set[Future[None]] = {pool.submit(_learn, collection, group, n) for n, group in enumerate(groups)}
        try:
            while waiting:
                tell()
                finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
            tell()
        except BrokenProcessPool as error:
            raise TrainingError(
                "collect: a process ended before its work, perhaps for want of memory; the goals that are finished "
                "are kept: run the same command again to go on"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_shared: Any = None


def _enter(done: Any, parent: int) -> None:
    """In a new process: one thread, an end when the parent's comes, and a place to say how far the work is."""
    global _shared
    _shared = done
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _learn(collection: Collection, goals: list[int], group: int) -> None:
    environment = collection.make_environment()
    source = collection.source
    # Of a goal, not of its place in the group.
    seeds = mixed(torch.tensor(goals) + (source["seed"] << 32))
    learner = learners(environment, environment.tasks()[goals], seeds, source)

    def tell(part: float) -> None:
        _shared[group] = min(part, 0.999)

    recording = learner.learn(source["steps"], tell)
    for index, goal in enumerate(goals):
        write(_part(collection, goal), environment, source, {goal: recording.goal(index)})
    _shared[group] = 1.0
