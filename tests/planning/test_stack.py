"""Habits of other programs: what each changes of a plan's memory, and what it leaves as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainwright.machine.describe import parse_machine
from trainwright.planning.architectures.catalog import find_model
from trainwright.planning.memory.peak import Memory, memory_of
from trainwright.planning.operations import BatchShape, Device, PassSettings, block_kinds, block_pass, embedding_pass
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.step_time.rates import Group, rates_of
from trainwright.planning.step_time.step import step_time
from trainwright.planning.workload import AdapterShape, Choice, Workload

ARCHITECTURE = find_model("meta-llama/Llama-3.2-1B").architecture()
PARAMETERS = ARCHITECTURE.parameters().total
WORKLOAD = Workload(ARCHITECTURE, row_tokens=1024, global_batch_rows=64, evaluates=False)
H100 = parse_machine("8xH100")
SHARDED = Choice("fsdp", 8, 2, 4, "bf16", "full")
QLORA = replace(WORKLOAD, adapter=AdapterShape("lora", 8), quantization="nf4")


def held(stack: Stack, choice: Choice = SHARDED, workload: Workload = WORKLOAD) -> Memory:
    return memory_of(workload, choice, H100, stack)


def test_gradients_that_are_summed_whole_are_whole_on_every_rank_and_sent_once() -> None:
    whole, plain = Stack(kept=2, state=2, sums_unsharded=True), Stack(kept=2, state=2)
    assert held(whole).parts["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.1)
    assert held(plain).parts["gradients"] < PARAMETERS
    # With one micro-batch a step there is nothing to sum.
    once = replace(SHARDED, gradient_accumulation_steps=1)
    less = replace(WORKLOAD, global_batch_rows=16)
    assert held(whole, once, less) == held(plain, once, less)
    waited = [
        step_time(WORKLOAD, SHARDED, H100, rates_of(H100), stack).parts["communication"] for stack in (whole, plain)
    ]
    assert waited[0] < waited[1]


def test_every_second_product_is_kept_and_the_other_ones_are_computed_again() -> None:
    def block(stack: Stack, recompute: Any) -> Any:
        batch = BatchShape(1, 2048, ((2048, 1),), 2048, True, False)
        setting = PassSettings(ARCHITECTURE, batch, Device("cuda"), 2, stack=stack)
        return block_pass(setting, block_kinds(ARCHITECTURE)[0], recompute)

    every, second, none = block(OWN, "selective"), block(Stack(alternates=True), "selective"), block(OWN, "full")
    a, tokens = ARCHITECTURE, 2048
    # Of query, key, value, output, gate, up and down the second, fourth and sixth are not kept, nor is the last.
    gone = 2 * tokens * (a.key_value_width + a.hidden + a.intermediate)
    assert every.kept - second.kept == gone
    again = {name: sum(k.flops for k in one.backward if k.kind == "product") for name, one in
             (("every", every), ("second", second), ("none", none))}  # fmt: skip
    assert again["second"] - again["every"] == gone * a.hidden
    assert again["every"] < again["second"] < again["none"]
    assert block(Stack(alternates=True), "full").kept == none.kept


def test_scales_of_a_quantized_base_are_cut_where_a_program_cuts_them() -> None:
    name = "quantized base's scales"
    whole, cut = held(OWN, workload=QLORA).parts[name], held(Stack(cuts_scales=True), workload=QLORA).parts[name]
    assert cut == pytest.approx(whole / 8, abs=8)


def test_zero3_cuts_a_quantized_base_as_it_cuts_any_matrix() -> None:
    choice = replace(SHARDED, strategy="zero3")
    parts = held(OWN, choice, QLORA).parts
    embedding = ARCHITECTURE.vocabulary * ARCHITECTURE.hidden
    stored = 2 * embedding + (PARAMETERS - embedding) / 2
    assert parts["parameters"] == pytest.approx(stored / 8, rel=0.1)


def test_a_loss_in_the_models_precision_takes_half_of_one_in_fp32() -> None:
    choice = replace(SHARDED, micro_batch_size=16, gradient_accumulation_steps=1)
    wide, narrow = (held(Stack(loss=loss), choice).parts["loss working set"] for loss in ("full", "narrow"))
    assert narrow == pytest.approx(wide / 2, rel=0.05)


@pytest.mark.parametrize(
    ("setting", "joined"),
    [
        ({}, True),
        ({"width": 2}, False),
        ({"device": Device("cuda")}, False),
        ({"hooked": True}, False),
        ({"trainable": False}, False),
        ({"architecture": replace(ARCHITECTURE, tied=False)}, False),
    ],
)
def test_a_tied_embedding_makes_a_gradient_of_its_own_only_where_it_cannot_be_joined(
    setting: dict[str, Any], joined: bool
) -> None:
    batch = BatchShape(1, 64, ((64, 1),), 64, True, False)
    made = replace(PassSettings(ARCHITECTURE, batch, Device("cpu"), 4), **setting)
    assert made.joins_gradients is joined
    whole = ARCHITECTURE.vocabulary * ARCHITECTURE.hidden * made.width
    peaks = [moment.peak for moment in embedding_pass(made).moments]
    assert len(peaks) == (made.trainable is True)
    assert all((peak < whole) is joined for peak in peaks)


def test_what_enters_frozen_blocks_stays_where_the_first_fsdp_has_hold_of_it() -> None:
    lora = replace(WORKLOAD, adapter=AdapterShape("lora", 8))
    holding, plain = Stack(holds_inputs=True, loss="chunked"), Stack(loss="chunked")
    inputs = ARCHITECTURE.layers * 2 * 2 * 1024 * ARCHITECTURE.hidden
    choice = replace(SHARDED, micro_batch_size=2, gradient_accumulation_steps=1)
    more = held(holding, choice, lora).phases["backward"] - held(plain, choice, lora).phases["backward"]
    # Of the first block's backward pass, when all inputs but its own and all gradients but its own are there.
    assert more <= 2 * inputs
    assert held(holding, choice, lora).phases["backward"] >= 2 * inputs * (1 - 1 / ARCHITECTURE.layers)
    for same in (replace(choice, strategy="zero3"), replace(choice, activation_checkpointing="none")):
        assert held(holding, same, lora) == held(plain, same, lora)
    assert held(holding, choice) == held(plain, choice)


def test_early_kernels_of_amd_are_slower_backwards_alone() -> None:
    mi300x = parse_machine("1xMI300X")
    alone = Choice("single", 1, 2, 4, "bf16")
    stacks = OWN, Stack(attention="early")
    usual, early = (step_time(WORKLOAD, alone, mi300x, rates_of(mi300x), stack).parts for stack in stacks)
    curves = rates_of(mi300x).setting(1).curves
    assert curves["attention/bf16/forwardearly"].seconds(4096) == curves["attention/bf16/forward"].seconds(4096)
    assert curves["attention/bf16/backwardearly"].seconds(4096) > 5 * curves["attention/bf16/backward"].seconds(4096)
    assert early["attention"] > usual["attention"]


def test_keys_and_values_that_are_cached_stay_to_the_end_of_the_step() -> None:
    choice = replace(SHARDED, gradient_accumulation_steps=1)
    cached = ARCHITECTURE.layers * 2 * 1024 * 2 * ARCHITECTURE.key_value_width * 2
    more = [held(Stack(caches_keys=True), choice).phases[name] - held(OWN, choice).phases[name]
            for name in ("forward", "backward", "optimizer")]  # fmt: skip
    assert more == [cached, cached, 0]


@pytest.mark.parametrize(("loss", "width"), [("full", 4), ("narrow", 2), ("chunked", 0)])
def test_what_a_forward_pass_returned_stays_until_the_next_one_has_returned(loss: Any, width: int) -> None:
    choice = replace(SHARDED, gradient_accumulation_steps=1)
    plain = Stack(loss=loss, caches_keys=True)
    before, after = held(plain, choice), held(replace(plain, keeps_outputs=True), choice)
    tokens = 2 * 1024
    cached = ARCHITECTURE.layers * tokens * 2 * ARCHITECTURE.key_value_width * 2
    more = {name: after.phases[name] - before.phases[name] for name in before.phases}
    assert more.pop("forward") == tokens * ARCHITECTURE.vocabulary * width + cached
    assert not any(more.values())


@pytest.mark.parametrize("sequences", [((512, 1),), ((512, 4),), ((512, 3), (256, 2))])
def test_attention_in_single_operations_computes_and_keeps_all_scores(sequences: tuple[tuple[int, int], ...]) -> None:
    a = find_model("meta-llama/Llama-2-7b-hf").architecture()
    tokens = sum(length * count for length, count in sequences)
    batch = BatchShape(1, tokens, sequences, tokens, True, False)
    single, flash = (
        block_pass(PassSettings(a, batch, Device("cuda"), 2, stack=stack), block_kinds(a)[0], "none")
        for stack in (Stack(attention="math"), OWN)
    )
    scores = a.heads * sum(count * length**2 for length, count in sequences)
    # Probabilities in fp32 and in bf16, instead of one sum for each query.
    assert single.kept - flash.kept == scores * (4 + 2) - a.heads * tokens * 4
    kernels = [kernel for kernel in single.forward if kernel.operation == "attention"]
    assert not any(kernel.kind == "attention" for kernel in [*single.forward, *single.backward])
    assert sum(kernel.flops for kernel in kernels) == 2 * 2 * scores * a.head_dim
    assert sum(kernel.kind == "product" for kernel in kernels) == 2 * len(sequences)


def test_ranks_that_divide_a_row_attend_to_all_of_it_and_exchange_positions_for_heads() -> None:
    alone = replace(WORKLOAD, row_tokens=16384, global_batch_rows=8)
    choice, rates = Choice("fsdp", 8, 1, 1, "bf16", "full"), rates_of(H100)
    whole, part = (step_time(alone, choice, H100, rates, Stack(sequence_parallel=ranks)) for ranks in (1, 8))
    curve = rates.setting(8).curves["attention/bf16/forward"]
    more = part.parts["attention"] / whole.parts["attention"]
    assert more == pytest.approx(curve.seconds(8 * 16384) / curve.seconds(16384), rel=0.01)
    for name in ("matrix products", "memory-bound operations", "loss and head"):
        assert part.parts[name] == whole.parts[name]
    # Queries and outputs, keys and values, in three passes over each block.
    size = 16384 * 2 * 2 * (ARCHITECTURE.query_width + ARCHITECTURE.key_value_width)
    exchanges = 3 * ARCHITECTURE.layers * rates.all_to_all(size, Group(1, 8))
    assert part.parts["communication"] - whole.parts["communication"] == pytest.approx(exchanges, rel=0.3)
    assert memory_of(alone, choice, H100, Stack(sequence_parallel=8)) == memory_of(alone, choice, H100)
