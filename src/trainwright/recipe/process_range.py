"""A number of processes that may change while a run is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from trainwright.errors import RequestError
from trainwright.recipe.checks import contradictions
from trainwright.recipe.sections.fields import Contradiction
from trainwright.recipe.sections.parallel import ProcessRange

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

R = TypeVar("R", bound="RecipeSchema")
_KEY = "parallel.num_processes"


def with_processes(recipe: R, processes: int | ProcessRange) -> R:
    """Return the recipe with this number of processes, without validating it."""
    parallel = recipe.parallel.model_copy(update={"num_processes": processes})
    return recipe.model_copy(update={"parallel": parallel})


def contradictions_in_range(recipe: RecipeSchema) -> list[Contradiction]:
    """Return all contradictions between the keys of ``recipe``, which is valid if it is with any of its numbers."""
    conflicts, processes = contradictions(recipe), recipe.parallel.num_processes
    if not isinstance(processes, ProcessRange):
        return conflicts
    if any(_KEY in item.keys for item in conflicts):  # of the largest number
        fewer = range(processes.max - 1, processes.min - 1, -1)
        conflicts = [] if any(not contradictions(with_processes(recipe, number)) for number in fewer) else conflicts
    if recipe.train.replan == "auto":
        why = f"auto chooses the number of processes, which {_KEY} leaves to the devices; set it to offer"
        conflicts.append(Contradiction(("train.replan", _KEY), why))
    return conflicts


def usable_processes(recipe: RecipeSchema, process_range: ProcessRange) -> tuple[int, ...]:
    """Return the numbers of processes in a range that the rest of the recipe allows, in order.

    A process without examples is of use only to strategies that shard something.

    Raises:
        RequestError: there is no choice.
    """
    spec, rows = recipe.parallel.spec, recipe.batch_rows
    highest = process_range.max if spec is None or spec.shards else max(process_range.min, min(process_range.max, rows))
    refused = {n: contradictions(with_processes(recipe, n)) for n in range(process_range.min, highest + 1)}
    usable = tuple(number for number, problems in refused.items() if not problems)
    if len(usable) < min(2, len(refused)):
        number, problems = next((number, problems) for number, problems in refused.items() if problems)
        only = f"only {usable[0]} is possible" if usable else "none is possible"
        why = f"with {number}: {problems[0].keys[0]}: {problems[0].message}"
        raise RequestError(f"parallel.num_processes: of {process_range} processes {only}; {why}")
    return usable


def in_words(numbers: Sequence[int]) -> str:
    """Return numbers in order as text: those that follow each other as their first and last."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)
