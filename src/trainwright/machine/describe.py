"""The machines that plans are made for: this one as detected, one described by a short text, or one read from a file.

`8xH100` is one node of eight; `4x8xA100-40GB@8x200Gb` four nodes of eight, each with eight network adapters of 200
Gb/s. A file is the output of ``trainwright machine --json``, and can also replace this machine. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.machine.catalog import Card, find_card, list_cards, look_up_gpu_card
from trainwright.machine.links import STRICT, Link, build_network_link, build_pcie_link
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.measured.calibration import Calibration, check_calibration, parse_calibration
from trainwright.machine.processor import build_cpu_card
from trainwright.machine.vendors import TRAINING_RUNS_ON, VENDORS, Vendor, look_up_device_type
from trainwright.recipe.files import read_json
from trainwright.utils.paths import expand_user_path

FORM = "[NODES x] DEVICES x CARD [@ NETWORK], such as 8xH100, 2xRTX4090 or 4x8xA100-40GB@8x200Gb"

_MOST_DEVICES_PER_NODE = 16
_SHAPE = re.compile(r"^(?:(?P<first>\d+)[x×*])?(?:(?P<second>\d+)[x×*])?(?P<card>[^@]+?)(?:@(?P<network>.*))?$")
_NETWORK = re.compile(r"^(?:(?P<count>\d+)[x×*])?(?P<rate>\d+(?:\.\d+)?)(?P<unit>[gt])(?:b|bit)?(?:/s|ps)?$")
_NO_CARD = re.compile(r"^[x×*-]|^\d{0,3}[x×*]?$|^\d+[x×*]|[a-z0-9][x×*]\d{1,3}$")  # the rest of 8xxH100, 8x, H100x8
_ADAPTERS_IF_UNKNOWN = (1, 100e9)
_CORES_PER_DEVICE = 8
_LEAST_HOST_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    ``card``: the device; on a CPU machine all its cores are one device, whose memory the processes share. ``link``:
    between the devices of a node. ``network``: a device's share of the network between nodes, None for a single node.
    ``host_memory_bytes`` and ``cpu_cores``: of one node. ``device_free_bytes``: free memory of the fullest device; None
    for a described machine, where all is assumed to be free. ``assumptions``: values that were neither given nor
    measured. ``is_here``: it was detected, so its software is the installed one. ``unified``: devices compute in the
    host's memory.
    """

    __pydantic_config__ = STRICT

    name: str
    nodes: int
    devices_per_node: int
    card: Card
    link: Link
    network: Link | None
    host_memory_bytes: int
    cpu_cores: int
    device_free_bytes: int | None = None
    host_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    assumptions: tuple[str, ...] = ()
    is_here: bool = False
    unified: bool = False

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def device(self) -> str:
        """The device type, as in torch: `cuda`, also for AMD's GPUs, `xpu` for Intel's, or `cpu`."""
        return look_up_device_type(self.card.vendor)

    @property
    def has_gpus(self) -> bool:
        """Whether the devices are GPUs."""
        return self.card.vendor != "CPU"

    @property
    def planned_only(self) -> str | None:
        """Why the machine can only be planned, not trained on; None if it can be trained on."""
        return f"planning only: {TRAINING_RUNS_ON}, not on {self.card.name}" if self.card.planned_only else None

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that is available to a run."""
        free = self.device_free_bytes
        return self.card.memory_bytes if free is None else min(free, self.card.memory_bytes)


def parse_machine(text: str) -> Cluster:
    """Return the machine that ``text`` describes, in the form ``FORM``.

    Raises:
        RequestError: the text is malformed, or the card is not in the catalog.
    """
    match = _SHAPE.match(re.sub(r"\s+", "", text).lower())
    if match is None or _NO_CARD.search(match["card"]):
        raise RequestError(f"{text or 'an empty machine'}: not a machine; write {FORM}")
    card = find_card(re.sub(r"@.*|^\s*(?:\d+\s*[xX×*]\s*){0,2}", "", text).strip())
    counts = [int(count) for count in (match["first"], match["second"]) if count]
    nodes, devices = (counts[0], counts[1]) if len(counts) == 2 else (1, counts[0] if counts else 1)
    _check_counts(text, nodes, devices, card)
    if match["network"] is not None and nodes == 1:
        raise RequestError(
            f"{text}: a network needs several nodes; write 2x{text} for two nodes, or remove the network"
        )
    host = max(_LEAST_HOST_BYTES, 2 * devices * card.nominal_bytes)
    assumptions = [
        f"{host / 2**30:.0f} GiB of host memory and {_CORES_PER_DEVICE * devices} cores per node",
        *([f"a device is {card.device}"] if card.device else []),
    ]
    count, rate = _choose_adapters(text, match["network"], card, assumptions if nodes > 1 else [])
    suffix = f"@{count}x{rate / 1e9:g}Gb" if nodes > 1 else ""
    return Cluster(
        name=f"{f'{nodes}x' if nodes > 1 else ''}{devices}x{card.name}{suffix}",
        nodes=nodes,
        devices_per_node=devices,
        card=card,
        link=_choose_node_link(card, devices),
        network=build_network_link(count * rate, devices) if nodes > 1 else None,
        host_memory_bytes=host,
        cpu_cores=_CORES_PER_DEVICE * devices,
        assumptions=tuple(assumptions),
    )


def build_cluster(machine: Machine, nodes: int = 1, network_bits: float | None = None) -> Cluster:
    """Return ``machine`` as detected, or ``nodes`` like it connected by ``network_bits`` per second each.

    A GPU that is not in the catalog has the rates of the most similar card in it.
    """
    assumptions: list[str] = []
    if machine.described_by is not None:
        assumptions.append(f"this machine is described by {machine.described_by} (TRAINWRIGHT_MACHINE)")
    gpus = machine.gpus
    card = _choose_card(min(gpus, key=lambda gpu: gpu.memory_bytes), assumptions) if gpus else build_cpu_card(machine)
    if len({gpu.name for gpu in gpus}) > 1:
        assumptions.append(f"the GPUs differ; all are planned as the smallest, {card.name}")
    devices = max(1, len(gpus))
    if nodes > 1 and network_bits is None:
        network_bits = _assume_network(card, assumptions)
    return Cluster(
        name=_name_cluster(nodes, devices, card),
        nodes=nodes,
        devices_per_node=devices,
        card=card,
        link=card.link if not gpus else _find_slowest_link(gpus) or _choose_node_link(card, devices),
        network=build_network_link(network_bits, devices) if nodes > 1 and network_bits else None,
        host_memory_bytes=machine.memory_bytes,
        cpu_cores=machine.cpu_cores,
        is_here=machine.is_here,
        device_free_bytes=_find_least_free(machine),
        host_free_bytes=machine.memory_free_bytes,
        disk_free_bytes=machine.disk_free_bytes,
        unified=any(gpu.unified for gpu in gpus),
        assumptions=tuple(assumptions),
    )


def build_machine(cluster: Cluster) -> Machine:
    """Return one node of a cluster of GPUs or CPUs as the machine that a run starts on, to stand in for this one."""
    card, link = cluster.card, cluster.link if cluster.devices_per_node > 1 else None
    vendor: Vendor = VENDORS[card.vendor].name if cluster.has_gpus else "CPU"
    gpu = Gpu(
        card.name,
        card.memory_bytes,
        card.capability or (0, 0),
        link=link,
        host_link=card.host_link,
        unified=cluster.unified,
        vendor=vendor,
    )
    return Machine(
        hostname=cluster.name,
        cpu_name=card.name if cluster.device == "cpu" else "unknown",
        cpu_cores=cluster.cpu_cores,
        memory_bytes=cluster.host_memory_bytes,
        gpus=(gpu,) * cluster.devices_per_node if cluster.has_gpus else (),
    )


def repeat_node(node: Cluster, nodes: int, devices: int) -> Cluster:
    """Return ``nodes`` like ``node``, each with ``devices`` for the job, connected by an assumed network."""
    if (nodes, devices) == (node.nodes, node.devices_per_node):
        return node
    assumptions = list(node.assumptions)
    if devices < node.devices_per_node:
        assumptions.append(
            f"the host memory and cores of a whole node, for {devices} of its {node.devices_per_node} GPUs"
        )
    return replace(
        node,
        name=_name_cluster(nodes, devices, node.card),
        nodes=nodes,
        devices_per_node=devices,
        network=build_network_link(_assume_network(node.card, assumptions), devices) if nodes > 1 else None,
        assumptions=tuple(assumptions),
    )


def _name_cluster(nodes: int, devices: int, card: Card) -> str:
    return f"{f'{nodes}x' if nodes > 1 else ''}{devices}x{card.name}"


def _assume_network(card: Card, assumptions: list[str]) -> float:
    """Return the bits per second of a node's network, which nothing describes."""
    count, rate = card.network_adapters or _ADAPTERS_IF_UNKNOWN
    assumptions.append(f"a network of {count * rate / 1e9:g} Gb/s per node")
    return count * rate


