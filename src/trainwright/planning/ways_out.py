"""When nothing fits: the smallest changes of a workload or a machine that would. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainwright.planning.candidates import Wishes
from trainwright.planning.rates import rates_of
from trainwright.planning.search import Judge, Judged, search
from trainwright.planning.workload import Adapter, Workload

_RANK = 16
_SHORTEST = 128
_MOST_DEVICES = 4096


@dataclass(frozen=True)
class WayOut:
    """``change``: what to write, or to get. ``judged``: the best choice there is with it."""

    change: str
    judged: Judged


def ways_out(judge: Judge, wishes: Wishes, most: int = 3) -> list[WayOut]:
    """At most ``most`` changes with which the workload fits, the cheapest first.

    What the user fixed is given up first, then what all parameters are trained for, then the length of the rows, and
    at last more devices.
    """
    found: list[WayOut] = []
    for change, other, kept in _changes(judge, wishes):
        best = search(other, kept).best
        if best is not None:
            found.append(WayOut(change, best))
        if len(found) == most:
            break
    return found


def _changes(judge: Judge, wishes: Wishes) -> Iterator[tuple[str, Judge, Wishes]]:
    yield from _without_wishes(judge, wishes)
    workload = judge.workload
    if workload.adapter is None:
        lora = replace(workload, adapter=Adapter("lora", _RANK))
        yield f"model.adapter=lora (rank {_RANK})", _with(judge, lora), wishes
    if workload.quantisation == "none":
        adapter = workload.adapter or Adapter("lora", _RANK)
        quantised = replace(workload, adapter=adapter, quantisation="nf4")
        yield f"model.adapter=qlora (4-bit base, rank {adapter.rank})", _with(judge, quantised), wishes
    yield from _shorter(judge, wishes)
    yield from _more_devices(judge, wishes)


_RELAXED: tuple[tuple[str, str], ...] = (
    ("activation_checkpointing", "train.activation_checkpointing=auto"),
    ("micro_batch_size", "train.micro_batch_size=auto"),
    ("gradient_accumulation_steps", "train.gradient_accumulation_steps=auto"),
    ("strategy", "parallel.strategy=auto"),
    ("mixed_precision", "train.mixed_precision=auto"),
    ("num_processes", "parallel.num_processes=auto"),
)


def _without_wishes(judge: Judge, wishes: Wishes) -> Iterator[tuple[str, Judge, Wishes]]:
    for name, change in _RELAXED:
        if name in wishes.fixed:
            yield change, judge, _drop(wishes, name)
    several = [name for name, _ in _RELAXED if name in wishes.fixed]
    if len(several) > 1:
        yield " ".join(change for name, change in _RELAXED if name in several), judge, _drop(wishes, *several)


def _drop(wishes: Wishes, *names: str) -> Wishes:
    # Keys of a strategy go with it.
    gone = {*names, *(("replicate_size", "reshard_after_forward") if "strategy" in names else ())}
    return Wishes({key: value for key, value in wishes.fixed.items() if key not in gone}, wishes.allows_world)


def _shorter(judge: Judge, wishes: Wishes) -> Iterator[tuple[str, Judge, Wishes]]:
    workload = judge.workload
    key = "data.pack_length" if workload.packed else "data.max_length"
    tokens = workload.row_tokens // 2
    while tokens >= _SHORTEST:
        rows = workload.global_batch_rows
        if workload.packed:
            rows *= workload.row_tokens / tokens
        shorter: dict[str, Any] = {"row_tokens": tokens, "global_batch_rows": rows}
        if workload.longest > tokens:
            shorter["longest_document"] = tokens
            shorter["document_tokens"] = min(workload.document, tokens)
            key = "data.max_length"
        yield f"{key}={tokens}", _with(judge, replace(workload, **shorter)), wishes
        tokens //= 2


def _more_devices(judge: Judge, wishes: Wishes) -> Iterator[tuple[str, Judge, Wishes]]:
    cluster = judge.cluster
    if cluster.device == "cpu":
        return
    free = _drop(wishes, "num_processes", "strategy")
    nodes, each = cluster.nodes, cluster.devices_per_node
    while nodes * each < _MOST_DEVICES:
        nodes, each = (nodes, min(8, 2 * each)) if each < 8 and nodes == 1 else (2 * nodes, each)
        larger = replace(
            cluster,
            nodes=nodes,
            devices_per_node=each,
            network=cluster.network or (cluster.card.host_link if nodes > 1 else None),
            name=f"{f'{nodes}x' if nodes > 1 else ''}{each}x{cluster.card.name}",
        )
        other = Judge(judge.workload, larger, rates_of(larger), judge.available)
        yield f"{nodes * each} of these devices ({larger.name})", other, free


def _with(judge: Judge, workload: Workload) -> Judge:
    return Judge(workload, judge.cluster, judge.rates, judge.available)
