from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import MACHINE, trainwright
from tests.support.measured import measurement
from tests.support.runs import TINY
from trainwright.errors import RequestError
from trainwright.machine.describe import read_machine_file
from trainwright.machine.detect import detect
from trainwright.machine.machine import Machine
from trainwright.machine.measured import quick
from trainwright.machine.measured.calibration import (
    Calibration,
    Curve,
    TimedSample,
    check_calibration,
    load_calibration,
    to_json,
)
from trainwright.machine.measured.quick import (
    KINDS,
    Block,
    Kernel,
    QuickMeasurement,
    Shapes,
    covers_shapes,
    locate_measurement,
    measure_if_needed,
)

HERE = Machine("here", "a processor", 2, 16 * 2**30, (), is_here=True)
SHAPES = Shapes(((256, 128),), 64)


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))


def keep(found: Calibration, machine: Machine = HERE) -> None:
    file = locate_measurement(machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(to_json(found)))


@pytest.mark.usefixtures("_cache")
def test_what_was_measured_is_kept_by_machine_and_by_what_chooses_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(measurement())
    assert measure_if_needed(HERE, Shapes(((512, 512),), 64)) == QuickMeasurement(measurement())
    assert load_calibration(locate_measurement(HERE)) == measurement()
    assert load_calibration(locate_measurement(replace(HERE, cpu_cores=3))) is None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert load_calibration(locate_measurement(HERE)) is None


def test_a_machine_that_is_not_at_hand_is_not_measured() -> None:
    assert measure_if_needed(replace(HERE, is_here=False), SHAPES) == QuickMeasurement()
    assert measure_if_needed(detect(), SHAPES) == QuickMeasurement()


def test_what_was_measured_tells_of_matrices_that_are_twice_as_large_and_no_larger() -> None:
    assert covers_shapes(measurement(), Shapes(((512, 512), (1024, 256)), 64))
    assert not covers_shapes(measurement(), Shapes(((512, 512), (4096, 512)), 64))


def test_shapes_are_few_and_bounded() -> None:
    found = Shapes(((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)), 3000).limit_size("cpu")
    assert found.length == 512 and len(found.widths) == 3
    assert all(max(width) <= 2048 for width in found.widths)


@pytest.mark.usefixtures("_cache")
def test_a_measurement_that_fails_leaves_the_plan_to_datasheets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    told = list[str]()
    found = measure_if_needed(HERE, SHAPES, told.append)
    assert measure_if_needed(HERE, SHAPES, told.append) == found and told == ["measuring this machine"], (
        "once in a command"
    )
    assert found.calibration is None and found.trouble is not None
    assert "could not be measured" in found.trouble and "datasheets" in found.trouble


@pytest.mark.usefixtures("_cache")
def test_a_disturbed_measurement_is_repeated_after_some_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))  # so that measuring is seen to be tried
    wanted, file = Shapes(((512, 512),), 64), locate_measurement(HERE)
    for found, minutes, again in (
        (replace(measurement(), disturbance=0.9), 1, False),
        (replace(measurement(), disturbance=0.9), 6, True),
        (measurement(), 6, False),
    ):
        keep(found)
        then = file.stat().st_mtime - 60 * minutes
        os.utime(file, (then, then))
        told = list[str]()
        assert (measure_if_needed(HERE, wanted, told.append).calibration is None) == again == bool(told)


def _with_curve(name: str, change: Callable[[Curve], Curve]) -> Calibration:
    found = measurement()
    first = found.settings[0]
    curves = {**first.curves, name: change(first.curves[name])}
    return replace(found, settings=(replace(first, curves=curves), *found.settings[1:]))


def _times(factor: float) -> Callable[[Curve], Curve]:
    return lambda curve: replace(
        curve, samples=tuple(TimedSample(sample.sizes, sample.seconds * factor) for sample in curve.samples)
    )


