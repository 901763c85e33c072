"""Suggest the smallest changes of a recipe or machine that make a run fit when nothing fits. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from trainwright.machine.describe import parse_machine
from trainwright.planning.candidates import Constraints
from trainwright.planning.search import Candidate, Evaluator, search
from trainwright.planning.step_time.rates import rates_of
from trainwright.planning.workload import Workload
from trainwright.recipe.sections.model import AdapterSection
from trainwright.recipe.strategy_spec import spec_of

# The text of a suggestion, and the evaluator and the constraints after the change.
_Change = tuple[str, Evaluator, Constraints]
# The kinds of a change, and the changes of these kinds.
_Series = tuple[frozenset[str], Iterator[_Change]]

_LENGTH, _DEVICES = "length", "devices"
_RANK = 16
_MOST = 3  # suggestions
_SHORTEST = 128
_USUAL = ("1xL4", "1xA100-40GB", "1xH100", "1xB200", "8xA100-40GB", "8xH100", "8xB200", "4x8xH100", "16x8xH100")


@dataclass(frozen=True)
class Suggestion:
    """A suggestion. ``change``: what to write or to use. ``candidate``: the best candidate with it."""

    change: str
    candidate: Candidate


def suggestions(evaluator: Evaluator, constraints: Constraints, nearest: Candidate) -> list[Suggestion]:
    """Return a few changes with which the workload runs, the cheapest first. ``nearest``: the nearest candidate.

    Changes are tried in this order: drop constraints, train an adapter instead of all parameters, shorten the rows, add
    devices; then two of these at once if neither is enough.
    """
    helpful: list[Suggestion] = []
    enough: list[frozenset[str]] = []
    # A candidate that fits but lacks a package does not need less memory.
    for kinds, series in (
        _without_constraints(evaluator, constraints) if nearest.fits else _series(evaluator, constraints)
    ):
        if any(one <= kinds for one in enough):
            continue
        tried = ((change, search(other, kept, sure=True).best) for change, other, kept in series)
        helps = list(islice((Suggestion(change, best) for change, best in tried if best is not None), 1))
        enough += [kinds] if helps else []
        helpful += helps
        if len(helpful) == _MOST:
            break
    return helpful


def _series(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Series]:
    """Yield series of changes of one kind each, the smallest first; the first that helps is suggested."""
    yield from _without_constraints(evaluator, constraints)
    yield from _offloaded(evaluator, constraints)
    adapted = list(_adapted(evaluator))
    for kind, change, other in adapted:
        yield frozenset([kind]), iter([(change, other, constraints)])
    yield frozenset([_LENGTH]), _shorter(evaluator, constraints)
    yield frozenset([_DEVICES]), _more_devices(evaluator, constraints)
    for kind, change, other in adapted:
        if (dropped := _fewest(other, constraints)) is not None:
            changes = " ".join([*(_RELAXED[name] for name in dropped), change])
            yield frozenset([kind, *dropped]), iter([(changes, other, _drop(constraints, *dropped))])
    for kind, change, other in adapted:
        for another, more in ((_LENGTH, _shorter(other, constraints)), (_DEVICES, _more_devices(other, constraints))):
            yield frozenset([kind, another]), _both(change, more)
    if written := _written(constraints):
        yield frozenset([*written, _LENGTH]), _shorter_and_free(evaluator, constraints)


def _shorter_and_free(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Change]:
    """Yield shorter rows, each with as few dropped constraints as needed."""
    for change, other, _ in _shorter(evaluator, _drop(constraints, *_written(constraints))):
        if (dropped := _fewest(other, constraints)) is not None:
            changes = " ".join([*(_RELAXED[name] for name in dropped), change])
            yield changes, other, _drop(constraints, *dropped)


def _both(change: str, more: Iterator[_Change]) -> Iterator[_Change]:
    return ((f"{change} and {another}", other, kept) for another, other, kept in more)


def _adapted(evaluator: Evaluator) -> Iterator[tuple[str, str, Evaluator]]:
    """Yield kind, change and evaluator of every adapter that could be added to the model."""
    workload = evaluator.workload
    if not workload.takes_adapters:
        return
    section = workload.model.adapter_section
    if not section:
        lora = AdapterSection(type="lora", rank=_RANK)
        yield "lora", f"model.adapter=lora (rank {_RANK})", _with(evaluator, _with_adapter(workload, lora))
    if workload.model.quantization == "none":
        rank = section.get("rank") or _RANK
        change = "model.adapter.quantization=nf4 (4-bit base)"  # the adapter itself is unchanged
        if not section:
            change = f"model.adapter=qlora (4-bit base, rank {rank})"
        quantized = AdapterSection.model_validate({"type": "lora", "rank": rank, **section, "quantization": "nf4"})
        yield "qlora", change, _with(evaluator, _with_adapter(workload, quantized))


def _with_adapter(workload: Workload, section: AdapterSection) -> Workload:
    return replace(workload, model=workload.model.adapted(section))


_RELAXED: Mapping[str, str] = {
    "activation_checkpointing": "train.activation_checkpointing=auto",
    "micro_batch_size": "train.micro_batch_size=auto",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps=auto",
    "strategy": "parallel.strategy=auto",
    "mixed_precision": "train.mixed_precision=auto",
    "num_processes": "parallel.num_processes=auto",
}


def _written(constraints: Constraints) -> tuple[str, ...]:
    return tuple(name for name in _RELAXED if name in constraints.fixed and name not in constraints.bound)


def _without_constraints(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Series]:
    """Yield each constraint alone, and, if none is enough, the smallest set of them that is."""
    names = _written(constraints)
    for name in names:
        yield frozenset([name]), iter([(_RELAXED[name], evaluator, _drop(constraints, name))])
    if len(names) > 1 and (dropped := _fewest(evaluator, constraints)):
        changes = " ".join(_RELAXED[name] for name in dropped)
        yield frozenset(dropped), iter([(changes, evaluator, _drop(constraints, *dropped))])


def _offloaded(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Series]:
    """Yield offloading to the host's memory if the recipe forbids it."""
    strategy = constraints.fixed.get("strategy")
    key = None if strategy is None else next(iter(spec_of(strategy).offloads), None)
    if key is not None and constraints.fixed.get(key) is False and evaluator.cluster.device != "cpu":
        moved = replace(constraints, fixed={**constraints.fixed, key: True})
        yield frozenset([key]), iter([(f"parallel.{key}=true", evaluator, moved)])


