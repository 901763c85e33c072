"""Histories of learning in one HDF5 file, read goal by goal.

Layout: a group for each goal, named "0", "1", ... by its index in the environment's tasks, with the arrays of
``ARRAYS``. The file's attribute ``environment`` is JSON with ``name`` and ``options``, ``source`` is JSON that
describes how the histories were made; a group's attribute ``task`` holds the goal's parameters. Without these
attributes the layout is that of https://github.com/tommyma3/Algorithm_Distillation; the two projects can read each
other's files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainwright.errors import MachineError, RequestError
from trainwright.tasks.algorithm_distillation.environments import Environment, check_stored, make
from trainwright.utils.installation import install_command
from trainwright.utils.paths import expand_user_path

FORMAT = "trainwright-histories-1"


class History(NamedTuple):
    """The history of all streams of one goal. A step is a row, a stream is a column.

    Attributes:
        states: ``[time, streams, k]``, the observations before the action.
        actions: ``[time, streams]``.
        rewards: float32 ``[time, streams]``.
        next_states: ``[time, streams, k]``, the observations after it. At the end of an episode this is its last
            observation; in files of the reference implementation it is the first of the next episode.
        dones: bool ``[time, streams]``, whether the episode ended with this step.
    """

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_states: np.ndarray
    dones: np.ndarray


ARRAYS = History._fields


class Histories:
    """An open file of histories. Arrays are only read on request.

    Attributes:
        environment: ``name`` and ``options``, for ``environments.make``.
        source: how the histories were made, as written; empty if the file does not say.
        goals: the rows of the environment's ``tasks()`` that have histories.
        tasks: their parameters, ``[goals, p]``.
        time: steps per stream.
        streams: streams per goal.
        observation_size: k.
    """

    def __init__(self, path: Path | str, environment: Environment | None = None) -> None:
        """Open and check the file.

        Args:
            environment: taken if the file names the same one, or none. Otherwise the file's own is made, if it is a
                registered one. Default, for a file that names none: the reference implementation's darkroom.

        Raises:
            RequestError: the file does not exist, is not HDF5, lacks an array, or does not match its environment.
        """
        self.path = expand_user_path(path)
        self._file = _open_file(self.path)
        try:
            self._read_outline(environment or make("darkroom"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Histories:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __len__(self) -> int:
        return len(self.goals)

    def make_environment(self) -> Environment:
        """Return the environment that the histories are of."""
        return self._environment

    def goal(self, index: int, time: slice = slice(None), streams: slice = slice(None)) -> History:
        """Return the history of the ``index``-th goal of ``goals``, or a part of it.

        Raises:
            RequestError: the file is damaged there, or its values do not match the environment.
        """
        goal = self.goals[index]
        group = self._file[str(goal)]
        try:
            history = _convert_types(group[name][time, streams] for name in ARRAYS)
        except OSError as error:
            raise RequestError(f"{self.path}: goal {goal} cannot be read, the file is damaged: {error}") from error
        self._check_values(goal, history)
        return history

    def read(
        self, goals: Sequence[int] | None = None, time: slice = slice(None), streams: slice = slice(None)
    ) -> History:
        """Return several goals (indices into ``goals``; default all): every array has a first dimension of goals."""
        histories = [self.goal(index, time, streams) for index in (range(len(self)) if goals is None else goals)]
        return History(*(np.stack(parts) for parts in zip(*histories, strict=True)))

    def find_indices(self, tasks: Any) -> list[int]:
        """Return the indices of ``tasks`` ``[n, p]`` (a tensor or an array), for ``goal`` and ``read``.

        Raises:
            RequestError: there is no history of one of them.
        """
        index_by_task = {build_task_key(task): index for index, task in enumerate(self.tasks)}
        missing = [task for task in np.asarray(tasks) if build_task_key(task) not in index_by_task]
        if missing:
            raise RequestError(
                f"{self.path}: has no history of {len(missing)} of {len(tasks)} tasks, such as "
                f"{missing[0].tolist()}; collect it with all tasks"
            )
        return [index_by_task[build_task_key(task)] for task in np.asarray(tasks)]

    def _read_outline(self, otherwise: Environment) -> None:
        file = self._file
        unsaid = {"name": otherwise.name, "options": otherwise.options}
        self.environment: dict[str, Any] = _read_attribute(self.path, file, "environment", unsaid)
        self.source: dict[str, Any] = _read_attribute(self.path, file, "source", {})
        self.goals = sorted(int(name) for name in file if name.isdigit())
        if not self.goals:
            raise RequestError(f"{self.path}: has no histories: groups named 0, 1, ... are expected, one for each goal")
        if self.environment == unsaid:
            environment = otherwise
        else:
            check_stored(self.environment, f"{self.path}: attribute environment")
            environment = make(self.environment["name"], **self.environment["options"])
        self._environment = environment
        self.observation_size = environment.observation_size
        self.time, self.streams = _shape_of(self.path, file, self.goals[0])
        for goal in self.goals:
            _check(self.path, file, goal, (self.time, self.streams), environment)
        # The first goal is enough to detect another environment's histories; the others are checked when read.
        self._check_lengths(self.goal(0).dones)
        self.tasks = self._read_tasks(environment)

    def _read_tasks(self, environment: Environment) -> np.ndarray:
        tasks = environment.tasks().numpy()
        says = "environment" in self._file.attrs
        if self.goals[-1] >= len(tasks):
            hint = f"; the file does not name its environment, so {environment.name} was assumed"
            raise RequestError(
                f"{self.path}: has a goal {self.goals[-1]}, but {environment.name} has {len(tasks)}"
                f"{'' if says else hint}"
            )
        if not says:
            return tasks[self.goals]
        tasks_of_goals = [np.asarray(self._file[str(goal)].attrs.get("task", ())) for goal in self.goals]
        for goal, task in zip(self.goals, tasks_of_goals, strict=True):
            if task.shape != tasks.shape[1:]:
                raise RequestError(
                    f"{self.path}: goal {goal} has no attribute task with the {tasks.shape[1]} numbers of a task of "
                    f"{environment.name}"
                )
        return np.stack(tasks_of_goals)

    def _check_values(self, goal: int, history: History) -> None:
        environment = self._environment
        limits = environment.observation_counts
        for name, counts in (("states", limits), ("next_states", limits), ("actions", (environment.action_count,))):
            values = getattr(history, name).reshape(-1, len(counts))
            if values.size and not _is_below(values, counts):
                raise RequestError(
                    f"{self.path}: {name} of goal {goal} go from {values.min(axis=0).tolist()} to "
                    f"{values.max(axis=0).tolist()}, where whole numbers from 0 to below {list(counts)} are expected "
                    f"in {environment.name}: these are histories of another environment"
                )
        if not np.isfinite(history.rewards).all():
            raise RequestError(f"{self.path}: rewards of goal {goal} are not all finite numbers")

    def _check_lengths(self, dones: np.ndarray) -> None:
        ends = np.zeros((len(dones) + 1, dones.shape[1]), np.int64)
        np.maximum.accumulate(dones * np.arange(1, len(dones) + 1)[:, None], axis=0, out=ends[1:])
        longest = int((np.arange(1, len(dones) + 1)[:, None] - ends[:-1]).max())
        if longest > self._environment.horizon:
            raise RequestError(
                f"{self.path}: dones of goal {self.goals[0]} have an episode of {longest} steps, but "
                f"{self._environment.name} ends one after {self._environment.horizon} (its option horizon)"
            )


def write(
    path: Path, environment: Environment, source: Mapping[str, Any], histories: Iterable[tuple[int, History]]
) -> None:
    """Write ``histories``, each with its row of ``environment.tasks()``, to ``path``, completely or not at all."""
    h5py = _import_h5py()
    tasks = environment.tasks().numpy()
    part = path.with_name(f"{path.name}.part")
    with h5py.File(part, "w") as file:
        file.attrs["format"] = FORMAT
        file.attrs["environment"] = json.dumps({"name": environment.name, "options": environment.options})
        file.attrs["source"] = json.dumps(dict(source))
        for goal, history in histories:
            group = file.create_group(str(goal))
            group.attrs["task"] = tasks[goal]
            for name, array in history._asdict().items():
                group.create_dataset(name, data=array, compression="gzip", compression_opts=1, shuffle=True)
    part.replace(path)


def compute_episode_returns(dones: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Return the returns of finished episodes, float32 ``[streams, episodes]``, from a goal's arrays ``[time,
    streams]``.

    NaN where a stream has fewer episodes than another.
    """
    episodes = int(dones.sum(axis=0).max(initial=0))
    returns = np.full((dones.shape[1], episodes), np.nan, np.float32)
    for stream in range(dones.shape[1]):
        ends = np.flatnonzero(dones[:, stream]) + 1
        sums = np.concatenate([[0.0], rewards[:, stream].cumsum(dtype=np.float64)])[[0, *ends]]
        returns[stream, : len(ends)] = np.diff(sums)
    return returns


