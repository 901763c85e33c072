"""A GPU without memory or computation: fake tensors on `cuda`, of any compute capability.

A host that would wait for the GPU (`item`, `tolist`, `bool` of a tensor) is an error here, as there are no values.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.commands import ROOT


def in_process(module: str) -> dict[str, Any]:
    """Return the JSON that a module prints; in its own process, as torch is told of the GPU before it is imported."""
    import torch

    if shutil.which("g++") is None and not torch.version.cuda:
        pytest.skip("needs g++ to tell a CPU build of torch of a GPU")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def fake_gpu(capability: tuple[int, int]) -> Iterator[list[str]]:
    """Compute on a fake GPU; give the names of the operations on it."""
    import torch
    import torch.nn.attention.flex_attention as torch_flex
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from trainwright.models.attention import packs

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name if hasattr(func, "_schema") else func.name())
            return func(*args, **(kwargs or {}))

    replaced = {
        (torch.cuda, "get_device_capability"): lambda device=None: capability,
        (torch.Tensor, "pin_memory"): lambda tensor: tensor,
        (FakeTensorMode, "avoid_device_init"): property(lambda mode: True),
        # The compiler takes no fake tensors; uncompiled, the operator is the same.
        (torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"): True,
        (packs, "compile_flex_attention"): lambda: torch_flex.flex_attention,
    }
    before = {place: getattr(*place) for place in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Watch():
            yield seen
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
