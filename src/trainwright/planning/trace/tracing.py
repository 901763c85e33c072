"""Trace a step and an evaluation of a model on tensors without data, at a few shapes, unit by unit.

Of equal blocks a few run, the others copy their input. Of a model that cannot be traced, a plan assumes its parameters,
and a bound for its activations.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.data.stream.batch import Batch
from trainwright.errors import RequestError
from trainwright.models import linear_losses
from trainwright.models.fused import blocked
from trainwright.models.linear_losses import compute_token_statistics, linear_cross_entropy
from trainwright.planning.trace.build import (
    LONG,
    SHORT,
    BatchSample,
    Built,
    build_batch,
    build_request_model,
    build_samples,
    compute_gpu_workspace,
    list_quantized,
    list_temporary_changes,
    read_model_facts,
    use_gpu_functions,
)
from trainwright.planning.trace.fit import Fitter, build_natural_terms, fit_pass
from trainwright.planning.trace.record import EMBEDDING, Direction, MemoryEvent, Recorder, Segment, TooManyError
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.units import (
    BASIS,
    ModelFacts,
    ModelTrace,
    Moment,
    Operation,
    PassTrace,
    Size,
    TracedParameter,
    UnitTrace,
    evaluate_polynomial,
)
from trainwright.planning.trace.values import list_tensors

_MOST = 40_000  # operations of a step and an evaluation, before it is traced with shorter sequences
_EXACT = 0.002  # of a trace's error, up to which it is kept
_Key = tuple[int, Direction]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "evaluation")


def trace(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    """Trace the model of a request in a regime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result, error = _trace_at_scale(request, regime)
        except TooManyError:
            return _trace_at_scale(request, regime, SHORT, None)[0]
        if error > _EXACT:
            with suppress(TooManyError):
                longer, error_of_longer = _trace_at_scale(request, regime, LONG, _MOST // 4)
                return longer if error_of_longer < error else result
        return result


def _trace_at_scale(
    request: TraceRequest, regime: Regime, scale: Fraction = Fraction(1), most: int | None = _MOST
) -> tuple[ModelTrace[Size], float]:
    """Return the trace at a scale of the sequences' lengths, and its error at the shapes that it was made from."""
    pads = request.width == 2 and not request.device.is_gpu
    shapes = build_samples(request.rows, regime, scale, pads=pads)
    built = build_request_model(request, regime, max(length for sample in shapes for length in sample.lengths))
    vocabulary = int(built.lm.config.get_text_config().vocab_size)
    batches = [build_batch(sample, vocabulary) for sample in shapes]
    division = Division(built.blocks, request.model.last_block, on_gpu=request.device.is_gpu)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = to_fake(built.lm, [block for n, block in enumerate(built.blocks) if division.stand_in[n] != n])
        built = built._replace(names={fakes.get(id(p), p): name for p, name in built.names.items()})
        recorders: list[Recorder] = []
        for parameter in built.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: recorders[-1].gradient(p))
        for sample, batch in zip(shapes, batches, strict=True):
            recorders.append(Recorder(built.lm, built.names, _choose_workspace(request, sample.part), most))
            division.recorder = recorders[-1]
            _run(request, built, recorders[-1], division, sample, batch)
    running = sorted({EMBEDDING, *division.stand_in, len(built.blocks)})
    merged_segments = [_group_by_unit(recorder.segments, running) for recorder in recorders]
    result = _build_trace(request, built, division, recorders[0], merged_segments, shapes, running)
    return result, _compute_error(result, running, merged_segments, shapes)


