"""What a plan says is held of parameters, masters, Adam's moments and gradients, against what each strategy's paper or
code says of them (ZeRO: arXiv 1910.02054, section 3; with fp32 gradients, as DeepSpeed accumulates them)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from trainwright.machine.describe import build_cluster, parse_machine
from trainwright.machine.machine import Machine
from trainwright.machine.processor import Processor
from trainwright.parallel.constants import CACHED_PRODUCTS, PRODUCT_BYTES
from trainwright.planning.memory.peak import Memory, estimate_memory
from trainwright.planning.memory.process import SLACK, estimate_libraries
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Recompute, Workload
from trainwright.recipe.sections.model import AdapterSection

NAME = "process and libraries"

MODEL = TracedModel.of(find_model("HuggingFaceTB/SmolLM2-135M").config)
TINY = TracedModel.of(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": 128,
    }
)
PARAMETERS, LAYERS, HIDDEN = 134_515_008, 30, 576
PROCESSES = 4
SHARD = 1 / PROCESSES
BUCKET = 2**24 / PARAMETERS  # DeepSpeed's, elements of it for each parameter

# Bytes a parameter: as computed with, fp32 masters, both moments, and gradients that are kept between micro-batches.
FP32: dict[str, tuple[float, float, float, float]] = {
    "single": (4, 0, 8, 4),
    "ddp": (4, 0, 8, 4),
    "fsdp": (4 * SHARD, 0, 8 * SHARD, 4 * SHARD),
    "zero1": (4, 4 * SHARD, 8 * SHARD, 4 + 4 * BUCKET),
    "zero2": (4, 4 * SHARD, 8 * SHARD, 4 * SHARD),
    "zero3": (4 * SHARD, 0, 8 * SHARD, 4 * SHARD + 4 * BUCKET),
}
BF16: dict[str, tuple[float, float, float, float]] = {
    "single": (2, 4, 8, 4),
    "ddp": (2, 4, 8, 4),
    "fsdp": (4 * SHARD, 0, 8 * SHARD, 4 * SHARD),  # its shards are the fp32 masters
    "zero1": (2, 4 * SHARD, 8 * SHARD, 2 + 4),  # the backward pass's own, and the fp32 sums
    "zero2": (2, 4 * SHARD, 8 * SHARD, 4 * SHARD),
    "zero3": (2 * SHARD, 4 * SHARD, 8 * SHARD, 4 * SHARD + 4 * BUCKET),
}
CASES = [(name, "no") for name in FP32] + [(name, "bf16") for name in BF16]


@lru_cache
def predicted(strategy: str, precision: str, passes: int) -> Memory:
    choice = Choice(
        strategy=strategy,
        num_processes=1 if strategy == "single" else PROCESSES,
        micro_batch_size=2,
        gradient_accumulation_steps=passes,
        mixed_precision=precision,  # type: ignore[arg-type]
        activation_checkpointing="full",
    )
    workload = Workload(MODEL, row_tokens=256, global_batch_rows=16)
    return estimate_memory(workload, choice, parse_machine("4xA100-80GB"))


@pytest.mark.parametrize(("strategy", "precision"), CASES)
def test_parameters_masters_and_moments_are_what_each_rank_holds_of_them(strategy: str, precision: str) -> None:
    parts = predicted(strategy, precision, 1).parts
    expected = (BF16 if precision == "bf16" else FP32)[strategy]
    for name, bytes_each in zip(("parameters", "master weights", "optimizer state"), expected, strict=False):
        assert parts.get(name, 0) / PARAMETERS == pytest.approx(bytes_each, rel=0.01), name


@pytest.mark.parametrize(("strategy", "precision"), CASES)
def test_gradients_are_held_from_one_micro_batch_to_the_next(strategy: str, precision: str) -> None:
    """A forward pass has them beside it from the second micro-batch on; what lasts lies in every phase."""
    one, two = (predicted(strategy, precision, passes) for passes in (1, 2))
    weights = sum(two.parts.get(name, 0) for name in ("parameters", "master weights", "optimizer state"))
    lasting = two.phases["checkpoint"] - weights
    found = (two.phases["forward"] - one.phases["forward"] + lasting) / PARAMETERS
    # With zero2 in fp32, a rank holds the whole gradient of a parameter of which its part has some.
    assert found == pytest.approx((BF16 if precision == "bf16" else FP32)[strategy][3], rel=0.03)


@pytest.mark.parametrize(("strategy", "precision"), CASES)
def test_a_backward_pass_ends_with_its_gradients(strategy: str, precision: str) -> None:
    memory = predicted(strategy, precision, 1)
    weights = sum(memory.parts.get(name, 0) for name in ("parameters", "master weights", "optimizer state"))
    # fp32 gradients of a rank's part, or the whole model's in what the backward pass computes in.
    whole = strategy in ("single", "ddp", "zero1")
    least = PARAMETERS * ((2 if precision == "bf16" else 4) if whole else 4 * SHARD)
    assert memory.phases["backward"] >= weights + least


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_in_the_hosts_memory_are_not_on_the_device(recompute: Recompute) -> None:
    choice = Choice("single", 1, 8, 1, "bf16", activation_checkpointing=recompute)
    workload = Workload(MODEL, row_tokens=1024, global_batch_rows=8)
    plain, moved = (
        estimate_memory(workload, replace(choice, activation_offload=offload), parse_machine("1xA100-80GB"))
        for offload in (False, True)
    )
    inputs = LAYERS * 8 * 1024 * HIDDEN * 2
    assert "activations" not in plain.host
    if recompute == "none":
        assert moved.host["activations"] > 10 * inputs
    else:  # what comes into each block; selective recomputation's results stay
        assert moved.host["activations"] == pytest.approx(inputs, rel=0.05)
    saved = plain.phases["forward"] - moved.phases["forward"]
    assert saved == pytest.approx(moved.host["activations"], rel=0.1)


def rounded(size: int) -> int:
    """The smallest power of two that is not smaller."""
    power = 1
    while power < size:
        power *= 2
    return power


def test_pinned_memory_is_rounded_up_to_powers_of_two() -> None:
    choice = Choice("fsdp", PROCESSES, 1, 1, "bf16", offload_parameters=True)
    workload = Workload(MODEL, row_tokens=64, global_batch_rows=4)
    host = estimate_memory(workload, choice, parse_machine("4xA100-80GB")).host
    matrices = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    block = [*matrices, (576, 1), (576, 1)]
    shards = [4 * rows * columns // PROCESSES for rows, columns in [(49152, 576), (576, 1), *(30 * block)]]
    # Of every parameter and its gradient; the optimizer's states are not copied to the device.
    assert host["rounding of pinned memory"] == 2 * sum(rounded(size) - size for size in shards)
    assert host["parameters"] == sum(shards)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_in_pinned_memory_are_rounded_up(recompute: Recompute) -> None:
    choice = Choice("single", 1, 7, 1, "bf16", activation_checkpointing=recompute, activation_offload=True)
    host = estimate_memory(Workload(MODEL, row_tokens=1024, global_batch_rows=7), choice, parse_machine("1xH100")).host
    output = 2 * 7 * 1024 * 576
    if recompute == "full":
        assert host["rounding of pinned memory"] == 30 * (rounded(output) - output)
    else:
        assert 0.1 < host["rounding of pinned memory"] / host["activations"] < 1


@pytest.mark.parametrize("on", ["1xA100-80GB", "1xRTX4090"])
def test_an_optimizer_step_of_a_gpu_has_the_gradients(on: str) -> None:
    choice = Choice("single", 1, 1, 2, "bf16", activation_checkpointing="full")
    memory = estimate_memory(Workload(MODEL, row_tokens=64, global_batch_rows=2), choice, parse_machine(on))
    between = memory.phases["checkpoint"]
    assert memory.phases["optimizer"] == pytest.approx(between + 4 * PARAMETERS, rel=0.01)


OF_WORK = ("answers", "saved_width", "master_weights", "weight_decay")


def on_cpu(
    precision: str,
    *instructions: str,
    model: TracedModel = TINY,
    lengths: int = 100,
    steps: int = 100,
    free: int = 2**36,
    **more: object,
) -> Memory:
    """Rows of up to 192 tokens, of ``lengths`` tokens in the mean, on two cores."""
    machine = Machine("here", "a CPU", 2, 2**36, (), memory_free_bytes=free, processor=Processor("X", 1, instructions))
    fixed = {"strategy": "single", "num_processes": 1, "micro_batch_size": 4, "gradient_accumulation_steps": 1}
    work = {name: more.pop(name) for name in OF_WORK if name in more}
    choice = Choice(**{**fixed, "mixed_precision": precision, "threads": 1, **more})  # type: ignore[arg-type]
    rows = {"packed": False, "row_tokens": 192, "document_tokens": lengths, "steps": steps, **work}
    return estimate_memory(Workload(model, global_batch_rows=4, **rows), choice, build_cluster(machine))  # type: ignore[arg-type]


def test_code_of_products_is_that_of_the_shapes_that_a_run_computes_in_bf16() -> None:
    """oneDNN has code for the sizes m, n and k of a product, for torch/aten/src/ATen/native/mkldnn/Matmul.cpp."""
    amx = ("amx_bf16", "avx512_bf16", "avx512f")
    one, four, many = (
        on_cpu("bf16", *amx, lengths=lengths, steps=steps).overhead["code of products"]
        for lengths, steps in ((192, 100), (100, 4), (100, 100))
    )
    # Of a block the queries' and output's, keys' and values', gate's and up's, and down's; with the head's 5, each
    # forward, and for both of its gradients.
    assert one % PRODUCT_BYTES == 0 and 10 <= one / PRODUCT_BYTES <= 20
    assert four == 4 * one and many == min(16 * one, CACHED_PRODUCTS * PRODUCT_BYTES)
    assert all("code of products" not in on_cpu(*without).overhead for without in (("bf16", "avx2"), ("no", *amx)))


def temporary_of(memory: Memory) -> int:
    return memory.tensors - memory.phases["checkpoint"]


def test_a_process_on_a_cpu_keeps_what_passes_free_up_to_what_is_returned() -> None:
    """By the C library, and before every block that is not compiled (machine/allocator.py)."""
    small, large = (on_cpu("no", micro_batch_size=rows, compile=True) for rows in (4, 8192))
    slack = [memory.overhead[SLACK] for memory in (small, large)]
    assert slack[0] == int(1.6 * temporary_of(small)) < 1.6 * 2**28 < slack[1] < temporary_of(large)
    assert on_cpu("no", micro_batch_size=8192).overhead[SLACK] == 384 * 2**20 < 0.6 * temporary_of(large)
    full = {"micro_batch_size": 64, "activation_checkpointing": "full"}
    kept, compiled = on_cpu("no", **full), on_cpu("no", **full, compile=True)
    assert compiled.overhead[SLACK] == int(1.6 * temporary_of(compiled))
    assert 2**26 < kept.overhead[SLACK] < min(2**26 + temporary_of(kept), compiled.overhead[SLACK])


def test_blocks_that_live_on_settle_in_freed_memory_where_sizes_vary_or_blocks_are_recomputed() -> None:
    def settled(lengths: int, recompute: str) -> float:
        memory = on_cpu("no", lengths=lengths, micro_batch_size=16, activation_checkpointing=recompute)
        return memory.overhead[SLACK] / temporary_of(memory)

    kept = [settled(192, "none"), settled(192, "selective"), settled(192, "full"), settled(100, "none")]
    assert kept == pytest.approx([0.6, 0.6, 1.2, 1.2], rel=1e-3)


SHARED: dict[str, Any] = {"num_processes": 2, "micro_batch_size": 1}


def tiny(strategy: str, **more: Any) -> tuple[int, int, int]:
    """Bytes of the copies of the exchange, and of two phases, of the small model on two processes."""
    memory = on_cpu("no", strategy=strategy, **SHARED, **more)
    return memory.overhead.get("copies of the exchange", 0), memory.phases["generation"], memory.phases["export"]


def test_copies_that_gloo_gathers_into_stay_in_the_arena_of_its_thread() -> None:
    """One of each size that was tried stayed there, up to 64 MiB (malloc(3), M_ARENA_MAX)."""
    matrices, vectors, ends = 2 * 128 * 64 + 2 * (2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 160), 5 * 64, 2 * 128 * 64 + 64
    block = (matrices + vectors - ends) // 2
    copied = {name: tiny(name)[0] for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")}
    all_of_it = 4 * (matrices + vectors)
    assert copied == {
        "ddp": 0,
        "fsdp": 4 * max(ends, block),
        "zero1": all_of_it,
        "zero2": all_of_it,
        "zero3": all_of_it,
    }
    assert tiny("zero1", weight_decay=True)[0] == 4 * matrices  # vectors are a group of their own
    choice = Choice("fsdp", 2, 1, 1, "no", threads=1)
    cluster = build_cluster(Machine("here", "a CPU", 2, 2**36, (), memory_free_bytes=2**36))
    large = estimate_memory(Workload(MODEL, row_tokens=64, global_batch_rows=2), choice, cluster)
    assert "copies of the exchange" not in large.overhead  # an embedding of 108 MiB


def test_zero1_in_bf16_concatenates_gradients_of_several_groups_only() -> None:
    """DeepSpeed flattens what it sums over the ranks, which copies nothing of a single tensor (runtime/engine.py)."""
    one, two = (
        on_cpu("bf16", model=MODEL, strategy="zero1", **SHARED, weight_decay=decay).phases["backward"]
        for decay in (False, True)
    )
    assert two - one == pytest.approx(4 * (PARAMETERS - 49_152 * HIDDEN), rel=0.01)


def test_answers_and_the_export_take_the_whole_model_where_it_is_sharded() -> None:
    numel = 2 * 128 * 64 + 2 * (2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 160) + 5 * 64
    between = {name: on_cpu("no", strategy=name, **SHARED).phases["checkpoint"] for name in ("fsdp", "zero1", "zero3")}
    assert tiny("fsdp")[1] == between["fsdp"]  # no prompts
    copies = 2 * 64 * 160  # gloo gathers two parameters at once, through a copy of each
    assert tiny("zero3", answers=True)[1] - between["zero3"] == pytest.approx(4 * (numel + copies), rel=0.02)
    assert 4 * numel < tiny("fsdp", answers=True)[1] - between["fsdp"] < 6 * numel
    assert tiny("zero1", answers=True)[1] == between["zero1"]
    for name in between:  # gathered in fp32 one by one, and saved together
        outside = 4 * (2 * 128 * 64 + 64) * (name == "fsdp")
        assert 4 * numel <= tiny(name)[2] - between[name] - outside <= 5 * numel
    half = tiny("fsdp", saved_width=2)[2] - between["fsdp"]
    assert 2 * numel < half < 4 * numel


def test_fsdp_has_the_parameters_outside_the_blocks_while_the_saved_model_is_read_back() -> None:
    """The pass that gives its logits gathers blocks one by one, and leaves those."""
    outside = 2 * 128 * 64 + 64
    phases = on_cpu("no", strategy="fsdp", **SHARED).phases
    numel = 2 * 128 * 64 + 2 * (2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 160) + 5 * 64
    assert phases["export"] - phases["checkpoint"] == 4 * numel + 8 * 64 * 160 + 4 * outside


def taken_by_export(precision: str, **more: object) -> int:
    """Bytes beside those that last."""
    memory = on_cpu(precision, **more)  # type: ignore[arg-type]
    return memory.phases["export"] - memory.phases["checkpoint"]


def test_the_saved_model_is_read_back_where_memory_for_it_is_free() -> None:
    """Otherwise one that is saved as it is takes no more, and another one a copy."""
    numel, largest = 2 * 128 * 64 + 2 * (2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 160) + 5 * 64, 64 * 160
    ways: list[tuple[str, dict[str, Any]]] = [
        ("no", {}),
        ("no", {"saved_width": 2}),
        ("bf16", {"master_weights": False}),
    ]
    read = [taken_by_export(precision, **how) for precision, how in ways]
    assert read == [width * numel + 8 * largest for width in (4, 2, 4)]
    assert [taken_by_export(precision, free=2**20, **how) for precision, how in ways] == [0, 2 * numel, 4 * numel]


def test_libraries_that_share_their_code_are_counted_once() -> None:
    cluster = build_cluster(Machine("here", "a CPU", 2, 2**36, ()))

    def mebibytes(strategy: str, model: TracedModel) -> float:
        choice = Choice(strategy, 2, 1, 1, "no", threads=1)
        return estimate_libraries(Workload(model, row_tokens=64, global_batch_rows=2), choice, cluster)[NAME] / 2**20

    adapted = TINY.add_adapter(AdapterSection(type="lora"))
    plain, adapter = mebibytes("ddp", TINY), mebibytes("ddp", adapted) - mebibytes("ddp", TINY)
    assert mebibytes("fsdp", adapted) == plain + 20 + adapter
    assert mebibytes("zero1", TINY) == plain + 70 == mebibytes("zero1", adapted) and 0 < adapter < 70


def test_a_loss_of_several_chunks_in_half_precision_is_traced() -> None:
    """Its rows are padded chunk by chunk; a plan would have a bound in place of the trace."""
    assert on_cpu("bf16", "amx_bf16", "avx512_bf16", "avx512f", micro_batch_size=8192).untraced == ""
