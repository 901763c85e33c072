"""Choose the number of worker processes if the recipe leaves it open: what suits the machine and the recipe allows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from trainwright.errors import RequestError
from trainwright.machine.machine import Machine
from trainwright.recipe.checks import contradictions
from trainwright.recipe.process_range import with_processes
from trainwright.recipe.schema import Recipe
from trainwright.recipe.sections.parallel import ProcessRange


def choose_processes(recipe: Recipe, machine: Machine, nodes: int = 1) -> tuple[int, str]:
    """Choose the number of processes on each of ``nodes`` machines like this one, with the reason.

    If the recipe's batch sizes or replicas contradict the usual number, return the nearest smaller number that they
    allow, or else the nearest larger one. If they allow none, return the usual number.
    """
    if machine.gpus:
        usual, why, most = len(machine.gpus), "one per GPU", len(machine.gpus)
    else:
        usual, why = min(2, machine.cpu_cores), "no GPU, and more than two on a CPU gain nothing"
        most = machine.cpu_cores
    if usual > recipe.train.global_batch_size:
        usual, why = recipe.train.global_batch_size, "the global batch has no more examples"
    against = contradictions(with_processes(recipe, usual * nodes))
    if against:
        for count in chain(range(usual - 1, 0, -1), range(usual + 1, most + 1)):
            if not contradictions(with_processes(recipe, count * nodes)):
                return count, f"{usual} ({why}) would contradict {against[0].keys[0]}"
    return usual, why


def usable_processes(recipe: Recipe, asked: ProcessRange) -> tuple[int, ...]:
    """Return the numbers of processes in a range that the rest of the recipe allows, in order.

    None of them leaves a process without examples.

    Raises:
        RequestError: there is no choice.
    """
    most = max(asked.min, min(asked.max, recipe.train.global_batch_size))
    refused = {n: contradictions(with_processes(recipe, n)) for n in range(asked.min, most + 1)}
    usable = tuple(number for number, found in refused.items() if not found)
    if len(usable) < min(2, len(refused)):
        number, found = next((number, found) for number, found in refused.items() if found)
        only = f"only {usable[0]} is possible" if usable else "none is possible"
        why = f"with {number}: {found[0].keys[0]}: {found[0].message}"
        raise RequestError(f"parallel.num_processes: of {asked} processes {only}; {why}")
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
