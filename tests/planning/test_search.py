from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from trainwright.errors import MachineError, RequestError
from trainwright.machine.describe import Cluster, build_cluster, parse_machine
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration
from trainwright.machine.processor import Processor
from trainwright.machine.vendors import look_up_processor
from trainwright.planning.candidates import (
    Constraints,
    build_choice,
    iterate_layouts,
    list_micro_batches,
    list_recomputations,
    list_worlds,
)
from trainwright.planning.memory.peak import estimate_least_memory, estimate_memory
from trainwright.planning.output import format_candidates
from trainwright.planning.plan import RunPlan, build_constraints, make_plan
from trainwright.planning.search import AS_FAST, Candidate, Evaluator, search
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import estimate_step_time
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.loading import build_recipe
from trainwright.recipe.sections.model import AdapterSection
from trainwright.recipe.strategy_spec import look_up_strategy

SMALL, LARGE, HUGE = "HuggingFaceTB/SmolLM2-135M", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"


def work(name: str, rows: int = 64, tokens: int = 2048, **more: Any) -> Workload:
    adapter = AdapterSection.model_validate(more.pop("adapter", {}))
    model = TracedModel.of(find_model(name).config).add_adapter(adapter)
    return Workload(model, row_tokens=tokens, global_batch_rows=rows, **more)


def plan(
    name: str, on: str, rows: int = 64, tokens: int = 2048, fixed: dict[str, Any] | None = None, **more: Any
) -> RunPlan:
    return make_plan(Constraints(fixed or {}), work(name, rows, tokens, **more), parse_machine(on))


def of_cores(count: int, *instructions: str, clock: float = 2.5e9) -> Cluster:
    memory, processor = 24 * 2**30, Processor("GenuineIntel", 6, instructions, clock)
    return build_cluster(Machine("here", "a CPU", count, memory, (), memory_free_bytes=memory, processor=processor))


AVX2, AVX512, BF16 = ("avx2",), ("avx2", "avx512f"), ("avx2", "avx512f", "avx512_bf16")
AMX = (*BF16, "amx_bf16")


def test_processes_without_rows_hold_shards_where_fewer_would_have_to_offload() -> None:
    found = plan(LARGE, "8xH100", 4, fixed={"strategy": "zero3"})
    assert found.chosen.choice.num_processes == 8 and not found.chosen.choice.offload_optimizer
    (why,) = (reason for reason in found.reasons if reason.startswith("parallel.num_processes"))
    assert "a step has 4 rows; 4 processes have none and hold shards" in why
    small = plan(SMALL, "8xH100", 4)
    assert small.chosen.choice.num_processes == 4
    assert any(reason.startswith("parallel.num_processes 4: with 8 a step takes") for reason in small.reasons)


def test_a_small_model_is_replicated_and_a_large_one_sharded() -> None:
    assert plan(SMALL, "8xH100").chosen.choice.strategy == "ddp"
    assert plan(SMALL, "1xH100").chosen.choice.strategy == "single"
    large = plan(LARGE, "8xH100")
    assert large.chosen.choice.strategy in ("fsdp", "zero1", "zero2", "zero3")
    lost = [one for one in large.search.candidates if one.choice.strategy == "ddp" and one.choice.num_processes == 8]
    assert lost and not any(one.fits for one in lost)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["1xRTX4090", "4xA100-40GB", "8xH100", "4x8xH100"])
@pytest.mark.parametrize("rows", [1, 7, 64, 100])
def test_every_candidate_makes_the_global_batch_in_as_few_passes(on: str, rows: int) -> None:
    for one in plan(SMALL, on, rows).search.candidates:
        choice = one.choice
        assert choice.num_processes <= max(1, rows) or look_up_strategy(choice.strategy).shards
        share = math.ceil(rows / choice.micro_batch_size)
        assert choice.gradient_accumulation_steps == math.ceil(
            math.ceil(rows / choice.num_processes) / choice.micro_batch_size
        )
        assert choice.gradient_accumulation_steps * choice.num_processes >= share


