from __future__ import annotations

import re

import pytest

from trainwright.errors import RequestError
from trainwright.machine.catalogue import card_of_gpu, cards, find_card

REQUIRED = (
    "V100-16GB V100-32GB T4 A10 A10G L4 L40S A100-40GB A100-80GB A800-80GB H100 H100-PCIe H100-NVL H200 B200 "
    "RTX3090 RTX4090 RTX5090 RTXA6000 MI250X MI300X"
)


def test_the_cards_people_have_are_in_it() -> None:
    assert set(REQUIRED.split()) <= {card.name for card in cards()}


def test_every_card_is_complete_and_cites_its_datasheet() -> None:
    for card in cards():
        assert card.source is not None and card.source.title and card.source.url.startswith("https://")
        assert 0.90 < card.memory_bytes / card.nominal_bytes < 1.08, card.name  # GB against GiB, and reserves
        assert 0.2e12 < card.memory_bandwidth < 10e12
        assert 50 < card.watts <= 1000 and card.link.bandwidth >= 15e9 and card.host_link.kind == "pcie"
        assert {"fp32", "fp16"} <= set(card.rates)


def test_rates_are_dense_and_in_order() -> None:
    for card in cards():
        rates = card.rates
        assert rates["fp32"] <= rates.get("tf32", rates["fp32"]) <= rates["fp16"], card.name
        assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
        assert rates["fp16"] <= rates.get("fp8", rates["fp16"]) <= 2.05 * rates["fp16"]
        assert card.rate("bf16") is None or card.capability >= (8, 0)
        assert card.rate("fp8") is None or card.capability >= (8, 9)


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
    ],
)
def test_a_card_is_found_by_what_people_and_drivers_call_it(written: str, name: str) -> None:
    assert find_card(written).name == name


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("H10O", "did you mean H100"),
        ("RTX4080", "did you mean RTX4090"),
        ("A100", "which one, A100-40GB or A100-80GB?"),
        ("V100", "which one, V100-16GB or V100-32GB?"),
        ("abacus", "no such card in the catalogue. `trainwright machine cards`"),
    ],
)
def test_an_unknown_or_ambiguous_card_is_refused_with_the_nearest(written: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        find_card(written)


def test_a_slice_of_a_gpu_is_not_taken_for_the_whole() -> None:
    whole = card_of_gpu("NVIDIA A100-SXM4-80GB", 79 * 2**30)
    assert whole is not None and whole.name == "A100-80GB"
    assert card_of_gpu("NVIDIA A100-SXM4-80GB", 20 * 2**30) is None
    assert card_of_gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40 * 2**30) is None


def test_names_mean_one_card_each() -> None:
    for card in cards():
        for name in (card.name, *card.aliases):
            assert find_card(name) is card