def _fewest(evaluator: Evaluator, constraints: Constraints) -> tuple[str, ...] | None:
    """Return the fewest constraints to drop so that the workload fits; None if dropping all is not enough."""
    dropped = _written(constraints)
    if not dropped or search(evaluator, _drop(constraints, *dropped), sure=True).best is None:
        return None
    for name in reversed(dropped):
        fewer = tuple(one for one in dropped if one != name)
        if search(evaluator, _drop(constraints, *fewer), sure=True).best is not None:
            dropped = fewer
    return dropped


def _drop(constraints: Constraints, *names: str) -> Constraints:
    # A strategy's own keys are dropped with it.
    gone = {*names, *(("replicate_size", "reshard_after_forward") if "strategy" in names else ())}
    fixed = {key: value for key, value in constraints.fixed.items() if key not in gone}
    return replace(constraints, fixed=fixed, given_up=constraints.given_up | frozenset(names))


def _shorter(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Change]:
    """Yield rows of half the length, a quarter, and so on."""
    workload = evaluator.workload
    lengths = [workload.row_tokens >> halvings for halvings in range(1, workload.row_tokens.bit_length())]
    lengths = [tokens for tokens in lengths if tokens >= _SHORTEST] if workload.texts else []
    if not lengths or search(_with(evaluator, _of_length(workload, lengths[-1])), constraints, sure=True).best is None:
        return
    for tokens in lengths:
        keys = ["data.pack_length"] if workload.packed else []
        if not workload.packed or (workload.max_length or workload.row_tokens) > tokens:  # packs hold none longer
            keys.append("data.max_length")
        yield " ".join(f"{key}={tokens}" for key in keys), _with(evaluator, _of_length(workload, tokens)), constraints


def _of_length(workload: Workload, tokens: int) -> Workload:
    """Return the workload with rows of ``tokens`` tokens; packs become correspondingly more."""
    rows = workload.global_batch_rows
    if workload.packed:
        rows *= workload.row_tokens / tokens
    shorter = replace(workload, row_tokens=tokens, global_batch_rows=rows)
    if workload.longest <= tokens:
        return shorter
    lengths = tuple(min(length, tokens) for length in workload.lengths)
    mean = min(workload.mean_length, tokens)
    return replace(shorter, longest_document=tokens, document_tokens=mean, lengths=lengths)


def _more_devices(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Change]:
    """Yield machines with twice as many devices and so on, while each has a row; without GPUs, common machines."""
    cluster = evaluator.cluster
    names = [name for name in _written(constraints) if name in ("num_processes", "strategy")]
    written = "".join(f" {_RELAXED[name]}" for name in names)
    free = _drop(constraints, *names)
    if cluster.device == "cpu":
        for larger in map(parse_machine, _USUAL):
            yield (
                f"a machine such as {larger.name}{written}",
                Evaluator(evaluator.workload, larger, rates_of(larger)),
                free,
            )
        return
    nodes, each = cluster.nodes, cluster.devices_per_node
    while nodes * each < evaluator.workload.global_batch_rows:
        nodes, each = (nodes, min(8, 2 * each)) if each < 8 and nodes == 1 else (2 * nodes, each)
        larger = replace(
            cluster,
            nodes=nodes,
            devices_per_node=each,
            network=cluster.network or (cluster.card.host_link if nodes > 1 else None),
            name=f"{f'{nodes}x' if nodes > 1 else ''}{each}x{cluster.card.name}",
        )
        other = Evaluator(evaluator.workload, larger, rates_of(larger), evaluator.available)
        yield f"{nodes * each} of these devices ({larger.name}){written}", other, free


def _with(evaluator: Evaluator, workload: Workload) -> Evaluator:
    return Evaluator(workload, evaluator.cluster, evaluator.rates, evaluator.available, evaluator.own)
