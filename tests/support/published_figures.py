"""Training runs that others measured and published: what ran on which machine, how fast, in how much memory.

They are in ``tests/planning/published``, by source. ``about.json`` says what the keys mean and which sources the
planning model is mended on; the others only check it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trainwright.errors import RequestError
from trainwright.machine.catalog import find_card
from trainwright.planning.trace.catalog import look_up_model

Half = Literal["mend", "check"]
Figure = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "planning" / "published"
CLASSES = ("dense", "MoE", "LoRA", "QLoRA", "long context", "offload", "several nodes", "other vendors")
_ABOUT = "about.json"
_LONG = 16_384
_REVISION = re.compile(r"^(/[^/]+/[^/]+)/(?:blob|raw|tree)/[^/]+(?=/)")
_NODES = re.compile(r"^\d+x\d+x")
_QUANTIZED = ("nf4", "int8")


def figures(half: Half | None = None) -> list[Figure]:
    """Every figure with its source and the defaults filled in; with ``half`` those of one side."""
    defaults = _about()["defaults"]
    found = []
    for source in sources():
        told = {"title": source["title"], "url": source["url"], "date": source["date"]}
        if half in (None, source["used"]):
            for figure in source["figures"]:
                found.append({**defaults, **source["common"], **figure, "source": told, "used": source["used"]})
    return found


def sources() -> list[dict[str, Any]]:
    """As the files have them, in the order of their names."""
    files = sorted(path for path in FOLDER.glob("*.json") if path.name != _ABOUT)
    return [source for path in files for source in json.loads(path.read_text(encoding="utf-8"))]


def half_of(url: str) -> Half:
    """On which side a source belongs, by its address alone."""
    address = urlsplit(url.lower())
    place = address.netloc.removeprefix("www.") + _REVISION.sub(r"\1", address.path).rstrip("/")
    if place in _about()["mended"]:
        return "mend"
    return "check" if int(hashlib.sha256(place.encode()).hexdigest(), 16) % 2 else "mend"


def class_of(figure: Figure) -> str:
    """The first that holds of: another vendor's machine, several nodes, offload, long context, MoE, QLoRA, LoRA."""
    if "class" in figure:
        return str(figure["class"])
    adapter = figure["adapter"] or {}
    holds = {
        "other vendors": _vendor(figure) != "NVIDIA",
        "several nodes": _NODES.match(figure["on"]) is not None,
        "offload": any(figure[key] for key in ("offload_parameters", "offload_optimizer", "activation_offload")),
        "long context": figure["sequence_length"] >= _LONG and (figure["mean_length"] or _LONG) >= _LONG,
        "MoE": any("expert" in key for key in config_of(figure) or ()),
        "QLoRA": adapter.get("quantization") in _QUANTIZED,
        "LoRA": bool(adapter),
    }
    return next((name for name, held in holds.items() if held), "dense")


def config_of(figure: Figure) -> Mapping[str, Any] | None:
    """The configuration of the model; None for one that is not known."""
    if "config" in figure:
        config: dict[str, Any] = figure["config"]
        return config
    model = look_up_model(figure["model"])
    return None if model is None else model.config


def _vendor(figure: Figure) -> str:
    card = re.sub(r"^(?:\d+x){1,2}|@.*$", "", figure["on"])
    try:
        return find_card(card).vendor
    except RequestError:
        return "other" if card.startswith(("MI", "Gaudi")) else "NVIDIA"


@cache
def _about() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / _ABOUT).read_text(encoding="utf-8"))
    return content
