"""The numbers of worker processes that a plan tries and a run may have, if the recipe leaves the number open."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from trainwright.errors import RequestError
from trainwright.machine.machine import Machine
from trainwright.recipe.checks import contradictions
from trainwright.recipe.process_range import with_processes
from trainwright.recipe.schema import Recipe
from trainwright.recipe.sections.parallel import ProcessRange


def on_nodes(recipe: Recipe, machine: Machine, nodes: int) -> tuple[int, ...]:
    """Return the numbers of processes to try on ``nodes`` machines like this one, as many on each.

    First the number with which each process has an example, or if the rest of the recipe does not allow it, the nearest
    smaller number that it does, or else the nearest larger one. Then all GPUs: those without examples can hold shards.
    """
    usual = len(machine.gpus) or min(2, machine.cpu_cores)  # more than two on a CPU gain nothing
    busy = max(1, min(usual, recipe.train.global_batch_size // nodes))
    others = chain(range(busy, 0, -1), range(busy + 1, (len(machine.gpus) or machine.cpu_cores) + 1))
    each = next((n for n in others if not contradictions(with_processes(recipe, n * nodes))), busy)
    idle = bool(machine.gpus) and not contradictions(with_processes(recipe, usual * nodes))
    return tuple(dict.fromkeys((each * nodes, usual * nodes if idle else each * nodes)))


def in_range(recipe: Recipe, process_range: ProcessRange) -> tuple[int, ...]:
    """Return the numbers of processes of a range to try: the largest with which each has an example, then the largest.

    Raises RequestError as ``usable_processes``.
    """
    usable, rows = usable_processes(recipe, process_range), recipe.train.global_batch_size
    return tuple(dict.fromkeys((max((n for n in usable if n <= rows), default=usable[0]), usable[-1])))


def usable_processes(recipe: Recipe, process_range: ProcessRange) -> tuple[int, ...]:
    """Return the numbers of processes in a range that the rest of the recipe allows, in order.

    A process without examples is of use only to strategies that shard something.

    Raises:
        RequestError: there is no choice.
    """
    spec, rows = recipe.parallel.spec, recipe.train.global_batch_size
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
