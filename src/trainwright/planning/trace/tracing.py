"""Trace a step and an evaluation of a model on tensors without data, at a few shapes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from fractions import Fraction
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.data.stream.batch import Batch
from trainwright.models.linear_losses import linear_cross_entropy, token_statistics
from trainwright.planning.trace.build import (
    LONG,
    SHORT,
    BatchSample,
    Built,
    batch_of,
    build,
    facts_of_model,
    quantized,
    samples,
)
from trainwright.planning.trace.divide import Division, loops_of_loss, to_fake
from trainwright.planning.trace.fit import Fitter, natural_terms, passes
from trainwright.planning.trace.gpu import functions_as_on_gpu, workspace_on_gpu
from trainwright.planning.trace.record import EMBEDDING, Direction, Recorder, Segment, TooManyError
from trainwright.planning.trace.request import Regime, TracedModel, TraceRequest
from trainwright.planning.trace.units import ModelTrace, Size, TracedParameter, UnitTrace, value_of

_MOST = 40_000  # operations of a step and an evaluation, before it is traced with shorter sequences
_EXACT = 0.002  # of a trace's error, up to which it is kept
_Key = tuple[int, Direction]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "evaluation")


def trace(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    """Trace the model of a request in a regime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result, error = _traced(request, regime)
        except TooManyError:
            return _traced(request, regime, SHORT, None)[0]
        if error > _EXACT:
            with suppress(TooManyError):
                longer, error_of_longer = _traced(request, regime, LONG, _MOST // 4)
                return longer if error_of_longer < error else result
        return result


def _traced(
    request: TraceRequest, regime: Regime, scale: Fraction = Fraction(1), most: int | None = _MOST
) -> tuple[ModelTrace[Size], float]:
    """Return the trace at a scale of the sequences' lengths, and its error at the shapes that it was made from."""
    pads = request.width == 2 and not request.device.is_gpu
    built, shapes = build(request, regime), samples(request.rows, regime, scale, pads=pads)
    vocabulary = int(built.lm.config.get_text_config().vocab_size)
    batches = [batch_of(sample, vocabulary) for sample in shapes]
    division = Division(built.blocks, request.model.last_block, on_gpu=request.device.is_gpu)
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = _fake(built, division)
        recorders: list[Recorder] = []
        for parameter in built.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: recorders[-1].gradient(p))
        for sample, batch in zip(shapes, batches, strict=True):
            recorders.append(Recorder(built.lm, built.names, _workspace(request), most))
            division.recorder = recorders[-1]
            _run(request, built, recorders[-1], division, sample, batch)
    merged = [_by_unit(recorder.segments) for recorder in recorders]
    result = _assembled(request, built, division, recorders[0], merged, shapes)
    return result, _error(result, sorted({EMBEDDING, *division.stand_in, len(built.blocks)}), merged, shapes)


def _error(
    made: ModelTrace[Size], numbers: Sequence[int], merged: Sequence[Mapping[_Key, Segment]], shapes: list[BatchSample]
) -> float:
    """Return the largest error of a pass's most bytes and of its last, as a part of the most bytes of any pass.

    Loops whose number is no polynomial of the shape leave one.
    """
    worst = 0.0
    for segments, sample in zip(merged, shapes, strict=True):
        values, high, error = sample.basis(), 1, 0.0
        for number, unit in zip(numbers, made.units, strict=True):
            for direction in _DIRECTIONS:
                moments = getattr(unit, direction).moments
                most, last = _most_and_last(segments.get((number, direction), Segment(number, direction)))
                planned = max((value_of(size, values) for moment in moments for size in moment.live), default=0.0)
                after = value_of(moments[-1].after, values) if moments else 0.0
                high, error = max(high, most), max(error, abs(planned - most), abs(after - last))
        worst = max(worst, error / high)
    return worst


def _most_and_last(segment: Segment) -> tuple[int, int]:
    changes = (event.size if event.kind == "allocated" else -event.size for event in segment.events)
    live = [*accumulate(changes, initial=0)]
    return max(live), live[-1]


def _fake(built: Built, division: Division) -> Built:
    made = to_fake(built.lm, [block for n, block in enumerate(built.blocks) if division.stand_in[n] != n])
    return built._replace(names={made.get(id(p), p): name for p, name in built.names.items()})


