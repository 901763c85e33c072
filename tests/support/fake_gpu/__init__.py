"""A GPU without memory or computation: fake tensors on `cuda`, of any compute capability.

A host that would wait for the GPU (`item`, `tolist`, `bool` of a tensor) is an error here, as there are no values.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load(directory: Path) -> None:
    """Compile the shim into ``directory`` and load it, unless torch has its own; before torch is imported."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    if (root / "lib" / "libtorch_cuda.so").exists():
        return
    made, library = directory / "no_cuda.so", root / "lib"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{library}", "-o", str(made)]
    source = Path(__file__).with_name("no_cuda.cpp")
    subprocess.run([*command, str(source), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}"], check=True)
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def fake_gpu(capability: tuple[int, int]) -> Iterator[list[str]]:
    """Compute on a fake GPU; give the names of the operations on it."""
    import torch
    import torch.nn.attention.flex_attention as torch_flex
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from trainwright.models.attention import flex

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
        (flex, "compiled"): lambda: torch_flex.flex_attention,
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
