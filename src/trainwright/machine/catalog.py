"""A catalog of accelerators with the values of their datasheets, and lookup by common names.

The values and their sources are in ``cards.json``. Imports no torch.
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
from trainwright.machine.links import STRICT, Link, build_fabric_link, build_pcie_link

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"]

_FILE = Path(__file__).with_name("cards.json")
_LIMITED = re.compile(r"^(?P<card>.+?)[-_ ]*\b(?P<watts>\d{2,4})\s*w(?:atts?)?$", re.IGNORECASE)
_LEAST_POWER = 0.25  # share of a card's own power below which drivers set no limit
_BRANDS = re.compile(r"nvidia|amd|intel|geforce|tesla|instinct|quadro|generation|[^a-z0-9]")


@dataclass(frozen=True)
class Publication:
    """The publication of a card's values."""

    __pydantic_config__ = STRICT

    title: str
    url: str


@dataclass(frozen=True)
class Card:
    """An accelerator as its datasheet describes it.

    ``memory_bytes``: the device's total as the driver reports it; ``nominal_bytes``: as advertised.
    ``memory_bandwidth``: bytes per second. ``rates``: peak operations per second by precision, dense, with matrix units
    if there are any; missing precisions have no units. ``link``: to the other devices of a node. ``host_link``: to the
    node's memory. ``watts``: board power. ``network_adapters``: (count, bits per second each) of the vendor's reference
    server. ``device``: the part of the card that programs see as one device, if not the whole card.
    ``planned_only``: torch alone does not train on it.
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
    source: Publication | None = None
    planned_only: bool = False

    def rate(self, precision: Precision) -> float | None:
        """Return the dense operations per second in ``precision``; None if the card has no units for it."""
        return self.rates.get(precision)


def list_cards() -> tuple[Card, ...]:
    """Return all cards of the catalog, in order."""
    return tuple(dict.fromkeys(_index_by_name().values()))


def find_card(name: str) -> Card:
    """Return the card called ``name``: its own name, an alias, or the driver's; `H100-500W` is limited to 500 W.

    Raises:
        RequestError: the name is unknown (the message has similar ones) or ambiguous (with the choices), or the card
            does not allow the power limit.
    """
    if (card := look_up_card(name)) is not None:
        return card
    if (match := _LIMITED.match(name)) is not None:
        return _limit_power(find_card(match["card"]), int(match["watts"]))
    key = _normalize_name(name)
    if (choices := _read_ambiguous().get(key)) is not None:
        raise RequestError(f"{name}: ambiguous; choose {_join_names(choices)}")
    near = difflib.get_close_matches(key, [*_index_by_name(), *_read_ambiguous()], n=6, cutoff=0.5)
    similar = dict.fromkeys(_index_by_name()[word].name if word in _index_by_name() else word.upper() for word in near)
    hint = f"; did you mean {_join_names(list(similar)[:3])}?" if similar else "."
    raise RequestError(f"{name}: no such card in the catalog{hint} `trainwright machine cards` lists all cards")


def _limit_power(card: Card, watts: int) -> Card:
    if watts == card.watts:
        return card
    if not _LEAST_POWER * card.watts <= watts <= card.watts:
        raise RequestError(
            f"{card.name}-{watts}W: its power limit must be from {math.ceil(_LEAST_POWER * card.watts)} to "
            f"{card.watts} W"
        )
    return replace(card, name=f"{card.name}-{watts}W", watts=watts, aliases=())


def look_up_card(name: str) -> Card | None:
    """Return the card called ``name``, or None if it is unknown."""
    return _index_by_name().get(_normalize_name(name))


def look_up_gpu_card(name: str, memory_bytes: int) -> Card | None:
    """Return the card with the driver's name ``name``; None if unknown, or for a slice with less memory."""
    card = look_up_card(name)
    return card if card is not None and abs(card.nominal_bytes / memory_bytes - 1) < 0.15 else None


# Compute capabilities by the value of ``train.float8``: Ada, Hopper and later; Blackwell.
_CAPABILITIES_OF_FLOAT8 = {
    "rowwise": ("float8", (8, 9)),
    "tensorwise": ("float8", (8, 9)),
    "mxfp8": ("MXFP8", (10, 0)),
    "nvfp4": ("NVFP4", (10, 0)),
}
FLOAT8 = tuple(_CAPABILITIES_OF_FLOAT8)


def explain_no_float8(card: Card, scales: str) -> str | None:
    """Return why a GPU cannot have a value of ``train.float8``, or None."""
    name, (major, minor) = _CAPABILITIES_OF_FLOAT8[scales]
    if card.vendor != "NVIDIA":
        return f"needs an NVIDIA GPU, {card.name} is one of {card.vendor}"
    if card.capability < (major, minor):
        return f"{card.name} does not compute in {name}, which needs compute capability {major}.{minor} or higher"
    return None


def list_possible_float8(card: Card) -> tuple[str, ...]:
    """Return the values of ``train.float8`` that a GPU can have."""
    return tuple(scales for scales in FLOAT8 if explain_no_float8(card, scales) is None)


@cache
def _index_by_name() -> dict[str, Card]:
    cards: dict[str, Card] = {}
    for entry in _read()["cards"]:
        card = _build_card(entry)
        for name in (card.name, *card.aliases):
            cards.setdefault(_normalize_name(name), card)
    return cards


@cache
def _read_ambiguous() -> dict[str, list[str]]:
    return {_normalize_name(name): names for name, names in _read()["ambiguous"].items()}


@cache
def _read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def _build_card(entry: Mapping[str, Any]) -> Card:
    generation = entry["pcie_generation"]
    slot, link = build_pcie_link(generation, direct=entry.get("peer_to_peer", True)), entry.get("link")
    return Card(
        name=entry["name"],
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        capability=(entry["capability"][0], entry["capability"][1]),
        memory_bytes=round(entry["usable_gib"] * 2**30),
        nominal_bytes=entry["nominal_gb"] * 10**9,
        memory_bandwidth=entry["gigabytes_per_second"] * 1e9,
        rates={name: value * 1e12 for name, value in entry["teraflops"].items()},
        link=slot if link is None else _build_fabric(link),
        host_link=_build_fabric(entry["host_link"]) if "host_link" in entry else build_pcie_link(generation),
        watts=entry["watts"],
        network_adapters=_parse_adapters(entry.get("network")),
        aliases=tuple(entry["aliases"]),
        note=entry.get("note"),
        device=entry.get("device"),
        source=Publication(**entry["source"]),
        planned_only=entry.get("planned_only", False),
    )


def _build_fabric(link: Mapping[str, Any]) -> Link:
    return build_fabric_link(link["kind"], link["generation"], link["gigabytes_per_second"] * 1e9, link["span"])


def _parse_adapters(text: str | None) -> tuple[int, float] | None:
    if text is None:
        return None
    count, _, rate = text.partition("x")
    return int(count), float(rate.removesuffix("Gb")) * 1e9


def _normalize_name(name: str) -> str:
    """Normalize names: `NVIDIA GeForce RTX 4090`, `RTX-4090` and `rtx4090` are equal."""
    return _BRANDS.sub("", name.lower())


def _join_names(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
