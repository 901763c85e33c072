from __future__ import annotations

import pytest
import torch

from tests.support.fake_gpu import in_process
from trainwright.parallel.strategy import compute_squared_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 4097, 2**18 + 3, 5_000_000])
def test_the_norm_of_any_size_is_right_to_fp32s_digits(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = tensor.double().square().sum()
    assert compute_squared_norm([tensor]).item() == pytest.approx(exact.item(), rel=2e-7)


def test_all_together_are_the_sum_of_each() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size in (3, 100_000, 200_000, 2**18, 600_000, 1)]
    tensors += [torch.randn(7, 5).bfloat16(), torch.randn(())]
    wanted = sum(float(compute_squared_norm([tensor])) for tensor in tensors)
    assert float(compute_squared_norm(tensors)) == pytest.approx(wanted, rel=1e-7)
    assert float(compute_squared_norm([])) == 0


@pytest.mark.slow
def test_a_gpu_computes_all_norms_of_a_dtype_at_once() -> None:
    found = in_process("tests.support.fake_gpu.norms")
    assert found["operations"].count("aten::_foreach_norm") == 2  # fp32 and bf16
    assert not any("vector_norm" in name for name in found["operations"])
    assert (found["dtype"], found["device"]) == ("torch.float64", "cuda")