def _check_counts(text: str, nodes: int, devices: int, card: Card) -> None:
    if nodes < 1 or devices < 1:
        raise RequestError(f"{text}: a machine has at least one device; write {FORM}")
    if devices > _MOST_DEVICES_PER_NODE:
        example = f"{-(-nodes * devices // 8)}x8x{card.name}"
        raise RequestError(f"{text}: {devices} devices in one node? write NODES x DEVICES x CARD, such as {example}")


def _choose_adapters(text: str, written: str | None, card: Card, assumptions: list[str]) -> tuple[int, float]:
    """Return the number of network adapters of a node, and the bits per second of each."""
    if written is None:
        count, rate = card.network_adapters or _ADAPTERS_IF_UNKNOWN
        assumptions.append(
            f"{count} network adapter{'s' * (count > 1)} of {rate / 1e9:g} Gb/s per node; @ sets another"
        )
        return count, rate
    match = _NETWORK.match(written)
    if match is None or not float(match["rate"]) or match["count"] == "0":
        raise RequestError(
            f"{text}: {written or 'nothing'} after the @ is not a network; write the rate of a node, such as @400Gb, "
            "or its adapters, such as @8x400Gb"
        )
    return int(match["count"] or 1), float(match["rate"]) * {"g": 1e9, "t": 1e12}[match["unit"]]


