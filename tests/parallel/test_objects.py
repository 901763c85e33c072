"""Objects that ranks exchange come back as they were sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainwright.parallel.world import dumps, loads

TENSORS = {
    "scalar": torch.tensor(3.0),
    "empty": torch.ones(0, 3),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "every second": torch.arange(6, dtype=torch.bfloat16)[::2],
    "one element, stride 0": torch.ones(3, dtype=torch.float64).as_strided((1,), (0,)),
    "repeated": torch.ones(1, 1).expand(2, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_any_strides_come_back(name: str) -> None:
    tensor = TENSORS[name]
    again = loads(dumps(tensor))
    assert again.dtype == tensor.dtype and again.shape == tensor.shape and torch.equal(again, tensor)


@pytest.mark.parametrize("array", [np.arange(6)[::-2], np.lib.stride_tricks.as_strided(np.ones(1), (1,), (0,))])
def test_arrays_of_any_strides_come_back(array: np.ndarray) -> None:
    again = loads(dumps(array))
    assert again.dtype == array.dtype and np.array_equal(again, array)
