"""A number of processes that may change while a run is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from trainwright.recipe.checks import contradictions
from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.sections.parallel import ProcessRange

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

R = TypeVar("R", bound="Recipe")
_KEY = "parallel.num_processes"


def with_processes(recipe: R, processes: int | ProcessRange) -> R:
    """Return the recipe with this number of processes, without validating it."""
    parallel = recipe.parallel.model_copy(update={"num_processes": processes})
    return recipe.model_copy(update={"parallel": parallel})


def contradictions_in_range(recipe: Recipe) -> list[Contradiction]:
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
