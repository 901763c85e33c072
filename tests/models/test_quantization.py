"""Quantized linear layers: bitsandbytes' numbers, whatever dtype, batch or mode they are used in."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.slow import slow_but
from trainwright.models.load import load_model
from trainwright.models.quantization import NF4, DoubleNF4, Int8, QuantizedLinear, WeightFormat, count_parameters
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.model import ModelSection

KINDS: dict[str, type[WeightFormat]] = {"nf4": NF4, "double nf4": DoubleNF4, "int8": Int8}
# Rows and columns: one where neither the bits nor the blocks of scales come out even.
SHAPES = ((96, 128), (30, 70), (7, 34))


def weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02


def expected(kind: str, of: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes makes of a weight and back."""
    if kind == "int8":
        bits, scales, _ = int8_vectorwise_quant(of.half())
        return int8_vectorwise_dequant(bits, scales)
    bits, state = quantize_4bit(of, blocksize=64, quant_type="nf4", compress_statistics=kind == "double nf4")
    return dequantize_4bit(bits, state)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_what_bitsandbytes_makes_of_it(kind: str, shape: tuple[int, int]) -> None:
    layer = QuantizedLinear(weight(shape), None, KINDS[kind])
    torch.testing.assert_close(layer.dequantize(), expected(kind, weight(shape)), rtol=1e-6, atol=1e-9)
    assert (layer.dequantize() - weight(shape)).abs().max() < 0.012


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_stay_bits_whatever_they_are_looked_at_as(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        layer = QuantizedLinear(weight(shape), None, KINDS[kind])
        before = layer.dequantize()
        layer.weight.data = layer.weight.data.view(dtype)
        assert torch.equal(layer.dequantize(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_expanded_weight(kind: str) -> None:
    torch.manual_seed(0)
    layer = QuantizedLinear(weight((96, 128)), torch.randn(96), KINDS[kind])
    x = torch.randn(5, 3, 128, requires_grad=True)
    plain = nn.functional.linear(x, layer.dequantize(), layer.bias)
    gradient = torch.randn_like(plain)
    (wanted,) = torch.autograd.grad(plain, x, gradient)
    for mode in (True, False):
        product = layer.train(mode)(x)
        (found,) = torch.autograd.grad(product, x, gradient)
        assert torch.equal(product, plain) and torch.equal(found, wanted)
        with torch.no_grad():
            assert torch.equal(layer(x), plain), "evaluation multiplies by the same weight"
    layer.bias.data = layer.bias.data.bfloat16()  # as strategies give it
    low = layer(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - plain).abs().max() < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    layer = QuantizedLinear(weight((96, 128)), None, KINDS[kind])
    rows = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    rows[2] *= 100  # an outlier, by which LLM.int8() would treat columns of all rows otherwise
    torch.testing.assert_close(layer(rows)[:1], layer(rows[:1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_bits_is_kept_for_the_backward_pass(kind: str) -> None:
    layer = QuantizedLinear(weight((96, 128)), None, KINDS[kind])
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(6, 128, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr()]


def peak(work: Callable[[], object]) -> int:
    """Bytes that this process holds at most while it works, beyond what it holds before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells how much a process held at most")
@pytest.mark.parametrize("kind", slow_but("nf4", among=("nf4", "int8")))
def test_a_base_is_quantized_as_it_is_read(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, vocab_size=300, dtype=torch.bfloat16)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    build_bytes_tokenizer().save_pretrained(tmp_path)
    section = ModelSection.model_validate(
        {"name": str(tmp_path), "adapter": {"type": "lora", "quantization": kind}, "tokenizer": "bytes"}
    )
    load_model(section)  # what is made once and kept, whatever is loaded
    held: list[int] = []
    most = peak(lambda: held.append(count_parameters(load_model(section))[0]))
    # As it was in the file it is 2 bytes a parameter, and in fp32 4.
    assert held[0] > 4e7
    assert most < {"nf4": 1.8, "int8": 1.9}[kind] * held[0], most / held[0]
