from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.support.measured import measurement
from trainwright.machine.describe import Cluster, build_cluster, parse_machine
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, Curve, ProcessRates, TimedSample
from trainwright.machine.measured.own_runs import OwnRun, OwnRuns
from trainwright.machine.measured.quick import (
    Block,
    MeasuredBlock,
    Shapes,
    choose_sequences,
    covers_shapes,
    iterate_blocks_to_measure,
    select_nearest_block,
)
from trainwright.machine.processor import Processor
from trainwright.planning.candidates import Constraints
from trainwright.planning.errors import FEWEST
from trainwright.planning.output import describe_plan, format_candidates, summarize_plan
from trainwright.planning.plan import RunPlan, make_plan
from trainwright.planning.search import Evaluator
from trainwright.planning.step_time.basis import (
    Basis,
    build_basis,
    build_model_key,
    build_way_key,
    collect_shapes,
    estimate_block_seconds,
)
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Workload

SMALL = "HuggingFaceTB/SmolLM2-135M"
AMX = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def of_cores(count: int = 2, *instructions: str) -> Cluster:
    memory = 32 * 2**30
    processor = Processor("GenuineIntel", 6, instructions, 2.5e9)
    return build_cluster(Machine("here", "a CPU", count, memory, (), memory_free_bytes=memory, processor=processor))


def work(rows: int = 8, tokens: int = 512) -> Workload:
    return Workload(
        TracedModel.of(find_model(SMALL).config), row_tokens=tokens, global_batch_rows=rows, document_tokens=128.0
    )


def planned(found: Calibration | None, fixed: dict[str, Any] | None = None, flags: tuple[str, ...] = AMX) -> RunPlan:
    return make_plan(Constraints(fixed or {}), work(), of_cores(2, *flags), basis=Basis(None, found))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), AMX])
@pytest.mark.parametrize(("bf16", "chosen"), [(0.56, "no"), (4.0, "bf16")])
def test_bf16_is_chosen_where_it_was_measured_to_be_faster_whatever_the_flags(
    flags: tuple[str, ...], bf16: float, chosen: str
) -> None:
    made = planned(measurement(bf16=bf16), flags=flags)
    assert made.chosen.choice.mixed_precision == chosen
    assert any(f"bf16 {bf16:.2f} times fp32 here (measured)" in reason for reason in made.reasons)
    seconds = {
        precision: planned(measurement(bf16=bf16), {"mixed_precision": precision}).search.fastest
        for precision in ("no", "bf16")
    }
    assert seconds[chosen] <= 1.05 * min(seconds.values())


def test_what_the_user_wrote_is_kept_and_judged_by_what_was_measured() -> None:
    made = planned(measurement(bf16=0.5), {"mixed_precision": "bf16"})
    assert made.chosen.choice.mixed_precision == "bf16"
    assert not any("mixed_precision" in reason for reason in made.reasons)


def test_without_a_measurement_the_flags_decide_and_no_share_of_a_peak_is_shown() -> None:
    made = planned(None)
    assert made.chosen.choice.mixed_precision == "bf16"
    assert made.chosen.time is not None and made.chosen.time.mfu is None and "mfu" not in made.predicted()
    assert not any("peak rate" in line for line in describe_plan(made))


def test_the_share_of_the_peak_is_of_the_fastest_products_that_were_measured() -> None:
    made = planned(measurement(bf16=0.5))
    time = made.chosen.time
    assert time is not None and time.peak == pytest.approx(2e11)  # two processes of one thread
    assert time.mfu is not None and 0 < time.mfu < 1
    assert any("of the measured peak rate" in line for line in describe_plan(made))
    assert "mfu" in made.predicted()


def test_fewer_threads_are_taken_where_they_were_measured_to_be_faster() -> None:
    slow_together = measurement({(1, 1): 1e11, (2, 1): 1e10, (1, 2): 2e10})
    assert planned(slow_together, {"num_processes": 1}).chosen.choice.threads == 1
    assert planned(slow_together).chosen.choice.num_processes == 1
    assert planned(measurement(), {"num_processes": 1}).chosen.choice.threads == 2
    assert planned(measurement(), {"num_processes": 2}).chosen.choice.threads == 1


def test_processes_follow_from_what_was_measured() -> None:
    apart = measurement({(1, 1): 1e11, (2, 1): 1e11, (1, 2): 1e11}, bf16=0.5)
    together = measurement({(1, 1): 1e11, (2, 1): 4e10, (1, 2): 2e11}, bf16=0.5)
    assert planned(together).chosen.choice.num_processes == 1
    times = {
        name: {n: planned(found, {"num_processes": n}).search.fastest for n in (1, 2)}
        for name, found in (("apart", apart), ("together", together))
    }
    assert times["apart"][2] / times["apart"][1] < times["together"][2] / times["together"][1]


