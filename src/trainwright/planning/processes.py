"""How many worker processes, where the recipe leaves it open: what the machine runs well and the recipe allows."""

from __future__ import annotations

from itertools import chain

from trainwright.machine.detect import Machine
from trainwright.recipe.checks import contradictions
from trainwright.recipe.schema import Recipe


def choose_processes(recipe: Recipe, machine: Machine, nodes: int = 1) -> tuple[int, str]:
    """Choose the number of processes on each of ``nodes`` machines like this one, with the reason.

    Where batch sizes or replicas are written out that the usual number contradicts, the nearest smaller number that
    they allow, else the nearest larger one. Where they allow none it is the usual number all the same.
    """
    if machine.gpus:
        usual, why, most = len(machine.gpus), "one for every GPU", len(machine.gpus)
    else:
        usual, why = min(2, machine.cpu_cores), "no GPU, and more than two on a CPU gain nothing"
        most = machine.cpu_cores
    if usual > recipe.train.global_batch_size:
        usual, why = recipe.train.global_batch_size, "a global batch has no more examples"
    against = contradictions(with_processes(recipe, usual * nodes))
    if against:
        for count in chain(range(usual - 1, 0, -1), range(usual + 1, most + 1)):
            if not contradictions(with_processes(recipe, count * nodes)):
                return count, f"{usual} ({why}) would contradict {against[0].keys[0]}"
    return usual, why


def with_processes(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe for so many processes; whether that is sound is not looked at."""
    parallel = recipe.parallel.model_copy(update={"num_processes": processes})
    return recipe.model_copy(update={"parallel": parallel})
