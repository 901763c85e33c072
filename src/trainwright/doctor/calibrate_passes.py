"""Passes of small models, which show how kernels in a training step compare with the same kernels in a loop.

In a loop a kernel finds its inputs in the caches, and nothing runs between two calls. In a step neither holds, and the
effect depends on the machine; so passes are timed, and factors on their kernels' times are fitted. Only CPUs need it:
on a GPU kernels wait in a queue, and its caches hold little of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainwright.doctor.calibrate_cases import DTYPES, CalibrationCase, Run, pack, vary_lengths
from trainwright.doctor.calibrate_worker import Numbers, solve_non_negative
from trainwright.machine.describe import build_cluster
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, Exchanged, InStep, ProcessRates
from trainwright.planning.step_time.basis import MIXED, build_cpu_pricing, build_packed_batch
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import estimate_step_time
from trainwright.planning.step_time.work import DeviceWork
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.trace.units import BatchShape
from trainwright.planning.workload import Choice, Workload

if TYPE_CHECKING:
    import torch

    from trainwright.data.stream.batch import Batch
    from trainwright.models.causal_lm import CausalLM
    from trainwright.parallel.world import World

Rows = Sequence[Mapping[str, Any]]

_VOCABULARY = 256
# Typical values (of AVX-512 servers): factors on products, attention and memory-bound kernels, seconds per kernel;
# seconds per collective and the factor on it. Fits are regularized toward them with the weight ``_HELD``, where a pass
# has weight 1, so that similar or disturbed passes do not distort them.
_IN_STEP = (1.1, 1.05, 2.0, 2e-5)
_EXCHANGE = (2.5e-3, 1.1)
_HELD = 0.15


class SmallModel(NamedTuple):
    """A llama of ``layers`` blocks on a pack of ``sequences`` sequences of about ``length`` tokens each."""

    width: int
    layers: int
    sequences: int
    length: int
    held_out: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the llama for ``transformers``."""
        heads = self.width // 64
        return {
            "hidden_size": self.width,
            "intermediate_size": 3 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }

    @property
    def traced(self) -> TracedModel:
        """The model, to be traced."""
        return TracedModel.of({"model_type": "llama", **self.config})

    @property
    def batch(self) -> BatchShape:
        """The micro-batch of its sequences."""
        return build_packed_batch(vary_lengths(self.sequences, self.length))


# Few and many tokens, narrow and wide matrices, short and long sequences; few models, as each is traced.
_MODELS = (
    SmallModel(192, 4, sequences=1, length=96),
    SmallModel(192, 4, sequences=6, length=160),
    SmallModel(512, 2, sequences=1, length=900),
    SmallModel(512, 2, sequences=5, length=60),
    SmallModel(896, 1, sequences=2, length=256),
    SmallModel(896, 1, sequences=3, length=100),
    SmallModel(512, 2, sequences=4, length=128, held_out=True),
    SmallModel(192, 4, sequences=2, length=256, held_out=True),
)
_SHARDED = (
    SmallModel(192, 4, sequences=4, length=128),
    SmallModel(896, 1, sequences=2, length=128),
    SmallModel(896, 1, sequences=3, length=128),
    SmallModel(512, 2, sequences=2, length=128, held_out=True),
)


def iterate_pass_cases(world: World) -> Iterator[CalibrationCase]:
    """Yield a forward and backward pass of each model in each precision; its size is its index.

    With several processes some are sharded too, to measure communication within a step.
    """
    if world.device.type != "cpu":
        return
    for precision in MIXED:
        for number, model in enumerate(_MODELS):
            build = partial(_prepare_pass, model, precision)
            yield CalibrationCase(f"passes/{precision}", (number,), build, model.held_out, typical=True)
        for number, model in enumerate(_SHARDED if world.size > 1 else ()):
            build = partial(_prepare_sharded_pass, model, precision, world)
            yield CalibrationCase(f"sharded/{precision}", (number,), build, model.held_out, joint=True, typical=True)


def fit_step_factors(setting: ProcessRates, precision: str, rows: Rows) -> InStep:
    """Return the factors with which the setting's curves predict the measured passes."""
    works = [_price_passes(model, precision, setting) for model in _MODELS]
    terms = np.array([[w.products, w.attention, w.traffic, w.launches] for w in works])
    rest = np.array([work.loss for work in works])
    (products, attention, traffic, host), off = _fit_coefficients(terms, rest, rows, _IN_STEP)
    return InStep(products, attention, traffic, host, off)