def test_rates_are_those_that_were_measured_and_what_was_not_is_scaled() -> None:
    cluster = of_cores(8, *AMX)
    found = measurement({(1, 1): 1e11, (8, 1): 5e10, (1, 8): 6e11})
    rates, nominal = Rates(cluster, None, found), Rates(cluster)
    for place, rate in (((1, 1), 1e11), ((8, 1), 5e10), ((1, 8), 6e11)):
        curve = rates.setting(*place).curves["product/fp32/forward"]
        assert 2 * 512**3 / curve.seconds(512, 512, 512) == pytest.approx(rate, rel=0.01)
    between = rates.setting(4, 2).curves["product/fp32/forward"]  # was not measured
    assert 5e10 < 2 * 512**3 / between.seconds(512, 512, 512) < 6e11
    copied = rates.setting(1, 1).curves["traffic/fp32/copy"]
    assert (copied.seconds(2**21), copied.seconds(2**25)) == (pytest.approx(1e-4), pytest.approx(1e-2))
    assert set(rates.setting(1, 1).curves) == set(nominal.setting(1, 1).curves)


def test_a_failed_measurement_is_told_first() -> None:
    made = make_plan(Constraints({}), work(), of_cores(2), basis=Basis(trouble="could not be measured, so datasheets"))
    assert summarize_plan(made).startswith("plan by datasheets, as could not be measured: ")
    assert made.as_json()["trouble"] == "could not be measured, so datasheets"


def test_gpus_that_are_not_here_go_by_their_datasheet() -> None:
    made = make_plan(Constraints({}), work(64, 2048), parse_machine("8xH100"))
    assert made.chosen.time is not None and made.chosen.time.peak == pytest.approx(8 * 989.4e12)


def test_shapes_are_the_models_own_the_most_work_first() -> None:
    shapes = collect_shapes(work())
    assert set(shapes.widths) == {(1536, 576), (576, 1536), (576, 576), (192, 576)}
    assert shapes.widths[0] == (1536, 576) and shapes.length == 128
    assert shapes.block is not None and shapes.block.hidden == 576
    assert shapes.block.breadth == pytest.approx(2 * 576 + 2 * 192 + 3 * 1536 + 2)


@cache
def block_of_the_model() -> Block:
    block = collect_shapes(work()).block
    assert block is not None
    return block


@cache
def passes() -> dict[str, MeasuredBlock]:
    return dict(iterate_blocks_to_measure(block_of_the_model(), 128))


NAMES = ("block/fp32/forward", "block/fp32/backward")


def seconds_of(setting: ProcessRates) -> float:
    """The seconds of the block in fp32 that a plan predicts."""
    return sum(estimate_block_seconds(passes()[name].sizes, name, setting) for name in NAMES)


def _with_block(found: Calibration, seconds: float, scale: float = 1.0) -> Calibration:
    """Two processes have measured a block, with a third of its time forward."""
    settings = list(found.settings)
    place = next(place for place, one in enumerate(settings) if (one.processes, one.threads) == (2, 1))
    curves = dict(settings[place].curves)
    for direction, share in (("forward", 1 / 3), ("backward", 2 / 3)):
        name = f"block/fp32/{direction}"
        known = curves[name].samples if name in curves else ()
        hidden, breadth, *rest = passes()[name].sizes
        curves[name] = Curve("table", (*known, TimedSample((scale * hidden, breadth, *rest), seconds * share)))
    settings[place] = replace(settings[place], curves=curves)
    return replace(found, settings=tuple(settings))


def test_kernels_in_a_step_take_what_a_measured_block_takes() -> None:
    cluster = of_cores(2, *AMX)
    plain = Rates(cluster, None, measurement()).setting(2, 1)
    expected = seconds_of(plain)
    slow = Rates(cluster, None, _with_block(measurement(), 1.5 * expected)).setting(2, 1)
    for name in ("products", "attention", "traffic", "host"):
        assert getattr(slow.in_step["fp32"], name) == pytest.approx(1.5 * getattr(plain.in_step["fp32"], name))
    assert slow.in_step["bf16"] == plain.in_step["bf16"]
    assert seconds_of(slow) == pytest.approx(1.5 * expected)
    spoilt = Rates(cluster, None, _with_block(measurement(), 100 * expected)).setting(2, 1)
    assert spoilt.in_step["fp32"].products == pytest.approx(2.5 * plain.in_step["fp32"].products)


def test_a_block_that_an_earlier_version_measured_counts_for_nothing() -> None:
    sample = TimedSample((576.0, 1536.0, 9.0, 3.0, 64.0, 2.0, 128.0), 1.0)
    settings = tuple(
        replace(one, curves={**one.curves, **{name: Curve("table", (sample,)) for name in NAMES}})
        for one in measurement().settings
    )
    cluster = of_cores(2, *AMX)
    rates = Rates(cluster, None, replace(measurement(), settings=settings)).setting(2, 1)
    assert rates == Rates(cluster, None, measurement()).setting(2, 1)


