"""Products of experts as other programs compute them, and the rows that they copy for that."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from trainwright.machine.describe import parse_machine
from trainwright.planning.architectures.catalog import find_model
from trainwright.planning.operations import BatchShape, Device, Pass, PassSettings, block_kinds, block_pass
from trainwright.planning.operations.tape import Kernel
from trainwright.planning.stack import Experts, Stack
from trainwright.planning.step_time.rates import rates_of
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
