"""Products in float8 against their formulas, and runs with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import Runs
from tests.support.small_models import small_config
from tests.support.training import Case, Trained, train
from trainwright.models.causal_lm import CausalLM, compile_blocks
from trainwright.models.float8 import block_product_on_gpu, swizzled, use_float8
from trainwright.models.recompute import save_activation_memory

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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
    formulas = (
        (out, by_blocks(x) @ by_blocks(weight).t()),
        (of_x, by_blocks(gradient) @ by_blocks(weight.t().contiguous()).t()),
        (of_weight, gradient.double().t() @ x.double()),
    )
    for got, wanted in formulas:
        torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-8 * float(wanted.abs().mean()))


def test_scales_of_mxfp8_have_the_order_of_a_gpu() -> None:
    scales = torch.arange(200 * 6).remainder(251).to(torch.uint8).view(200, 6)
    expected = torch.zeros(256 * 8, dtype=torch.uint8)
    for row in range(200):
        for column in range(6):
            tile = 512 * (row // 128 * 2 + column // 4)  # tiles of 128 x 4, row by row
            expected[tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    assert torch.equal(swizzled(scales), expected)


def test_torch_takes_what_mxfp8_gives_a_gpu() -> None:
    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    rows, columns = empty(37, 96, dtype=E4M3), empty(160, 96, dtype=E4M3).t()
    of_rows, of_columns = empty(37, 3, dtype=torch.uint8), empty(160, 3, dtype=torch.uint8)
    out = block_product_on_gpu(rows, columns, of_rows, of_columns)
    assert (out.shape, out.dtype) == ((37, 160), torch.bfloat16)
    with pytest.raises(RuntimeError, match="scale_a must have"):  # torch checks them also without a GPU
        block_product_on_gpu(rows, columns, empty(200, 3, dtype=torch.uint8), of_columns)


@pytest.mark.parametrize("scales", ["rowwise", "mxfp8"])
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


def test_numbers_of_zero_stay_zero_and_a_bias_is_added() -> None:
    layer = linear(bias=True)
    use_float8([layer], "rowwise")
    assert torch.equal(layer(torch.zeros(1, 3, 64, dtype=torch.bfloat16)), layer.bias.expand(1, 3, -1))


def test_routers_and_other_sizes_are_left_alone() -> None:
    block = nn.ModuleDict({"gate": linear(), "odd": linear(64, 40), "up": linear(), "norm": nn.LayerNorm(64)})
    assert use_float8([block], "no") == 0
    assert use_float8([block], "rowwise") == 1
    odd = linear(48, 96)  # a multiple of 16, but not of 32
    assert [use_float8([odd], scales) for scales in ("mxfp8", "tensorwise")] == [0, 1]
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
    ("recompute", "scales"), [("full", "rowwise"), ("selective", "rowwise"), ("selective", "mxfp8")]
)
def test_recomputed_blocks_have_the_same_gradients(recompute: str, scales: str) -> None:
    plain, again = language_model(scales), language_model(scales)
    save_activation_memory(again.blocks(), recompute)
    assert all(map(torch.equal, gradients(plain), gradients(again)))


@pytest.mark.parametrize("scales", ["rowwise", "tensorwise", "mxfp8"])
def test_a_layer_is_compiled_once_for_all_lengths(scales: str) -> None:
    layer = nn.Sequential(linear())
    use_float8([layer], scales)
    compiled = []

    def compile_as_it_is(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    layer.compile(dynamic=True, backend=compile_as_it_is)
    for rows in (40, 41, 56, 72):
        layer(torch.randn(rows, 64, dtype=torch.bfloat16))
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["rowwise", "tensorwise", "mxfp8"])
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
MXFP8 = (*FLOAT8, "train.float8=mxfp8")


@pytest.fixture(scope="module")
def trained(runs: Runs) -> dict[str, Trained]:
    return train(runs, {"float8": Case(FLOAT8), "bf16": Case((*FLOAT8, "train.float8=no")), "mxfp8": Case(MXFP8)}, 1)


def test_micro_batches_of_one_have_the_losses_of_larger_ones(runs: Runs, trained: dict[str, Trained]) -> None:
    divided = train(runs, {"divided": Case((*MXFP8, "train.micro_batch_size=1"))}, 1)["divided"].column("loss")
    assert divided == pytest.approx(trained["mxfp8"].column("loss"), rel=2e-4)
    assert trained["mxfp8"].column("loss") != trained["bf16"].column("loss")
    assert trained["mxfp8"].column("loss") == pytest.approx(trained["bf16"].column("loss"), rel=5e-3)


@pytest.mark.parametrize("strategies", [("ddp", "fsdp"), pytest.param(("zero1", "zero3"), marks=pytest.mark.slow)])
def test_two_processes_have_the_losses_of_one(
    runs: Runs, trained: dict[str, Trained], strategies: tuple[str, ...]
) -> None:
    one, bf16 = (trained[name].column("loss") for name in ("float8", "bf16"))
    cases = {name: Case((*FLOAT8, f"parallel.strategy={name}")) for name in strategies}
    blocks = {f"mxfp8 {name}": Case((*MXFP8, f"parallel.strategy={name}")) for name in strategies}
    for name, run in train(runs, cases | blocks, 2).items():
        expected = trained["mxfp8"].column("loss") if name.startswith("mxfp8") else one
        assert run.column("loss") == pytest.approx(expected, rel=2e-4)
    assert one != bf16
    assert one == pytest.approx(bf16, rel=5e-3)


def test_a_run_that_is_stopped_goes_on_to_the_bit(runs: Runs, trained: dict[str, Trained]) -> None:
    where = str(runs.new_directory("float8"))
    train(runs, {"stopped": Case(FLOAT8, until=4, checkpoints=where)}, 1)
    resumed = train(runs, {"resumed": Case(FLOAT8, checkpoints=where)}, 1)["resumed"]
    assert resumed.column("loss") == trained["float8"].column("loss")[4:]