def _choose_node_link(card: Card, devices: int) -> Link:
    """Return ``card``'s own link if it connects all ``devices``, or else their PCIe slots."""
    # Cards that connect eight directly can connect sixteen through switches; bridges have a fixed span.
    reach = card.link.span if card.link.span < 8 else _MOST_DEVICES_PER_NODE
    return card.link if card.link.kind == "pcie" or devices <= reach else card.host_link


def _choose_card(gpu: Gpu, assumptions: list[str]) -> Card:
    host_link = gpu.host_link or build_pcie_link(3)
    catalog_card = look_up_gpu_card(gpu.name, gpu.memory_bytes)
    if catalog_card is not None:
        return replace(catalog_card, memory_bytes=gpu.memory_bytes, host_link=host_link)
    like = min(
        (card for card in list_cards() if card.vendor == gpu.vendor and not card.planned_only),
        key=lambda card: (
            _compute_distance(card.capability, gpu.capability),
            abs(math.log(card.memory_bytes / gpu.memory_bytes)),
        ),
    )
    assumptions.append(
        f"{gpu.name} is not in the catalog; assumed as fast as {like.name}; `trainwright machine calibrate` measures it"
    )
    return replace(
        like,
        name=gpu.name,
        architecture="unknown",
        capability=gpu.capability,
        memory_bytes=gpu.memory_bytes,
        nominal_bytes=gpu.memory_bytes,
        link=gpu.link or host_link,
        host_link=host_link,
        aliases=(),
        note=None,
        source=None,
    )


