from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.measured import measurement
from trainwright.machine.describe import Cluster, build_cluster, parse_machine
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, Curve, Exchanged, InStep, ProcessRates
from trainwright.planning.step_time.rates import Group, Rates, build_nominal_setting
from trainwright.planning.step_time.step import (
    StepTime,
    build_typical_batch,
    count_model_operations,
    estimate_step_time,
)
from trainwright.planning.step_time.update import LAUNCHES_OF_STACK, Update
from trainwright.planning.step_time.work import Pricing
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.trace.units import Operation
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.sections.model import AdapterSection

H100 = parse_machine("8xH100")
NODES = parse_machine("4x8xH100@8x400Gb")


def llama(**changed: Any) -> TracedModel:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    }
    return TracedModel.of({**config, **changed})


def large(layers: int = 32) -> TracedModel:
    return llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )


LARGE = large()


def workload(model: TracedModel = LARGE, **changed: Any) -> Workload:
    made = Workload(model, row_tokens=4096, global_batch_rows=64, batch_tokens=64 * 4096)
    return replace(made, **changed)


def choice(strategy: Any = "fsdp", processes: int = 8, **changed: Any) -> Choice:
    rows = 64 // processes
    made = Choice(strategy, processes, min(2, rows), max(1, rows // 2), "bf16")
    return replace(made, **changed)


def timed(made: Choice | None = None, work: Workload | None = None, cluster: Cluster = H100) -> StepTime:
    return estimate_step_time(work or workload(), made or choice(), cluster, Rates(cluster))


# Worked by hand: queries and output 64 x 64, keys and values 64 x 32, and three matrices of 64 x 176.
BLOCK = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176


def test_operations_are_six_of_each_parameter_and_token_and_attention() -> None:
    tokens, targets, length = 4 * 32, 96, 32
    small = workload(llama(), row_tokens=32, global_batch_rows=4, batch_tokens=tokens, target_fraction=targets / tokens)
    products = 6 * tokens * 2 * BLOCK + 6 * targets * 256 * 64
    pairs = 4 * (length * (length + 1) // 2)
    attention = 12 * 2 * 64 * pairs
    assert count_model_operations(small) == products + attention


def test_operations_of_documents_in_packs_are_those_inside_documents() -> None:
    whole = workload(llama(), row_tokens=64, global_batch_rows=1, batch_tokens=64)
    parts = replace(whole, document_tokens=16)
    attention = 12 * 2 * 64 * (64 * 65 // 2 - 4 * (16 * 17 // 2))
    assert count_model_operations(whole) - count_model_operations(parts) == attention


def test_operations_of_an_adapter_leave_out_the_gradients_of_what_is_frozen() -> None:
    full = workload(llama(), row_tokens=32, global_batch_rows=1, batch_tokens=32)
    lora = replace(
        full, model=full.model.add_adapter(AdapterSection(type="lora", rank=4, targets=["q_proj", "down_proj"]))
    )
    frozen = 2 * 32 * (2 * BLOCK + 256 * 64)
    added = 6 * 32 * 2 * 4 * ((64 + 64) + (64 + 176))
    assert count_model_operations(full) - count_model_operations(lora) == frozen - added


def test_operations_of_a_window_end_with_it() -> None:
    a = llama(model_type="mistral", sliding_window=8)
    work = workload(a, row_tokens=32, global_batch_rows=1, batch_tokens=32)
    seen = sum(min(position, 8) for position in range(1, 33))
    assert count_model_operations(work) == 6 * 32 * (2 * BLOCK + 256 * 64) + 12 * 2 * 64 * seen


def test_operations_of_experts_are_those_that_a_token_goes_to() -> None:
    sparse = llama(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    work = workload(sparse, row_tokens=32, global_batch_rows=1, batch_tokens=32)
    block = BLOCK - 3 * 64 * 176 + 2 * 3 * 64 * 176 + 8 * 64
    assert count_model_operations(work) == 6 * 32 * (2 * block + 256 * 64) + 12 * 2 * 64 * (32 * 33 // 2)


def test_processes_share_the_updates_of_matrices() -> None:
    """A process has an eighth of the products, and communicates instead."""
    rates = Rates(H100)
    muon, adamw = workload(optimizer="muon"), workload()
    for strategy in ("fsdp", "ddp"):
        added = []
        for processes in (2, 8):
            made = choice(strategy, processes)
            with_muon, without = (estimate_step_time(one, made, H100, rates).parts for one in (muon, adamw))
            added.append({part: with_muon[part] - without[part] for part in with_muon})
        assert added[1]["optimizer"] == pytest.approx(added[0]["optimizer"] / 4, rel=0.05), strategy
        assert 0 < added[1]["communication"] < added[1]["optimizer"]


def test_equal_matrices_are_updated_together_on_one_gpu() -> None:
    """Thirty small matrices take as many launches as one."""
    speeds = Rates(parse_machine("1xH100")).setting(1)
    pricing = Pricing(speeds, build_typical_batch(workload(), choice()), "bf16", on_gpu=True, vocabulary=128256)
    launch, single = speeds.launch, choice("single", 1)
    update = Update(single, pricing, 10**6, 10**6, matrices=30, width=2, orthogonalized=((64, 48),) * 30)
    alone = replace(update, orthogonalized=((64, 48),))
    assert update.optimizer() == alone.optimizer() > LAUNCHES_OF_STACK * launch
    different = replace(update, orthogonalized=((64, 48), (48, 48)))
    assert different.optimizer() - alone.optimizer() == pytest.approx(LAUNCHES_OF_STACK * launch)


def test_rows_of_texts_are_prepared_while_a_gpu_computes() -> None:
    rates, made = Rates(H100), choice()
    data = [estimate_step_time(workload(texts=texts), made, H100, rates).parts["data"] for texts in (True, False)]
    assert data[0] == 0 < data[1]


def test_the_share_of_a_gpus_peak_is_of_its_datasheet_also_where_it_was_measured() -> None:
    one = parse_machine("1xH200")
    quick = measurement({(1, 1): 250e12})  # its largest products reach half of the peak
    for rates in (Rates(one), Rates(one, measurement=quick)):
        time = estimate_step_time(workload(), choice("single", 1), one, rates)
        assert time.peak == pytest.approx(989.4e12) and time.peak_is_nominal


def test_parts_add_up_and_rates_follow() -> None:
    time = timed()
    assert time.seconds == pytest.approx(sum(time.parts.values()))
    assert all(seconds >= 0 for seconds in time.parts.values())
    assert time.tokens_per_second == pytest.approx(64 * 4096 / time.seconds)
    assert time.mfu == pytest.approx(time.operations / (8 * 989.4e12 * time.seconds))
    assert time.joules == pytest.approx(8 * 700 * time.seconds)
    assert time.as_json()["parts"] == time.parts


def test_one_process_exchanges_nothing() -> None:
    assert timed(choice("single", 1), cluster=parse_machine("H100")).parts["communication"] == 0.0


def test_more_of_a_machine_is_not_slower() -> None:
    base = timed()
    for changed in (
        replace(H100, card=replace(H100.card, memory_bandwidth=2 * H100.card.memory_bandwidth)),
        replace(H100, card=replace(H100.card, watts=1000)),
        replace(H100, link=replace(H100.link, bandwidth=2 * H100.link.bandwidth)),
    ):
        assert timed(cluster=changed).seconds < base.seconds


def test_a_slower_network_is_slower_and_replicas_inside_nodes_need_less_of_it() -> None:
    slow = parse_machine("4x8xH100@100Gb")
    spread, kept_inside = (choice("fsdp", 32, gradient_accumulation_steps=4, replicate_size=n) for n in (1, 4))
    waits = [timed(made, cluster=c).parts["communication"] for c in (NODES, slow) for made in (spread, kept_inside)]
    assert waits[2] > 2 * waits[0]
    assert waits[3] < waits[2] / 2


@pytest.mark.slow
def test_recomputation_costs_by_how_much_is_recomputed() -> None:
    options: list[Any] = ["none", "selective", 4, 2, "full"]
    times = {option: timed(choice(activation_checkpointing=option)) for option in options}
    again = [times[option].parts["recomputation"] for option in options]
    assert again[0] == 0.0
    assert again[3] == pytest.approx(again[4] / 2) and again[2] == pytest.approx(again[4] / 4)
    assert 0 < again[1] < again[4] / 2
    # All of a block's forward pass once more.
    products = times["none"].parts["matrix products"] / 3
    assert again[4] > products


def test_smaller_micro_batches_are_not_faster() -> None:
    halves = timed(choice(micro_batch_size=1, gradient_accumulation_steps=8))
    whole = timed(choice(micro_batch_size=8, gradient_accumulation_steps=1))
    assert halves.seconds > whole.seconds


def test_weights_that_stay_gathered_save_gathering() -> None:
    freed, kept = timed(choice()), timed(choice(reshard_after_forward=False))
    assert kept.parts["communication"] < freed.parts["communication"]


def test_compiling_saves_memory_traffic_alone() -> None:
    eager, compiled = timed(), timed(choice(compile=True))
    assert compiled.parts["matrix products"] == eager.parts["matrix products"]
    assert compiled.parts["memory-bound operations"] < 0.8 * eager.parts["memory-bound operations"]


def test_a_small_model_on_a_gpu_waits_for_python() -> None:
    small = workload(llama(), row_tokens=64, global_batch_rows=8, batch_tokens=512)
    time = timed(choice("ddp", 8, micro_batch_size=1, gradient_accumulation_steps=1), small)
    assert time.parts["launches"] > time.seconds / 2
    assert timed().parts["launches"] == 0.0


def test_offloading_costs_time() -> None:
    for strategy, offload in (
        ("fsdp", {"offload_parameters": True}),
        ("zero2", {"offload_optimizer": True}),
        ("zero3", {"offload_parameters": True, "offload_optimizer": True}),
        ("fsdp", {"activation_offload": True}),
    ):
        without, with_it = timed(choice(strategy)), timed(choice(strategy, **offload))
        assert with_it.parts["offload"] > 0 == without.parts["offload"]
        assert with_it.seconds > without.seconds


@pytest.mark.slow
def test_activations_are_copied_while_others_are_computed() -> None:
    """Only those of one block are waited for."""
    made = choice(activation_offload=True, activation_checkpointing="full")
    few, many = (timed(made, workload(large(layers))).parts["offload"] for layers in (16, 32))
    assert few == pytest.approx(many, rel=0.01) and few > 0


def test_tf32_multiplies_at_the_rate_of_the_datasheet() -> None:
    fp32, tf32 = (timed(choice(mixed_precision="no"), workload(tf32=tf32)) for tf32 in (False, True))
    rates = H100.card.rates
    assert fp32.parts["matrix products"] / tf32.parts["matrix products"] == pytest.approx(
        rates["tf32"] / rates["fp32"], rel=0.1
    )
    assert tf32.peak == 8 * rates["tf32"] and fp32.peak == 8 * rates["fp32"]
    without, with_it = (timed(choice(), workload(tf32=tf32)) for tf32 in (False, True))
    assert with_it.seconds == pytest.approx(without.seconds, rel=0.01)  # products are in bf16


def test_products_in_fewer_bits_are_faster_by_the_datasheet() -> None:
    """Linear layers of blocks are in 8 bits at twice the rate; forward in 4 bits at four times."""
    cluster = parse_machine("8xB200")
    products = [
        timed(work=workload(replace(large(2), float8=kind)), cluster=cluster).parts["matrix products"]
        for kind in ("no", "mxfp8", "nvfp4")
    ]
    assert 1.2 < products[0] / products[1] < 2
    assert 1.05 < products[1] / products[2] < 2


@pytest.mark.slow
def test_a_frozen_model_is_faster_to_train() -> None:
    lora = timed(work=workload(LARGE.add_adapter(AdapterSection(type="lora", rank=16))))
    assert 0.6 < lora.parts["matrix products"] / timed().parts["matrix products"] < 0.85
    assert lora.parts["optimizer"] < timed().parts["optimizer"] / 5


def test_the_busiest_process_decides() -> None:
    # Three packs for two processes: one has two of them.
    work = Workload(llama(), row_tokens=1000, global_batch_rows=3, batch_tokens=2500)
    assert build_typical_batch(work, choice("ddp", 2, micro_batch_size=1, gradient_accumulation_steps=2)).tokens == 1000
    alone = build_typical_batch(work, choice("single", 1, micro_batch_size=3, gradient_accumulation_steps=1))
    assert alone.tokens == 2500


def test_padded_rows_are_as_long_as_the_longest_beside_them() -> None:
    work = Workload(llama(), 100, 16, packed=False, document_tokens=60, longest_document=100, batch_tokens=16 * 60)
    lengths = [
        build_typical_batch(
            work, choice("single", 1, micro_batch_size=rows, gradient_accumulation_steps=16 // rows)
        ).length
        for rows in (1, 4, 16)
    ]
    assert lengths[0] == 60 and lengths[2] == 100 and 60 < lengths[1] < 100


def test_collectives_are_those_of_a_ring() -> None:
    rates, size = Rates(H100), 1e9
    sent = 0.8 * 450e9
    gather = 25e-6 + 7 * 3.4e-6 + 7 / 8 * size / sent
    assert rates.collective("all_gather", size, Group(1, 8)) == pytest.approx(gather)
    assert rates.collective("reduce_scatter", size, Group(1, 8)) == pytest.approx(gather)
    assert rates.collective("all_reduce", size, Group(1, 8)) == pytest.approx(
        25e-6 + 14 * 3.4e-6 + 14 / 8 * size / sent
    )
    assert rates.collective("all_gather", size, Group(1, 1)) == 0.0
    assert rates.collective("all_gather", 0, Group(1, 8)) == 0.0


def test_between_nodes_the_slower_of_link_and_network_decides() -> None:
    size, rates = 1e9, Rates(NODES)
    across = 31 / 32 * size / (0.75 * 50e9 * 8)
    inside = 31 / 32 * size / (0.8 * 450e9)
    latency = 25e-6 + 3 * 14e-6 + 28 * 3.4e-6
    assert rates.collective("all_gather", size, Group(4, 8)) == pytest.approx(latency + max(across, inside))
    slow = Rates(parse_machine("4x8xH100@400Gb"))
    assert slow.collective("all_gather", size, Group(4, 8)) == pytest.approx(latency + 8 * across)
    # One device of each node has its own adapter and no more.
    alone = rates.collective("all_reduce", size, Group(4, 1))
    assert alone == pytest.approx(25e-6 + 4 * 14e-6 + 2 * 3 / 4 * size / (0.75 * 50e9))


def test_a_measured_collective_is_taken_to_other_numbers_of_ranks_by_its_ring() -> None:
    measured = ProcessRates(8, None, {"collective/all_reduce": Curve("amount", (), (140e-6, 1.4e-9))})
    rates = Rates(H100, Calibration("", "", {}, (measured,), {}))
    assert rates.collective("all_reduce", 1e6, Group(1, 8)) == pytest.approx(140e-6 + 1.4e-3)
    # 2 steps in place of 14, and each link carries 1 in place of 7/4 of the bytes.
    assert rates.collective("all_reduce", 1e6, Group(1, 2)) == pytest.approx(20e-6 + 0.8e-3)


def test_a_collective_in_a_step_waits_and_is_slower_than_alone() -> None:
    curves = {"collective/all_reduce": Curve("amount", (), (140e-6, 1.4e-9))}
    measured = ProcessRates(8, None, curves, exchange=Exchanged(waited=2e-3, factor=1.5))
    rates = Rates(H100, Calibration("", "", {}, (measured,), {}))
    assert rates.collective("all_reduce", 1e6, Group(1, 8)) == pytest.approx(2e-3 + 1.5 * (140e-6 + 1.4e-3))


def test_kernels_in_a_step_take_what_whole_passes_told() -> None:
    cpu = build_cluster(Machine("here", "Some CPU", 2, 2**34, ()))
    alone = replace(build_nominal_setting(cpu, 1), in_step={})
    inside = {"bf16": InStep(products=1.5, attention=2.0, traffic=3.0, host=1e-4)}
    small, single = workload(llama()), choice("single", 1, threads=2)
    before, after = (
        estimate_step_time(small, single, cpu, Rates(cpu, Calibration("", "", {}, (made,), {}))).parts
        for made in (alone, replace(alone, in_step=inside))
    )
    assert after["matrix products"] == pytest.approx(1.5 * before["matrix products"])
    assert after["attention"] == pytest.approx(2.0 * before["attention"])
    assert before["launches"] == 0.0 and after["launches"] > 0.0


def test_power_bounds_what_a_card_sustains() -> None:
    weaker = replace(H100, card=replace(H100.card, watts=350))
    slower = timed(cluster=weaker).parts["matrix products"] / timed().parts["matrix products"]
    assert 1.3 < slower < 2.0


@pytest.mark.parametrize(
    "name",
    [
        "openai-community/gpt2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("google/gemma-2-2b", "mistralai/Mixtral-8x7B-v0.1", "EleutherAI/pythia-1b", "tiiuae/falcon-7b")
        ),
    ],
)
def test_what_a_device_computes_of_any_family_is_within_what_such_steps_reach(name: str) -> None:
    work = Workload(TracedModel.of(find_model(name).config), row_tokens=1024, global_batch_rows=64)
    time = timed(choice(), work)
    computed = time.seconds - time.parts["communication"] - time.parts["launches"]
    assert time.peak is not None and 0.08 < time.operations / time.peak / computed < 0.6


def test_products_that_are_counted_together_are_priced_by_their_flops() -> None:
    setting = build_nominal_setting(H100, 1)
    pricing = Pricing(setting, build_typical_batch(workload(), choice()), "bf16", on_gpu=True, vocabulary=128256)
    flops = 2 * 4096**3

    def products(launches: int, flops: int) -> float:
        one = Operation("product", "w", launches, 4096, 4096, 4096, 1, flops, 0, 0, 2)
        return pricing.work([one], backward=False).products

    assert products(4, 4 * flops) == pytest.approx(4 * products(1, flops))
    assert products(4, 2 * flops) == pytest.approx(2 * products(1, flops))  # the sizes are those of the largest


def test_an_optimizer_takes_its_own_time_and_an_average_adds_to_it() -> None:
    choice, rates = Choice("single", 1, 8, 1, "bf16"), Rates(parse_machine("1xA100-80GB"))

    def update(**more: Any) -> float:
        return estimate_step_time(workload(**more), choice, parse_machine("1xA100-80GB"), rates).parts["optimizer"]

    adamw = update()
    assert update(optimizer="adamw_8bit") < adamw < update(optimizer="lion") < update(optimizer="schedule_free_adamw")
    assert update(averages=True) > adamw
    assert update(master_weights=False) > adamw


def test_soap_takes_the_products_of_its_bases_on_every_process() -> None:
    """Of one matrix of 4096 x 1024: four products with each side's square, and a tenth of those that refresh it."""
    speeds = Rates(parse_machine("1xH100")).setting(1)
    pricing = Pricing(speeds, build_typical_batch(workload(), choice()), "bf16", on_gpu=True, vocabulary=128256)

    def seconds(processes: int, *bases: tuple[int, int]) -> float:
        made = choice("ddp" if processes > 1 else "single", processes)
        return Update(made, pricing, 10**7, 10**7, 4, 2, (), bases=bases).optimizer()

    curve = pricing.curve("product", "fp32", "forward")
    sides = ((1024, 4096), (4096, 1024))
    added = sum(4 * curve.seconds(a, b, b) + 7 / 30 * curve.seconds(b, b, b) for a, b in sides)
    assert seconds(1, (4096, 1024)) - seconds(1) == pytest.approx(added)
    assert seconds(8, (4096, 1024)) - seconds(8) == pytest.approx(added)
    assert seconds(1, (4096, 10_001)) - seconds(1) == pytest.approx(
        4 * curve.seconds(10_001, 4096, 4096) + 7 / 30 * curve.seconds(4096, 4096, 4096)
    )
