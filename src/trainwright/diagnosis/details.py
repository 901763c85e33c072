"""Extract details of the cause from a log: how much memory was missing, which rank the others waited for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainwright.diagnosis.log import Line

_SIZE = r"([\d.]{1,20}) ?([KMGT]i?B)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}", re.IGNORECASE)
_CAPACITY = re.compile(rf"{_SIZE} total capacity|total capacity of {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"{_SIZE} (?:free|is free)\b|of which {_SIZE} is free", re.IGNORECASE)
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE)
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use", re.IGNORECASE)
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

_TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d{1,6})\] Watchdog caught collective operation timeout: Work\w+\(SeqNum=(?P<number>\d{1,18}), "
    r"OpType=(?P<kind>\w+)(?:, NumelIn=(?P<into>\d+), NumelOut=(?P<out>\d+))?"
)
_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
_PROGRESS = re.compile(
    r"Rank (?P<rank>\d{1,6})\].{0,200}last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), "
    r"last completed (?:NCCL )?work: -?\d"
)


def details_of(name: str, lines: Sequence[Line]) -> list[str]:
    """Return what the log says about the cause with this name."""
    find = _DETAILS.get(name)
    return find(lines) if find is not None else []


def _memory(lines: Sequence[Line]) -> list[str]:
    line = next((line for line in lines if _ASKED.search(line.text)), None)
    if line is None:
        return []
    found = []
    amounts = {"requested": _ASKED, "free": _FREE, "total": _CAPACITY}
    listed = [f"{amount} {name}" for name, pattern in amounts.items() if (amount := _first(pattern, line.text))]
    found.append(f"{', '.join(listed)} on the GPU")
    unused, asked = _bytes(_UNUSED, line.text), _bytes(_ASKED, line.text)
    if unused is not None and asked is not None and unused >= asked:
        found.append(
            f"{_first(_UNUSED, line.text)} are reserved but unused, in blocks that are too small: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids this fragmentation"
        )
    users = {found[0] for found in re.findall(r"Process (\d+) has", line.text)}
    others = _first(_OTHERS, line.text)
    if others and ("including non-PyTorch memory" not in line.text or len(users) > 1):
        found.append(f"another process on the same GPU has {others}: see nvidia-smi")
    return found


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return " ".join(group for group in found.groups() if group) if found else None


def _bytes(pattern: re.Pattern[str], text: str) -> float | None:
    amount = _first(pattern, text)
    if amount is None:
        return None
    number, unit = amount.split()
    return float(number) * _UNITS[unit[0].lower()]


@dataclass(frozen=True)
class _Waited:
    """The collective in which a rank waited."""

    number: int
    kind: str
    sizes: str


def _waiting(lines: Sequence[Line]) -> list[str]:
    waited: dict[int, _Waited] = {}
    enqueued: dict[int, int] = {}
    for line in lines:
        if found := _TIMEOUT.search(line.text):
            sizes = f", {found['into']} -> {found['out']} elements" if found["into"] else ""
            entry = _Waited(int(found["number"]), found["kind"], sizes)
            rank = int(found["rank"])
            if rank not in waited or entry.number < waited[rank].number:
                waited[rank] = entry
        if found := _PROGRESS.search(line.text):
            enqueued.setdefault(int(found["rank"]), int(found["enqueued"]))
    if not waited:
        return []
    return [_where(waited), *_behind(waited, enqueued), *_absent(waited, lines)]


def _where(waited: dict[int, _Waited]) -> str:
    places: dict[_Waited, list[int]] = {}
    for rank, place in sorted(waited.items()):
        places.setdefault(place, []).append(rank)
    listed = [
        f"{ranks_in_words(ranks)} in collective {place.number} ({place.kind}{place.sizes})"
        for place, ranks in sorted(places.items(), key=lambda item: item[0].number)
    ]
    same_number = len({place.number for place in places}) < len(places)
    disagree = "; ranks ran different operations as the same collective" if same_number else ""
    return f"waited: {'; '.join(listed)}{disagree}"


def _behind(waited: dict[int, _Waited], enqueued: dict[int, int]) -> list[str]:
    """Return which ranks had called fewer collectives than the others."""
    calls = enqueued if len(enqueued) > 1 else {rank: place.number for rank, place in waited.items()}
    most, fewest = max(calls.values()), min(calls.values())
    if most == fewest:
        return []
    last = sorted(rank for rank, number in calls.items() if number == fewest)
    return [f"{ranks_in_words(last)} had called {fewest} collectives, others up to {most}: check what it did instead"]


def _absent(waited: dict[int, _Waited], lines: Sequence[Line]) -> list[str]:
    seen = {line.rank for line in lines if line.rank is not None} | set(waited)
    absent = sorted(set(range(max(seen) + 1)) - set(waited))
    if not absent or len(waited) < 2 or len(absent) > len(waited):
        return []
    return [f"no timeout was reported by {ranks_in_words(absent)}: check there first"]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Format ranks: 'rank 3', 'ranks 0-2, 5'."""
    ranks = sorted(ranks)
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    listed = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def _reported(lines: Sequence[Line]) -> list[str]:
    """Return which process the launcher reports as the first to fail."""
    begun = False
    rank = None
    for line in lines:
        begun = begun or line.text.startswith("Root Cause")
        if found := _FAILED.search(line.text):
            return [f"failed first: local rank {found['rank']}, exit code {found['code']}"]
        if begun and (found := re.match(r"\s+rank\s+: (\d+)", line.text)):
            rank = found[1]
        if begun and rank is not None and (found := re.match(r"\s+exitcode\s*: ?(-?\d+)", line.text)):
            return [f"failed first: rank {rank}, exit code {found[1]}"]
    return []


_DETAILS: dict[str, Callable[[Sequence[Line]], list[str]]] = {
    "gpu-out-of-memory": _memory,
    "nccl-timeout": _waiting,
    "launcher-report": _reported,
    "killed": _reported,
    "crashed": _reported,
}
