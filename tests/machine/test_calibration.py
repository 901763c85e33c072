from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.doctor.calibrate import calibrate, choose_process_counts, format_calibration
from trainwright.doctor.calibrate_worker import build_curve, fit_coefficients
from trainwright.doctor.undisturbed import Stopwatch, Timed, choose_quantile, choose_shortest
from trainwright.errors import MachineError
from trainwright.machine.detect import detect
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.measured.calibration import (
    FORMS,
    Calibration,
    Curve,
    Exchanged,
    InStep,
    ProcessRates,
    TimedSample,
    from_json,
    load_calibration,
    load_current_calibration,
    locate_calibration,
    read_versions,
    save_calibration,
    save_if_reliable,
    to_json,
)

MACHINE = Machine("here", "Some CPU", 8, 2**34, ())
SHAPES = [(64, 512, 512), (1024, 128, 512), (1024, 576, 1536), (2048, 256, 64), (512, 2048, 2048), (32, 4096, 64)]


def calibration(**changed: object) -> Calibration:
    curve = Curve("amount", (TimedSample((1.0,), 3.0), TimedSample((2.0,), 7.0, held_out=True)), (1.0, 2.0))
    inside = {"fp32": InStep(1.1, 1.2, 1.3, 1e-5, (0.01, 0.02))}
    between = Exchanged(1e-3, 1.5, (0.03,))
    setting = ProcessRates(2, 4, {"collective/all_reduce": curve}, 1e-6, 0.5, in_step=inside, exchange=between)
    made = Calibration(
        "a machine", "2026-01-01T00:00:00+00:00", read_versions(MACHINE), (setting,), {"products": 1.5}, 0.25
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def test_a_fit_finds_the_coefficients_that_made_the_samples() -> None:
    wanted = (2e-5, 0.0, 1e-11, 3e-10, 0.0, 4e-10)
    seconds = [sum(c * t for c, t in zip(wanted, FORMS["product"](*shape), strict=True)) for shape in SHAPES]
    samples = [TimedSample(shape, each) for shape, each in zip(SHAPES, seconds, strict=True)]
    assert fit_coefficients("product", samples) == pytest.approx(wanted, rel=1e-6, abs=1e-16)


def test_a_fit_has_nothing_below_zero() -> None:
    # Half the bytes in less than half the time: by a line alone the start would be negative.
    start, each = fit_coefficients("amount", [TimedSample((1e6,), 1e-3), TimedSample((2e6,), 3e-3)])
    assert start == 0.0 and 1e-9 < each < 1.5e-9


def test_what_is_held_out_is_not_fitted_and_tells_the_error() -> None:
    rows = [{"sizes": (float(n),), "seconds": 1.0 + n, "held_out": False} for n in (1, 2, 4)]
    curve = build_curve("collective/broadcast", [*rows, {"sizes": (3.0,), "seconds": 8.0, "held_out": True}])
    assert curve.coefficients == pytest.approx((1.0, 1.0))
    assert curve.errors == pytest.approx([0.5])


def test_a_table_is_met_at_its_samples_and_goes_on_in_proportion() -> None:
    curve = Curve("table", (TimedSample((100.0,), 1e-3), TimedSample((400.0,), 4e-3), TimedSample((1600.0,), 64e-3)))
    assert [curve.seconds(size) for size in (100, 400, 1600)] == pytest.approx([1e-3, 4e-3, 64e-3])
    assert curve.seconds(200) == pytest.approx(2e-3)
    assert curve.seconds(800) == pytest.approx(16e-3)
    assert curve.seconds(3200) == pytest.approx(128e-3)
    assert curve.seconds(10) == pytest.approx(1e-3)  # a kernel has a start
    assert curve.seconds(0) == 0.0


def test_a_calibration_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "some" / "calibration.json"
    save_calibration(calibration(), file)
    assert load_calibration(file) == calibration()
    assert from_json(json.loads(json.dumps(to_json(calibration())))) == calibration()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"form": 0}', '{"form": 99, "settings": []}'])
def test_a_file_of_another_layout_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    assert load_calibration(file) is None
    file.write_text(text)
    assert load_calibration(file) is None


def test_a_calibration_is_of_one_machine(tmp_path: Path) -> None:
    gpu = Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30, (9, 0))
    machines = [
        MACHINE,
        replace(MACHINE, cpu_cores=4),
        replace(MACHINE, cpu_name="Other"),
        replace(MACHINE, gpus=(gpu,)),
    ]
    assert len({locate_calibration(machine, tmp_path) for machine in machines}) == len(machines)
    busy = replace(MACHINE, hostname="there", memory_free_bytes=1, disk_free_bytes=2)
    assert locate_calibration(busy, tmp_path) == locate_calibration(MACHINE, tmp_path)


