"""Checks of the number of processes and of the strategy with its keys."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.strategy_spec import all_specs

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe
    from trainwright.recipe.sections.parallel import ParallelSection


def processes(recipe: Recipe) -> Iterator[Contradiction]:
    """Check that the strategy runs on the number of processes."""
    parallel, spec = recipe.parallel, recipe.parallel.spec
    count = parallel.processes
    if spec is None or count == "auto":
        return
    max_processes = spec.most_processes
    if count < spec.least_processes:
        requirement = f"{parallel.strategy} needs at least {spec.least_processes} processes"
    elif max_processes is not None and count > max_processes:
        requirement = (
            f"{parallel.strategy} runs {'one process' if max_processes == 1 else f'at most {max_processes} processes'}"
        )
    else:
        return
    yield Contradiction(
        ("parallel.strategy", "parallel.num_processes"),
        f"{requirement}, but parallel.num_processes is {count}; set one of the two to auto",
    )


# Keys of `parallel` that every strategy reads.
_OF_ALL = ("strategy", "num_processes", "device", "timeout")


def implied_strategy(parallel: ParallelSection) -> tuple[str, str] | None:
    """Return the only strategy that reads all keys that are set, and one of these keys, if the strategy is auto."""
    if parallel.strategy != "auto" or not (meant := _meant_for_a_strategy(parallel)):
        return None
    readers = {key: _readers(key) for key in meant}
    common = [name for name in readers[meant[0]] if all(name in names for names in readers.values())]
    if len(common) > 1:  # extensions that happen to be installed must not change a recipe
        common = [name for name in common if STRATEGIES.package(name) is None]
    return (common[0], f"parallel.{min(meant, key=lambda key: len(readers[key]))}") if len(common) == 1 else None


def _meant_for_a_strategy(parallel: ParallelSection) -> list[str]:
    """Return the keys that not every strategy reads and whose value is not the default."""
    return [key for key in parallel.changed() if key not in _OF_ALL]


def _readers(key: str) -> list[str]:
    return [name for name, spec in all_specs().items() if key in spec.keys]


def strategy(recipe: Recipe) -> Iterator[Contradiction]:
    """Check that the strategy reads the keys of ``parallel`` that are set, and permits the rest of the recipe."""
    parallel, spec = recipe.parallel, recipe.parallel.spec
    for key in _meant_for_a_strategy(parallel):
        if spec is None and implied_strategy(parallel) is None:
            yield Contradiction(
                (f"parallel.{key}", "parallel.strategy"),
                f"has an effect only with {', '.join(_readers(key))}; set parallel.strategy to one of them",
            )
        elif spec is not None and key not in spec.keys:
            yield Contradiction(
                (f"parallel.{key}", "parallel.strategy"),
                f"has no effect with parallel.strategy {parallel.strategy}, only with {', '.join(_readers(key))}",
            )
    if spec is None:
        return
    for limit in spec.limits:
        value = attrgetter(limit.key)(recipe)
        if value not in ("auto", *limit.allowed):
            yield Contradiction((limit.key, "parallel.strategy"), limit.why.format(value=value))
    if "replicate_size" in spec.keys:
        yield from _replicas(parallel)


def _replicas(parallel: ParallelSection) -> Iterator[Contradiction]:
    processes = parallel.processes
    if processes == "auto":
        return
    if processes % parallel.replicate_size:
        yield Contradiction(
            ("parallel.replicate_size", "parallel.num_processes"),
            f"{processes} processes cannot be divided into {parallel.replicate_size} equal replicas",
        )
    elif processes == parallel.replicate_size > 1:
        yield Contradiction(
            ("parallel.replicate_size", "parallel.num_processes"),
            f"{processes} replicas on {processes} processes do not shard anything; lower it, or use parallel.strategy "
            "ddp",
        )
