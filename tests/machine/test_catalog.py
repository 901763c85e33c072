from __future__ import annotations

import math
import re

import pytest

from trainwright.errors import RequestError
from trainwright.machine.catalog import find_card, list_cards, look_up_gpu_card

REQUIRED = (
    "V100-16GB V100-32GB T4 A10 A10G A30 A40 L4 L40 L40S A100-40GB A100-80GB A100-PCIe-40GB A100-PCIe-80GB A800-80GB "
    "H100 H100-PCIe H100-NVL H100-96GB H20 H200 H200-NVL GH200-96GB GH200-144GB B200 B300 GB200 GB300 "
    "RTX3060 RTX3080 RTX3090 RTX4070 RTX4080 RTX4090 RTX5070 RTX5080 RTX5090 RTXA4000 RTXA5000 RTXA6000 RTX6000Ada "
    "RTXPRO6000 RTXPRO6000-Server RTXPRO6000-MaxQ MI210 MI250 MI250X MI300X MI325X MI350X MI355X Gaudi2 Gaudi3"
)


def test_the_cards_people_have_are_in_it() -> None:
    assert set(REQUIRED.split()) <= {card.name for card in list_cards()}


def test_every_card_is_complete_and_cites_its_datasheet() -> None:
    for card in list_cards():
        assert card.source is not None and card.source.title and card.source.url.startswith("https://")
        assert 0.90 < card.memory_bytes / card.nominal_bytes < 1.08, card.name  # GB against GiB, and reserves
        assert 0.2e12 < card.memory_bandwidth < 10e12
        assert 50 < card.watts <= 1400 and card.link.bandwidth >= 15e9
        assert card.host_link.kind == ("nvlink" if card.name.startswith("G") and card.vendor == "NVIDIA" else "pcie")
        assert "fp32" in card.rates and {"bf16", "fp16"} & set(card.rates)


def test_rates_are_dense_and_in_order() -> None:
    for card in (card for card in list_cards() if card.vendor != "Intel"):
        rates = card.rates
        assert rates["fp32"] <= rates.get("tf32", rates["fp32"]) <= rates["fp16"], card.name
        assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
        assert rates["fp16"] <= rates.get("fp8", rates["fp16"]) <= 2.05 * rates["fp16"]
        assert ("fp4" in rates) == (card.vendor == "NVIDIA" and card.capability >= (10, 0))
        assert 2 * rates.get("fp8", 0.0) <= rates.get("fp4", math.inf)
        assert card.rate("bf16") is None or card.capability >= (8, 0)
        assert card.rate("fp8") is None or card.capability >= (8, 9)


@pytest.mark.parametrize(
    ("name", "gib"),  # what torch says a device has in all, in its messages when memory runs out
    [
        ("V100-16GB", 15.77),
        ("T4", 14.74),
        ("A100-40GB", 39.38),
        ("A100-80GB", 79.14),
        ("L4", 22.03),
        ("RTX4090", 23.52),
        ("RTX5090", 31.36),
        ("RTXPRO6000", 94.97),
        ("H100", 79.1),
        ("H100-96GB", 95.0),
        ("GH200-96GB", 94.5),
        ("H200", 139.8),
        ("B200", 178.35),
        ("B300", 267.69),
        ("GB200", 184.31),
        ("GB300", 276.5),
        ("MI325X", 255.69),
        ("MI355X", 287.98),
        ("Gaudi2", 94.62),
    ],
)
def test_memory_is_what_programs_can_have_not_what_is_printed_on_the_box(name: str, gib: float) -> None:
    assert find_card(name).memory_bytes == pytest.approx(gib * 2**30)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),  # the datasheets' tables, without sparsity
    [
        ("A100-80GB", "bf16", 312),
        ("A100-80GB", "tf32", 156),
        ("H100", "bf16", 989.4),
        ("H100", "fp8", 1978.9),
        ("H100-PCIe", "bf16", 756),
        ("L40S", "fp8", 733),
        ("RTX4090", "bf16", 165.2),
        ("B200", "bf16", 2250),
        ("MI300X", "fp16", 1307.4),
        ("B300", "bf16", 2250),
        ("GB200", "bf16", 2500),
        ("H20", "bf16", 148),
        ("RTXPRO6000", "bf16", 503.8),
        ("RTX5080", "bf16", 112.6),
        ("MI250X", "bf16", 191.5),  # one of its two dies
        ("MI355X", "bf16", 2516.6),
        ("Gaudi3", "bf16", 1678),
        ("T4", "fp16", 65),
        ("V100-32GB", "fp16", 125),
    ],
)
def test_rates_are_those_of_the_datasheet(name: str, precision: str, tera: float) -> None:
    assert find_card(name).rates[precision] == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100"),
        ("H100-SXM", "H100"),
        ("RTX 4090", "RTX4090"),
        ("4090", "RTX4090"),
        ("A6000", "RTXA6000"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("gh200", "GH200-96GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA H20", "H20"),
        ("h100-96gb", "H100-96GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("rtx pro 6000", "RTXPRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000-Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTXPRO6000-MaxQ"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TiSuper"),
        ("NVIDIA RTX A5000", "RTXA5000"),
        ("Quadro RTX 8000", "RTX8000"),
        ("Gaudi 3", "Gaudi3"),
        ("intel gaudi2", "Gaudi2"),
    ],
)
def test_a_card_is_found_by_what_people_and_drivers_call_it(written: str, name: str) -> None:
    assert find_card(written).name == name


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("H10O", "did you mean H100"),
        ("RTX4095", "did you mean RTX4090"),
        ("MI300", "did you mean MI300X"),
        ("RTX 6000", "ambiguous; choose RTXPRO6000 or RTX6000Ada"),
        ("Gaudi", "ambiguous; choose Gaudi2 or Gaudi3"),
        ("H100-50W", "H100-50W: its power limit must be from 175 to 700 W"),
        ("B200-1200W", "to 1000 W"),
        ("abacus-300W", "abacus: no such card"),
        ("A100", "ambiguous; choose A100-40GB or A100-80GB"),
        ("V100", "ambiguous; choose V100-16GB or V100-32GB"),
        ("abacus", "no such card in the catalog. `trainwright machine cards`"),
    ],
)
def test_an_unknown_or_ambiguous_card_is_refused_with_the_nearest(written: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        find_card(written)


@pytest.mark.parametrize("written", ["H100-500W", "h100 500w", "H100-SXM-500W"])
def test_the_power_of_a_card_can_be_limited(written: str) -> None:
    limited, whole = find_card(written), find_card("H100")
    assert (limited.name, limited.watts) == ("H100-500W", 500)
    assert limited.rates == whole.rates and limited.memory_bytes == whole.memory_bytes
    assert find_card(limited.name) == limited
    assert find_card("H100-700W") is whole


def test_a_slice_of_a_gpu_is_not_taken_for_the_whole() -> None:
    whole = look_up_gpu_card("NVIDIA A100-SXM4-80GB", 79 * 2**30)
    assert whole is not None and whole.name == "A100-80GB"
    assert look_up_gpu_card("NVIDIA A100-SXM4-80GB", 20 * 2**30) is None
    assert look_up_gpu_card("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40 * 2**30) is None


def test_names_mean_one_card_each() -> None:
    for card in list_cards():
        for name in (card.name, *card.aliases):
            assert find_card(name) is card
