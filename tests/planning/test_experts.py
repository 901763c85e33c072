"""Products of experts as other programs compute them, and the rows that they copy for that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from trainwright.machine.describe import parse_machine
from trainwright.planning.architectures.catalog import find_model
from trainwright.planning.memory.peak import memory_of
from trainwright.planning.operations import BatchShape, Device, Pass, PassSettings, block_kinds, block_pass
from trainwright.planning.operations.launches import Kernel
from trainwright.planning.stack import Experts, Stack
from trainwright.planning.step_time.rates import Group, rates_of
from trainwright.planning.step_time.step import step_time
from trainwright.planning.step_time.work import Pricing
from trainwright.planning.workload import Choice, Workload

TOKENS, WIDTH = 2048, 2
BATCH = BatchShape(1, TOKENS, ((TOKENS, 1),), TOKENS, True, False)
QWEN = find_model("Qwen/Qwen3-30B-A3B").architecture()
SELECTED = TOKENS * QWEN.experts_per_token
ROWS = SELECTED * QWEN.hidden * WIDTH
MATRICES = {"gate_up": 2 * QWEN.expert_intermediate * QWEN.hidden, "down": QWEN.expert_intermediate * QWEN.hidden}
H100 = parse_machine("8xH100")


def block(stack: Stack, model: str = "Qwen/Qwen3-30B-A3B") -> Pass:
    architecture = find_model(model).architecture()
    setting = PassSettings(architecture, BATCH, Device("cuda"), WIDTH, stack=stack)
    return block_pass(setting, block_kinds(architecture)[-1], "none")


def of(experts: Experts) -> Pass:
    return block(Stack(experts=experts))


def products(kernels: Iterable[Kernel]) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.operation == "experts" and kernel.kind == "product"]


def flops(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.flops for kernel in products(kernels))


def moved(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.read + kernel.written for kernel in kernels if kernel.operation == "dispatch")


def test_experts_padded_to_all_tokens_compute_as_if_each_token_chose_every_one() -> None:
    grouped, padded = of("grouped"), of("padded")
    more = QWEN.experts // QWEN.experts_per_token
    for before, after in ((grouped.forward, padded.forward), (grouped.backward, padded.backward)):
        assert flops(after) == more * flops(before) > 0
    assert {kernel.m for kernel in products(padded.forward)} == {TOKENS}
    # The rows of every expert are copied into zeros for all, and from there into zeros for those that were chosen.
    assert moved(padded.forward) - moved(grouped.forward) == (more * ROWS + 2 * ROWS) + (ROWS + 2 * ROWS)
    # Each of these copies copies the whole gradient again.
    assert moved(padded.backward) - moved(grouped.backward) >= 2 * QWEN.experts * (more + 1) * ROWS


def test_sliced_experts_are_one_product_each_and_their_gradients_each_as_large_as_all() -> None:
    grouped, sliced = of("grouped"), of("sliced")
    assert len(products(grouped.forward)) == 2
    assert len(products(sliced.forward)) == 2 * QWEN.experts
    assert len(products(sliced.backward)) == 2 * len(products(sliced.forward))
    assert [flops(grouped.forward), flops(grouped.backward)] == [flops(sliced.forward), flops(sliced.backward)]
    for size in MATRICES.values():
        zeros = [k for k in sliced.backward if k.operation == "experts" and k.written == QWEN.experts * size * WIDTH]
        # Zeros of every expert's gradient, and sums of all but the first one.
        assert len([k for k in zeros if k.kind == "copy" and not k.read]) == QWEN.experts
        assert len([k for k in zeros if k.kind == "elementwise"]) == QWEN.experts - 1


def test_permuted_rows_are_copied_twice_more_and_weighted_in_fp32() -> None:
    grouped, permuted = of("grouped"), of("permuted")
    assert [flops(grouped.forward), flops(grouped.backward)] == [flops(permuted.forward), flops(permuted.backward)]
    copies = 2 * ROWS + (2 * ROWS + 8 * SELECTED) + 2 * ROWS
    # To fp32 and back, and a product with twice the bytes; the scores become fp32 too.
    wide = (ROWS + 2 * ROWS) + (2 * ROWS + ROWS) + 2 * ROWS + SELECTED * (2 + 4) + SELECTED * 2
    assert moved(permuted.forward) - moved(grouped.forward) == copies + wide


@pytest.mark.parametrize(("experts", "less"), [("grouped", True), ("sliced", True), ("permuted", False)])
def test_a_compiler_leaves_the_copies_of_permuted_rows_alone(experts: Experts, less: bool) -> None:
    kernels = [kernel for kernel in of(experts).forward if kernel.operation == "dispatch"]
    pricing = Pricing(rates_of(H100).setting(1), BATCH, "bf16", True, Stack(experts=experts))
    alone, compiled = (pricing.work(kernels, backward=False, compiled=one) for one in (False, True))
    assert (compiled.traffic < alone.traffic) is less
    assert (compiled.launches < alone.launches) is less


def test_experts_that_are_modules_run_one_by_one_where_a_model_computes_every_expert() -> None:
    name = "meta-llama/Llama-4-Scout-17B-16E"
    experts = find_model(name).architecture().experts
    together, alone = block(Stack(), name), block(Stack(expert_linears=True), name)
    assert len(products(together.forward)) == 2
    assert len(products(alone.forward)) == 3 * experts
    assert [flops(together.forward), flops(together.backward)] == [flops(alone.forward), flops(alone.backward)]


def test_a_kept_auxiliary_loss_keeps_what_every_block_has_recomputed_before_its_router() -> None:
    architecture = find_model("mistralai/Mixtral-8x7B-v0.1").architecture()
    setting = PassSettings(architecture, BATCH, Device("cuda"), WIDTH, stack=Stack(keeps_routes=True))
    kind = block_kinds(architecture)[0]
    hidden, keys = (TOKENS * width * WIDTH for width in (architecture.hidden, architecture.key_value_width))
    # Each norm: its input in fp32, one number a row, its result before and after the weight. Query, key, value, output
    # and sums of attention; logits and probabilities of the router.
    norm = 4 * hidden + 4 * TOKENS
    attention = 2 * hidden + 2 * keys + 4 * TOKENS * architecture.heads
    kept = block_pass(setting, kind, "full").left
    assert kept == pytest.approx(2 * norm + attention, rel=0.002)
    assert block_pass(setting, kind, "none").left == 0
    assert block_pass(replace(setting, stack=Stack()), kind, "full").left == 0
    workload = Workload(architecture, row_tokens=TOKENS, global_batch_rows=8, evaluates=False)
    choice = Choice("fsdp", 8, 1, 1, "bf16", "full")
    with_it, without = (memory_of(workload, choice, H100, Stack(keeps_routes=keeps)).phases for keeps in (True, False))
    # Of all blocks behind the second one, in whose backward pass the first is gathered.
    assert with_it["backward"] - without["backward"] == (architecture.layers - 2) * kept
    assert with_it["forward"] == without["forward"]


@pytest.mark.parametrize(("model", "waits"), [("Qwen/Qwen3-30B-A3B", True), ("Qwen/Qwen3-8B", False)])
def test_zero3_gathers_the_matrices_of_experts_that_are_modules_one_by_one(model: str, waits: bool) -> None:
    workload = Workload(find_model(model).architecture(), row_tokens=1024, global_batch_rows=64, evaluates=False)
    choice = Choice("zero3", 8, 2, 4, "bf16", "full")
    together, alone = (
        step_time(workload, choice, H100, rates_of(H100), Stack(expert_linears=one)).parts["communication"]
        for one in (False, True)
    )
    assert (alone > together) is waits
    assert waits or alone == together


def test_ranks_that_divide_experts_compute_as_much_with_fewer_and_fuller_ones() -> None:
    whole, divided = of("grouped"), block(Stack(expert_parallel=8))
    assert [flops(whole.forward), flops(whole.backward)] == [flops(divided.forward), flops(divided.backward)]
    for before, after in zip(products(whole.forward), products(divided.forward), strict=True):
        assert (after.m, after.times) == (8 * before.m, before.times // 8)
    assert whole.gradients - divided.gradients == QWEN.experts * sum(MATRICES.values()) * 7 // 8
    # Received rows are sorted by expert, and sorted back.
    assert moved(divided.forward) - moved(whole.forward) == 2 * (2 * ROWS + 8 * SELECTED)


def test_divided_experts_are_not_gathered_and_their_rows_are_exchanged() -> None:
    workload = Workload(QWEN, row_tokens=4096, global_batch_rows=8, evaluates=False)
    choice = Choice("fsdp", 8, 1, 1, "bf16", "full")
    memory = {p: memory_of(workload, choice, H100, Stack(expert_parallel=p)).parts for p in (1, 2, 8)}
    expert = QWEN.experts * sum(MATRICES.values())
    for name in ("parameters", "optimizer state"):
        assert memory[1][name] == memory[2][name] == memory[8][name]
    assert memory[1]["gathered parameters"] - memory[8]["gathered parameters"] >= expert * WIDTH * 7 // 8
    rates = rates_of(H100)
    group = Group(1, 8)
    rows = 4096 * QWEN.experts_per_token * QWEN.hidden * WIDTH
    # There and back in the forward pass, when it is repeated, and in the backward pass, of every block.
    exchanges = 6 * QWEN.layers * rates.all_to_all(rows, group)
    waited = step_time(workload, choice, H100, rates, Stack(expert_parallel=8)).parts["communication"]
    assert exchanges < waited < 1.2 * exchanges
    # A program that sends a row once to each rank sends to 8 (1 - (7/8)^8) = 5.25 ranks instead of eight experts.
    once = step_time(workload, choice, H100, rates, Stack(expert_parallel=8, experts="fused")).parts["communication"]
    fewer = 6 * QWEN.layers * rates.all_to_all(rows * (1 - (7 / 8) ** 8), group)
    assert waited - once == pytest.approx(exchanges - fewer)


def test_rows_cross_the_network_only_for_experts_of_other_nodes() -> None:
    rates = rates_of(parse_machine("2x8xH100@8x400Gb"))
    size = 1e10
    inside, across = rates.all_to_all(size, Group(1, 8)), rates.all_to_all(size, Group(2, 8))
    assert inside == pytest.approx(size * 7 / 8 / (0.8 * 450e9), rel=0.02)
    assert across == pytest.approx(size / 2 / (0.75 * 50e9), rel=0.02)


def test_fused_kernels_of_experts_move_each_row_once_to_sort_and_once_to_sum() -> None:
    grouped, fused = of("grouped"), of("fused")
    assert [flops(grouped.forward), flops(grouped.backward)] == [flops(fused.forward), flops(fused.backward)]
    assert moved(fused.forward) < moved(grouped.forward)
    rows = [kernel for kernel in fused.forward if kernel.operation == "dispatch" and kernel.read >= ROWS]
    assert [kernel.kind for kernel in rows] == ["copy", "reduction"]
    assert fused.kept < grouped.kept


def test_many_small_products_are_slower_than_one_where_that_was_published() -> None:
    blackwell, hopper = (rates_of(parse_machine(card)).setting(1).curves for card in ("1xB200", "1xH100"))
    large = 8192, 8192, 8192
    ratio = blackwell["product/bf16/forward"].seconds(*large) / blackwell["product/bf16/grouped"].seconds(*large)
    assert ratio == pytest.approx(0.55, rel=0.05)
    assert "product/bf16/grouped" not in hopper
