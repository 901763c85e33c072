"""The quick measurement runs the kernels of a traced block."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trainwright.doctor.calibrate_cases import build_block_case
from trainwright.machine.measured.quick import KINDS, Block, MeasuredBlock, iterate_blocks_to_measure
from trainwright.planning.step_time.basis import list_block_passes
from trainwright.planning.trace.request import TracedModel

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = TracedModel.of({"model_type": "llama", **LLAMA, "num_hidden_layers": 2, "vocab_size": 64})


@cache
def passes() -> dict[str, MeasuredBlock]:
    return dict(iterate_blocks_to_measure(Block(64.0, 400.0, partial(list_block_passes, MODEL)), 64))


class Written(TorchDispatchMode):
    """Counts operations and the bytes of their results."""

    count = written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, torch.Tensor):
            self.count, self.written = self.count + 1, self.written + out.nbytes
        return out


@pytest.mark.parametrize(
    "curve", [f"block/{name}/{way}" for name in ("fp32", "bf16") for way in ("forward", "backward")]
)
def test_a_replay_computes_and_writes_what_the_block_does(curve: str) -> None:
    block = passes()[curve]
    run = build_block_case(curve, block.sizes).build()
    with FlopCounterMode(display=False) as counter:
        run()
    products = sum(k.flops for k in block.kernels if KINDS[k.kind] == "product")
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == products
    others = block._replace(kernels=tuple(k for k in block.kernels if KINDS[k.kind] not in ("product", "attention")))
    run = build_block_case(curve, others.sizes).build()
    with Written() as done:
        run()
    assert done.count == sum(k.launches for k in others.kernels)
    assert done.written == pytest.approx(sum(k.written for k in others.kernels), rel=0.02)


def test_attention_is_that_of_sequences_of_unequal_lengths() -> None:
    block = passes()["block/fp32/forward"]
    attention = tuple(k for k in block.kernels if KINDS[k.kind] == "attention")
    assert block.sequences == 4 and len(attention) == 1
    build_block_case("block/fp32/forward", block._replace(kernels=attention).sizes).build()()


@pytest.mark.slow
def test_it_imports_no_transformers_whose_import_takes_longer_than_the_measurement() -> None:
    block: MeasuredBlock = passes()["block/fp32/backward"]
    run = f"""
import sys
from trainwright.doctor.calibrate_cases import build_block_case
build_block_case("block/fp32/backward", {block.sizes}).build()()
assert "transformers" not in sys.modules and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", run], check=True)