def test_a_calibration_is_out_of_date_with_another_torch(tmp_path: Path) -> None:
    file = locate_calibration(MACHINE, tmp_path)
    save_calibration(calibration(), file)
    assert load_current_calibration(MACHINE, tmp_path) == calibration()
    old = calibration(versions={**read_versions(MACHINE), "torch": "2.0.1"})
    save_calibration(old, file)
    assert load_current_calibration(MACHINE, tmp_path) is None
    assert old.explain_outdated(MACHINE) == (f"torch 2.0.1 then, {read_versions(MACHINE)['torch']} now",)


def test_the_nearest_setting_is_that_of_the_nearest_number_of_processes() -> None:
    settings = tuple(ProcessRates(n, 1, {}) for n in (1, 4, 32))
    found = calibration(settings=settings)
    assert [found.nearest(n).processes for n in (1, 2, 3, 8, 16, 64)] == [1, 1, 4, 4, 32, 32]


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (8, (1, 2, 4, 8)), (6, (1, 2, 4, 6)), (64, (1, 4, 16, 64))],
)
def test_processes_are_measured_from_one_to_one_a_core(cores: int, counts: tuple[int, ...]) -> None:
    assert choose_process_counts(replace(MACHINE, cpu_cores=cores)) == counts


@pytest.mark.slow
@pytest.mark.usefixtures("this_machine")
def test_this_machine_is_measured(tmp_path: Path) -> None:
    machine = detect()
    for _ in range(3):  # of whole passes, other programs can spoil all that is held out
        try:
            found = calibrate(machine, seconds=0.0, limit=120.0)  # one round over everything, in haste
        except MachineError:
            pytest.skip("other programs leave too little of this machine to measure it")
        if all(passes.errors for passes in found.settings[0].in_step.values()):
            break
    assert found.explain_outdated(machine) == ()
    assert [setting.processes for setting in found.settings] == list(choose_process_counts(machine))
    for setting in found.settings:
        for name, curve in setting.curves.items():
            assert all(0 < sample.seconds < 10 for sample in curve.samples), name
            assert curve.errors and all(math.isfinite(error) for error in curve.errors), name
            assert all(curve.seconds(*sample.sizes) > 0 for sample in curve.samples), name
        rates = [
            2 * 1024**3 / setting.curves[f"product/fp32/{way}"].seconds(1024, 1024, 1024)
            for way in ("forward", "input", "weight")
        ]
        assert all(1e8 < rate < 1e15 for rate in rates)
        assert ("collective/all_reduce" in setting.curves) == (setting.processes > 1)
        assert 0 <= setting.overlap <= 1 and setting.launch > 0
        assert set(setting.in_step) == (set() if machine.gpus else {"fp32", "bf16"})
        assert all(found.products > 0 and found.errors for found in setting.in_step.values())
    file = locate_calibration(machine, tmp_path)
    save_calibration(found, file)
    assert load_current_calibration(machine, tmp_path) == found
    text = "\n".join(format_calibration(found))
    assert "matrix products, GFLOP/s" in text and "error" in text


def _off_by(times: float) -> Calibration:
    """Whose held-out sample took so many times what the curve says."""
    samples = (
        TimedSample((100.0,), 1.0),
        TimedSample((200.0,), 2.0),
        TimedSample((150.0,), 1.5 * times, held_out=True),
    )
    return calibration(settings=(ProcessRates(1, 2, {"optimizer": Curve("table", samples)}),))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (calibration(disturbance=0.6), "other programs used the cores during 60% of the measurements"),
        (_off_by(2.0), "the median error for held-out sizes is 50%"),
    ],
)
def test_a_bad_calibration_does_not_take_the_place_of_a_good_one(tmp_path: Path, bad: Calibration, says: str) -> None:
    nothing = save_if_reliable(bad, MACHINE, tmp_path)
    assert nothing is not None and says in nothing and "quick measurement" in nothing
    assert load_current_calibration(MACHINE, tmp_path) is None
    good = _off_by(1.1)
    assert save_if_reliable(good, MACHINE, tmp_path) is None
    refused = save_if_reliable(bad, MACHINE, tmp_path)
    assert refused is not None and f"the one of {good.measured} is kept" in refused
    assert load_current_calibration(MACHINE, tmp_path) == good


def test_times_in_which_a_thread_waited_for_a_core_are_left_out() -> None:
    clean, disturbed = Timed(1.2, 0.01), Timed(1.0, 0.3)
    assert not clean.is_disturbed and disturbed.is_disturbed
    assert choose_quantile([disturbed, clean, Timed(1.3, 0.0)], 0.0) == clean
    assert choose_shortest([disturbed, clean]) == clean
    mended = choose_quantile([disturbed, Timed(0.5, 0.2), Timed(2.0, 1.5)], 0.0)
    assert mended.seconds == pytest.approx(0.7) and mended.is_disturbed


def test_a_stopwatch_times_calls_wherever_it_runs() -> None:
    clock = Stopwatch()
    clock.start()
    found = clock.time(lambda: sum(range(1000)))
    assert found.seconds > 0 and found.waited >= 0