def _compute_error(
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
                peak, last = _find_most_and_last(segments.get((number, direction), Segment(number, direction)))
                sizes = (evaluate_polynomial(size, values) for moment in moments for size in moment.live)
                planned_bytes = max(sizes, default=0.0)
                after = evaluate_polynomial(moments[-1].after, values) if moments else 0.0
                high, error = max(high, peak), max(error, abs(planned_bytes - peak), abs(after - last))
        worst = max(worst, error / high)
    return worst


def _find_most_and_last(segment: Segment) -> tuple[int, int]:
    live = [*accumulate(map(_compute_change, segment.events), initial=0)]
    return max(live), live[-1]


def _run(
    request: TraceRequest, built: Built, recorder: Recorder, division: Division, sample: BatchSample, batch: Batch
) -> None:
    lm, head, traced_model, on_gpu = built.lm, len(built.blocks), request.model, request.device.is_gpu
    collects = gc.isenabled()
    gc.disable()
    try:
        functions = use_gpu_functions() if on_gpu else nullcontext()
        with functions, set_loss_loops(recorder, sample, on_gpu=on_gpu), recorder:
            lm.eval()
            division.begin(EMBEDDING, "evaluation")
            with torch.no_grad():
                lm(batch, statistics=True) if traced_model.objective != "hidden" else _compute_loss(
                    lm, traced_model, batch
                )
            recorder.segments.append(Segment(head, "evaluation"))
            lm.train()
            division.begin(EMBEDDING, "forward")
            total = _compute_loss(lm, traced_model, batch) / batch.weight
            division.begin(head, "backward")
            total.backward()
            del total
            for parameter in built.names:
                parameter.grad = None
    finally:
        if collects:
            gc.enable()


def _compute_loss(lm: Any, wanted: TracedModel, batch: Batch) -> torch.Tensor:
    if wanted.objective == "hidden":
        activations = lm.compute_activations(batch)
        return cast(torch.Tensor, (activations - torch.zeros_like(activations)).square().mean())
    if wanted.objective == "objective":  # as causal_lm.evaluate_objective, without the function of the losses
        head = lm.head(batch)
        compute_token_statistics(head, batch.targets)
        return linear_cross_entropy(head, batch.targets, target_weights=torch.ones(len(batch.targets)))
    return cast(torch.Tensor, lm(batch))


def _choose_workspace(request: TraceRequest, part: int) -> Any:
    if request.device.is_gpu:
        return compute_gpu_workspace

    def extra(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        name = func.overloadpacket.__name__
        if name == "sum" and kwargs.get("dtype", args[0].dtype) != args[0].dtype:  # converts all that it sums
            return list_temporary_changes(args[0].numel() * kwargs["dtype"].itemsize)
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            query = args[1] if "backward" in name else args[0]
            return list_temporary_changes(_compute_flash_workspace(query, "backward" in name))
        if name == "_scaled_mm_v2":  # of float8: each operand in fp32, then scaled; the product, then rounded
            (m, k), n = args[0].shape, args[1].shape[1]
            first, second, result = 4 * m * k, 4 * k * n, 6 * m * n
            scaled_operands = first, first, -first, second, second, -second
            return k * n, *scaled_operands, result, -result, -second, -first, -k * n
        if name == "block_product":
            return _list_block_bytes(args)
        return blocked.compute_workspace(name, args, part)

    return extra


def _list_block_bytes(args: Any) -> tuple[int, ...]:
    """Return what a CPU's product of blocks allocates: both operands in bf16, and the result, which is counted already.

    Numbers in bytes of two are found by indices of 32 bits.
    """
    packed = args[0].dtype == torch.uint8
    first, second = (2 * matrix.numel() * (2 if packed else 1) for matrix in args[:2])
    result = 2 * args[0].shape[0] * args[1].shape[1]
    operands = (first, first, -first, second, second, -second) if packed else (first, second)
    return -result, *operands, result, -first, -second


def _compute_flash_workspace(query: torch.Tensor, backward: bool) -> int:
    """Return the bytes that a thread of the CPU's flash attention works in
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    length, size, width = query.shape[-2], query.shape[-1], query.element_size()
    strip = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    tile, half = strip * min(512, length), 0 if width == 4 else width
    return (8 + 2 * half) * tile if backward else 4 * (tile + 2 * strip + strip * size) + half * tile


def _build_trace(
    request: TraceRequest,
    built: Built,
    division: Division,
    first: Recorder,
    merged: Sequence[Mapping[_Key, Segment]],
    shapes: list[BatchSample],
    running: Sequence[int],
) -> ModelTrace[Size]:
    fitter = _fitter(tuple(sample.basis() for sample in shapes))
    natural = build_natural_terms(request.rows == "packed")
    parameters = group_parameters(built, list(first.used.values()))
    units = []
    for unit in running:
        forward, backward, evaluation = (
            fit_pass([segments.get(key, Segment(*key)) for segments in merged], fitter, natural)
            for key in [(unit, direction) for direction in _DIRECTIONS]
        )
        units.append(UnitTrace(parameters[unit], forward, backward, evaluation))
    order = [running.index(unit) for unit in (EMBEDDING, *division.stand_in, running[-1])]
    model = request.model
    last = len(order) if model.reference_block is None else model.reference_block + 2
    reference = () if model.reference == "none" else tuple(order[:last])
    return ModelTrace(tuple(units), tuple(order), read_model_facts(model), reference, model.reference == "copied")


_fitter = lru_cache(maxsize=16)(Fitter)  # traces of one kind of rows have equal shapes, and many equal sizes


def _group_by_unit(segments: list[Segment], running: Sequence[int]) -> dict[_Key, Segment]:
    """Return what happened in the units that run.

    What others have released while they only copied their input is of the last block that runs. In a run each block
    releases what the one before it left, and the head that of the last one.
    """
    merged_segments: dict[_Key, Segment] = {}
    remaining_bytes: Counter[Direction] = Counter()
    for segment in segments:
        if segment.unit not in running:
            remaining_bytes[segment.direction] -= sum(map(_compute_change, segment.events))
            continue
        key = segment.unit, segment.direction
        merged_segment = merged_segments.setdefault(key, Segment(*key))
        merged_segment.events += segment.events
        merged_segment.done += segment.done
        merged_segment.remaining |= segment.remaining
    for direction, size in remaining_bytes.items():
        if size > 0 and direction != "backward":
            head = merged_segments.setdefault((running[-1], direction), Segment(running[-1], direction))
            head.events.insert(0, MemoryEvent("released", size))
    return merged_segments


def _compute_change(event: MemoryEvent) -> int:
    return event.size if event.kind == "allocated" else -event.size


def group_parameters(built: Built, first: list[nn.Parameter]) -> dict[int, tuple[TracedParameter, ...]]:
    """Return the parameters of each unit. ``first``: those outside the blocks that are used before them."""
    before = {id(parameter) for parameter in first}
    units = {id(p): number for number, block in reversed([*enumerate(built.blocks)]) for p in block.parameters()}
    smaller = list_quantized(built.lm)
    parameters_by_unit: dict[int, list[TracedParameter]] = {n: [] for n in range(EMBEDDING, len(built.blocks) + 1)}
    for parameter, name in built.names.items():
        outside = EMBEDDING if id(parameter) in before else len(built.blocks)
        shape, packed_bytes, buffers = smaller.get(id(parameter), (tuple(parameter.shape), 0, 0))
        parameters_by_unit[units.get(id(parameter), outside)].append(
            TracedParameter(name, shape, parameter.requires_grad, parameter.element_size(), packed_bytes, buffers)
        )
    return {unit: tuple(parameters) for unit, parameters in parameters_by_unit.items()}


# Bytes that the state of the CPU's random numbers takes, which recomputation keeps.
_RANDOM_STATE = 5056


class Division:
    """The blocks of a model, each of which begins a segment of a recorder.

    The first two of a kind run: the first one is special, as it is the last to release what its kind shares, such as
    masks.

    Args:
        last: the last block that runs; None: all do.

    Attributes:
        stand_in: for each block the one that runs in its place.
        recorder: of the current trace.
    """

    def __init__(self, blocks: list[nn.Module], last: int | None, *, on_gpu: bool) -> None:
        self._last = len(blocks) - 1 if last is None else last
        equal: dict[tuple[str, bool], list[int]] = {}
        for number, block in enumerate(blocks):
            equal.setdefault((_describe_block(block), number <= self._last), []).append(number)
        self.stand_in = list(range(len(blocks)))
        for numbers in equal.values():
            for number in numbers[1:]:
                self.stand_in[number] = numbers[1]
        self.recorder: Recorder | None = None
        self._state = [0 if on_gpu or "forward" not in vars(block) else _RANDOM_STATE for block in blocks]
        self._rest: dict[int, int | None] = {}  # how many values a block returns beside its output; None: no tuple
        for number, block in enumerate(blocks):
            block.forward = partial(self._run, number, block.forward)

    def begin(self, unit: int, direction: Direction) -> None:
        """Begin a segment."""
        assert self.recorder is not None
        self.recorder.begin(unit, direction)

    def _ended(self, number: int, state: int) -> None:
        assert self.recorder is not None
        self.recorder.change(-state)
        self.begin(number - 1 if number else EMBEDDING, "backward")

    def _run(self, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.recorder is not None
        direction: Direction = "forward" if torch.is_grad_enabled() else "evaluation"
        hidden = list_tensors((args, kwargs))[0]
        self.begin(number, direction)
        stand_in = self.stand_in[number]
        state = self._state[number] if direction == "forward" and stand_in == number else 0
        self.recorder.change(state)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._ended(number, state))
        if stand_in != number:
            rest = self._rest[stand_in]
            output = hidden.clone() if rest is None else (hidden.clone(), *[None] * rest)
        else:
            output = forward(*args, **kwargs)
            self._rest[number] = None if isinstance(output, torch.Tensor) else len(output) - 1
        if number == self._last:
            result = list_tensors(output)[0]
            if result.requires_grad:
                result.register_hook(lambda _: self.begin(number, "backward"))
            self.recorder.begin_later(len(self.stand_in), direction)
        return output


def _describe_block(block: nn.Module) -> str:
    """Describe a block but for its number: its modules' classes and plain attributes, and its parameters."""
    parts: list[Any] = ["forward" in vars(block)]
    for name, module in block.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str)) and "layer_i" not in k}
        shapes = [(k, p.shape, p.requires_grad) for k, p in module.named_parameters(recurse=False)]
        parts += [name, type(module).__name__, sorted(plain.items()), shapes]
    return repr(parts)


