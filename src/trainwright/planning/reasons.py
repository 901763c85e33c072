"""Explain a plan in words, and suggest the smallest changes that make a run fit when nothing fits. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.machine.describe import Cluster, parse_machine
from trainwright.machine.processor import explain_no_triton
from trainwright.models.attention.kernels import CPU_FLASH, describe_kernels
from trainwright.models.fused.choice import explain_auto
from trainwright.parallel.constants import BF16_FROM_LENGTH
from trainwright.planning.candidates import Constraints, build_layout
from trainwright.planning.errors import SHARE
from trainwright.planning.memory.micro_batch import find_largest_micro_batch
from trainwright.planning.search import Candidate, Evaluator, SearchResult, search
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.trace.traced import list_attention_needs, needs_fp32_backward
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.sections.model import AdapterSection
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.utils.text import format_bytes, format_plural


def iterate_reasons(
    chosen: Candidate,
    result: SearchResult,
    constraints: Constraints,
    workload: Workload,
    cluster: Cluster,
    precision: tuple[str, str] | None,
    no_compile_reason: str | None,
) -> Iterator[str]:
    """Yield a line for every choice that the recipe left open: ``key value: reason``.

    ``precision``: the chosen one and why; None if the recipe sets it. ``no_compile_reason``: why blocks
    cannot be compiled.
    """
    choice = chosen.choice
    candidate = result.best or chosen  # not compiled, like all candidates it is compared with
    if "num_processes" not in constraints.fixed:
        why = _explain_processes(candidate, result, workload, cluster)
        yield f"parallel.num_processes {choice.num_processes}: {why}"
    if "strategy" not in constraints.fixed:
        layout = chosen.layout.in_words(choice.num_processes)
        yield f"parallel.strategy {layout}: {_explain_strategy(candidate, result)}"
    if precision is not None:
        yield f"train.mixed_precision {precision[0]}: {precision[1]}"
    if "activation_checkpointing" not in constraints.fixed:
        yield f"train.activation_checkpointing {choice.activation_checkpointing}: {_explain_recompute(chosen)}"
    if "micro_batch_size" not in constraints.fixed:
        yield f"train.micro_batch_size {choice.micro_batch_size}: {_explain_micro_batch(chosen, constraints, workload)}"
    if "compile" not in constraints.fixed:
        yield f"train.compile {str(choice.compile).lower()}: {_explain_compile(choice, workload, no_compile_reason)}"
    if workload.kernels == "auto" and cluster.has_gpus:
        missing = explain_no_triton() if cluster.is_here else None
        yield f"model.kernels eager: {explain_auto(cluster.card.vendor, cluster.card.capability, missing)}"
    time = chosen.time
    if cluster.has_gpus and time is not None and (share := time.parts["launches"] / time.seconds) > _NOTICED:
        yield (
            f"train.micro_batch_size {choice.micro_batch_size}: {share:.0%} of a step the GPU waits for Python to "
            "launch kernels that are shorter than that; larger micro-batches or fewer kernels (train.compile) lower it"
        )


_NOTICED = 0.1  # part of a step


def explain_attention(workload: Workload, choice: Choice, cluster: Cluster) -> Iterator[str]:
    """Yield a line for each kernel that computes the attention of a text model, with the reasons."""
    if not workload.texts:
        return
    batch = find_largest_micro_batch(workload, choice)
    request = workload.request(choice, cluster, batch)
    short = f"for sequences of less than {BF16_FROM_LENGTH} tokens"
    why = f"; backward in fp32, which is faster {short if request.device.amx else 'on a processor without AMX'}"
    for line in describe_kernels(list_attention_needs(request, batch.longest), request.device.limits):
        is_flash = line.startswith(CPU_FLASH.title)
        yield line + why if is_flash and needs_fp32_backward(request, batch) else line


def describe_verdict(candidate: Candidate, best: Candidate | None) -> str:
    """Return why a candidate was chosen or not, compared with the best."""
    if candidate.missing is not None:
        return candidate.missing
    if not candidate.fits:
        return describe_fit(candidate) if candidate.is_close else _describe_excess(candidate)
    assert candidate.time is not None
    if best is None or best.time is None:
        return "fits"
    if is_same_place(candidate.choice, best.choice):
        return "chosen"
    ratio = candidate.time.seconds / best.time.seconds
    if ratio < 1.02:
        return "has the same speed, and is more complex"
    part = _find_slower_part(candidate, best)
    return f"would take {ratio:.2f} times as long per step{f', mostly because of {part}' if part else ''}"


def is_same_place(one: Choice, other: Choice) -> bool:
    """Return whether two choices are equal except for compilation."""
    keys = ("num_processes", "micro_batch_size", "activation_checkpointing")
    return build_layout(one) == build_layout(other) and all(getattr(one, key) == getattr(other, key) for key in keys)


def describe_shortage(nearest: Candidate, cluster: Cluster, out: Sequence[Suggestion]) -> str:
    """Return why nothing fits, by how much, and the suggestions."""
    choice = nearest.choice
    name = nearest.layout.in_words(choice.num_processes)
    if nearest.missing is not None and nearest.fits:
        text = f"parallel.strategy: {choice.strategy} fits {cluster.name}, but {nearest.missing}"
    else:
        text = (
            f"the run does not fit {cluster.name}: the nearest is {name} on {choice.num_processes} with micro-batches "
            f"of {choice.micro_batch_size} and activation checkpointing {choice.activation_checkpointing}, "
            f"which {_describe_excess(nearest)}"
        )
    if not out:
        return f"{text}. No known change would make it fit"
    ways = "".join(f"\n  {way.change}: {_format_needed(way.candidate)}{_format_speed(way.candidate)}" for way in out)
    return f"{text}. Changes that would make it fit:{ways}\nuse `train --force` to start it anyway"


def _describe_excess(candidate: Candidate) -> str:
    parts = []
    if candidate.needed_interval[1] > candidate.available_bytes:
        parts.append(_format_needed(candidate))
    if candidate.host_needed_bytes > candidate.host_available_bytes:
        host = f"{format_bytes(candidate.host_needed_bytes)} of {format_bytes(candidate.host_available_bytes)}"
        parts.append(f"{host} of the host's memory")
    return f"needs {' and '.join(parts)}"


def _format_needed(candidate: Candidate) -> str:
    return f"{format_bytes(candidate.needed_bytes)} of {format_bytes(candidate.available_bytes)}"


def format_interval(candidate: Candidate) -> str:
    """Return the interval of the memory of such runs."""
    low, high = candidate.needed_interval
    return f"{format_bytes(low)} to {format_bytes(high)}"


def describe_fit(candidate: Candidate) -> str:
    """Describe a candidate that is close to the limit."""
    errors = candidate.errors
    return f"close: {SHARE * 10:.0f} of 10 runs of this kind ({errors.words}) take {format_interval(candidate)}"


def _format_speed(candidate: Candidate) -> str:
    return "" if candidate.time is None else f", {candidate.time.tokens_per_second:,.0f} tokens/s"


def _find_slower_part(candidate: Candidate, best: Candidate) -> str:
    """Return the part of the step that explains most of the difference from the best."""
    assert candidate.time is not None and best.time is not None
    differences = {
        name: seconds - best.time.parts.get(name, 0.0) for name, seconds in candidate.time.parts.items() if seconds
    }
    name, difference = max(differences.items(), key=lambda item: item[1], default=("", 0.0))
    return name if difference > 0.3 * (candidate.time.seconds - best.time.seconds) else ""


def _explain_processes(chosen: Candidate, result: SearchResult, workload: Workload, cluster: Cluster) -> str:
    count = chosen.choice.num_processes
    alternatives = [one for one in result.candidates if one.runs and one.choice.num_processes != count]
    rows = max(1, math.ceil(workload.global_batch_rows))
    if count > rows:
        without = format_plural(count - rows, "process has none and holds", "processes have none and hold")
        return f"a step has {format_plural(rows, 'row')}; {without} shards, which leaves more memory to each"
    if not alternatives and result.slower and chosen.time is not None:
        nearest_count, seconds = min(result.slower.items(), key=lambda item: item[1])
        ratio = seconds / chosen.time.seconds
        return f"with {nearest_count} a step would take {ratio:.2f} times as long even at the peak rate"
    if not alternatives or chosen.time is None:
        if count == 1 and cluster.devices == 1 and cluster.has_gpus:
            return "only one GPU"
        if count >= workload.global_batch_rows:
            idle = f"; the other {cluster.devices - count} GPUs would only hold shards" * (count < cluster.devices)
            return f"the global batch has no more rows{idle if cluster.has_gpus else ''}"
        if cluster.has_gpus:
            return "one per GPU" if count == cluster.devices else "the most that the set values allow"
        return "as many as fit"
    nearest = min(alternatives, key=lambda one: one.time.seconds if one.time else float("inf"))
    assert nearest.time is not None
    ratio = nearest.time.seconds / chosen.time.seconds
    return f"with {nearest.choice.num_processes} a step takes {ratio:.2f} times as long"


def _explain_strategy(chosen: Candidate, result: SearchResult) -> str:
    count = chosen.choice.num_processes
    others = [one for one in result.candidates if one.choice.num_processes == count and one.layout != chosen.layout]
    if not chosen.runs:
        return "the nearest to fitting"
    lost = [f"{one.layout.in_words(count)} {describe_verdict(one, chosen)}" for one in others]
    if not lost:
        return "one process"
    return "the fastest that fits; " + "; ".join(lost[:3])


def _explain_recompute(chosen: Candidate) -> str:
    if not chosen.runs:
        return "the least memory"
    fits = f"{_format_needed(chosen)}{', which is close' if chosen.is_close else ''}"
    if chosen.choice.activation_checkpointing == "none":
        return f"everything fits, {fits}"
    return f"faster than smaller micro-batches without recomputation; {fits}"


def _explain_micro_batch(chosen: Candidate, constraints: Constraints, workload: Workload) -> str:
    choice = chosen.choice
    if "gradient_accumulation_steps" in constraints.fixed:
        return "from train.gradient_accumulation_steps"
    rows = "packs" if workload.packed else "examples"
    tokens = choice.micro_batch_size * workload.row_tokens
    passes = choice.gradient_accumulation_steps
    about = "about " if workload.packed else ""  # a batch fills more or fewer packs from step to step
    return (
        f"{rows} of up to {workload.row_tokens} tokens, {tokens} at a time, "
        f"{about}{format_plural(passes, 'micro-batch', 'micro-batches')} per step"
    )


def _explain_compile(choice: Choice, workload: Workload, no_compile_reason: str | None) -> str:
    if no_compile_reason is not None:
        return f"torch.compile {no_compile_reason}"
    if choice.compile:
        return "saves much more than the minute of compilation at the start"
    return (
        "compile time would exceed the time saved" if workload.steps else "compiling would take a minute at the start"
    )


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


def find_suggestions(evaluator: Evaluator, constraints: Constraints, nearest: Candidate) -> list[Suggestion]:
    """Return a few changes with which the workload runs, the cheapest first. ``nearest``: the nearest candidate.

    Changes are tried in this order: drop constraints, train an adapter instead of all parameters, shorten the rows, add
    devices; then two of these at once if neither is enough.
    """
    helpful: list[Suggestion] = []
    enough: list[frozenset[str]] = []
    # A candidate that fits but lacks a package does not need less memory.
    iterate_changes = _iterate_dropped_constraints if nearest.fits else _iterate_series
    for kinds, series in iterate_changes(evaluator, constraints):
        if any(subset <= kinds for subset in enough):
            continue
        for change, changed_evaluator, kept_constraints in series:
            best = search(changed_evaluator, kept_constraints, sure=True).best
            if best is not None:
                enough.append(kinds)
                helpful.append(Suggestion(change, best))
                break
        if len(helpful) == _MOST:
            break
    return helpful


def _iterate_series(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Series]:
    """Yield series of changes of one kind each, the smallest first; the first that helps is suggested."""
    yield from _iterate_dropped_constraints(evaluator, constraints)
    yield from _iterate_offloads(evaluator, constraints)
    adaptations = list(_iterate_adapters(evaluator))
    for kind, change, changed_evaluator in adaptations:
        yield frozenset([kind]), iter([(change, changed_evaluator, constraints)])
    yield frozenset([_LENGTH]), _iterate_shorter(evaluator, constraints)
    yield frozenset([_DEVICES]), _iterate_more_devices(evaluator, constraints)
    for kind, change, changed_evaluator in adaptations:
        if (dropped_names := _find_fewest(changed_evaluator, constraints)) is not None:
            changes = " ".join([*(_RELAXED[name] for name in dropped_names), change])
            free = _drop(constraints, *dropped_names)
            yield frozenset([kind, *dropped_names]), iter([(changes, changed_evaluator, free)])
    for kind, change, changed_evaluator in adaptations:
        for another, iterate_more in ((_LENGTH, _iterate_shorter), (_DEVICES, _iterate_more_devices)):
            yield frozenset([kind, another]), _combine_changes(change, iterate_more(changed_evaluator, constraints))
    if written_names := _list_written(constraints):
        yield frozenset([*written_names, _LENGTH]), _iterate_shorter_and_free(evaluator, constraints)


def _iterate_shorter_and_free(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Change]:
    """Yield shorter rows, each with as few dropped constraints as needed."""
    for change, changed_evaluator, _ in _iterate_shorter(evaluator, _drop(constraints, *_list_written(constraints))):
        if (dropped_names := _find_fewest(changed_evaluator, constraints)) is not None:
            changes = " ".join([*(_RELAXED[name] for name in dropped_names), change])
            yield changes, changed_evaluator, _drop(constraints, *dropped_names)


def _combine_changes(change: str, more: Iterator[_Change]) -> Iterator[_Change]:
    return ((f"{change} and {another}", evaluator, constraints) for another, evaluator, constraints in more)


def _iterate_adapters(evaluator: Evaluator) -> Iterator[tuple[str, str, Evaluator]]:
    """Yield kind, change and evaluator of every adapter that could be added to the model."""
    workload = evaluator.workload
    if not workload.takes_adapters:
        return
    section = workload.model.adapter_section
    if not section:
        lora = AdapterSection(type="lora", rank=_RANK)
        yield "lora", f"model.adapter=lora (rank {_RANK})", _replace_workload(evaluator, _add_adapter(workload, lora))
    if workload.model.quantization == "none":
        rank = section.get("rank") or _RANK
        change = "model.adapter.quantization=nf4 (4-bit base)"  # the adapter itself is unchanged
        if not section:
            change = f"model.adapter=qlora (4-bit base, rank {rank})"
        adapter = AdapterSection.model_validate({"type": "lora", "rank": rank, **section, "quantization": "nf4"})
        yield "qlora", change, _replace_workload(evaluator, _add_adapter(workload, adapter))


def _add_adapter(workload: Workload, section: AdapterSection) -> Workload:
    return replace(workload, model=workload.model.add_adapter(section))


_RELAXED: Mapping[str, str] = {
    "activation_checkpointing": "train.activation_checkpointing=auto",
    "micro_batch_size": "train.micro_batch_size=auto",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps=auto",
    "strategy": "parallel.strategy=auto",
    "mixed_precision": "train.mixed_precision=auto",
    "num_processes": "parallel.num_processes=auto",
}


def _list_written(constraints: Constraints) -> tuple[str, ...]:
    return tuple(name for name in _RELAXED if name in constraints.fixed and name not in constraints.bound)


def _iterate_dropped_constraints(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Series]:
    """Yield each constraint alone, and, if none is enough, the smallest set of them that is."""
    names = _list_written(constraints)
    for name in names:
        yield frozenset([name]), iter([(_RELAXED[name], evaluator, _drop(constraints, name))])
    if len(names) > 1 and (dropped_names := _find_fewest(evaluator, constraints)):
        changes = " ".join(_RELAXED[name] for name in dropped_names)
        yield frozenset(dropped_names), iter([(changes, evaluator, _drop(constraints, *dropped_names))])


def _iterate_offloads(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Series]:
    """Yield offloading to the host's memory if the recipe forbids it."""
    strategy = constraints.fixed.get("strategy")
    key = None if strategy is None else next(iter(look_up_strategy(strategy).offloads), None)
    if key is not None and constraints.fixed.get(key) is False and evaluator.cluster.device != "cpu":
        offload_constraints = replace(constraints, fixed={**constraints.fixed, key: True})
        yield frozenset([key]), iter([(f"parallel.{key}=true", evaluator, offload_constraints)])