def _run(
    request: TraceRequest, built: Built, recorder: Recorder, division: Division, sample: BatchSample, batch: Batch
) -> None:
    lm, head, wanted, on_gpu = built.lm, len(built.blocks), request.model, request.device.is_gpu
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            functions_as_on_gpu() if on_gpu else nullcontext(),
            loops_of_loss(recorder, sample, on_gpu=on_gpu),
            recorder,
        ):
            lm.eval()
            division.begin(EMBEDDING, "evaluation")
            with torch.no_grad():
                lm(batch, statistics=True) if wanted.objective != "hidden" else _loss(lm, wanted, batch)
            recorder.segments.append(Segment(head, "evaluation"))
            lm.train()
            division.begin(EMBEDDING, "forward")
            total = _loss(lm, wanted, batch) / batch.weight
            division.begin(head, "backward")
            total.backward()
            del total
            for parameter in built.names:
                parameter.grad = None
    finally:
        if collects:
            gc.enable()


def _loss(lm: Any, wanted: TracedModel, batch: Batch) -> torch.Tensor:
    """Return the loss of a task."""
    if wanted.objective == "hidden":
        activations = lm.activations(batch)
        return cast(torch.Tensor, (activations - torch.zeros_like(activations)).square().mean())
    if wanted.objective == "objective":  # as causal_lm.objective_at, without the function of the losses
        head = lm.head(batch)
        token_statistics(head, batch.targets)
        return linear_cross_entropy(head, batch.targets, target_weights=torch.ones(len(batch.targets)))
    return cast(torch.Tensor, lm(batch))


def _workspace(request: TraceRequest) -> Any:
    if request.device.is_gpu:
        return workspace_on_gpu

    def extra(func: Any, args: Any, kwargs: Any) -> int:
        name = func.overloadpacket.__name__
        if name == "sum" and kwargs.get("dtype", args[0].dtype) != args[0].dtype:  # converts all that it sums
            return int(args[0].numel() * kwargs["dtype"].itemsize)
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
    request: TraceRequest,
    built: Built,
    division: Division,
    first: Recorder,
    merged: Sequence[Mapping[_Key, Segment]],
    shapes: list[BatchSample],
) -> ModelTrace[Size]:
    fitter = Fitter([sample.basis() for sample in shapes])
    natural = natural_terms(request.rows == "packed")
    head = len(built.blocks)
    running = sorted({EMBEDDING, *division.stand_in, head})
    parameters = parameters_of(built, list(first.used.values()))
    units = []
    for unit in running:
        forward, backward, evaluation = (
            passes([one.get(key, Segment(*key)) for one in merged], fitter, natural)
            for key in [(unit, direction) for direction in _DIRECTIONS]
        )
        units.append(UnitTrace(parameters[unit], forward, backward, evaluation))
    order = [running.index(unit) for unit in (EMBEDDING, *division.stand_in, head)]
    model = request.model
    last = len(order) if model.reference_block is None else model.reference_block + 2
    reference = () if model.reference == "none" else tuple(order[:last])
    return ModelTrace(tuple(units), tuple(order), facts_of_model(model), reference, model.reference == "copied")


def _by_unit(segments: list[Segment]) -> dict[_Key, Segment]:
    merged: dict[_Key, Segment] = {}
    for segment in segments:
        combined = merged.setdefault((segment.unit, segment.direction), Segment(segment.unit, segment.direction))
        combined.events += segment.events
        combined.done += segment.done
        combined.remaining |= segment.remaining
    return merged


def parameters_of(built: Built, first: list[nn.Parameter]) -> dict[int, tuple[TracedParameter, ...]]:
    """Return the parameters of each unit. ``first``: those outside the blocks that are used before them."""
    before = {id(parameter) for parameter in first}
    units = {id(p): number for number, block in reversed([*enumerate(built.blocks)]) for p in block.parameters()}
    smaller = quantized(built.lm)
    listed: dict[int, list[TracedParameter]] = {n: [] for n in range(EMBEDDING, len(built.blocks) + 1)}
    for parameter, name in built.names.items():
        outside = EMBEDDING if id(parameter) in before else len(built.blocks)
        shape, packed, buffers = smaller.get(id(parameter), (tuple(parameter.shape), 0, 0))
        listed[units.get(id(parameter), outside)].append(
            TracedParameter(name, shape, parameter.requires_grad, parameter.element_size(), packed, buffers)
        )
    return {unit: tuple(parameters) for unit, parameters in listed.items()}
