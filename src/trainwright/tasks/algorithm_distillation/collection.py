"""Collect histories: goals in groups, groups over processes, every finished goal in a separate file.

An interrupted collection can be continued: finished goals are in a directory next to the output file, with the request
they were made for, and are moved into the file when all are finished.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainwright.errors import MachineError, RequestError, TrainingError
from trainwright.recipe.extensions import build_child_environment
from trainwright.tasks.algorithm_distillation.environments import Environment, make
from trainwright.tasks.algorithm_distillation.environments.base import mix_bits
from trainwright.tasks.algorithm_distillation.histories import Histories, History, compute_episode_returns, write
from trainwright.tasks.algorithm_distillation.learners import build_learners
from trainwright.utils.drawing import build_figure, save_chart

# Goals per process: the networks of this many fit a core's cache, and larger groups are slower; tables are faster the
# more there are.
_GOALS_OF_PPO = 9
_STREAMS_OF_TABLES = 4000
_LOOKS = 0.2  # seconds between checks of the other processes
_REQUEST = "request.json"


@dataclass(frozen=True)
class Collection:
    """What to collect.

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
        """Return the directory of finished goals until all are finished."""
        return self.path.with_name(f"{self.path.name}.parts")

    @property
    def request(self) -> dict[str, Any]:
        """Return the request; a collection can continue another one if their requests are equal."""
        return json.loads(json.dumps({key: value for key, value in asdict(self).items() if key != "path"}))

    def make_environment(self) -> Environment:
        """Return the environment to learn in."""
        return make(self.environment, **self.options)


class CollectionProgress(NamedTuple):
    """``goals`` of ``all_goals`` are finished; ``done`` also counts parts of those in progress (0 to 1, of all)."""

    goals: int
    all_goals: int
    done: float


def collect(collection: Collection, processes: int, progress: Callable[[CollectionProgress], None]) -> bool:
    """Collect the missing goals, and write the file.

    Returns:
        False if the complete file already existed.

    Raises:
        RequestError: another file exists there, or parts of another collection; or the source cannot learn there.
        MachineError: the disk is full or not writable.
        TrainingError: a process ended early.
    """
    if _is_there(collection):
        if _read_request(collection) == collection.request:
            shutil.rmtree(collection.parts)
        return False
    environment = collection.make_environment()
    # A source that cannot learn here raises now, before anything is written.
    build_learners(
        environment, environment.tasks()[list(collection.goals[:1])], torch.zeros(1).long(), collection.source
    )
    _claim(collection)
    missing = [goal for goal in collection.goals if not _build_part_path(collection, goal).exists()]
    streams = int(collection.source["streams"])
    goals_at_once = _GOALS_OF_PPO if collection.source["name"] == "ppo" else max(1, _STREAMS_OF_TABLES // streams)
    groups = _group_goals(missing, processes, goals_at_once)
    try:
        if groups:
            _work(collection, groups, processes, progress)
        write(collection.path, environment, collection.source, _iterate_parts(collection, environment))
    except OSError as error:
        raise MachineError(f"{collection.path}: cannot be written: {error}; finished tasks are kept") from error
    shutil.rmtree(collection.parts)
    return True


def _is_there(collection: Collection) -> bool:
    if not collection.path.exists():
        return False
    environment = collection.make_environment()
    with Histories(collection.path, environment) as histories:
        same = (
            histories.environment == {"name": collection.environment, "options": environment.options}
            and histories.source == collection.source
            and histories.goals == sorted(collection.goals)
        )
    if not same:
        raise RequestError(
            f"algorithm_distillation.histories: {collection.path} already exists, with another environment, source or "
            "choice of tasks; choose another file, or remove it"
        )
    return True


def _claim(collection: Collection) -> None:
    """Create the directory of parts, or check that it belongs to the same request."""
    stored_request = _read_request(collection)
    if stored_request == collection.request:
        return
    if stored_request is not None:
        raise RequestError(
            f"algorithm_distillation.histories: {collection.parts} has parts of a collection with other settings; "
            "continue with that recipe, choose another file, or remove the directory"
        )
    try:
        collection.parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"algorithm_distillation.histories: {collection.parts} cannot be created: {error}") from None
    temporary = collection.parts / f"{_REQUEST}.part"
    temporary.write_text(json.dumps(collection.request, indent=2), encoding="utf-8")
    temporary.replace(collection.parts / _REQUEST)


