from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainwright.doctor import calibrate_passes as passes
from trainwright.machine.describe import build_cluster
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Exchanged, InStep, ProcessRates
from trainwright.planning.step_time.rates import build_nominal_setting

MACHINE = Machine("here", "Some CPU", 2, 2**34, ())
USUAL, BETWEEN = InStep(*passes._IN_STEP), Exchanged(*passes._EXCHANGE)


def setting(processes: int = 2) -> ProcessRates:
    return build_nominal_setting(build_cluster(MACHINE), processes)


def seconds(alone: ProcessRates, precision: str, found: InStep) -> list[float]:
    """Of every model's pass on a machine where kernels take in a step what ``found`` says."""
    inside = replace(alone, in_step={precision: found})
    return [passes._price_passes(model, precision, inside).seconds for model in passes._MODELS]


def rows(times: list[float], models: tuple[passes.SmallModel, ...]) -> list[dict[str, Any]]:
    return [{"seconds": each, "held_out": model.held_out} for each, model in zip(times, models, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_factors_that_made_the_times_are_found(precision: str) -> None:
    found = passes.fit_step_factors(setting(), precision, rows(seconds(setting(), precision, USUAL), passes._MODELS))
    assert (found.products, found.attention, found.traffic, found.host) == pytest.approx(passes._IN_STEP, rel=1e-6)
    assert max(found.errors) < 1e-6 and len(found.errors) == sum(model.held_out for model in passes._MODELS)


def test_other_factors_are_found_in_what_they_come_to() -> None:
    actual = InStep(products=1.8, attention=0.9, traffic=3.0, host=4e-5)
    times = seconds(setting(), "fp32", actual)
    found = passes.fit_step_factors(setting(), "fp32", rows(times, passes._MODELS))
    assert seconds(setting(), "fp32", found) == pytest.approx(times, rel=0.1)
    assert max(found.errors) < 0.1


@pytest.mark.slow
def test_what_a_collective_takes_in_a_step_is_found() -> None:
    usual = replace(setting(), exchange=BETWEEN)
    sharded = {
        precision: rows(
            [passes._estimate_sharded_seconds(model, precision, usual, MACHINE) for model in passes._SHARDED],
            passes._SHARDED,
        )
        for precision in ("fp32", "bf16")
    }
    found = passes.fit_exchange(setting(), MACHINE, sharded)
    assert (found.waited, found.factor) == pytest.approx(passes._EXCHANGE, rel=1e-6)
    assert max(found.errors) < 1e-6


def test_documents_of_a_pass_are_of_different_lengths_about_the_wanted_one() -> None:
    batch = passes.SmallModel(64, 1, sequences=5, length=60).batch
    assert [length for length, _ in batch.sequences] == [54, 57, 60, 63, 66]
    assert batch.tokens == 300 and batch.targets == 295
    assert passes.SmallModel(64, 1, sequences=1, length=60).batch.sequences == ((60, 1),)