@pytest.mark.parametrize(
    ("name", "factor", "says"),
    [
        ("product/fp32/forward", -1.0, "settings.0.curves.product/fp32/forward: -"),
        ("product/fp32/forward", math.nan, "settings.0.curves.product/fp32/forward: nan seconds"),
        ("product/bf16/forward", 1e-9, "operations per second"),
        ("product/bf16/forward", 1e4, "settings.0.curves: fp32 is"),
        ("traffic/fp32/copy", 1e-9, "bytes per second"),
    ],
)
def test_what_no_machine_is_like_contradicts_itself(name: str, factor: float, says: str) -> None:
    assert not list(check_calibration(measurement()))
    assert any(says in line for line in check_calibration(_with_curve(name, _times(factor))))


def test_threads_that_make_it_ten_times_slower_contradict_themselves() -> None:
    slow = measurement({(1, 1): 100e9, (1, 2): 5e9})
    assert any("2 threads are 20 times as slow as one" in line for line in check_calibration(slow))


def _file(tmp_path: Path, found: Any) -> Path:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**json.loads(MACHINE.read_text()), "measurement": found}))
    return file


def test_a_described_machine_brings_what_was_measured_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(_file(tmp_path, to_json(measurement()))))
    assert measure_if_needed(detect(), SHAPES).calibration == measurement()
    shown = trainwright("machine", "--json", cwd=tmp_path)
    assert json.loads(shown.stdout)["measurement"] == to_json(measurement())
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(shown.stdout)
    monkeypatch.delenv("TRAINWRIGHT_MACHINE")
    planned = trainwright(
        "plan", str(TINY), "train.mixed_precision=auto", "--on", str(elsewhere), "--json", cwd=tmp_path
    )
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["measured"] and any("bf16 2.00 times fp32 here (measured)" in reason for reason in plan["reasons"])


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"measurement": to_json(_with_curve("product/fp32/input", _times(-1.0)))}, "measurement.settings.0.curves"),
        ({"measurement": 5}, "measurement"),
        ({"machine.cpu_cores": 0}, "machine.cpu_cores"),
        ({"machine.processor": {"clock": -1.0}}, "machine.processor.clock"),
    ],
)
def test_impossible_figures_in_a_machine_file_are_refused_with_their_key(
    tmp_path: Path, changed: dict[str, Any], key: str
) -> None:
    content = json.loads(MACHINE.read_text())
    for place, value in changed.items():
        *above, last = place.split(".")
        (content[above[0]] if above else content)[last] = value
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=key.replace(".", r"\.")):
        read_machine_file(file)
    ended = trainwright("machine", cwd=tmp_path, TRAINWRIGHT_MACHINE=str(file))
    assert ended.returncode == 2 and key in ended.stderr


# Of a matrix of 128 x 256 for 64 tokens.
BLOCK = Block(128, 256, lambda sequences, length: {name: [PRODUCT] for name in PASSES})
PASSES = [f"{precision}/{direction}" for precision in ("fp32", "bf16") for direction in ("forward", "backward")]
PRODUCT = Kernel(KINDS.index("product"), 1, 1, 64, 256, 128, 1, 2.0 * 64 * 256 * 128, 1e5, 1e5, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("this_machine", "_cache")
@pytest.mark.parametrize("seconds", [quick.SECONDS, 0.0])  # nothing is left where imports take longer
def test_this_machine_is_measured_quickly(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SECONDS", seconds)
    machine, told, shapes = replace(detect(), gpus=()), list[str](), replace(SHAPES, block=BLOCK)
    found = measure_if_needed(machine, shapes, told.append)
    if found.calibration is None:  # too busy to be measured: that is told, and nothing is kept
        assert found.trouble is not None and load_calibration(locate_measurement(machine)) is None
        return
    assert told == ["measuring this machine"]
    assert found.message is not None and "fp32" in found.message and str(locate_measurement(machine)) in found.message
    assert not list(check_calibration(found.calibration))
    for setting in found.calibration.settings:
        assert all(sample.seconds > 0 for curve in setting.curves.values() for sample in curve.samples)
    assert covers_shapes(found.calibration, shapes.limit_size("cpu"))
    assert load_calibration(locate_measurement(machine)) == found.calibration
    assert measure_if_needed(machine, shapes).message is None or found.calibration.disturbance > 0