def test_the_chosen_one_fits_and_none_that_fits_is_faster() -> None:
    made = plan(LARGE, "4xA100-80GB")
    assert made.fits and made.chosen.time is not None
    times = [one.time.seconds for one in made.search.candidates if one.runs and one.time]
    assert made.chosen.time.seconds <= 1.02 * min(times)
    assert made.chosen.needed_interval[1] <= made.chosen.available_bytes == parse_machine("1xA100-80GB").usable_bytes


@pytest.mark.parametrize(("name", "rows", "tokens"), [(SMALL, 8, 512), ("Qwen/Qwen2.5-0.5B", 64, 8192)])
def test_recomputation_is_not_looked_at_where_larger_micro_batches_gain_less(name: str, rows: int, tokens: int) -> None:
    """A model that is not known is then traced once. Of the first all fit, of the second the largest does not."""
    tried = []

    class Noting(Evaluator):
        def fit(self, choice: Choice) -> Candidate:
            tried.append(choice.activation_checkpointing)
            return super().fit(choice)

    cluster = parse_machine("8xH100")
    found = search(Noting(work(name, rows, tokens), cluster, Rates(cluster)), Constraints({}))
    assert found.best is not None and set(tried) == {"none"}


PADDED = {"packed": False, "document_tokens": 90.0}


def check_search(workload: Workload, cluster: Cluster, fixed: dict[str, Any]) -> None:
    """Compare what is found with everything that could be chosen."""
    constraints = Constraints(fixed)
    evaluator = Evaluator(workload, cluster, Rates(cluster))
    every = [
        build_choice(layout, processes, size, recompute, constraints, cluster)
        for processes in list_worlds(workload, cluster, constraints)
        for layout in iterate_layouts(processes, cluster, constraints, math.ceil(workload.global_batch_rows))
        for recompute in list_recomputations(workload, constraints)
        for size in list_micro_batches(workload, processes, constraints)
    ]
    # Keeping numbers in the host's memory costs time, and is not looked at where something fits, or is close, without.
    levels = (
        [choice for choice in every if one.fit(choice).fits and (may_offload or not offloads(choice))]
        for may_offload in (False, True)
        for one in (evaluator, evaluator.reduce_margin())
    )
    fitting = next((choices for choices in levels if choices), [])
    found = search(evaluator, constraints)
    assert (found.best is None) == (not fitting)
    if found.best is not None:
        seconds = [evaluator.seconds(choice) for choice in fitting]
        assert found.fastest == pytest.approx(min(seconds), rel=1e-9)
        assert evaluator.seconds(found.best.choice) <= (1 + AS_FAST[look_up_processor(cluster.device)]) * found.fastest


def offloads(choice: Choice) -> bool:
    return choice.offload_parameters or choice.offload_optimizer


