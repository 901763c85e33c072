from __future__ import annotations

import re
from dataclasses import replace

import pytest

from trainwright.errors import RequestError
from trainwright.machine.describe import build_cluster, parse_machine
from trainwright.machine.detect import detect
from trainwright.machine.links import build_fabric_link, build_pcie_link
from trainwright.machine.machine import Gpu, Machine

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "card", "name"),
    [
        ("8xH100", 1, 8, "H100", "8xH100"),
        ("H200", 1, 1, "H200", "1xH200"),
        ("2xRTX4090", 1, 2, "RTX4090", "2xRTX4090"),
        ("2x4090", 1, 2, "RTX4090", "2xRTX4090"),
        ("4x8xA100-40GB", 4, 8, "A100-40GB", "4x8xA100-40GB@8x200Gb"),
        ("4 x 8 x A100-40GB", 4, 8, "A100-40GB", "4x8xA100-40GB@8x200Gb"),
        ("16×8×H100", 16, 8, "H100", "16x8xH100@8x400Gb"),
        ("128x8xH100@3.2Tb/s", 128, 8, "H100", "128x8xH100@1x3200Gb"),
        ("8xMI300X", 1, 8, "MI300X", "8xMI300X"),
        ("8xH100-NVL", 1, 8, "H100-NVL", "8xH100-NVL"),
        ("8xB200-700W", 1, 8, "B200-700W", "8xB200-700W"),
        ("4 x rtx pro 6000", 1, 4, "RTXPRO6000", "4xRTXPRO6000"),
        ("18x4xGB200@4x7.2Tb", 18, 4, "GB200", "18x4xGB200@4x7200Gb"),
        ("2x4xL40S@100Gb", 2, 4, "L40S", "2x4xL40S@1x100Gb"),
    ],
)
def test_a_machine_is_read(text: str, nodes: int, devices: int, card: str, name: str) -> None:
    cluster = parse_machine(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.card.name) == (nodes, devices, card)
    assert (cluster.name, cluster.devices, cluster.device) == (name, nodes * devices, "cuda")
    again = parse_machine(cluster.name)
    assert replace(again, assumptions=()) == replace(cluster, assumptions=())
    assert cluster.usable_bytes == cluster.card.memory_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty machine: not a machine; write [NODES x] DEVICES x CARD"),
        ("8x", "8x: not a machine"),
        ("8xxH100", "not a machine"),
        ("H100x8", "not a machine"),
        ("2x2x2xH100", "not a machine"),
        ("-1xH100", "not a machine"),
        ("0xH100", "at least one device"),
        ("8xH10O", "did you mean H100"),
        ("8xA100", "ambiguous; choose A100-40GB or A100-80GB"),
        ("64xH100", "write NODES x DEVICES x CARD, such as 8x8xH100"),
        ("8xH100@400Gb", "a network needs several nodes; write 2x8xH100@400Gb"),
        ("2x8xH100@fast", "fast after the @ is not a network; write the rate of a node, such as @400Gb"),
        ("2x8xH100@", "nothing after the @ is not a network"),
        ("2x8xH100@0Gb", "is not a network"),
    ],
)
def test_a_malformed_machine_is_refused_with_the_form(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        parse_machine(text)


def test_a_network_is_shared_by_the_devices_of_a_node() -> None:
    slow, fast = parse_machine("4x8xH100@400Gb").network, parse_machine("4x8xH100@8x400Gb").network
    assert slow is not None and slow.bandwidth == pytest.approx(400e9 / 8 / 8)
    assert fast is not None and fast.bandwidth == pytest.approx(50e9)
    assert parse_machine("8xH100").network is None


def test_what_was_not_said_is_listed() -> None:
    assumed = "\n".join(parse_machine("2x8xH100").assumptions)
    assert "host memory" in assumed and "8 network adapters of 400 Gb/s per node" in assumed
    assert "network" not in "\n".join(parse_machine("2x8xH100@8x400Gb").assumptions)


def test_what_training_does_not_run_on_is_planned_only() -> None:
    for text, device in (
        ("8xH100", "cuda"),
        ("8xMI300X", "cuda"),
        ("8xMI250", "cuda"),
        ("2xB580", "xpu"),
        ("12xPVC", "xpu"),
    ):
        machine = parse_machine(text)
        assert (machine.planned_only, machine.device, machine.has_gpus) == (None, device, True)
    said = "planning only: training runs on NVIDIA, AMD and Intel GPUs and on CPUs, not on Gaudi3"
    assert parse_machine("8xGaudi3").planned_only == said


def test_a_die_that_is_a_device_is_said_to_be_one() -> None:
    assert "a device is one of the card's two dies" in "\n".join(parse_machine("8xMI250X").assumptions)


def test_devices_further_apart_than_a_bridge_use_their_slots() -> None:
    assert parse_machine("2xH100-NVL").link.kind == "nvlink"
    assert parse_machine("4xH100-NVL").link.kind == "pcie"
    assert parse_machine("16xV100-32GB").link.kind == "nvlink"  # through switches


def test_consumer_cards_reach_each_other_through_the_host() -> None:
    assert not parse_machine("2xRTX4090").link.direct
    assert parse_machine("2xA10").link.direct


def machine(*gpus: Gpu) -> Machine:
    return Machine("here", "Some CPU", 16, 64 * GIB, gpus, 60 * GIB, 100 * GIB)


def gpu(name: str = "NVIDIA A100-SXM4-40GB", free: int = 39, span: int = 4) -> Gpu:
    link = build_fabric_link("nvlink", 3, 300e9, span) if span else build_pcie_link(4)
    return Gpu(name, 39 * GIB, (8, 0), free * GIB, link, build_pcie_link(4))


def test_a_detected_gpu_has_the_rates_of_its_card_and_its_own_memory() -> None:
    cluster = build_cluster(machine(gpu(free=30), gpu(), gpu(), gpu()))
    assert (cluster.name, cluster.device) == ("4xA100-40GB", "cuda")
    assert cluster.card.rate("bf16") == 312e12
    assert (cluster.card.memory_bytes, cluster.usable_bytes) == (39 * GIB, 30 * GIB)
    assert (cluster.link.kind, cluster.link.bandwidth) == ("nvlink", 300e9)
    assert (cluster.host_memory_bytes, cluster.cpu_cores, cluster.assumptions) == (64 * GIB, 16, ())


def test_gpus_that_bridges_join_in_pairs_are_as_fast_as_their_slots() -> None:
    cluster = build_cluster(machine(*[gpu(span=2)] * 4))
    assert (cluster.link.kind, cluster.link.generation) == ("pcie", 4)
    assert build_cluster(machine(*[gpu(span=2)] * 2)).link.kind == "nvlink"


def test_a_gpu_that_is_not_in_the_catalog_is_taken_for_the_one_most_like_it() -> None:
    cluster = build_cluster(machine(gpu("NVIDIA Abacus"), gpu("NVIDIA Abacus")))
    assert cluster.card.name == "NVIDIA Abacus" and cluster.card.source is None
    assert cluster.card.rate("bf16") == 312e12
    assert "as fast as A100" in cluster.assumptions[0] and "calibrate" in cluster.assumptions[0]


def test_gpus_that_differ_are_taken_for_the_smallest() -> None:
    small = Gpu("Tesla T4", 15 * GIB, (7, 5), 15 * GIB, build_pcie_link(3), build_pcie_link(3))
    cluster = build_cluster(machine(gpu(span=0), small))
    assert cluster.card.name == "T4" and "differ" in cluster.assumptions[0]


def test_nodes_like_this_one_share_a_network() -> None:
    cluster = build_cluster(machine(gpu(), gpu()), nodes=4, network_bits=100e9)
    assert cluster.devices == 8
    assert cluster.network is not None and cluster.network.bandwidth == pytest.approx(100e9 / 8 / 2)


@pytest.mark.usefixtures("this_machine")
def test_this_machine_is_described() -> None:
    found = detect()
    cluster = build_cluster(found)
    assert cluster.devices == max(1, len(found.gpus))
    assert found.memory_free_bytes is not None and 0 < found.memory_free_bytes <= found.memory_bytes
    assert found.disk_free_bytes is not None and found.disk_free_bytes > 0
    if not found.gpus:
        assert cluster.device == "cpu" and cluster.card.memory_bytes == found.memory_bytes
        assert 1e10 < cluster.card.rates["fp32"] < 1e14
    for seen in found.gpus:
        assert seen.link is not None and seen.host_link is not None and seen.host_link.bandwidth > 1e9
        assert seen.free_bytes is not None and 0 < seen.free_bytes <= seen.memory_bytes * 1.01
