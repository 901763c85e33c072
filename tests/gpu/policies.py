"""Step policies of the tests on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.engine.policies.base import StepPolicy

STEP = 5


class FillsMemory(StepPolicy):
    """Leaves a step only a part of the memory that the steps before it took."""

    def before(self, step: int, batch: Any, gradients: Any) -> None:
        """Limit what torch may allocate, in one step."""
        if step == STEP:
            torch.cuda.empty_cache()
            whole = torch.cuda.get_device_properties(0).total_memory
            now, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
            torch.cuda.set_per_process_memory_fraction((now + 0.7 * (peak - torch.cuda.memory_allocated())) / whole)
