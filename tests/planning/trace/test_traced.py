"""Traces against real steps on the CPU."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.planning.trace.real_step import batch_of, measured, planned, real_model, shape_of
from tests.support.small_models import causal_families, small_config
from trainwright.models import linear_losses
from trainwright.models.attention import plain
from trainwright.parallel.constants import BF16_FROM_LENGTH
from trainwright.planning.trace import traced
from trainwright.planning.trace.build import build_samples
from trainwright.planning.trace.fit import Fitter
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest, choose_row_kind
from trainwright.planning.trace.traced import read_model_facts, size_model
from trainwright.planning.trace.units import BatchShape, compute_basis
from trainwright.recipe.sections.model import AdapterSection

PACK, SHORT, ROWS, PADDED = (128, 320, 576), (100, 60, 96, 128), (512, 512), (256, 512)


@pytest.fixture(autouse=True)
def _processor_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention as on the processor that requests are of."""
    monkeypatch.setattr(plain, "choose_least_bf16_length", lambda: BF16_FROM_LENGTH)


class Case(NamedTuple):
    """A step. ``rows``: lengths of its sequences, packed if there are more than two."""

    family: str
    rows: tuple[int, ...] = PACK
    dtype: Any = "fp32"
    adapter: dict[str, Any] | None = None
    recompute: str | int = "none"
    float8: Any = "no"


_CPU = Device("cpu", fused=True)


