"""A machine that a file describes, and what the rates of a processor are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.commands import trainwright
from trainwright.errors import RequestError
from trainwright.machine.describe import build_cluster, parse_machine
from trainwright.machine.detect import detect
from trainwright.machine.links import build_fabric_link, build_pcie_link
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.processor import Processor

GIB = 2**30
GPU = Gpu(
    "NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), 79 * GIB, build_fabric_link("nvlink", 4, 450e9, 8), build_pcie_link(5)
)
AMX = Processor("GenuineIntel", 6, ("amx_bf16", "avx2", "avx512_bf16", "avx512f"), 2.2e9)
MACHINES = {
    "cores": Machine("a", "Some CPU", 16, 64 * GIB, (), 60 * GIB, 100 * GIB, AMX),
    "gpus": Machine("b", "Some CPU", 16, 64 * GIB, (GPU, GPU), 60 * GIB, 100 * GIB),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_what_is_written_is_taken_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"machine": asdict(MACHINES[kind])}))
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(first))
    found = detect()
    assert {**asdict(found), "described_by": None} == asdict(MACHINES[kind])
    assert build_cluster(found).assumptions[0] == f"this machine is described by {first} (TRAINWRIGHT_MACHINE)"

    written = trainwright("machine", "--json", cwd=tmp_path, TRAINWRIGHT_MACHINE=str(first))
    assert written.returncode == 0, written.stderr
    second.write_text(written.stdout)
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(second))
    assert {**asdict(detect()), "described_by": None} == asdict(MACHINES[kind])


def test_a_described_machine_stands_in_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.json"
    file.write_text(trainwright("machine", "--on", "2x8xH100", "--json", cwd=tmp_path).stdout)
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(file))
    node, here = parse_machine("8xH100"), build_cluster(detect())
    for key in ("name", "device", "devices", "card", "link", "host_memory_bytes", "cpu_cores"):
        assert getattr(here, key) == getattr(node, key), key


@pytest.mark.usefixtures("this_machine")
def test_this_machine_can_be_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = detect()
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"machine": asdict(found)}))
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(file))
    assert {**asdict(detect()), "described_by": None, "is_here": True} == asdict(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("cores: 2", "not JSON"),
        ("[1]", "has no key `machine`"),
        ('{"machine": null}', "has no key `machine`"),
        ('{"machine": {"hostname": "a"}}', "machine.cpu_name: Field required"),
        (json.dumps({"machine": {**asdict(MACHINES["cores"]), "cpu_cores": "many"}}), "machine.cpu_cores: "),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    file = tmp_path / "machine.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(file))
    with pytest.raises(RequestError) as refused:
        detect()
    message = str(refused.value)
    assert message.startswith(f"TRAINWRIGHT_MACHINE: {file}") and said in message and "machine --json" in message


@pytest.mark.parametrize(
    ("processor", "fp32", "bf16"),
    [
        (Processor(clock=1e9), 16, None),
        (Processor("GenuineIntel", 6, ("avx2",), 1e9), 32, None),
        (Processor("GenuineIntel", 6, ("avx2", "avx512f"), 1e9), 64, None),
        (Processor("GenuineIntel", 6, ("avx2", "avx512_bf16", "avx512f"), 1e9), 64, 128),
        (AMX, 64 * 2.2, 2048 * 2.2),
        (Processor("AuthenticAMD", 25, ("avx2", "avx512_bf16", "avx512f"), 1e9), 32, 64),
        (Processor("AuthenticAMD", 26, ("avx2", "avx512_bf16", "avx512f"), 1e9), 64, 128),
        (Processor("", 0, ("bf16",), 1e9), 16, 32),
    ],
)
def test_the_rates_of_cores_follow_from_their_instructions(
    processor: Processor, fp32: float, bf16: float | None
) -> None:
    machine = Machine("here", "Some CPU", 4, 8 * GIB, (), processor=processor)
    rates = build_cluster(machine).card.rates
    assert rates["fp32"] == pytest.approx(4 * fp32 * 1e9)
    assert rates.get("bf16") == (None if bf16 is None else pytest.approx(4 * bf16 * 1e9))
    assert machine.has_bf16 == (bf16 is not None)
