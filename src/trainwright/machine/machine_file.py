"""Read a machine from the output of ``trainwright machine --json``: to plan for it elsewhere, or to replace this one.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.machine.describe import Cluster, parse_machine
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, of_json
from trainwright.machine.measured.contradictions import contradictions
from trainwright.recipe.files import read_json
from trainwright.utils.paths import user_path

# Derived from the other keys; written for readers.
_DERIVED = ("devices", "device")
_MEASURED = ("calibration", "measurement")
# What the cluster was made from, to replace this machine.
_DETECTED = "machine"
_LEAST_ONE = (
    "nodes",
    "devices_per_node",
    "host_memory_bytes",
    "cpu_cores",
    "card.memory_bytes",
    "card.nominal_bytes",
)
_FIX = "`trainwright machine --json > FILE` writes such a file"
VARIABLE = "TRAINWRIGHT_MACHINE"
_LEAST_ONE_HERE = ("cpu_cores", "memory_bytes")
_ADVICE = "write the file with `trainwright machine --json` on that machine, or with --on for NVIDIA GPUs"


Written = tuple[Cluster, Calibration | None, Calibration | None]


def machine_of(text: str) -> Written:
    """Return the machine that ``--on`` names: a file, or a description for ``parse_machine``. Raises RequestError."""
    if names_file(text):
        return read_machine(user_path(text))
    return parse_machine(text), None, None


def names_file(text: str) -> bool:
    """Return whether ``--on`` names a file by this text, and not a description."""
    return text.endswith(".json") or Path(text).is_file()


def read_machine(file: Path) -> Written:
    """Return the machine in ``file``, with its calibration and quick measurement if the file has them.

    Raises:
        RequestError: the file is invalid; the message has one line per error, with the key.
    """
    content = read_json(file)
    if not isinstance(content, dict):
        raise RequestError(f"{file}: not a machine, which is a JSON object; {_FIX}")
    values = {key: value for key, value in content.items() if key not in (*_DERIVED, *_MEASURED, _DETECTED)}
    cluster = _cluster(values, file)
    _refuse(file, _impossible(cluster))
    derived: Mapping[str, Any] = {"devices": cluster.devices, "device": cluster.device}
    _refuse(
        file,
        (
            f"{key}: {content[key]!r} contradicts the other keys, which make it {expected!r}"
            for key, expected in derived.items()
            if content.get(key, expected) != expected
        ),
    )
    calibration, measurement = (measured_in(content, key, file) for key in _MEASURED)
    return cluster, calibration, measurement


def described_machine() -> Machine | None:
    """Return the machine of the file that ``$TRAINWRIGHT_MACHINE`` names; None if it is not set.

    Raises:
        RequestError: the file cannot be read or does not describe a machine.
    """
    file = os.environ.get(VARIABLE)
    return machine_described_in(Path(file)) if file else None


def machine_described_in(file: Path) -> Machine:
    """Return the machine that ``trainwright machine --json`` has written to ``file``.

    Raises:
        RequestError: the file cannot be read or does not describe a machine.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        values = read_json(file)
    except RequestError as error:
        raise RequestError(f"{VARIABLE}: {error}; {_ADVICE}") from None
    if not isinstance(values, dict) or values.get("machine") is None:
        raise RequestError(f"{VARIABLE}: {file} has no key `machine`; {_ADVICE}")
    measured_in(values, "measurement", file)
    try:
        machine: Machine = TypeAdapter(Machine).validate_json(json.dumps(values["machine"]))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("machine", *first["loc"])))
        raise RequestError(f"{VARIABLE}: {file}: {key}: {first['msg']}; {_ADVICE}") from error
    for key in _LEAST_ONE_HERE:
        if getattr(machine, key) < 1:
            raise RequestError(f"{VARIABLE}: {file}: machine.{key}: expected at least 1, not {getattr(machine, key)}")
    if not (math.isfinite(machine.processor.clock) and machine.processor.clock > 0):
        expected = f"expected a finite number above 0, not {machine.processor.clock}"
        raise RequestError(f"{VARIABLE}: {file}: machine.processor.clock: {expected}")
    return replace(machine, described_by=str(file), is_here=False)


def measured_in(content: Mapping[str, Any], key: str, file: Path) -> Calibration | None:
    """Return the measurement in ``file`` under ``key``, or None. Raises RequestError if it is invalid."""
    if (value := content.get(key)) is None:
        return None
    try:
        calibration = of_json(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"{file}: {key}: {reason}; set it to null to plan without it") from None
    _refuse(file, (f"{key}.{line}; set {key} to null to plan without it" for line in contradictions(calibration)))
    return calibration


def _cluster(values: dict[str, Any], file: Path) -> Cluster:
    from pydantic import TypeAdapter, ValidationError

    from trainwright.recipe.problems import expected_and_found

    try:
        return TypeAdapter(Cluster).validate_json(json.dumps(values))
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            key = ".".join(map(str, item["loc"]))
            if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                lines.append(f"{key}: unknown key")
            elif item["type"] in ("missing", "missing_argument"):
                lines.append(f"{key}: is missing")
            else:
                lines.append(f"{key}: {expected_and_found(item)}")
        raise RequestError("\n".join(f"{file}: {line}" for line in dict.fromkeys(lines)) + f"\n{_FIX}") from None


def _impossible(cluster: Cluster) -> Iterator[str]:
    """Yield messages about numbers of the right type that are impossible."""
    values = {key: attrgetter(key)(cluster) for key in _LEAST_ONE}
    yield from (f"{key}: expected a number of at least 1, not {value}" for key, value in values.items() if value < 1)
    links = {"link": cluster.link, "network": cluster.network, "card.link": cluster.card.link}
    rates = {f"{name}.bandwidth": link.bandwidth for name, link in links.items() if link is not None}
    rates |= {f"card.rates.{name}": rate for name, rate in cluster.card.rates.items()}
    rates["card.memory_bandwidth"] = cluster.card.memory_bandwidth
    for key, rate in rates.items():
        if not (math.isfinite(rate) and rate > 0):
            yield f"{key}: expected a finite number above 0, not {rate}"
    if cluster.nodes > 1 and cluster.network is None:
        yield f"network: is null, and {cluster.nodes} nodes need one"


def _refuse(file: Path, lines: Iterator[str]) -> None:
    if problems := list(lines):
        raise RequestError("\n".join(f"{file}: {line}" for line in problems))
