from __future__ import annotations

import pytest
import torch

from trainwright.parallel.norms import squared_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 4097, 2**18 + 3, 5_000_000])
def test_the_norm_of_any_size_is_right_to_fp32s_digits(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = tensor.double().square().sum()
    assert squared_norm(tensor).item() == pytest.approx(exact.item(), rel=2e-7)
