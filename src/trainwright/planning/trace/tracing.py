"""Trace a step and an evaluation of a model on tensors without data, at a few shapes."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.data.stream.batch import Batch
from trainwright.planning.trace.build import Built, Sample, batch_of, build, facts_of_model, samples
from trainwright.planning.trace.divide import Division, loops_of_loss, to_fake
from trainwright.planning.trace.fit import Fitter, natural_terms, passes
from trainwright.planning.trace.record import EMBEDDING, Direction, Recorder, Segment
from trainwright.planning.trace.request import Regime, TraceRequest
from trainwright.planning.trace.units import ModelTrace, Size, TracedParameter, UnitTrace

_Key = tuple[int, Direction]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "evaluation")


def trace(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    """Trace the model of a request in a regime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _traced(request, regime)


def _traced(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    built, shapes = build(request, regime), samples(request.rows, regime)
    vocabulary = int(built.lm.config.get_text_config().vocab_size)
    batches = [batch_of(sample, vocabulary) for sample in shapes]
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = _fake(built)
        division = Division(built.blocks)
        recorders: list[Recorder] = []
        for parameter in built.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: recorders[-1].gradient(p))
        for sample, batch in zip(shapes, batches, strict=True):
            recorders.append(Recorder(built.lm, built.names, _workspace(request)))
            division.recorder = recorders[-1]
            _run(built, recorders[-1], division, sample, batch)
    return _assembled(request, built, division, recorders, shapes)


def _fake(built: Built) -> Built:
    made = to_fake(built.lm)
    return built._replace(names={made.get(id(p), p): name for p, name in built.names.items()})


def _run(built: Built, recorder: Recorder, division: Division, sample: Sample, batch: Batch) -> None:
    lm, head = built.lm, len(built.blocks)
    collects = gc.isenabled()
    gc.disable()
    try:
        with loops_of_loss(recorder, sample), recorder:
            lm.eval()
            division.begin(EMBEDDING, "evaluation")
            with torch.no_grad():
                lm(batch, statistics=True)
            recorder.segments.append(Segment(head, "evaluation"))
            lm.train()
            division.begin(EMBEDDING, "forward")
            total = lm(batch) / batch.weight
            division.begin(head, "backward")
            total.backward()
            del total
            for parameter in built.names:
                parameter.grad = None
    finally:
        if collects:
            gc.enable()


def _workspace(request: TraceRequest) -> Any:
    def extra(func: Any, args: Any) -> int:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            return _flash_workspace(args[1] if "backward" in name else args[0], "backward" in name)
        return 0

    return extra


def _flash_workspace(query: torch.Tensor, backward: bool) -> int:
    """Return the bytes that a thread of the CPU's flash attention works in
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    length, size, width = query.shape[-2], query.shape[-1], query.element_size()
    strip = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    tile, half = strip * min(512, length), 0 if width == 4 else width
    return (8 + 2 * half) * tile if backward else 4 * (tile + 2 * strip + strip * size) + half * tile


def _assembled(
    request: TraceRequest, built: Built, division: Division, recorders: list[Recorder], shapes: list[Sample]
) -> ModelTrace[Size]:
    fitter = Fitter([sample.basis() for sample in shapes])
    natural = natural_terms(request.rows == "packed")
    merged = [_by_unit(recorder.segments) for recorder in recorders]
    head = len(built.blocks)
    running = sorted({EMBEDDING, *division.stand_in, head})
    parameters = _parameters(built, recorders[0])
    units = []
    for unit in running:
        forward, backward, evaluation = (
            passes([one.get(key, Segment(*key)) for one in merged], fitter, natural)
            for key in [(unit, direction) for direction in _DIRECTIONS]
        )
        units.append(UnitTrace(parameters[unit], forward, backward, evaluation))
    order = [running.index(unit) for unit in (EMBEDDING, *division.stand_in, head)]
    return ModelTrace(tuple(units), tuple(order), facts_of_model(request.model))


def _by_unit(segments: list[Segment]) -> dict[_Key, Segment]:
    merged: dict[_Key, Segment] = {}
    for segment in segments:
        known = merged.setdefault((segment.unit, segment.direction), Segment(segment.unit, segment.direction))
        known.events += segment.events
        known.done += segment.done
    return merged


def _parameters(built: Built, recorder: Recorder) -> dict[int, tuple[TracedParameter, ...]]:
    units = {id(p): number for number, block in reversed([*enumerate(built.blocks)]) for p in block.parameters()}
    listed: dict[int, list[TracedParameter]] = {n: [] for n in range(EMBEDDING, len(built.blocks) + 1)}
    for parameter, name in built.names.items():
        outside = EMBEDDING if id(parameter) in recorder.used else len(built.blocks)
        unit = units.get(id(parameter), outside)
        listed[unit].append(
            TracedParameter(name, tuple(parameter.shape), parameter.requires_grad, parameter.element_size())
        )
    return {unit: tuple(parameters) for unit, parameters in listed.items()}
