"""Compile the launches of the fused kernels for GPUs that are not here, as Triton does at a first launch on one.

A process of its own does that (``python -m tests.support.compiled_kernels``), as tests have Triton's interpreter; it
prints a JSON object for each launch and GPU.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainwright.models.fused import kernels, operators

GPUS = {
    "A100": GPUTarget("cuda", 80, 32),
    "H100": GPUTarget("cuda", 90, 32),
    "B200": GPUTarget("cuda", 100, 32),
    "RTX 5090": GPUTarget("cuda", 120, 32),
    "MI300X": GPUTarget("hip", "gfx942", 64),
}
_DTYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class _Compiled:
    """Stands for a kernel: launching it compiles it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, **constants: Any) -> None:
            names = self._kernel.arg_names
            types = {name: _type_of(argument) for name, argument in zip(names, arguments, strict=False)}
            types |= dict.fromkeys(constants, "constexpr")
            # Addresses of tensors, and strides that can be, are multiples of 16: what lets loads be wide.
            even = [at for at, it in enumerate(arguments) if torch.is_tensor(it) or (type(it) is int and it % 16 == 0)]
            source = ASTSource(
                self._kernel,
                types,
                {(names.index(name),): value for name, value in constants.items()},
                {(at,): [["tt.divisibility", 16]] for at in even},
            )
            for name, gpu in GPUS.items():
                compiled = triton.compile(source, target=gpu, options={"num_warps": num_warps})
                usage = {"kernel": self._kernel.__name__, "gpu": name, "warps": num_warps}
                print(json.dumps(usage | _usage(compiled.asm.get("cubin"))))

        return launch


def _type_of(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _DTYPES[argument.dtype]
    if isinstance(argument, tuple):
        return tuple(map(_type_of, argument))
    return "fp32" if isinstance(argument, float) else "i32"


def _usage(code: bytes | None) -> dict[str, int]:
    """Return the registers and the bytes of stack of each thread; nothing for other vendors' code."""
    if code is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":") for word in text.split() if word.count(":") == 1 and not word.endswith(":"))
    return {"registers": int(words["REG"]), "stack": int(words["STACK"])}


def launch_all(dtype: torch.dtype) -> None:
    """Launch every kernel with the sizes of small and large models."""
    logits, targets = torch.empty(2, 262144, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    operators.cross_entropy(logits, targets, None, None, 1.0, 0.0, 0.0)
    operators.cross_entropy(logits, targets, torch.ones(2), 30.0, 0.5, 1e-4, 0.1)
    operators.loss_and_correct(logits, targets, 30.0, 1.0)
    for width in (576, 8192):
        rows, weight = torch.empty(64, width, dtype=dtype), torch.ones(width, dtype=dtype)
        _, inverses = operators.rms_norm(rows, weight, 1e-5, False, True)
        operators.add_rms_norm(rows, rows, weight, 1e-5, True, False)
        operators.rms_norm_backward(rows, rows, weight, inverses, None, False)
        operators.rms_norm_backward(rows, rows, weight, inverses, rows, True)
    for is_silu in (True, False):
        operators.gated(rows, rows, is_silu)
        operators.gated_backward(rows, rows, rows, is_silu)
    for query_heads, key_heads, size, rotated in (
        (9, 3, 64, 64),
        (32, 32, 80, 32),
        (8, 4, 256, 256),
        (128, 8, 128, 128),
    ):
        query, key = (torch.empty(2, 4, heads, size, dtype=dtype).transpose(1, 2) for heads in (query_heads, key_heads))
        cos = torch.empty(1, 4, rotated, dtype=dtype)
        operators.rotary(query, key, cos, cos, False)


if __name__ == "__main__":
    for name in ("cross_entropy", "rms_norm", "rms_norm_backward", "gated", "gated_backward", "rotary"):
        setattr(kernels, name, _Compiled(getattr(kernels, name)))
    launch_all(torch.bfloat16)