def fit_exchange(setting: ProcessRates, machine: Machine, sharded: Mapping[str, Rows]) -> Exchanged:
    """Return the seconds per collective and the factor on it that predict the measured sharded passes."""
    terms: list[list[float]] = []
    rest: list[float] = []
    rows: list[Mapping[str, Any]] = []
    for precision, measured_rows in sharded.items():
        for model in _SHARDED:
            none, once, twice = (
                _estimate_sharded_seconds(model, precision, replace(setting, exchange=Exchanged(*pair)), machine)
                for pair in ((0.0, 0.0), (_EXCHANGE[0], 0.0), (0.0, 1.0))
            )
            terms.append([(once - none) / _EXCHANGE[0], twice - none])
            rest.append(none)
        rows += measured_rows
    (wait_seconds, factor), off = _fit_coefficients(np.array(terms), np.array(rest), rows, _EXCHANGE)
    return Exchanged(wait_seconds, factor, off)


def _fit_coefficients(
    terms: Numbers, rest: Numbers, rows: Rows, usual: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return coefficients of ``terms`` [M, N], regularized toward ``usual``, and errors of the held-out rows."""
    seconds = np.array([row["seconds"] for row in rows])
    is_fitted = np.array([not row["held_out"] for row in rows])
    units = np.array(usual)
    relative, aim = terms * units / seconds[:, None], 1 - rest / seconds
    regularization = _HELD * np.eye(len(units))
    coefficients = solve_non_negative(
        np.vstack([relative[is_fitted], regularization]), np.append(aim[is_fitted], np.full(len(units), _HELD))
    )
    off = np.abs(relative @ coefficients - aim)[~is_fitted]
    return tuple(map(float, coefficients * units)), tuple(map(float, off))


def _price_passes(model: SmallModel, precision: str, setting: ProcessRates) -> DeviceWork:
    trace, pricing = build_cpu_pricing(model.traced, model.batch, precision, setting)
    loss = DeviceWork(loss=pricing.logits(model.batch.targets * _VOCABULARY))
    return sum((pricing.price_unit(unit) for unit in trace.list_units()), loss)


def _estimate_sharded_seconds(model: SmallModel, precision: str, setting: ProcessRates, machine: Machine) -> float:
    """Return the seconds of a step of the model without the optimizer."""
    count, tokens = setting.processes, model.batch.tokens
    workload = Workload(
        model.traced,
        row_tokens=tokens,
        global_batch_rows=float(count),
        document_tokens=model.length,
        batch_tokens=count * tokens,
    )
    choice = Choice("fsdp", count, 1, 1, MIXED[precision], threads=setting.threads)
    cluster = build_cluster(machine)
    rates = Rates(cluster, Calibration(machine.describe(), "", {}, (setting,), {}))
    parts = estimate_step_time(workload, choice, cluster, rates).parts
    return sum(seconds for part, seconds in parts.items() if part not in ("optimizer", "data"))


def _prepare_pass(model: SmallModel, precision: str) -> Run:
    module, batch = _build_model(model, DTYPES[precision])

    def run() -> None:
        module(batch).backward()
        module.zero_grad(set_to_none=True)

    return run


def _prepare_sharded_pass(model: SmallModel, precision: str, world: World) -> Run:
    import torch

    from trainwright.engine.optimizer import build_optimizer_factory
    from trainwright.parallel.fsdp.fully_sharded import FullySharded
    from trainwright.parallel.strategy import StrategyConfig
    from trainwright.recipe.schema import OptimizerSection
    from trainwright.recipe.sections.parallel import ParallelSection

    module, batch = _build_model(model, torch.float32)
    make, parallel = build_optimizer_factory(OptimizerSection()), ParallelSection(strategy="fsdp")
    strategy = FullySharded(StrategyConfig(parallel, world, module, make, DTYPES[precision], module.blocks()))

    def run() -> None:
        strategy.backward(module(batch), last=True)
        strategy.discard_gradients()

    return run


def _build_model(model: SmallModel, dtype: torch.dtype) -> tuple[CausalLM, Batch]:
    from transformers import AutoConfig

    from trainwright.models.causal_lm import CausalLM
    from trainwright.models.load import build_fresh_model

    lengths = vary_lengths(model.sequences, model.length)
    llama = build_fresh_model(AutoConfig.for_model("llama", **model.config), seed=0, dtype=dtype)
    module = CausalLM(llama, packed=True).train()
    return module, pack([[token % _VOCABULARY for token in range(length)] for length in lengths])()
