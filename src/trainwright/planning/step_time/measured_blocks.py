"""The time of kernels in a step relative to the same kernels in a loop, from a measured transformer block.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trainwright.machine.measured.calibration import Calibration, ProcessRates
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.architectures.configured import from_config
from trainwright.planning.operations import BatchShape, Device, ModelPasses, PassSettings, passes
from trainwright.planning.step_time.rates_measured import distance
from trainwright.planning.step_time.work import Pricing
from trainwright.planning.workload import MixedPrecision

MIXED: dict[str, MixedPrecision] = {"fp32": "no", "bf16": "bf16"}
_WIDTH = {"fp32": 4, "bf16": 2}
# Factors outside this range come from a disturbed measurement.
_LEAST, _MOST = 0.7, 2.5


def with_measured_blocks(
    setting: ProcessRates, measured: Calibration, setting_of: Callable[[int, int | None], ProcessRates]
) -> ProcessRates:
    """Return the setting with its factors of kernels in a step scaled so that they predict the measured block.

    The block is that of the nearest setting in which it was measured.

    Args:
        setting_of: the rates of a number of processes and threads, with typical factors.
    """
    by_distance = sorted(measured.settings, key=lambda one: distance(one, setting.processes, setting.threads))
    in_step = dict(setting.in_step)
    for precision in MIXED.keys() & in_step.keys():
        names = [f"block/{precision}/{direction}" for direction in ("forward", "backward")]
        nearest = next((one for one in by_distance if all(name in one.curves for name in names)), None)
        if nearest is None:
            continue
        samples, typical = [nearest.curves[name].samples[-1] for name in names], in_step[precision]
        expected = block_seconds(samples[0].sizes, precision, setting_of(nearest.processes, nearest.threads))
        found = sum(sample.seconds for sample in samples)
        factor = min(_MOST, max(_LEAST, found / expected))
        in_step[precision] = replace(
            typical,
            products=typical.products * factor,
            attention=typical.attention * factor,
            traffic=typical.traffic * factor,
            host=typical.host * factor,
        )
    return replace(setting, in_step=in_step)


def llama(**sizes: object) -> Architecture:
    """Return the architecture of a small llama; ``sizes``: keys of its configuration."""
    found = from_config({"model_type": "llama", **sizes})
    assert found is not None, "llamas are known"
    return found


def on_cpu(a: Architecture, batch: BatchShape, precision: str, setting: ProcessRates) -> tuple[ModelPasses, Pricing]:
    """Return the passes of a model on a CPU, and what predicts their time."""
    shapes = PassSettings(a, batch, Device("cpu", setting.threads or 1), _WIDTH[precision])
    return passes(shapes), Pricing(setting, batch, MIXED[precision], on_gpu=False)


def block_seconds(sizes: Sequence[float], precision: str, setting: ProcessRates) -> float:
    """Return the predicted seconds of the forward and backward pass of a block (``trainwright.doctor.block.Sizes``)."""
    hidden, inner, heads, shared, size, sequences, length = map(int, sizes)
    architecture = llama(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=size,
        vocab_size=2,
    )
    tokens = sequences * length
    batch = BatchShape(1, tokens, ((length, sequences),), tokens, packed=True, masked=False)
    run, pricing = on_cpu(architecture, batch, precision, setting)
    return pricing.pass_and_back(run.blocks[0]).seconds