def _read_request(collection: Collection) -> Any:
    """Return the request of the existing parts, None if there are none."""
    file = collection.parts / _REQUEST
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _group_goals(goals: list[int], processes: int, together: int) -> list[list[int]]:
    """Return groups of at most ``together`` goals, as even as possible, and enough of them for all processes."""
    if not goals:
        return []
    count = -(-len(goals) // together)
    count = min(-(-count // processes) * processes, len(goals))
    return [goals[group::count] for group in range(count)]


def _iterate_parts(collection: Collection, environment: Environment) -> Iterator[tuple[int, History]]:
    for goal in sorted(collection.goals):
        with Histories(_build_part_path(collection, goal), environment) as part:
            yield goal, part.goal(0)


def _build_part_path(collection: Collection, goal: int) -> Path:
    return collection.parts / f"{goal}.h5"


def _work(
    collection: Collection, groups: list[list[int]], processes: int, progress: Callable[[CollectionProgress], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    # The progress of each group, and a flag to stop.
    shared = context.Array("d", len(groups) + 1)
    sizes = [len(group) for group in groups]
    total = len(collection.goals)
    before = total - sum(sizes)

    def report() -> None:
        parts = list(zip(shared[:-1], sizes, strict=True))
        finished_count = before + sum(size for part, size in parts if part == 1)
        progress(CollectionProgress(finished_count, total, (before + sum(part * size for part, size in parts)) / total))

    pool = ProcessPoolExecutor(
        min(processes, len(groups)),
        mp_context=context,
        initializer=_enter,
        initargs=(shared, os.getpid(), build_child_environment()),
    )
    try:
        with _ignore_signals():
            futures = [pool.submit(_learn, collection, group, n) for n, group in enumerate(groups)]
        waiting: set[Future[None]] = set(futures)
        while waiting:
            report()
            finished_futures, waiting = wait(waiting, timeout=_LOOKS, return_when=FIRST_COMPLETED)
            for future in finished_futures:
                future.result()
        report()
    except BrokenProcessPool as error:
        raise TrainingError(
            "collect: a process was killed, perhaps because memory ran out; finished tasks are kept: run the same "
            "command again to continue"
        ) from error
    finally:
        shared[-1] = 1.0
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ignore_signals() -> Iterator[None]:
    """Start processes that ignore ctrl-C, and delay SIGTERM, which would end a starting process with a traceback."""
    signal_numbers: list[int] = []
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the processes
    terminate = signal.signal(signal.SIGTERM, lambda number, _: signal_numbers.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
    if signal_numbers:
        signal.raise_signal(signal_numbers[0])


_shared: Any = None


def _enter(shared: Any, parent: int, environment: dict[str, str]) -> None:
    """Initialize a new process: one thread, a place to report progress, and an end when its parent is gone."""
    global _shared
    _shared = shared
    os.environ.update(environment)
    torch.set_num_threads(1)
    # For goals that are never found, Adam's state becomes denormal, which makes arithmetic many times slower.
    torch.set_flush_denormal(True)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent and not _shared[-1]:
        time.sleep(_LOOKS)
    os._exit(1)


def _learn(collection: Collection, goals: list[int], group: int) -> None:
    environment = collection.make_environment()
    source = collection.source
    # Of the goal, not of its index in the group.
    seeds = mix_bits(torch.tensor(goals) + (source["seed"] << 32))
    learner = build_learners(environment, environment.tasks()[goals], seeds, source)

    def report(part: float) -> None:
        _shared[group] = min(part, 0.999)

    recording = learner.learn(source["steps"], report)
    for index, goal in enumerate(goals):
        write(_build_part_path(collection, goal), environment, source, [(goal, recording.goal(index))])
    _shared[group] = 1.0


_MAX_LINES = 200


def compute_learning_curves(histories: Histories) -> np.ndarray:
    """Return the mean return over the streams, float32 ``[goals, episodes]``; NaN where no stream has so many."""
    curves = []
    for index in range(len(histories)):
        history = histories.goal(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # means over nothing, which are NaN as intended
            curves.append(np.nanmean(compute_episode_returns(history.dones, history.rewards), axis=0))
    returns = np.full((len(curves), max(len(curve) for curve in curves)), np.nan, np.float32)
    for row, curve in zip(returns, curves, strict=True):
        row[: len(curve)] = curve
    return returns


def draw_curves(histories: Histories, file: Path) -> None:
    """Plot the return by episode: a line for each goal, their mean, and the mean of the optimum.

    Raises:
        RequestError: the format of ``file`` is not supported, or its directory does not exist.
        MachineError: matplotlib is not installed.
    """
    figure = build_figure(8, 5, "--chart")
    curves = compute_learning_curves(histories)
    axes = figure.subplots()
    episodes = np.arange(1, curves.shape[1] + 1)
    for number, curve in enumerate(curves[:_MAX_LINES]):
        axes.plot(
            episodes, curve, color="tab:orange", alpha=0.25, linewidth=0.7, label="a task" if not number else None
        )
    axes.plot(episodes, np.nanmean(curves, axis=0), color="tab:blue", linewidth=2, label="mean of all tasks")
    if np.isfinite(best := compute_mean_optimum(histories)):
        axes.axhline(best, color="tab:grey", linestyle="--", label="mean of the optimum")
    axes.set_xlabel("episode")
    axes.set_ylabel(f"return, mean of {histories.streams} streams")
    axes.set_title(
        f"{histories.source.get('name', 'source')} in {histories.environment['name']}, {len(histories)} tasks"
    )
    axes.legend(loc="lower right", fontsize="small")
    save_chart(figure, file)


def compute_mean_optimum(histories: Histories) -> float:
    """Return the mean of the optimal returns of the tasks; NaN if one is not known."""
    environment = histories.make_environment()
    return float(environment.optimal_return(environment.tasks()[histories.goals]).mean())
