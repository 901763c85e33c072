from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.machine.processor import Processor
from trainwright.models.attention import packs
from trainwright.models.attention import plain as kernels
from trainwright.models.attention.packs import packed_attention
from trainwright.models.attention.sequences import Call
from trainwright.models.causal_lm import compile_blocks

LENGTHS = [1, 7, 33, 2, 50]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
    """All sequences at once with a dense mask, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    allowed = (sequence[:, None] == sequence) & (place[:, None] >= place)
    if window is not None:
        allowed &= place[:, None] - place < window
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def inputs(dtype: torch.dtype, heads: int = 6, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = [(1, total, n, 16) for n in (heads, kv_heads, kv_heads)]
    made = [torch.randn(s, generator=generator).transpose(1, 2).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in made]


def boundaries() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_each_sequence_sees_itself_alone(window: int | None, softcap: float | None, kv_heads: int) -> None:
    q, k, v = inputs(torch.float32, kv_heads=kv_heads)
    output, _ = packed_attention(
        nn.Identity(), q, k, v, None,
        cu_seq_lens_q=boundaries(), max_length_q=max(LENGTHS), sliding_window=window, softcap=softcap,
    )  # fmt: skip
    expected = plain(q, k, v, window, softcap)
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-5)
    assert output.is_contiguous()  # some models view it
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((output * weight).sum(), [q, k, v])
    want = torch.autograd.grad((expected * weight.double()).sum(), [q, k, v])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_bf16_is_as_good_as_its_rounding() -> None:
    q, k, v = inputs(torch.bfloat16)
    output, _ = packed_attention(nn.Identity(), q, k, v, None, cu_seq_lens_q=boundaries(), max_length_q=max(LENGTHS))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), plain(q, k, v, None, None), rtol=1e-2, atol=1e-2)


class Kernels(TorchDispatchMode):
    """Note in which dtypes flash attention is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention_for_cpu" in str(func):
            self.dtypes += {x.dtype for x in args if isinstance(x, torch.Tensor) and x.dim() == 4}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("instructions", "lengths", "backward"),
    [
        (("amx_bf16",), (300, 511), torch.float32),
        (("amx_bf16",), (300, 512), torch.bfloat16),
        (("avx2", "avx512_bf16"), (300, 512), torch.float32),
    ],
)
def test_a_processor_computes_in_the_precision_that_is_fast_on_it(
    monkeypatch: pytest.MonkeyPatch, instructions: tuple[str, ...], lengths: tuple[int, ...], backward: torch.dtype
) -> None:
    monkeypatch.setattr(kernels, "detect_processor", lambda: Processor(instructions=instructions))
    kernels.choose_least_bf16_length.cache_clear()
    q, k, v = (torch.randn(1, sum(lengths), heads, 16).transpose(1, 2).bfloat16() for heads in (6, 2, 2))
    edges = torch.tensor([0, *lengths]).cumsum(0)
    with Kernels() as computed:
        output, sums = kernels.flash_forward(q, k, v, edges, 0.25)
        gradients = kernels.flash_backward(output, q, k, v, output, sums, edges, 0.25)
    kernels.choose_least_bf16_length.cache_clear()
    assert computed.dtypes == [torch.bfloat16] * 2 + [backward] * 2
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(lengths, 2) for x in double), strict=True)
    exact = torch.cat(
        [F.scaled_dot_product_attention(*p, is_causal=True, scale=0.25, enable_gqa=True) for p in parts], 2
    )
    for got, want in zip(gradients, torch.autograd.grad(exact, double, output.double()), strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_sequences_of_one_length_are_what_each_is_alone(dtype: torch.dtype, kv_heads: int) -> None:
    q, k, v = inputs(dtype, kv_heads=kv_heads)
    sequences, length = 3, sum(LENGTHS) // 3
    q, k, v = (x.detach()[:, :, : sequences * length].requires_grad_() for x in (q, k, v))

    def attended(*tensors: torch.Tensor, count: int) -> torch.Tensor:
        edges = torch.arange(0, count * length + 1, length, dtype=torch.int32)
        return packed_attention(nn.Identity(), *tensors, None, cu_seq_lens_q=edges, max_length_q=length)[0]

    together = attended(q, k, v, count=sequences)
    alone = torch.cat(
        [attended(*parts, count=1) for parts in zip(*(x.split(length, 2) for x in (q, k, v)), strict=True)], 1
    )
    torch.testing.assert_close(together, alone)
    weight = torch.randn(together.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for got, want in zip(
        torch.autograd.grad(together, [q, k, v], weight), torch.autograd.grad(alone, [q, k, v], weight), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_one_length_keep_their_own_precision(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    edges = torch.arange(0, q.shape[2] + 1, q.shape[2] // 2, dtype=torch.int32)
    q, k, v = (x.detach()[:, :, : edges[-1]].requires_grad_() for x in (q, k, v))
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        packed_attention(nn.Identity(), q, k, v, None, cu_seq_lens_q=edges, max_length_q=q.shape[2] // 2)
    assert kept.count(dtype) >= 4  # queries, keys, values, output; fp32 sums beside them


def test_attention_sinks_take_their_part_of_the_weight() -> None:
    q, k, v = inputs(torch.float32)
    sinks = torch.full((6,), -1e9)
    arguments = {"cu_seq_lens_q": boundaries(), "max_length_q": max(LENGTHS)}
    without, _ = packed_attention(nn.Identity(), q, k, v, None, **arguments)
    negligible, _ = packed_attention(nn.Identity(), q, k, v, None, s_aux=sinks, **arguments)
    torch.testing.assert_close(negligible, without, rtol=1e-5, atol=1e-5)
    overwhelming, _ = packed_attention(nn.Identity(), q, k, v, None, s_aux=-sinks, **arguments)
    assert overwhelming.abs().max() == 0


def test_the_operator_is_right_by_torchs_own_checks() -> None:
    q, k, v = inputs(torch.float32)
    torch.library.opcheck(torch.ops.trainwright.packed_flash_cpu, (q, k, v, boundaries(), 0.25))
    whole = torch.tensor([0, sum(LENGTHS)], dtype=torch.int32)
    torch.library.opcheck(torch.ops.trainwright.packed_flash_cpu, (q, k, v, whole, 0.25))


def test_dropout_drops_and_keeps_the_scale() -> None:
    q, k, v = inputs(torch.float32)
    v = torch.ones_like(v)
    torch.manual_seed(0)
    output, _ = packed_attention(
        nn.Identity(), q, k, v, None, cu_seq_lens_q=boundaries(), max_length_q=max(LENGTHS), dropout=0.5
    )
    assert output.std() > 0.05
    assert abs(output.mean().item() - 1) < 0.1
    assert F.mse_loss(output, torch.ones_like(output)) > 0


def test_a_scale_of_the_models_own_reaches_the_scores() -> None:
    query, key, value = (x.detach() for x in inputs(torch.float32))
    told = {"cu_seq_lens_q": boundaries(), "max_length_q": max(LENGTHS)}
    found, _ = packed_attention(nn.Module(), query, key, value, None, scaling=0.5, **told)  # type: ignore[arg-type]
    expected = plain(query * 2, key, value, None, None).float()  # of heads of 16 numbers the scale is a quarter
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_compiled_code_has_activated_flash_attention_4_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler cannot follow torch's switch, which changes torch's operators."""
    activated: list[str] = []

    def activate(name: str) -> None:
        assert not torch.compiler.is_dynamo_compiling()
        activated.append(name)

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
    monkeypatch.setattr(packs, "_switched", set())
    monkeypatch.setattr(packs, "varlen", lambda call, sequences: call.query.transpose(1, 2))
    compile_blocks([])
    edges = torch.tensor([0, 4], dtype=torch.int32)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return packs.flash_attn_4(Call(x, x, x, edges, 4, 1.0), None)

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    for length in (4, 5, 6):
        x = torch.randn(1, 2, length, 8)
        assert torch.equal(compiled(x), x.transpose(1, 2))
    assert activated == ["FA4"]
