"""The intervals that plans show, and what is said to fit by them."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.machine.describe import Cluster, build_cluster, parse_machine
from trainwright.machine.machine import Machine
from trainwright.planning.candidates import Constraints
from trainwright.planning.errors import Errors, Interval, build_errors, estimate_interval, list_kinds
from trainwright.planning.output import describe_plan, format_candidates, summarize_plan
from trainwright.planning.plan import RunPlan, make_plan
from trainwright.planning.trace import tracing
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.sections.model import AdapterSection

SMALL = Workload(TracedModel.of(find_model("meta-llama/Llama-3.2-1B").config), row_tokens=2048, global_batch_rows=16)
ONE = Choice("single", 1, 1, 16, "bf16")
H100 = parse_machine("1xH100")


def of(low: float, high: float) -> Errors:
    return Errors(Interval(low, high, 20), Interval(0.9, 1.2, 20), ("dense",))


def planned(cluster: Cluster, own: Errors | None = None, **fixed: Any) -> RunPlan:
    return make_plan(Constraints(fixed), SMALL, cluster, own=own)


def with_memory(size: float) -> Cluster:
    return replace(H100, card=replace(H100.card, memory_bytes=int(size)))


def test_nine_of_ten_other_runs_lie_in_an_interval() -> None:
    """Of many runs whatever their errors are, of few if these are normal; and what was predicted is in it."""
    found = estimate_interval(1.01**step for step in range(-19, 20))
    assert found is not None
    assert (math.log(found.low, 1.01), math.log(found.high, 1.01)) == (pytest.approx(-18), pytest.approx(18))
    chance = random.Random(0)
    for runs in (4, 12, 25):
        inside = 0
        for _ in range(2000):
            *known, other = (math.exp(chance.gauss(0.02, 0.1)) for _ in range(runs + 1))
            interval = estimate_interval(known)
            assert interval is not None and interval.low <= 1 <= interval.high
            inside += interval.low <= other <= interval.high
        assert 0.88 <= inside / 2000 <= 0.93, runs
    assert estimate_interval([1.0] * 3) is None


def test_a_plan_says_that_activations_are_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))

    def fails(*_: object) -> None:
        raise NotImplementedError("aten.nonzero reads data")

    traced = [line for line in planned(H100).assumptions if "traced" in line]
    monkeypatch.setattr(tracing, "trace", fails)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    untraced = TracedModel.of({"model_type": "llama", **sizes, "num_key_value_heads": 2, "vocab_size": 777})
    plan = make_plan(Constraints({}), replace(SMALL, model=untraced), H100)
    assert plan.assumptions[0] == (
        "llama cannot be traced (NotImplementedError: aten.nonzero reads data): activations are planned by a bound"
    )
    assert traced == []


@pytest.mark.slow
def test_a_run_is_of_all_kinds_that_it_is_of() -> None:
    lora = replace(SMALL, model=SMALL.model.add_adapter(AdapterSection(type="lora", rank=8)))
    qlora = replace(SMALL, model=SMALL.model.add_adapter(AdapterSection(type="lora", rank=8, quantization="nf4")))
    nodes = parse_machine("2x8xH100")
    spread = replace(ONE, strategy="fsdp", num_processes=16, gradient_accumulation_steps=1, offload_parameters=True)
    assert list_kinds(SMALL, ONE, H100) == ("dense",)
    assert list_kinds(lora, ONE, H100) == ("LoRA",)
    assert list_kinds(qlora, spread, nodes) == ("QLoRA", "offload", "several nodes")
    assert list_kinds(replace(SMALL, row_tokens=32_768), ONE, parse_machine("1xMI300X")) == (
        "dense",
        "long context",
        "other vendors",
    )
    machine = Machine("here", "a CPU", 2, 2**34, (), memory_free_bytes=2**34)
    assert list_kinds(lora, ONE, build_cluster(machine)) == ("CPU",)


def test_of_several_kinds_the_wider_counts() -> None:
    nodes = parse_machine("2x8xH100")
    spread = replace(ONE, strategy="fsdp", num_processes=16, gradient_accumulation_steps=1)
    whole, alone = build_errors(SMALL, spread, nodes), build_errors(SMALL, ONE, H100)
    assert whole.speed.low <= alone.speed.low and whole.speed.high >= alone.speed.high


@pytest.mark.slow
def test_what_fits_has_a_margin_as_wide_as_the_interval() -> None:
    fixed: dict[str, Any] = {"micro_batch_size": 1, "activation_checkpointing": "full", "strategy": "single"}
    fixed["num_processes"] = 1
    needed = planned(H100, **fixed).chosen.needed_bytes
    errors = of(0.8, 1.25)
    for memory, verdict, fits in (
        (1.26, "fits", True),
        (1.1, "close", True),
        (0.9, "close", False),
        (0.79, "too large", False),
    ):
        plan = planned(with_memory(memory * needed), errors, **fixed)
        assert (plan.chosen.verdict, plan.fits, plan.is_close) == (verdict, fits, verdict == "close"), memory


def test_what_is_close_is_taken_only_where_nothing_fits_for_sure() -> None:
    errors = of(0.7, 1.3)
    plan = planned(with_memory(40 * 2**30), errors)
    assert plan.fits and not plan.is_close
    assert plan.chosen.needed_interval[1] <= plan.chosen.available_bytes
    least = planned(H100, strategy="single", micro_batch_size=1, activation_checkpointing="full").chosen.needed_bytes
    close = planned(with_memory(1.1 * least), errors, strategy="single")
    assert close.fits and close.is_close
    assert "close: 9 of 10 runs of this kind (dense) take" in "\n".join(describe_plan(close))
    assert "which is close" in summarize_plan(close)


def test_intervals_are_shown_beside_memory_and_speed() -> None:
    plan = planned(H100, of(0.8, 1.25))
    time = plan.chosen.time
    assert time is not None
    told = plan.as_json()["errors"]
    assert told["memory_bytes"] == [round(part * plan.chosen.memory.total) for part in (0.8, 1.25)]
    assert told["tokens_per_second"] == [pytest.approx(part * time.tokens_per_second) for part in (0.9, 1.2)]
    assert told["step_time"] == [pytest.approx(time.seconds / part) for part in (1.2, 0.9)]
    assert told["kinds"] == ["dense"]
    said = "\n".join([*format_candidates(plan), *describe_plan(plan), summarize_plan(plan)])
    for value in (0.9 * time.tokens_per_second, 1.2 * time.tokens_per_second):
        assert f"{value:,.0f}" in said
    assert "9 of 10 such runs" in said


def test_intervals_need_no_torch() -> None:
    code = "import sys, trainwright.planning.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