def _find_fewest(evaluator: Evaluator, constraints: Constraints) -> tuple[str, ...] | None:
    """Return the fewest constraints to drop so that the workload fits; None if dropping all is not enough."""
    dropped_names = _list_written(constraints)
    if not dropped_names or search(evaluator, _drop(constraints, *dropped_names), sure=True).best is None:
        return None
    for name in reversed(dropped_names):
        fewer = tuple(dropped_name for dropped_name in dropped_names if dropped_name != name)
        if search(evaluator, _drop(constraints, *fewer), sure=True).best is not None:
            dropped_names = fewer
    return dropped_names


def _drop(constraints: Constraints, *names: str) -> Constraints:
    # A strategy's own keys are dropped with it.
    gone = {*names, *(("replicate_size", "reshard_after_forward") if "strategy" in names else ())}
    fixed_values = {key: value for key, value in constraints.fixed.items() if key not in gone}
    return replace(constraints, fixed=fixed_values, given_up=constraints.given_up | frozenset(names))


def _iterate_shorter(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Change]:
    """Yield rows of half the length, a quarter, and so on."""
    workload = evaluator.workload
    lengths = [workload.row_tokens >> halvings for halvings in range(1, workload.row_tokens.bit_length())]
    lengths = [tokens for tokens in lengths if tokens >= _SHORTEST] if workload.texts else []
    if not lengths:
        return
    shortest = _replace_workload(evaluator, _set_row_length(workload, lengths[-1]))
    if search(shortest, constraints, sure=True).best is None:
        return
    for tokens in lengths:
        keys = ["data.pack_length"] if workload.packed else []
        if not workload.packed or (workload.max_length or workload.row_tokens) > tokens:  # packs hold none longer
            keys.append("data.max_length")
        change = " ".join(f"{key}={tokens}" for key in keys)
        yield change, _replace_workload(evaluator, _set_row_length(workload, tokens)), constraints