ON_GPUS: list[tuple[str, str, int, int, dict[str, Any], dict[str, Any]]] = [
    (SMALL, "2xRTX4090", 16, 1024, {}, {}),
    (LARGE, "2x8xV100-32GB", 16, 512, {"strategy": "fsdp"}, {}),
    # A micro-batch that is the whole share of a device fits, and half of it, accumulated, does not.
    (LARGE, "4xA100-40GB", 7, 256, {}, PADDED),
    (SMALL, "2xT4", 16, 2048, {"mixed_precision": "no"}, {}),
    ("Qwen/Qwen2.5-1.5B", "2xA100-40GB", 16, 4096, {}, {}),
    (LARGE, "4xA100-80GB", 16, 4096, {}, {}),
    (LARGE, "8xL4", 16, 1024, {"num_processes": 8, "micro_batch_size": 1}, {}),
    (SMALL, "2xRTX4090", 16, 512, {}, PADDED),
    ("Qwen/Qwen2.5-1.5B", "4xT4", 7, 512, {}, PADDED),
    (LARGE, "8xH100", 64, 512, {}, PADDED),
]
ON_CORES: list[tuple[int, tuple[str, ...], float, dict[str, Any]]] = [
    (2, BF16, 2.0e9, {}),
    (16, AVX512, 2.7e9, {"mixed_precision": "bf16"}),
    (2, AVX2, 3.5e9, {}),
    (2, BF16, 2.5e9, {}),
    (2, AMX, 2.2e9, {}),
    (128, AMX, 2.0e9, {"mixed_precision": "no"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on", "rows", "tokens", "fixed", "more"),
    [*ON_GPUS[:3], *(pytest.param(*case, marks=pytest.mark.slow) for case in ON_GPUS[3:])],
)
def test_nothing_that_was_not_looked_at_is_faster_on_gpus(
    name: str, on: str, rows: int, tokens: int, fixed: dict[str, Any], more: dict[str, Any]
) -> None:
    check_search(work(name, rows, tokens, **more), parse_machine(on), fixed)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("cores", "instructions", "clock", "fixed"),
    [*ON_CORES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in ON_CORES[2:])],
)
def test_nothing_that_was_not_looked_at_is_faster_on_cores(
    cores: int, instructions: tuple[str, ...], clock: float, fixed: dict[str, Any], more: dict[str, Any]
) -> None:
    check_search(work(SMALL, 16, 256, **more), of_cores(cores, *instructions, clock=clock), fixed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_nothing_that_was_not_looked_at_is_faster_on_any_machine(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        tokens = draw.choice([128, 256, 512, 2048])
        more = {"packed": False, "document_tokens": tokens / draw.choice([1.1, 2, 3, 8])} if draw.random() < 0.5 else {}
        fixed = {"mixed_precision": draw.choice(["no", "bf16"])} if draw.random() < 0.2 else {}
        if draw.random() < 0.5:
            cluster = of_cores(draw.choice([1, 2, 4, 8, 16, 48, 128]), *draw.choice([AVX2, AVX512, BF16, AMX]))
            name, rows = SMALL, draw.choice([1, 3, 7, 16, 64])
        else:
            cluster = parse_machine(
                draw.choice(["1xRTX4090", "4xA100-40GB", "8xH100", "4xT4", "1xMI300X", "2x8xV100-32GB"])
            )
            name, rows = draw.choice([SMALL, "Qwen/Qwen2.5-1.5B", LARGE]), draw.choice([1, 7, 16, 64, 100, 256])
        check_search(work(name, rows, tokens, **more), cluster, fixed)


@pytest.mark.slow
def test_what_is_given_up_for_a_simpler_choice_does_not_add_up() -> None:
    # Of one process and of two, of small micro-batches and of large ones: within five per cent of the fastest of all.
    for clock in range(20, 40):
        cluster = of_cores(2, *BF16, clock=clock * 1e8)
        found = search(Evaluator(work(SMALL, 16, 256, **PADDED), cluster, Rates(cluster)), Constraints({}))
        assert found.best is not None and found.best.time is not None
        assert found.best.time.seconds <= (1 + AS_FAST["cpu"]) * found.fastest


def test_fewer_devices_are_left_out_where_their_peak_rate_is_too_slow() -> None:
    made = plan(LARGE, "8xH100", tokens=8192)
    assert made.chosen.choice.num_processes == 8 and made.chosen.time is not None
    assert {one.choice.num_processes for one in made.search.candidates} == {8}
    assert made.search.slower[1] > made.chosen.time.seconds
    told = next(reason for reason in made.reasons if reason.startswith("parallel.num_processes 8: "))
    assert f"with 1 a step would take {made.search.slower[1] / made.chosen.time.seconds:.2f} times as long" in told


@pytest.mark.parametrize(
    "fixed",
    [
        {"strategy": "zero3"},
        {"strategy": "fsdp", "replicate_size": 2},
        {"strategy": "fsdp", "reshard_after_forward": False},
        {"micro_batch_size": 2},
        {"gradient_accumulation_steps": 4},
        {"activation_checkpointing": "full"},
        {"mixed_precision": "no"},
        {"num_processes": 4},
        {"strategy": "zero2", "offload_optimizer": True},
    ],
)
def test_what_the_user_fixed_is_kept(fixed: dict[str, Any]) -> None:
    made = plan(SMALL, "8xH100", fixed=fixed)
    assert made.fits
    for one in made.search.candidates:
        assert {key: getattr(one.choice, key) for key in fixed} == fixed


def test_more_memory_is_never_slower() -> None:
    small, large = parse_machine("2xA100-40GB"), parse_machine("2xA100-80GB")
    large = replace(large, card=replace(small.card, memory_bytes=large.card.memory_bytes), link=small.link)
    seconds = []
    for cluster in (small, large):
        time = make_plan(Constraints({}), work("Qwen/Qwen2.5-1.5B", tokens=4096), cluster).chosen.time
        assert time is not None
        seconds.append(time.seconds)
    assert seconds[1] <= seconds[0] * 1.02


def test_numbers_go_to_the_host_only_where_nothing_fits_without() -> None:
    assert not plan(SMALL, "1xRTX4090").chosen.layout.offloads
    made = plan("Qwen/Qwen2.5-3B", "1xRTX4090", rows=8)
    assert made.fits and made.chosen.layout.offloads
    assert 0 < made.chosen.host_needed_bytes <= made.chosen.host_available_bytes


def test_unified_memory_holds_the_devices_part_and_the_hosts() -> None:
    apart = parse_machine("1xRTX4090")
    unified = replace(apart, unified=True, host_memory_bytes=apart.card.memory_bytes)
    fixed = {"strategy": "fsdp", "offload_parameters": True, "micro_batch_size": 1}
    one, both = (
        make_plan(Constraints(fixed), work(SMALL, tokens=1024), cluster).chosen for cluster in (apart, unified)
    )
    held = sum(size for name, size in one.memory.host.items() if name != "weights while loading")
    assert one.needed_bytes == one.memory.total and one.host_needed_bytes > 0
    assert both.needed_bytes >= one.memory.total + held and both.host_needed_bytes == 0
    assert both.available_bytes < one.available_bytes  # other programs need some of it


def test_gradients_of_offloaded_parameters_are_in_the_hosts_memory() -> None:
    fixed = {"strategy": "fsdp", "offload_parameters": True, "micro_batch_size": 1}
    memory = plan(LARGE, "8xH100", fixed=fixed).chosen.memory
    rows = 8_030_261_248 / 8
    host = {name: size for name, size in memory.host.items() if name != "rounding of pinned memory"}
    assert sum(host.values()) == pytest.approx(16 * rows, rel=0.01)  # masters, gradients, AdamW's two
    # On the device: what a block has before it is reduced, and as the others of its unit are gathered.
    assert memory.parts["gradients"] < 4 * rows / 2


@pytest.mark.parametrize("on", ["2xRTX4090", "8xRTX4090", "2x8xA100-40GB"])
def test_what_never_fits_is_found_without_a_pass(on: str) -> None:
    cluster, workload = parse_machine(on), work(LARGE)
    evaluator = Evaluator(workload, cluster, Rates(cluster))
    every = search(evaluator, Constraints({}))
    for one in every.candidates:
        assert estimate_least_memory(workload, one.choice, cluster) <= one.memory.total
        assert not evaluator.never_fits(one.choice) or one.verdict == "too large"
    assert any(evaluator.never_fits(one.choice) for one in every.candidates)
    if every.best is not None and not every.best.bold:
        assert search(evaluator, Constraints({}), sure=True).best == every.best


def test_suggestions_fit_where_nothing_else_does() -> None:
    made = plan(LARGE, "1xRTX4090", rows=8, fixed={"strategy": "single"})
    assert not made.fits
    changes = [way.change for way in made.suggestions]
    assert 0 < len(changes) <= 3
    assert any("lora" in change for change in changes)
    assert all(
        way.candidate.fits and way.candidate.needed_bytes <= way.candidate.available_bytes for way in made.suggestions
    )
    with pytest.raises(MachineError) as refused:
        made.refuse_shortage()
    assert all(change in str(refused.value) for change in changes)
    assert "--force" in str(refused.value)


def test_muon_keeps_less_and_runs_where_matrices_are_whole() -> None:
    adamw, muon = (plan(LARGE, "4xA100-80GB", optimizer=name) for name in ("adamw", "muon"))
    assert not muon.chosen.choice.strategy.startswith("zero")
    assert {one.missing is None for one in muon.search.candidates if one.choice.strategy.startswith("zero")} == {False}
    same = Choice("fsdp", 4, 1, 16, "bf16")
    kept = [estimate_memory(one.workload, same, one.cluster).parts["optimizer state"] for one in (adamw, muon)]
    # 7.0 billion of 8.0 are in matrices of blocks, which need their momentum alone.
    assert kept[1] / kept[0] == pytest.approx(1 - 7.0 / 8.0 / 2, rel=0.01)
    times = [estimate_step_time(one.workload, same, one.cluster, Rates(one.cluster)) for one in (adamw, muon)]
    assert times[1].parts["optimizer"] > times[0].parts["optimizer"]


def test_soap_has_squares_of_the_sides_of_matrices_and_runs_where_states_are_whole() -> None:
    made = plan(LARGE, "8xB200", optimizer="soap")
    assert {one.choice.strategy for one in made.search.candidates if one.missing is None} <= {"single", "ddp"}
    assert any(one.choice.strategy == "fsdp" and one.missing for one in made.search.candidates)
    one = Choice("ddp", 8, 1, 8, "bf16")
    adamw, soap = (
        estimate_memory(replace(made.workload, optimizer=name), one, made.cluster) for name in ("adamw", "soap")
    )
    wide, narrow = 4096**2, 1024**2  # sides of 14336 have none
    squares = 32 * (2 * 2 * wide + 2 * (wide + narrow) + 3 * wide)
    assert soap.parts["optimizer state"] - adamw.parts["optimizer state"] == pytest.approx(2 * 4 * squares, rel=1e-3)
    assert soap.phases["optimizer"] > adamw.phases["optimizer"]


def test_a_quantized_base_fits_where_nothing_else_does() -> None:
    assert not plan(LARGE, "1xRTX4090", rows=8, fixed={"strategy": "single"}).fits
    adapted = plan(LARGE, "1xRTX4090", rows=8, adapter={"type": "qlora", "rank": 16})
    assert adapted.fits and adapted.chosen.choice.strategy == "single"


@pytest.mark.slow
def test_processes_of_a_cpu_share_its_memory() -> None:
    candidates = make_plan(Constraints({"num_processes": 2}), work(SMALL, 4, 512), of_cores(2)).search.candidates
    assert {one.choice.threads for one in candidates} == {1}
    for one in candidates:
        assert one.needed_bytes == 2 * one.memory.total


def test_what_is_not_installed_is_not_chosen() -> None:
    missing = {"zero1": "not here", "zero2": "not here", "zero3": "not here"}
    made = make_plan(Constraints({}), work(LARGE), parse_machine("8xH100"), available=lambda name: missing.get(name))
    assert made.chosen.missing is None and not made.chosen.choice.strategy.startswith("zero")
    asked = make_plan(
        Constraints({"strategy": "zero3"}),
        work(LARGE),
        parse_machine("8xH100"),
        available=lambda name: missing.get(name),
    )
    assert not asked.fits and "not here" in str(asked.chosen.missing)
    there = make_plan(Constraints({"strategy": "zero3"}), work(LARGE), parse_machine("8xH100"))
    assert there.chosen.choice in [one.choice for one in asked.search.candidates]  # judged as it would run


def test_worlds_are_no_larger_than_the_batch_and_whole_nodes() -> None:
    cluster = parse_machine("4x8xH100")
    assert list_worlds(work(SMALL, 1000), cluster, Constraints({})) == (32, 16, 8, 1)
    # Where some have no row, all can hold shards.
    assert list_worlds(work(SMALL, 20), cluster, Constraints({})) == (16, 8, 1, 32)
    assert list_worlds(work(SMALL, 3), cluster, Constraints({})) == (3, 1, 8, 32)
    fives = Constraints({}, why_not=lambda n, given_up: "no multiple of 5" if n % 5 else "")
    assert list_worlds(work(SMALL, 1000), cluster, fives) == (30,)


def test_replicas_are_whole_nodes() -> None:
    cluster = parse_machine("8x8xH100")
    sizes = {layout.replicate_size for layout in iterate_layouts(64, cluster, Constraints({}))}
    assert sizes == {1, 2, 4, 8}


def test_micro_batches_that_contradict_are_none() -> None:
    assert list_micro_batches(work(SMALL, 8, packed=False), 2, Constraints({"gradient_accumulation_steps": 3})) == []
    assert list_micro_batches(work(SMALL, 8, packed=False), 2, Constraints({"gradient_accumulation_steps": 2})) == [
        (2, 2)
    ]
    with pytest.raises(RequestError, match="gradient_accumulation_steps 3"):
        fixed = {"gradient_accumulation_steps": 3, "num_processes": 2}
        make_plan(Constraints(fixed), work(SMALL, 8, packed=False), parse_machine("2xH100"))


def test_wishes_are_what_a_recipe_says() -> None:
    base = ["task=sft", "model.name=x", "data.train=pydoc"]
    assert build_constraints(build_recipe(base, "test")).fixed == {}
    asked = ["parallel.strategy=fsdp", "parallel.reshard_after_forward=true", "train.micro_batch_size=2"]
    fixed = build_constraints(build_recipe([*base, *asked], "test")).fixed
    assert fixed == {"strategy": "fsdp", "reshard_after_forward": True, "micro_batch_size": 2}


def test_every_number_of_a_plan_is_in_its_json() -> None:
    import json

    made = plan(LARGE, "8xH100", steps=100)
    content = json.loads(json.dumps(made.as_json()))
    assert content["fits"] and content["chosen"]["strategy"] == made.chosen.choice.strategy
    assert content["predicted"]["memory_bytes"] == made.chosen.memory.total
    assert {"memory_bytes", "tensors_bytes", "step_time", "tokens_per_second"} <= set(content["predicted"])
    bounds = {name: content["predicted"][name] for name in ("memory_low", "memory_high", "speed_low", "speed_high")}
    errors = made.chosen.errors
    assert list(bounds.values()) == [errors.memory.low, errors.memory.high, errors.speed.low, errors.speed.high]
    assert len(content["candidates"]) == len(made.search.candidates)


@pytest.mark.slow
def test_suggestions_are_two_changes_where_neither_is_enough() -> None:
    fixed = {"strategy": "ddp", "activation_checkpointing": "none"}
    changes = [way.change for way in plan(LARGE, "1xRTX4090", tokens=8192, fixed=fixed).suggestions]
    lora, qlora, shorter = changes
    assert lora.startswith("train.activation_checkpointing=auto ") and lora.endswith("model.adapter=lora (rank 16)")
    assert qlora == "train.activation_checkpointing=auto model.adapter=qlora (4-bit base, rank 16)"
    assert shorter.startswith("model.adapter=lora (rank 16) and data.pack_length=")


def test_more_devices_say_what_is_given_up_for_them() -> None:
    fixed = {"strategy": "single", "num_processes": 1}
    text = " ".join(way.change for way in plan("Qwen/Qwen2.5-7B", "1xA100-40GB", fixed=fixed).suggestions)
    assert "of these devices" in text and text.count("parallel.num_processes=auto") >= 1
    assert "parallel.strategy=auto" in text


def test_a_model_that_takes_no_adapter_is_offered_none_and_a_fixed_length_no_shorter_rows() -> None:
    found = plan(LARGE, "1xRTX4090", tokens=8192, takes_adapters=False, texts=False).suggestions
    assert found and all("devices" in way.change for way in found)


@pytest.mark.slow
def test_a_machine_without_gpus_is_told_of_one_that_would_do() -> None:
    made = make_plan(Constraints({}), work("Qwen/Qwen2.5-3B", 8, takes_adapters=False), of_cores(2))
    assert [way.change for way in made.suggestions] == ["a machine such as 1xL4"]


def test_what_contradicts_more_devices_is_given_up_with_them() -> None:
    asked = ["task=sft", "model.name=Qwen/Qwen2.5-7B", "data.train=pydoc", "parallel.strategy=single"]
    constraints = build_constraints(build_recipe([*asked, "parallel.num_processes=1"], "test"))
    made = make_plan(constraints, work("Qwen/Qwen2.5-7B"), parse_machine("1xA100-40GB"))
    assert any("parallel.strategy=auto parallel.num_processes=auto" in way.change for way in made.suggestions)


def test_a_strategy_that_other_keys_ask_for_is_not_given_up() -> None:
    asked = ["task=sft", f"model.name={LARGE}", "data.train=pydoc", "parallel.strategy=fsdp"]
    assert build_constraints(build_recipe(asked, "test")).bound == frozenset()
    wrapped = build_constraints(build_recipe([*asked, "parallel.wrap=[LlamaDecoderLayer]"], "test"))
    assert wrapped.bound == {"strategy"}
    changes = [way.change for way in make_plan(wrapped, work(LARGE), parse_machine("1xRTX4090")).suggestions]
    assert changes and not any("parallel.strategy=auto" in change for change in changes)


def test_a_very_large_batch_is_planned_at_once() -> None:
    workload = work(SMALL, 10**9)
    sizes = list_micro_batches(workload, 1, Constraints({}))
    assert sizes[-1] == (1, 10**9) and sizes[0][0] * 2048 <= 2**24 and len(sizes) < 30
    assert all(rows * passes >= 10**9 for rows, passes in sizes)


def test_every_nth_of_fewer_blocks_is_refused() -> None:
    with pytest.raises(RequestError, match="the model has 30 blocks, so there is no 31th one"):
        plan(SMALL, "1xH100", fixed={"activation_checkpointing": 31})


def test_what_is_compiled_is_compared_as_the_others_are() -> None:
    made = plan(SMALL, "8xH100", steps=100_000)
    assert made.chosen.choice.compile and made.search.best is not None and not made.search.best.choice.compile
    fsdp = next(line for line in format_candidates(made) if line.startswith(" fsdp"))
    assert "same speed" in fsdp or "1.0" in fsdp
    assert any("chosen; compiled" in line for line in format_candidates(made))


def test_a_disturbed_calibration_is_told() -> None:
    found = Calibration("here", {}, "now", (), {}, disturbance=0.5)
    assert found.is_disturbed and not replace(found, disturbance=0.0).is_disturbed


def test_a_plan_says_why_operations_are_not_fused() -> None:
    said = {on: [r for r in plan(SMALL, on).reasons if "model.kernels" in r] for on in ("1xH100", "1xV100-32GB")}
    (possible,) = said["1xH100"]
    assert possible.startswith("model.kernels eager: triton is possible, but its kernels were not measured on GPUs")
    assert said["1xV100-32GB"] == [
        "model.kernels eager: triton needs compute capability 8.0 or higher, this GPU has 7.0"
    ]
    assert not [r for r in plan(SMALL, "1xH100", kernels="eager").reasons if "model.kernels" in r]


def test_a_plan_says_where_a_gpu_waits_for_launches() -> None:
    few, many = (plan(SMALL, "1xH100", rows, tokens) for rows, tokens in ((1, 256), (16, 4096)))
    assert few.chosen.time is not None and many.chosen.time is not None
    share = few.chosen.time.parts["launches"] / few.chosen.time.seconds
    assert share > 0.1 > many.chosen.time.parts["launches"] / many.chosen.time.seconds
    remark = f"train.micro_batch_size 1: {share:.0%} of a step the GPU waits for Python"
    assert [r for r in few.reasons if r.startswith(remark)]
    assert not [r for r in many.reasons if "waits for Python" in r]