def narrow(counts: Sequence[int]) -> type[np.integer]:
    """Return the smallest integer type that holds numbers below each of ``counts``."""
    for kind in (np.uint8, np.int16):
        if max(counts) - 1 <= np.iinfo(kind).max:
            return kind
    return np.int32


def _open_file(path: Path) -> Any:
    h5py = _import_h5py()
    if path.is_dir():
        raise RequestError(f"{path}: is a directory; a file of histories is expected")
    if not path.is_file():
        raise RequestError(f"{path}: no such file; create it with trainwright collect")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise RequestError(f"{path}: is not a readable HDF5 file: {error}") from None


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MachineError(f"histories need h5py: {install_command('reinforcement')}") from None
    return h5py


def _read_attribute(path: Path, file: Any, attribute: str, unsaid: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a file's attribute, or ``unsaid`` if it has none."""
    text = file.attrs.get(attribute)
    if text is None:
        return unsaid
    try:
        content = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not unsaid.keys() <= content.keys():
        keys = f" with {' and '.join(unsaid)}" if unsaid else ""
        raise RequestError(f"{path}: the attribute {attribute} is not a JSON object{keys}; remove it, or collect again")
    return content


def _is_below(values: np.ndarray, counts: Sequence[int]) -> bool:
    """Return whether all values are whole numbers from 0 to below their count."""
    integral = values.dtype.kind in "biu" or bool((values == np.floor(values)).all())
    return integral and bool((values >= 0).all() and (values < np.array(counts)).all())


def _convert_types(arrays: Any) -> History:
    states, actions, rewards, next_states, dones = arrays
    return History(states, actions, rewards.astype(np.float32), next_states, dones.astype(bool))


def _read_array(path: Path, file: Any, goal: int, name: str) -> Any:
    """Return an array of a goal, None if there is none; raise RequestError if it is one of another file."""
    h5py = _import_h5py()
    for entry in (str(goal), f"{goal}/{name}"):
        link = file.get(entry, getlink=True)
        if isinstance(link, (h5py.ExternalLink, h5py.SoftLink)):  # a soft link can pass through an external one
            raise RequestError(
                f"{path}: {entry} is a link, which may lead to other files; copy the arrays into this one"
            )
    array = file.get(f"{goal}/{name}")
    if not isinstance(array, h5py.Dataset):
        return None
    if array.is_virtual or array.external:
        raise RequestError(f"{path}: {goal}/{name} is stored in other files; copy the array into this one")
    return array


def _shape_of(path: Path, file: Any, goal: int) -> tuple[int, int]:
    array = _read_array(path, file, goal, "actions")
    if array is None or array.ndim != 2 or 0 in array.shape:
        raise RequestError(f"{path}: goal {goal} has no array actions [time, streams]")
    return array.shape[0], array.shape[1]


def _check(path: Path, file: Any, goal: int, shape: tuple[int, int], environment: Environment) -> None:
    size = environment.observation_size
    for name in ARRAYS:
        array = _read_array(path, file, goal, name)
        if array is None:
            raise RequestError(f"{path}: goal {goal} has no array {name}; each goal needs {', '.join(ARRAYS)}")
        if array.dtype.kind not in "biuf":
            raise RequestError(f"{path}: {name} of goal {goal} is of type {array.dtype}; numbers are expected")
        full_shape = (*shape, size) if name.endswith("states") else shape
        if array.shape != full_shape:
            raise RequestError(
                f"{path}: {name} of goal {goal} is {list(array.shape)}, where {list(full_shape)} is expected (time, "
                f"streams{', and the ' + str(size) + ' numbers of an observation' if len(full_shape) == 3 else ''} of "
                f"{environment.name})"
            )


def build_task_key(task: Any) -> bytes:
    """Return the parameters of a task as a key; equal for a list and an array."""
    return np.asarray(task, dtype=np.float64).tobytes()


class Recording:
    """Buffers for ``steps`` steps of ``goals`` x ``streams`` copies, filled step by step."""

    def __init__(self, environment: Environment, steps: int, goals: int, streams: int) -> None:
        shape = (steps, goals, streams, environment.observation_size)
        observation = narrow(environment.observation_counts)
        self._arrays = History(
            np.zeros(shape, observation),
            np.zeros(shape[:3], narrow([environment.action_count])),
            np.zeros(shape[:3], np.float32),
            np.zeros(shape, observation),
            np.zeros(shape[:3], bool),
        )
        self._step = 0

    def add(self, *step: torch.Tensor) -> None:
        """Add one step of all copies, in the order of ``ARRAYS``, with the streams of a goal next to one another."""
        for array, values in zip(self._arrays, step, strict=True):
            array[self._step] = values.numpy().reshape(array.shape[1:])
        self._step += 1

    def goal(self, index: int) -> History:
        """Return the history of one goal."""
        return History(*(array[:, index] for array in self._arrays))