def _set_row_length(workload: Workload, tokens: int) -> Workload:
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


def _iterate_more_devices(evaluator: Evaluator, constraints: Constraints) -> Iterator[_Change]:
    """Yield machines with twice as many devices and so on, while each has a row; without GPUs, common machines."""
    cluster = evaluator.cluster
    names = [name for name in _list_written(constraints) if name in ("num_processes", "strategy")]
    relaxations = "".join(f" {_RELAXED[name]}" for name in names)
    free = _drop(constraints, *names)
    if cluster.device == "cpu":
        for larger in map(parse_machine, _USUAL):
            larger_evaluator = Evaluator(evaluator.workload, larger, Rates(larger))
            yield f"a machine such as {larger.name}{relaxations}", larger_evaluator, free
        return
    nodes, per_node = cluster.nodes, cluster.devices_per_node
    while nodes * per_node < evaluator.workload.global_batch_rows:
        nodes, per_node = (nodes, min(8, 2 * per_node)) if per_node < 8 and nodes == 1 else (2 * nodes, per_node)
        larger = replace(
            cluster,
            nodes=nodes,
            devices_per_node=per_node,
            network=cluster.network or (cluster.card.host_link if nodes > 1 else None),
            name=f"{f'{nodes}x' if nodes > 1 else ''}{per_node}x{cluster.card.name}",
        )
        larger_evaluator = Evaluator(evaluator.workload, larger, Rates(larger), evaluator.available)
        yield f"{nodes * per_node} of these devices ({larger.name}){relaxations}", larger_evaluator, free


def _replace_workload(evaluator: Evaluator, workload: Workload) -> Evaluator:
    return Evaluator(workload, evaluator.cluster, evaluator.rates, evaluator.available, evaluator.own)