def compared(case: Case, device: Device = _CPU, **sizes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return what the trace says, and what a real step takes. ``sizes``: of the model, instead of usual ones."""
    configuration, packed = {**small_config(case.family), **sizes}, len(case.rows) > 2
    batch = batch_of(case.rows, packed, configuration["vocab_size"])
    shape, model = shape_of(batch), replace(TracedModel.of(configuration), float8=case.float8)
    if case.adapter is not None:
        model = model.add_adapter(AdapterSection(**case.adapter))
    request = TraceRequest(model, device, case.dtype, choose_row_kind(shape), case.recompute)
    return planned(size_model(request, shape)), measured(real_model(request), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"vocab_size": 16, "intermediate_size": 16}),  # attention, which converts short sequences
        ("phi", {"vocab_size": 2048}),  # the gradient of the head's bias, which is summed in fp32
    ],
)
def test_what_operators_convert_inside_is_counted(family: str, sizes: dict[str, int]) -> None:
    plan, real = compared(Case(family, (448, 320, 256), "bf16", recompute="full"), **sizes)
    for phase in ("step", "evaluation"):  # without these conversions up to 46 % less
        assert plan[phase] == pytest.approx(real[phase], rel=0.03)


_SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "case",
    [
        Case("llama"),
        Case("qwen3", SHORT, "bf16"),
        Case("gemma2", ROWS),
        pytest.param(Case("mistral", PADDED, recompute="full"), marks=_SLOW),
        pytest.param(Case("qwen3_moe", dtype="bf16"), marks=_SLOW),
        pytest.param(
            Case("llama", adapter={"type": "dora", "quantization": "nf4", "modules_to_save": ["lm_head"]}), marks=_SLOW
        ),
        Case("llama", adapter={"type": "oft", "block_size": 8}),
        pytest.param(Case("gpt2", PADDED, "bf16", recompute="selective"), marks=_SLOW),
        Case("llama", dtype="bf16", float8="rowwise"),
        Case("llama", dtype="bf16", float8="mxfp8"),
        Case("llama", dtype="bf16", float8="nvfp4"),
        pytest.param(Case("llama", dtype="bf16", float8="tensorwise"), marks=_SLOW),
        pytest.param(Case("qwen3", PADDED, "bf16", recompute="selective", float8="rowwise"), marks=_SLOW),
    ],
    ids=str,
)
def test_a_step_allocates_and_computes_what_its_trace_says(case: Case) -> None:
    plan, real = compared(case)
    assert plan["step"] == pytest.approx(real["step"], rel=1e-4 if case.dtype == "fp32" else 5e-3)
    assert plan["evaluation"] == pytest.approx(real["evaluation"], rel=0.05)
    assert plan["flops"] == pytest.approx(real["flops"], rel=1e-9 if case.dtype == "fp32" else 5e-3)


@pytest.mark.parametrize(
    ("case", "within"),
    [
        (Case("mpt", PADDED, recompute="full"), 1e-4),  # the scores of the last block are gone when the head runs
        (Case("inkling2_text", (256, 256)), 1e-4),  # sums by index; scores for each position of a window
        (Case("gpt_neox", (100,) * 5 + (95,) * 15, "bf16"), 0.05),  # results of a sequence, in a loop over sequences
    ],
    ids=str,
)
def test_what_is_released_before_the_next_is_made_is_not_counted_twice(case: Case, within: float) -> None:
    plan, real = compared(case, **({"sliding_window": 512} if case.family == "inkling2_text" else {}))
    assert plan["step"] == pytest.approx(real["step"], rel=within)


@pytest.mark.parametrize("rows", [SHORT, pytest.param(PADDED, marks=_SLOW)], ids=str)
def test_norms_of_heads_that_come_before_the_tokens_take_all_of_them_at_a_time(rows: tuple[int, ...]) -> None:
    """Also where the keys have one head, whose strides are those of tokens."""
    plan, real = compared(Case("gemma3_text", rows, "bf16"), num_key_value_heads=1)
    assert plan["step"] == pytest.approx(real["step"], rel=5e-3)  # counted by tokens, several times as much


@pytest.mark.parametrize("family", ["bloom", "gpt2"])
def test_gradients_are_of_parameters_of_their_unit(family: str) -> None:
    """Also of the bias of a norm before the blocks."""
    for unit in traced.load_trace(TraceRequest(TracedModel.of(small_config(family)), _CPU, "fp32", "plain")).units:
        names = {parameter.name for parameter in unit.parameters}
        assert {moment.gradient for moment in unit.backward.moments} <= {"", *names}


def test_a_quantized_model_has_as_many_parameters_as_without() -> None:
    """The weights of a new one are drawn in fp32 before they are quantized."""
    model = TracedModel.of(small_config("qwen2"))
    plain, quantized = (model.add_adapter(AdapterSection(type="lora", quantization=how)) for how in ("none", "nf4"))
    assert read_model_facts(quantized).total == read_model_facts(plain).total


@pytest.mark.parametrize("fields", [{}, {"quantization": "nf4", "quantize_experts": True}], ids=["", "quantized"])
def test_the_weights_of_experts_with_what_their_adapter_adds_are_counted(fields: dict[str, Any]) -> None:
    """torch counts no grouped products, so FLOPs are not compared."""
    adapter = {"type": "lora", "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], **fields}
    traced = TracedModel.of(small_config("mixtral")).add_adapter(AdapterSection(**adapter))
    assert {key: traced.adapter_section[key] for key in adapter} == adapter
    plan, real = compared(Case("mixtral", adapter=adapter))
    assert plan["step"] == pytest.approx(real["step"], rel=1e-4)
    assert plan["evaluation"] == pytest.approx(real["evaluation"], rel=0.05)


def test_a_processor_without_amx_converts_long_sequences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "choose_least_bf16_length", lambda: 2**62)
    case, sizes = Case("llama", (1024, 512, 512), "bf16", recompute="full"), {"vocab_size": 16, "intermediate_size": 16}
    plan, real = compared(case, replace(_CPU, amx=False), **sizes)
    assert plan["step"] == pytest.approx(real["step"], rel=0.05)
    assert compared(case, **sizes)[0]["step"] < 0.65 * plan["step"]


def test_a_product_of_float8_has_its_scaled_operand_beside_the_one_in_fp32() -> None:
    """At the weights' gradients, whose operands have a column for each token, the largest of a small model's step."""
    case = Case("llama", dtype="bf16", float8="tensorwise")
    plan, real = compared(case, vocab_size=128, num_hidden_layers=2)
    assert plan["step"] == pytest.approx(real["step"], rel=5e-3)  # without it 7 % less


def test_rows_of_the_loss_are_padded_as_in_a_run() -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # whose products work in some memory of their own
        plan, real = compared(Case("llama", (256, 160, 96), "bf16"), vocab_size=8192, num_hidden_layers=1)
    assert plan["step"] == pytest.approx(real["step"], rel=5e-4)  # without the rows and their copy 1 % less


def test_sizes_of_all_tokens_of_a_pack_beside_each_other_are_exact() -> None:
    """As in models that compare all of them, and mask those of other sequences."""
    shapes = build_samples("packed", Regime())
    fitted = Fitter([shape.basis() for shape in shapes])([4 * sum(shape.lengths) ** 2 for shape in shapes])
    batch = BatchShape(1, 512, ((256, 1), (160, 1), (96, 1)), 400, packed=True, masked=False)
    assert fitted @ compute_basis(batch, 400, 400, 1) == pytest.approx(4 * 512**2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_loop_over_parts_of_a_sequence_is_traced_with_several() -> None:
    plan, real = compared(Case("minimax", ROWS))  # whose linear attention takes 256 tokens at a time
    assert plan["step"] == pytest.approx(real["step"], rel=5e-3)  # traced with up to 320 tokens, it is 24 % more


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_steps_of_many_architectures() -> None:
    errors: dict[str, float] = {}
    for family in causal_families()[::4]:
        try:
            plan, real = compared(Case(family, ROWS))
        except Exception:  # of the small configuration, or of the family's code in a real step
            continue
        errors[family] = abs(plan["step"] / real["step"] - 1)
    assert len(errors) > 20
    assert statistics.median(errors.values()) < 0.005
    assert max(errors.values()) < 0.03, errors


@pytest.mark.slow
def test_chunks_of_the_loss_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, block = 2**18, 2**16
    monkeypatch.setattr(linear_losses, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(linear_losses, "BLOCK_BYTES", block)
    monkeypatch.setattr(traced, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(traced, "BLOCK_BYTES", block)
    traced.load_trace.cache_clear()
    plan, real = compared(Case("llama"))
    traced.load_trace.cache_clear()
    assert plan["step"] == pytest.approx(real["step"], rel=1e-4)
    assert plan["flops"] == pytest.approx(real["flops"], rel=5e-3)  # the last chunk is smaller