def test_a_calibration_is_scaled_to_a_block_of_the_model() -> None:
    cluster = of_cores(2, *AMX)
    calibrated = replace(measurement(), settings=(Rates(cluster, None, measurement()).setting(2, 1),))
    assert Rates(cluster, calibrated).setting(2, 1) == calibrated.settings[0]
    expected = seconds_of(calibrated.settings[0])
    scaled = Rates(cluster, calibrated, _with_block(measurement(), 1.4 * expected)).setting(2, 1)
    assert seconds_of(scaled) == pytest.approx(1.4 * expected)
    assert scaled.curves == calibrated.settings[0].curves


def test_the_block_of_a_plan_is_the_nearest_that_was_measured() -> None:
    both = _with_block(_with_block(measurement(), 1.0), 2.0, scale=7.0)
    for scale, seconds in ((1.0, 1.0), (5.0, 2.0)):
        found = select_nearest_block(both, replace(block_of_the_model(), hidden=scale * block_of_the_model().hidden))
        (sample,) = found.settings[1].curves["block/fp32/backward"].samples
        assert sample.seconds == pytest.approx(seconds * 2 / 3)
    assert select_nearest_block(measurement(), block_of_the_model()) == measurement()
    required = Shapes(((512, 512),), 64, block_of_the_model())
    assert covers_shapes(both, required) and not covers_shapes(measurement(), required)
    assert not covers_shapes(both, replace(required, block=Block(64.0, 300.0)))


@pytest.mark.slow
def test_a_large_block_is_measured_at_a_fraction_of_its_widths() -> None:
    block = collect_shapes(replace(work(), model=TracedModel.of(find_model("meta-llama/Llama-3.1-8B").config))).block
    assert block is not None and block.scale == 1 / 8
    bounded = Shapes(((14336, 4096),), 100, block).limit_size("cpu").block
    assert bounded is not None and bounded.hidden == 512 and bounded.hidden * bounded.breadth <= 4_000_000
    narrow = dict(iterate_blocks_to_measure(bounded, 128))
    assert set(narrow) == {f"block/{name}/{way}" for name in ("fp32", "bf16") for way in ("forward", "backward")}
    products = {(k.m, k.n, k.k) for k in narrow["block/fp32/forward"].kernels if k.kind == 0}
    assert products == {(256, 512, 512), (256, 128, 512), (256, 1792, 512), (256, 512, 1792)}
    gradients = {(k.m, k.n, k.k) for k in narrow["block/fp32/backward"].kernels if k.kind == 0 and not k.weights}
    assert gradients == {(512, 512, 256), (128, 512, 256), (1792, 512, 256), (512, 1792, 256)}
    assert choose_sequences(128) == (2, 128)
    assert Shapes(((14336, 4096),), 100, block).limit_size("cuda").block is None


def test_a_measured_block_comes_back_from_the_sizes_of_its_sample() -> None:
    for passed in passes().values():
        assert MeasuredBlock.of(passed.sizes) == passed


def test_nothing_is_measured_of_a_machine_that_is_not_at_hand() -> None:
    machine = Machine("here", "a CPU", 2, 2**34, ())
    assert build_basis(machine, work()) == Basis()
    assert replace(machine, is_here=True) != machine


def test_the_table_has_a_row_for_each_candidate_all_the_same() -> None:
    made = planned(measurement(bf16=0.5))
    layouts = [(one.layout, one.choice.num_processes) for one in made.search.candidates]
    assert len(layouts) == len(set(layouts)) and len(list(format_candidates(made))) > 2
    assert Evaluator(work(), of_cores(2), Rates(of_cores(2))).rates.threads(1) == (2,)


def _with_runs(*runs: OwnRun) -> RunPlan:
    return make_plan(Constraints({}), work(), of_cores(2, *AMX), basis=Basis(None, measurement(), runs=OwnRuns(runs)))


def test_a_plan_is_corrected_by_what_runs_of_this_machine_took() -> None:
    plain = _with_runs()
    choice, time = plain.chosen.choice, plain.chosen.time
    own = OwnRun(build_model_key(work()), build_way_key(choice), "measurement", 1.02, 1.0)
    corrected = _with_runs(own)
    assert time is not None and corrected.chosen.choice == choice and corrected.chosen.time is not None
    assert corrected.chosen.time.seconds == pytest.approx(1.02 * time.seconds)
    assert corrected.predicted()["correction"] == pytest.approx(1.02)
    assert any("this machine's own runs: 1, within 0%" in line for line in describe_plan(corrected))
    assert not any("own runs" in line for line in describe_plan(plain))


def test_a_few_runs_tell_how_far_plans_are_off_here() -> None:
    own = OwnRun(build_model_key(work()), build_way_key(_with_runs().chosen.choice), "measurement", 1.0, 1.0)
    assert _with_runs(*[own] * (FEWEST - 1)).chosen.errors.words != "runs on this machine"
    assert _with_runs(*[own] * FEWEST).chosen.errors.words == "runs on this machine"
