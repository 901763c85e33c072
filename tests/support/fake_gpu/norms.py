"""The norm of many tensors on a fake GPU: its operations, and the dtype and device of the result; as JSON.

python -m tests.support.fake_gpu.norms
"""

from __future__ import annotations

import json

from tests.support.fake_gpu import fake_gpu
from trainwright.planning.simulation.start import load_simulated_device

load_simulated_device()

import torch  # noqa: E402

from trainwright.parallel.strategy import compute_squared_norm  # noqa: E402

SIZES = (4096, 3, 70_000, 0, 1)

if __name__ == "__main__":
    with fake_gpu((9, 0)) as seen:
        dtypes = torch.float32, torch.bfloat16
        tensors = [torch.empty(size, device="cuda", dtype=dtype) for size in SIZES for dtype in dtypes]
        seen.clear()
        norm = compute_squared_norm(tensors)
        print(json.dumps({"operations": list(seen), "dtype": str(norm.dtype), "device": norm.device.type}))
