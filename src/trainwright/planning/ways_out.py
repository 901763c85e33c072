"""When nothing fits: the smallest changes of a workload or a machine that would. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from trainwright.planning.candidates import Wishes
from trainwright.planning.rates import rates_of
from trainwright.planning.search import Judge, Judged, search
from trainwright.planning.workload import Adapter, Workload

# What to write or to get, and the judge and the wishes that are left with it.
_Change = tuple[str, Judge, Wishes]

_RANK = 16
_SHORTEST = 128


@dataclass(frozen=True)
class WayOut:
    """``change``: what to write, or to get. ``judged``: the best choice there is with it."""

    change: str
    judged: Judged


def ways_out(judge: Judge, wishes: Wishes, nearest: Judged, most: int = 3) -> list[WayOut]:
    """At most ``most`` changes with which the workload runs, the cheapest first. ``nearest``: what comes nearest to it.

    What the user fixed is given up first, then what all parameters are trained for, then the length of the rows, and
    at last more devices are got, or these and an adapter.
    """
    found: list[WayOut] = []
    # What fits already and is not installed needs no less memory.
    for series in _without_wishes(judge, wishes) if nearest.fits else _series(judge, wishes):
        tried = ((change, search(other, kept).best) for change, other, kept in series)
        found += islice((WayOut(change, best) for change, best in tried if best is not None), 1)
        if len(found) == most:
            break
    return found


def _series(judge: Judge, wishes: Wishes) -> Iterator[Iterator[_Change]]:
    """Of changes of one kind, the smallest first: of each, the first that helps is told."""
    yield from _without_wishes(judge, wishes)
    workload = judge.workload
    lora = judge if workload.adapter else _with(judge, replace(workload, adapter=Adapter("lora", _RANK)))
    if lora is not judge:
        yield iter([(f"model.adapter=lora (rank {_RANK})", lora, wishes)])
    if workload.quantisation == "none":
        adapter = workload.adapter or Adapter("lora", _RANK)
        quantised = replace(workload, adapter=adapter, quantisation="nf4")
        yield iter([(f"model.adapter=qlora (4-bit base, rank {adapter.rank})", _with(judge, quantised), wishes)])
    yield _shorter(judge, wishes)
    yield _more_devices(judge, wishes)
    if lora is not judge:
        yield ((f"model.adapter=lora and {more}", other, kept) for more, other, kept in _more_devices(lora, wishes))


_RELAXED: tuple[tuple[str, str], ...] = (
    ("activation_checkpointing", "train.activation_checkpointing=auto"),
    ("micro_batch_size", "train.micro_batch_size=auto"),
    ("gradient_accumulation_steps", "train.gradient_accumulation_steps=auto"),
    ("strategy", "parallel.strategy=auto"),
    ("mixed_precision", "train.mixed_precision=auto"),
    ("num_processes", "parallel.num_processes=auto"),
)


def _without_wishes(judge: Judge, wishes: Wishes) -> Iterator[Iterator[_Change]]:
    """One key each, and where none is enough, all of them."""
    fixed = {name: change for name, change in _RELAXED if name in wishes.fixed}
    enough = False
    for name, change in fixed.items():
        tried = [(change, judge, _drop(wishes, name))]
        enough = enough or search(judge, tried[0][2]).best is not None
        yield iter(tried)
    if len(fixed) > 1 and not enough:
        yield iter([(" ".join(fixed.values()), judge, _drop(wishes, *fixed))])


def _drop(wishes: Wishes, *names: str) -> Wishes:
    # Keys of a strategy go with it.
    gone = {*names, *(("replicate_size", "reshard_after_forward") if "strategy" in names else ())}
    return Wishes({key: value for key, value in wishes.fixed.items() if key not in gone}, wishes.allows_world)


def _shorter(judge: Judge, wishes: Wishes) -> Iterator[_Change]:
    """Half as long and so on."""
    workload = judge.workload
    key = "data.pack_length" if workload.packed else "data.max_length"
    lengths = [workload.row_tokens >> halvings for halvings in range(1, workload.row_tokens.bit_length())]
    lengths = [tokens for tokens in lengths if tokens >= _SHORTEST]
    if not lengths or search(_with(judge, _of_length(workload, lengths[-1])), wishes).best is None:
        return
    for tokens in lengths:
        if workload.longest > tokens:
            key = "data.max_length"
        yield f"{key}={tokens}", _with(judge, _of_length(workload, tokens)), wishes


def _of_length(workload: Workload, tokens: int) -> Workload:
    """Rows of so many tokens, and where they are packed as many more of them."""
    rows = workload.global_batch_rows
    if workload.packed:
        rows *= workload.row_tokens / tokens
    shorter = replace(workload, row_tokens=tokens, global_batch_rows=rows)
    if workload.longest <= tokens:
        return shorter
    return replace(shorter, longest_document=tokens, document_tokens=min(workload.document, tokens))


def _more_devices(judge: Judge, wishes: Wishes) -> Iterator[_Change]:
    """Twice as many and so on, as long as each has a row of the global batch."""
    cluster = judge.cluster
    if cluster.device == "cpu":
        return
    free = _drop(wishes, "num_processes", "strategy")
    nodes, each = cluster.nodes, cluster.devices_per_node
    while nodes * each < judge.workload.global_batch_rows:
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
