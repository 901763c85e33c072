"""Choose the number of worker processes if the recipe leaves it open: what suits the machine and the recipe allows."""

from __future__ import annotations

from itertools import chain

from trainwright.machine.machine import Machine
from trainwright.recipe.checks import contradictions
from trainwright.recipe.schema import Recipe


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


def with_processes(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe with this number of processes, without validating it."""
    parallel = recipe.parallel.model_copy(update={"num_processes": processes})
    return recipe.model_copy(update={"parallel": parallel})