def _compute_distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return the distance between two compute capabilities."""
    return abs(10 * (one[0] - other[0]) + one[1] - other[1])


def _find_slowest_link(gpus: tuple[Gpu, ...]) -> Link | None:
    """Return the slowest link of a ring over all ``gpus``; None if the driver reports none."""
    links = [gpu.link for gpu in gpus if gpu.link is not None]
    if len(links) < len(gpus):
        return None
    slots = [gpu.host_link for gpu in gpus if gpu.link is not None and gpu.link.span < len(gpus)]
    return min([*links, *(slot for slot in slots if slot is not None)], key=lambda link: link.bandwidth)


def _find_least_free(machine: Machine) -> int | None:
    if not machine.gpus:
        return machine.memory_free_bytes
    free = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    return min(free) if len(free) == len(machine.gpus) else None


# Derived from the other keys; written for readers.
_DERIVED = ("devices", "device")
_MEASURED = ("calibration", "measurement")
# What the cluster was made from, to replace this machine.
_DETECTED = "machine"
_LEAST_ONE = (
    *("nodes", "devices_per_node", "host_memory_bytes", "cpu_cores", "card.memory_bytes", "card.nominal_bytes"),
)
_FIX = "`trainwright machine --json > FILE` writes such a file"
VARIABLE = "TRAINWRIGHT_MACHINE"
_LEAST_ONE_HERE = ("cpu_cores", "memory_bytes")
_ADVICE = "write the file with `trainwright machine --json` on that machine, or with --on for NVIDIA GPUs"


Written = tuple[Cluster, Calibration | None, Calibration | None]


def resolve_machine(text: str) -> Written:
    """Return the machine that ``--on`` names: a file, or a description for ``parse_machine``. Raises RequestError."""
    if is_file_name(text):
        return read_machine(expand_user_path(text))
    return parse_machine(text), None, None


def is_file_name(text: str) -> bool:
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
    cluster = _parse_cluster(values, file)
    _refuse(file, _check_numbers(cluster))
    derived_values: Mapping[str, Any] = {"devices": cluster.devices, "device": cluster.device}
    _refuse(
        file,
        (
            f"{key}: {content[key]!r} contradicts the other keys, which make it {expected!r}"
            for key, expected in derived_values.items()
            if content.get(key, expected) != expected
        ),
    )
    calibration, measurement = (read_measurement(content, key, file) for key in _MEASURED)
    return cluster, calibration, measurement


def read_described_machine() -> Machine | None:
    """Return the machine of the file that ``$TRAINWRIGHT_MACHINE`` names; None if it is not set.

    Raises:
        RequestError: the file cannot be read or does not describe a machine.
    """
    file = os.environ.get(VARIABLE)
    return read_machine_file(Path(file)) if file else None


@cache  # a run asks again, and must not depend on being able to open a file then
def read_machine_file(file: Path) -> Machine:
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
    read_measurement(values, "measurement", file)
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
        requirement = f"expected a finite number above 0, not {machine.processor.clock}"
        raise RequestError(f"{VARIABLE}: {file}: machine.processor.clock: {requirement}")
    return replace(machine, described_by=str(file), is_here=False)


def read_measurement(content: Mapping[str, Any], key: str, file: Path) -> Calibration | None:
    """Return the measurement in ``file`` under ``key``, or None. Raises RequestError if it is invalid."""
    if (value := content.get(key)) is None:
        return None
    try:
        calibration = parse_calibration(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"{file}: {key}: {reason}; set it to null to plan without it") from None
    _refuse(file, (f"{key}.{line}; set {key} to null to plan without it" for line in check_calibration(calibration)))
    return calibration


def _parse_cluster(values: dict[str, Any], file: Path) -> Cluster:
    from pydantic import TypeAdapter, ValidationError

    from trainwright.recipe.problems import describe_mismatch

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
                lines.append(f"{key}: {describe_mismatch(item)}")
        raise RequestError("\n".join(f"{file}: {line}" for line in dict.fromkeys(lines)) + f"\n{_FIX}") from None


def _check_numbers(cluster: Cluster) -> Iterator[str]:
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
