"""Select the tasks for training, and those for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import Environment
from trainwright.tasks.algorithm_distillation.histories import Histories
from trainwright.tasks.algorithm_distillation.histories import task_key as _key
from trainwright.tasks.algorithm_distillation.section import AlgorithmDistillationSection

_MAX_NAMED = 3
_KEY = "algorithm_distillation"
# Keys of the section that determine the held-out tasks.
HELD_OUT_BY = ("split_seed", "test_fraction", "test_tasks")


@dataclass(frozen=True)
class Goals:
    """Tasks as parameters, and the histories of tasks.

    Attributes:
        train: the training tasks, as indices into the histories' goals.
        held_out: the held-out tasks that have histories, as such indices.
        train_tasks: the training tasks ``[tasks, p]``.
        tried: the tasks for evaluation ``[tasks, p]``.
    """

    train: list[int]
    held_out: list[int]
    train_tasks: torch.Tensor
    tried: torch.Tensor


def tasks_tried(section: AlgorithmDistillationSection, environment: Environment) -> torch.Tensor:
    """Return the tasks ``[tasks, p]`` to evaluate an agent on: the held-out tasks, or the first of them.

    Raises:
        RequestError: as ``tasks_held_out``.
    """
    return tasks_held_out(section, environment)[: section.trial.tasks]


def find_goals(section: AlgorithmDistillationSection, environment: Environment, histories: Histories) -> Goals:
    """Divide the tasks into training and held-out ones.

    If only some of the environment's tasks were collected, these are divided.

    Raises:
        RequestError: a task is not in the environment, has no history, or is both trained and evaluated on.
    """
    index_of = {_key(task): index for index, task in enumerate(histories.tasks.tolist())}
    train, test = environment.split(section.split_seed, section.test_fraction)
    kept_apart = tasks_held_out(section, environment)
    apart = {_key(task) for task in kept_apart.tolist()}
    if isinstance(section.train_tasks, list):
        chosen = _given(section.train_tasks, environment, "train_tasks")
        both = [task for task in chosen.tolist() if _key(task) in apart]
        if both:
            raise RequestError(
                f"{_KEY}.train_tasks: {len(both)} of them are also test tasks, such as {_named(both)}; remove them, "
                f"or set {_KEY}.test_tasks to others"
            )
        missing = [task for task in chosen.tolist() if _key(task) not in index_of]
        if missing:
            raise RequestError(
                f"{_KEY}.train_tasks: {histories.path} has no history of {_named(missing)}; collect it, or remove it"
            )
    else:
        remaining = [
            task for task in torch.cat([train, test]).tolist() if _key(task) in index_of and _key(task) not in apart
        ]
        count = section.train_tasks or len(remaining)
        if count > len(remaining):
            raise RequestError(
                f"{_KEY}.train_tasks: {count} tasks requested, but {histories.path} has histories of only "
                f"{len(remaining)} that are not held out"
            )
        chosen = torch.tensor(remaining[:count], dtype=train.dtype)
    if not len(chosen):
        raise RequestError(f"{_KEY}.histories: {histories.path} has no task to train on; all of its tasks are held out")
    rows = [index_of[_key(task)] for task in chosen.tolist()]
    held_out = [index_of[_key(task)] for task in kept_apart.tolist() if _key(task) in index_of]
    return Goals(rows, held_out, chosen, tasks_tried(section, environment))


def tasks_held_out(section: AlgorithmDistillationSection, environment: Environment) -> torch.Tensor:
    """Return the held-out tasks ``[tasks, p]``.

    Raises:
        RequestError: one of them is not in the environment, or there are none.
    """
    if section.test_tasks is not None:
        return _given(section.test_tasks, environment, "test_tasks")
    tried = environment.split(section.split_seed, section.test_fraction)[1]
    if not len(tried):
        raise RequestError(f"{_KEY}.test_fraction: holds out no task to evaluate on; raise it")
    return tried


def _given(tasks: Sequence[Sequence[float]], environment: Environment, name: str) -> torch.Tensor:
    all_tasks = environment.tasks()
    existing = {_key(task) for task in all_tasks.tolist()}
    unknown = [task for task in tasks if _key(task) not in existing]
    if unknown:
        raise RequestError(
            f"{_KEY}.{name}: {_named(unknown)} is not a task of {environment.name}; there are {len(all_tasks)} tasks, "
            f"such as {all_tasks[0].tolist()}"
        )
    return torch.tensor(tasks, dtype=all_tasks.dtype)


def _named(tasks: Sequence[Sequence[float]]) -> str:
    more = f" and {len(tasks) - _MAX_NAMED} more" if len(tasks) > _MAX_NAMED else ""
    return ", ".join(map(str, tasks[:_MAX_NAMED])) + more
