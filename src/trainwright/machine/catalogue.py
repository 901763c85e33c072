"""A catalogue of accelerators with the numbers of their datasheets, and look-up by the names people use.

The numbers and their sources are in ``cards.json``. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainwright.errors import RequestError
from trainwright.machine.links import STRICT, Link, fabric, pcie

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]

_FILE = Path(__file__).with_name("cards.json")
_LIMITED = re.compile(r"^(?P<card>.+?)[-_ ]*\b(?P<watts>\d{2,4})\s*w(?:atts?)?$", re.IGNORECASE)
_LEAST_POWER = 0.25  # of a card's own, below which no driver limits it
_BRANDS = re.compile(r"nvidia|amd|intel|geforce|tesla|instinct|quadro|generation|[^a-z0-9]")


@dataclass(frozen=True)
class Source:
    """Where a card's numbers are published."""

    __pydantic_config__ = STRICT

    title: str
    url: str


@dataclass(frozen=True)
class Card:
    """An accelerator as its datasheet describes it.

    ``memory_bytes``: what the driver reports as the device's total to programs; ``nominal_bytes`` is what is
    printed on the box. ``memory_bandwidth``: bytes a second. ``rates``: peak operations a second by
    precision, dense, matrix units where there are any; a precision that is not in it has no units of its own.
    ``link``: to the other devices of a node. ``host_link``: to the node's memory. ``watts``: board power.
    ``network_adapters``: (count, bits a second each) of the vendor's reference server. ``device``: what programs see
    as one device, where that is not the whole card.
    """

    __pydantic_config__ = STRICT

    name: str
    vendor: str
    architecture: str
    capability: tuple[int, int]
    memory_bytes: int
    nominal_bytes: int
    memory_bandwidth: float
    rates: Mapping[str, float] = field(hash=False)
    link: Link
    host_link: Link
    watts: int
    network_adapters: tuple[int, float] | None = None
    aliases: tuple[str, ...] = ()
    note: str | None = None
    device: str | None = None
    source: Source | None = None

    def rate(self, precision: Precision) -> float | None:
        """Dense operations a second in ``precision``; None where the card has no units for it."""
        return self.rates.get(precision)


def cards() -> tuple[Card, ...]:
    """Every card of the catalogue, in its order."""
    return tuple(dict.fromkeys(_by_name().values()))


def find_card(name: str) -> Card:
    """Return the card that ``name`` means: its own name, an alias, or what its driver calls it; `H100-500W` is one
    whose power is limited to 500 W.

    Raises RequestError with the nearest names for an unknown one, with the choices for one that names several cards,
    and for a limit that the card cannot have.
    """
    if (card := known_card(name)) is not None:
        return card
    if (limited := _LIMITED.match(name)) is not None:
        return _with_limit(find_card(limited["card"]), int(limited["watts"]))
    key = _key(name)
    if (choices := _ambiguous().get(key)) is not None:
        raise RequestError(f"{name}: which one, {_listed(choices)}?")
    near = difflib.get_close_matches(key, [*_by_name(), *_ambiguous()], n=6, cutoff=0.5)
    found = dict.fromkeys(_by_name()[word].name if word in _by_name() else word.upper() for word in near)
    hint = f"; did you mean {_listed(list(found)[:3])}?" if found else "."
    raise RequestError(f"{name}: no such card in the catalogue{hint} `trainwright machine cards` shows all there are")


def _with_limit(card: Card, watts: int) -> Card:
    if watts == card.watts:
        return card
    if not _LEAST_POWER * card.watts <= watts <= card.watts:
        raise RequestError(
            f"{card.name}-{watts}W: its power can be limited to {math.ceil(_LEAST_POWER * card.watts)} W at the least, "
            f"and it takes {card.watts} W at the most"
        )
    return replace(card, name=f"{card.name}-{watts}W", watts=watts, aliases=())


def known_card(name: str) -> Card | None:
    """As ``find_card``, with None where that raises."""
    return _by_name().get(_key(name))


def card_of_gpu(name: str, memory_bytes: int) -> Card | None:
    """Return the card that its driver calls ``name``; None if unknown, or if a slice of it has less
    ``memory_bytes``.
    """
    card = known_card(name)
    return card if card is not None and abs(card.nominal_bytes / memory_bytes - 1) < 0.15 else None


@cache
def _by_name() -> dict[str, Card]:
    named: dict[str, Card] = {}
    for entry in _read()["cards"]:
        card = _card(entry)
        for name in (card.name, *card.aliases):
            named.setdefault(_key(name), card)
    return named


@cache
def _ambiguous() -> dict[str, list[str]]:
    return {_key(name): names for name, names in _read()["ambiguous"].items()}


@cache
def _read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def _card(entry: Mapping[str, Any]) -> Card:
    generation = entry["pcie_generation"]
    slot, link = pcie(generation, direct=entry.get("peer_to_peer", True)), entry.get("link")
    return Card(
        name=entry["name"],
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        capability=(entry["capability"][0], entry["capability"][1]),
        memory_bytes=round(entry["usable_gib"] * 2**30),
        nominal_bytes=entry["nominal_gb"] * 10**9,
        memory_bandwidth=entry["gigabytes_per_second"] * 1e9,
        rates={name: value * 1e12 for name, value in entry["teraflops"].items()},
        link=slot if link is None else _fabric(link),
        host_link=_fabric(entry["host_link"]) if "host_link" in entry else pcie(generation),
        watts=entry["watts"],
        network_adapters=_adapters(entry.get("network")),
        aliases=tuple(entry["aliases"]),
        note=entry.get("note"),
        device=entry.get("device"),
        source=Source(**entry["source"]),
    )


def _fabric(link: Mapping[str, Any]) -> Link:
    return fabric(link["kind"], link["generation"], link["gigabytes_per_second"] * 1e9, link["span"])


def _adapters(text: str | None) -> tuple[int, float] | None:
    if text is None:
        return None
    count, _, rate = text.partition("x")
    return int(count), float(rate.removesuffix("Gb")) * 1e9


def _key(name: str) -> str:
    """One spelling for `NVIDIA GeForce RTX 4090`, `RTX-4090` and `rtx4090`."""
    return _BRANDS.sub("", name.lower())


def _listed(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
