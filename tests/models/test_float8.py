"""Products in float8 against their formulas, and runs with them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.support.runs import Runs
from tests.support.small_models import small_config
from tests.support.training import Case, Trained, train
from trainwright.models.causal_lm import CausalLM, compile_blocks
from trainwright.models.float8 import multiply_blocks_on_gpu, quantize_to_four_bits, swizzle_scales, use_float8
from trainwright.models.recompute import save_activation_memory

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KINDS = ("rowwise", "tensorwise", "mxfp8", "nvfp4")


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None, power: bool) -> torch.Tensor:
    """Return ``x`` rounded to float8 with scales of fp32 along ``dim``, in fp64."""
    values = x.float()
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest
    if power:
        scale = 2.0 ** scale.log2().floor()
    return (values * scale).to(dtype).double() / scale.double()


def by_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded to MXFP8 along its last dimension, in fp64."""
    return torch.cat([rounded(part, E4M3, 1, True) for part in x.split(32, 1)], 1)


def in_four_bits(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded to NVFP4 along its last dimension, in fp64: to the nearest number, of two to the even."""
    power = 2.0 ** (6 * 448 / x.double().abs().amax(1, keepdim=True)).log2().floor()
    blocks = (x.double() * power).unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(2, keepdim=True) / 6).float().to(E4M3).double()
    distances = ((blocks / scales).abs()[..., None] - torch.tensor(E2M1)).abs()
    nearest = (distances + 1e-9 * (torch.arange(8) % 2)).argmin(-1)
    return (torch.tensor(E2M1).double()[nearest] * blocks.sign() * scales).flatten(1) / power


def linear(inputs: int = 64, outputs: int = 96, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)


def passed(layer: nn.Linear, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the result of a layer, and the gradients of its input and its weight."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    out = layer(x)
    out.backward(gradient)
    assert x.grad is not None
    return out.detach(), x.grad, layer.weight.grad


def data(rows: int = 40, inputs: int = 64, outputs: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, inputs) * torch.logspace(-3, 2, rows)[:, None]
    return x.bfloat16(), torch.randn(rows, outputs).mul(torch.logspace(1, -4, rows)[:, None]).bfloat16()


@pytest.mark.parametrize("rows", [40, 37, 1])  # a sum over 37 rows is padded for a GPU
@pytest.mark.parametrize("scales", ["rowwise", "tensorwise"])
def test_a_layer_computes_its_formula(scales: str, rows: int) -> None:
    layer, (x, gradient) = linear(), data(rows)
    assert use_float8([layer], scales) == 1
    out, of_x, of_weight = passed(layer, x, gradient)
    weight, by_rows = layer.weight.detach(), scales == "rowwise"
    dim = 1 if by_rows else None
    expected = rounded(x, E4M3, dim, by_rows) @ rounded(weight, E4M3, dim, by_rows).t()
    slopes = rounded(gradient, E4M3 if by_rows else E5M2, dim, by_rows)
    expected_of_x = slopes @ rounded(weight, E4M3, None, by_rows)
    expected_of_weight = (gradient.double() if by_rows else slopes).t() @ (
        x.double() if by_rows else rounded(x, E4M3, None, False)
    )
    for got, wanted in ((out, expected), (of_x, expected_of_x), (of_weight, expected_of_weight)):
        # Of a rounding to bf16; a row has its own scale.
        torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-8 * float(wanted.abs().mean()))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(40, 64, 96), (37, 32, 32), (1, 160, 64)])
def test_a_layer_in_mxfp8_computes_its_formula(rows: int, inputs: int, outputs: int) -> None:
    layer, (x, gradient) = linear(inputs, outputs), data(rows, inputs, outputs)
    with torch.no_grad():  # blocks differ by more than e4m3 reaches, and all of them count in a sum
        for numbers, of_weight in ((x, layer.weight), (gradient, layer.weight.t())):
            numbers[:, :32] *= 2.0**18
            of_weight[:, :32] *= 2.0**-18
    assert use_float8([layer], "mxfp8") == 1
    out, of_x, of_weight = passed(layer, x, gradient)
    weight = layer.weight.detach()
    assert_rounded(out, by_blocks(x) @ by_blocks(weight).t())
    assert_gradients_of_blocks(of_x, of_weight, gradient, x, weight)


def assert_rounded(result: torch.Tensor, formula: torch.Tensor) -> None:
    """Assert that a result is that of its formula in fp64, rounded to bf16."""
    torch.testing.assert_close(result.double(), formula, rtol=2**-7, atol=2**-8 * float(formula.abs().mean()))


def assert_gradients_of_blocks(
    of_x: torch.Tensor, of_weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> None:
    assert_rounded(of_x, by_blocks(gradient) @ by_blocks(weight.t().contiguous()).t())
    assert_rounded(of_weight, gradient.double().t() @ x.double())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(40, 64, 96), (37, 32, 32), (1, 160, 64)])
def test_a_layer_in_nvfp4_computes_its_formula(rows: int, inputs: int, outputs: int) -> None:
    layer, (x, gradient) = linear(inputs, outputs), data(rows, inputs, outputs)
    assert use_float8([layer], "nvfp4") == 1
    out, of_x, of_weight = passed(layer, x, gradient)
    weight = layer.weight.detach()
    assert_rounded(out, in_four_bits(x) @ in_four_bits(weight).t())
    assert_gradients_of_blocks(of_x, of_weight, gradient, x, weight)
    # Of the largest number of its block: half of the widest distance, with the scale's own rounding.
    largest = x.double().abs().unflatten(1, (-1, 16)).amax(2).repeat_interleave(16, 1)
    assert ((in_four_bits(x) - x.double()).abs() <= largest / 6 * (1 + 2**-4)).all()


def test_numbers_of_four_bits_are_packed_as_torch_packs_them() -> None:
    """The first of two has the lower bits: torch.float4_e2m1fn_x2. Numbers halfway between two become the even one."""
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    numbers = torch.tensor([[*E2M1, *(-size for size in E2M1)], [*halfway, *(-size for size in halfway)]])
    packed, scales = quantize_to_four_bits(numbers, torch.ones(2, 1))
    assert packed.tolist() == [
        [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE],
        [0x20, 0x42, 0x64, 0x76, 0xA8, 0xCA, 0xEC, 0xFE],
    ]
    assert scales.view(E4M3).tolist() == [[1.0], [1.0]]


def test_a_row_and_a_weight_of_any_size_are_rounded_as_others_are() -> None:
    """Their own factors are powers of two, which round nothing."""
    layer, (x, _) = linear(), data(2)
    use_float8([layer], "nvfp4")
    out = layer(x).detach()
    assert torch.equal(layer(x * 2.0**40), out * 2.0**40)
    with torch.no_grad():
        layer.weight *= 2.0**-30
    assert torch.equal(layer(x), out * 2.0**-30)


def test_scales_of_mxfp8_have_the_order_of_a_gpu() -> None:
    scales = torch.arange(200 * 6).remainder(251).to(torch.uint8).view(200, 6)
    expected = torch.zeros(256 * 8, dtype=torch.uint8)
    for row in range(200):
        for column in range(6):
            tile = 512 * (row // 128 * 2 + column // 4)  # tiles of 128 x 4, row by row
            expected[tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    assert torch.equal(swizzle_scales(scales), expected)


def test_torch_takes_what_mxfp8_gives_a_gpu() -> None:
    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    rows, columns = empty(37, 96, dtype=E4M3), empty(160, 96, dtype=E4M3).t()
    of_rows, of_columns = empty(37, 3, dtype=torch.uint8), empty(160, 3, dtype=torch.uint8)
    out = multiply_blocks_on_gpu(rows, columns, of_rows, of_columns)
    assert (out.shape, out.dtype) == ((37, 160), torch.bfloat16)
    with pytest.raises(RuntimeError, match="scale_a must have"):  # torch checks them also without a GPU
        multiply_blocks_on_gpu(rows, columns, empty(200, 3, dtype=torch.uint8), of_columns)
    rows, columns = empty(37, 48, dtype=torch.uint8), empty(160, 48, dtype=torch.uint8).t()  # two numbers in each
    of_rows, of_columns = empty(37, 6, dtype=torch.uint8), empty(160, 6, dtype=torch.uint8)
    out = multiply_blocks_on_gpu(rows, columns, of_rows, of_columns)
    assert (out.shape, out.dtype) == ((37, 160), torch.bfloat16)
    with pytest.raises(RuntimeError, match="NV scaling scale_a must have"):
        multiply_blocks_on_gpu(rows, columns, empty(200, 6, dtype=torch.uint8), of_columns)


@pytest.mark.parametrize("scales", ["rowwise", "mxfp8", "nvfp4"])
def test_a_row_does_not_depend_on_the_others(scales: str) -> None:
    layer, (x, gradient) = linear(bias=True), data()
    use_float8([layer], scales)
    out, of_x, _ = passed(layer, x, gradient)
    part_out, part_of_x, _ = passed(layer, x[:7], gradient[:7])
    torch.testing.assert_close(part_out, out[:7], rtol=0, atol=0)
    torch.testing.assert_close(part_of_x, of_x[:7], rtol=0, atol=0)
    other = linear()
    use_float8([other], "tensorwise")
    assert not torch.equal(passed(other, x[:7], gradient[:7])[0], passed(other, x, gradient)[0][:7])


@pytest.mark.parametrize("scales", KINDS)
def test_numbers_of_zero_stay_zero_and_a_bias_is_added(scales: str) -> None:
    layer = linear(bias=True)
    use_float8([layer], scales)
    assert torch.equal(layer(torch.zeros(1, 3, 64, dtype=torch.bfloat16)), layer.bias.expand(1, 3, -1))


@pytest.mark.parametrize("scales", KINDS)
@pytest.mark.parametrize("number", ["inf", "nan"])
def test_numbers_that_are_not_finite_do_not_become_finite_ones(scales: str, number: str) -> None:
    layer, (x, gradient) = linear(), data(3)
    use_float8([layer], scales)
    x[1, 5] = gradient[2, 7] = float(number)
    out, of_x, of_weight = passed(layer, x, gradient)
    assert not out[1].isfinite().any() and not of_x[2].isfinite().any() and not of_weight[7].isfinite().all()


def test_routers_and_other_sizes_are_left_alone() -> None:
    block = nn.ModuleDict({"gate": linear(), "odd": linear(64, 40), "up": linear(), "norm": nn.LayerNorm(64)})
    assert use_float8([block], "no") == 0
    assert use_float8([block], "rowwise") == 1
    odd = linear(48, 96)  # a multiple of 16, but not of 32
    assert [use_float8([odd], scales) for scales in ("mxfp8", "nvfp4", "tensorwise")] == [0, 0, 1]
    assert "forward" in vars(block["up"]) and "forward" not in vars(block["gate"])
    assert list(block.state_dict()) == ["gate.weight", "odd.weight", "up.weight", "norm.weight", "norm.bias"]


def language_model(scales: str) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_config("llama")), dtype=torch.bfloat16)
    lm = CausalLM(model, packed=True)
    use_float8(lm.blocks(), scales)
    return lm


def gradients(lm: CausalLM) -> list[torch.Tensor]:
    from tests.planning.trace.real_step import batch_of

    lm(batch_of((48, 80, 64), True, lm.config.vocab_size)).backward()
    return [parameter.grad.float() for parameter in lm.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("recompute", "scales"), [("full", "rowwise"), ("selective", "rowwise"), ("selective", "nvfp4")]
)
def test_recomputed_blocks_have_the_same_gradients(recompute: str, scales: str) -> None:
    plain, again = language_model(scales), language_model(scales)
    save_activation_memory(again.blocks(), recompute)
    assert all(map(torch.equal, gradients(plain), gradients(again)))


@pytest.mark.parametrize("scales", KINDS)
def test_layers_are_compiled_once_for_all_lengths(scales: str) -> None:
    """Two: what the first one took from outside, such as a global number, the second one has to find."""
    layers = nn.Sequential(linear(64, 64), linear())
    use_float8([layers], scales)
    compiled = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layers[1](layers[0](x)))

    def compile_as_it_is(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    passes = torch.compile(compute, dynamic=True, fullgraph=True, backend=compile_as_it_is)
    for rows in (40, 41, 56, 72):
        passes(torch.randn(rows, 64, dtype=torch.bfloat16))
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scales", KINDS)
def test_a_compiled_layer_computes_the_same(scales: str) -> None:
    layers, (x, gradient) = [nn.Sequential(linear()) for _ in range(2)], data()
    for layer in layers:
        use_float8([layer], scales)
    plain = layers[0][0]
    compile_blocks(layers[1:])
    expected = passed(plain, x, gradient)
    x = x.clone().requires_grad_()
    out = layers[1](x)
    out.backward(gradient)
    for one, other in zip(expected, (out, x.grad, layers[1][0].weight.grad), strict=True):
        assert (one - other).norm() < 1e-3 * one.norm()


FLOAT8 = ("train.mixed_precision=bf16", "train.float8=rowwise", "model.dropout=0", "train.max_steps=8")
# By the value of train.float8 that is compared: how far losses are from those in bf16, at most.
OFF = {"rowwise": 5e-3, "mxfp8": 5e-3, "nvfp4": 3e-2}


def of_kind(scales: str, *more: str) -> Case:
    return Case((*FLOAT8, f"train.float8={scales}", *more))


@pytest.fixture(scope="module")
def trained(runs: Runs) -> dict[str, Trained]:
    return train(runs, {scales: of_kind(scales) for scales in ("no", *OFF)}, 1)


def test_micro_batches_of_one_have_the_losses_of_larger_ones(runs: Runs, trained: dict[str, Trained]) -> None:
    cases = {scales: of_kind(scales, "train.micro_batch_size=1") for scales in ("mxfp8", "nvfp4")}
    for scales, divided in train(runs, cases, 1).items():
        losses, bf16 = (trained[name].column("loss") for name in (scales, "no"))
        assert divided.column("loss") == pytest.approx(losses, rel=2e-4)
        assert losses != bf16 and losses == pytest.approx(bf16, rel=OFF[scales])


@pytest.mark.parametrize("strategies", [("ddp", "fsdp"), pytest.param(("zero1", "zero3"), marks=pytest.mark.slow)])
def test_two_processes_have_the_losses_of_one(
    runs: Runs, trained: dict[str, Trained], strategies: tuple[str, ...]
) -> None:
    cases = {(s, name): of_kind(s, f"parallel.strategy={name}") for name in strategies for s in OFF}
    for (scales, _), run in train(runs, cases, 2).items():
        assert run.column("loss") == pytest.approx(trained[scales].column("loss"), rel=2e-4)
    one, bf16 = (trained[name].column("loss") for name in ("rowwise", "no"))
    assert one != bf16 and one == pytest.approx(bf16, rel=OFF["rowwise"])


def test_a_run_that_is_stopped_goes_on_to_the_bit(runs: Runs, trained: dict[str, Trained]) -> None:
    where = str(runs.new_directory("float8"))
    train(runs, {"stopped": Case(FLOAT8, until=4, checkpoints=where)}, 1)
    resumed = train(runs, {"resumed": Case(FLOAT8, checkpoints=where)}, 1)["resumed"]
    assert resumed.column("loss") == trained["rowwise"].column("loss")[4:]