def to_fake(module: nn.Module, leave: Sequence[nn.Module]) -> dict[int, nn.Parameter]:
    """Replace tensors on the meta device by fake ones on the CPU; tied ones stay tied. Return the new parameters by the
    ``id`` of the old ones.

    Args:
        leave: modules that do not run.
    """
    excluded_ids = {id(part) for submodule in leave for part in submodule.modules()}
    fakes: dict[int, Any] = {}
    old_ones = []  # so that no identity is used twice
    for part in module.modules():
        if id(part) in excluded_ids:
            continue
        for name, old in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if not old.is_meta:
                continue
            old_ones.append(old)
            if id(old) not in fakes:
                new = torch.empty_like(old, device="cpu")
                fakes[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(part, name, fakes[id(old)])
    return fakes


@contextmanager
def set_loss_loops(recorder: Recorder, sample: BatchSample, *, on_gpu: bool) -> Iterator[None]:
    """Let the loss take as many chunks and blocks as a sample says, and note the iterations."""

    def chunks(count: int, hidden: Any, weight: Any, *, fused: bool = False) -> Iterator[slice]:
        for number in range(sample.chunks):
            with recorder.scope(f"chunk{number}"):
                yield slice(number * sample.chunk, (number + 1) * sample.chunk)

    def row_blocks(logits: torch.Tensor) -> Iterator[slice]:
        if on_gpu:
            yield slice(None)
            return
        for number in range(sample.blocks):
            with recorder.scope(f"block{number}"):
                yield slice(number * sample.block, (number + 1) * sample.block)

    before = linear_losses.split_into_chunks, linear_losses.split_into_row_blocks, linear_losses.has_wide_products
    linear_losses.split_into_chunks, linear_losses.split_into_row_blocks = chunks, row_blocks  # type: ignore[assignment]
    linear_losses.has_wide_products = lambda tensor: on_gpu
    try:
        yield
    finally:
        linear_losses.split_into_chunks, linear_losses.split_into_row_blocks, linear_losses.has_wide_products = before


# Tensors of the width of a matrix's result that are kept for it: the result, its activation, and what is between them.
_KEPT = 4


def trace_or_bound(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    """Trace the model of a request; if its code cannot run on tensors without data, return a bound.

    Raises:
        RequestError: the model cannot be made, as in a run.
    """
    try:
        return trace(request, regime)
    except RequestError:
        raise
    except Exception as error:  # whatever the code of a model raises
        line = " ".join(str(error).split())[:120]
        return _estimate_bound(request, build_request_model(request, regime), f"{type(error).__name__}: {line}")


def trace_without_passes(model: TracedModel) -> ModelTrace[Size]:
    """Return a model's units with their parameters alone: its modules are made, without memory, but not run.

    Raises:
        RequestError: the model cannot be made, as in a run.
    """
    empty_pass = PassTrace[Size]((), ())
    built = build_request_model(TraceRequest(model, Device("cpu"), "fp32"), Regime())
    return _build_from_units(
        built,
        lambda kind, parameters: UnitTrace(parameters, empty_pass, empty_pass, empty_pass),
        read_model_facts(model),
    )


def _estimate_bound(request: TraceRequest, built: Built, failed: str) -> ModelTrace[Size]:
    facts = dataclasses.replace(read_model_facts(request.model), failed=failed)
    share = facts.active / facts.total
    return _build_from_units(
        built, lambda kind, parameters: _estimate_unit(request, kind, parameters, share, facts), facts
    )


def _build_from_units(
    built: Built, unit_of: Callable[[str, tuple[TracedParameter, ...]], UnitTrace[Size]], facts: ModelFacts
) -> ModelTrace[Size]:
    """Return the trace of a model whose units are equal if their parameters are."""
    embedding: Any = built.lm.model.get_input_embeddings().weight
    blocks = len(built.blocks)
    kinds = {EMBEDDING: "embedding", blocks: "head"}
    parameters_by_unit = sorted(group_parameters(built, [embedding]).items())
    keys = [(kinds.get(unit, "block"), parameters) for unit, parameters in parameters_by_unit]
    units = {key: unit_of(*key) for key in dict.fromkeys(keys)}
    numbers = {key: number for number, key in enumerate(units)}
    return ModelTrace(tuple(units.values()), tuple(numbers[key] for key in keys), facts)


def _estimate_unit(
    request: TraceRequest, kind: str, parameters: Sequence[TracedParameter], share: float, facts: ModelFacts
) -> UnitTrace[Size]:
    """Return the bound of a unit: of a block all results of its matrices and all scores of its attention."""
    width, hidden, heads, vocabulary = request.width, facts.hidden, facts.heads, facts.vocabulary
    experts = max(1, facts.experts_per_token)
    matrices = [p for p in parameters if len(p.shape) >= 2] if kind != "embedding" else []
    results = sum(max(p.shape[-2:]) * (experts if len(p.shape) > 2 else 1) for p in matrices)
    kept_bytes = {"tokens": width * hidden * (2 if kind == "block" else 1)}
    work = {"tokens": width * hidden}
    if kind == "block":
        kept_bytes["tokens"] += _KEPT * width * results
        kept_bytes["pairs"] = (4 + width) * heads
        work = {name: 2 * size for name, size in kept_bytes.items()}
    if kind == "head":
        work |= {"chunk": 2 * width * vocabulary, "block": 8 * vocabulary, "1": 4 * vocabulary * hidden}
    both = {name: kept_bytes.get(name, 0) + work.get(name, 0) for name in (*kept_bytes, *work)}
    forward_products, backward_products = (_list_products(matrices, kind, share, width, times) for times in (1, 2))
    forward = PassTrace[Size]((Moment("", (_build_size(both),), _build_size(kept_bytes)),), forward_products)
    moments = tuple(Moment[Size](p.name, (_build_size(work),), ()) for p in parameters if p.trainable)
    gone = {name: -size for name, size in kept_bytes.items()}
    last_moment = Moment("", (_build_size(work),), _build_size(gone))
    backward = PassTrace[Size]((*moments, last_moment), backward_products)
    evaluation = PassTrace[Size]((Moment("", (_build_size(both),), ()),), forward.operations)
    return UnitTrace(tuple(parameters), forward, backward, evaluation)


def _list_products(
    matrices: Sequence[TracedParameter], kind: str, share: float, width: int, times: int
) -> tuple[Operation[Size], ...]:
    rows = "targets" if kind == "head" else "tokens"
    operations: list[Operation[Size]] = []
    for p in matrices:
        active = math.prod(p.shape) * (share if "experts" in p.name else 1.0)
        n, k = p.shape[-2:]
        launches, m, one = _build_size({"1": times}), _build_size({rows: 1}), _build_size({"1": 1})
        shape = (m, _build_size({"1": n}), _build_size({"1": k}))
        flops, read = _build_size({rows: 2 * active * times}), _build_size({"1": width * p.numel, rows: width * k})
        written = _build_size({rows: width * n})
        operations.append(Operation[Size]("product", p.name, launches, *shape, one, flops, read, written, width))
    return tuple(operations)


def _build_size(terms: Mapping[str, float]) -> Size:
    return tuple(terms.get(name, 0) for name in BASIS)
