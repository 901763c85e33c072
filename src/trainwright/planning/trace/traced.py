"""Traces of requests: from the store without torch, otherwise traced now and stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from trainwright.errors import MachineError, TrainwrightError
from trainwright.models.attention.kernels import (
    ASSUMED,
    FLEX,
    VARLEN,
    AttentionKernel,
    AttentionNeeds,
    Dtype,
    Platform,
    choose,
)
from trainwright.parallel.constants import BF16_FROM_LENGTH, BLOCK_BYTES, CHUNK_BYTES, FUSED_CHUNK_BYTES
from trainwright.planning.trace import store
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.units import (
    BatchShape,
    ModelFacts,
    ModelTrace,
    Size,
    SizedModel,
    TracedParameter,
    evaluate_trace,
)


def size_model(request: TraceRequest, batch: BatchShape, threads: int = 1) -> SizedModel:
    """Return what passes over a batch allocate and compute. ``threads``: of a process on a CPU."""
    facts = build_request_facts(request)
    chunk, _ = facts.compute_logit_rows(batch.targets)
    regime = Regime(
        windows=0 < facts.window < batch.longest,
        long=not needs_fp32_backward(request, batch),
        chunked=batch.targets > chunk or request.device.fuses_loss,  # which compute one chunk as the first of several
        every=batch.targets >= batch.tokens,
    )
    if isinstance(request.recompute, int) and request.recompute > 1:
        none, full = (dataclasses.replace(request, recompute=how) for how in ("none", "full"))
        traces = (load_trace(one, regime) for one in (none, full))
        return evaluate_trace(_build_recomputed(request.recompute, *traces), batch, threads)
    return evaluate_trace(load_trace(request, regime), batch, threads)


@lru_cache(maxsize=64)
def _build_recomputed(number: int, none: ModelTrace[Size], full: ModelTrace[Size]) -> ModelTrace[Size]:
    """Return the trace of a model of which every block of this number is recomputed."""
    last, begin = len(none.order) - 1, len(none.units)
    order = (
        begin + full.order[unit] if 0 < unit < last and unit % number == 0 else index
        for unit, index in enumerate(none.order)
    )
    return dataclasses.replace(none, units=(*none.units, *full.units), order=tuple(order))


def needs_fp32_backward(request: TraceRequest, batch: BatchShape) -> bool:
    """Return whether a CPU converts the attention of packs in bf16 to fp32 in the backward pass."""
    if request.rows not in ("packed", "equal") or request.device.is_gpu or request.width != 2:
        return False
    return batch.longest < BF16_FROM_LENGTH or not request.device.amx


_USUAL = Regime()


@lru_cache(maxsize=256)
def load_trace(request: TraceRequest, regime: Regime = _USUAL) -> ModelTrace[Size]:
    """Return the trace of a request in a regime."""
    generation = max((kernel.generation for kernel in _choose_kernels(request, request.device, 2**62)), default=2)
    trace = _load_stored_trace(normalize_request(request, regime), regime, generation)
    units = trace.units
    if request.recompute == "selective":  # its results stay on the device; only a block's input, the last output, moves
        units = tuple(u._replace(forward=u.forward._replace(saved=u.forward.saved[-1:])) for u in units)
    return dataclasses.replace(trace, units=units, facts=build_request_facts(request, trace.facts))


@lru_cache(maxsize=64)
def _load_stored_trace(request: TraceRequest, regime: Regime, generation: int) -> ModelTrace[Size]:
    """Return the trace of a request as it is stored; ``generation``: of the flash attention that computes it."""
    if (values := store.read_value(key := build_trace_key(request, regime), request.model.configuration)) is None:
        store.write_value(key, values := _trace(request, regime))
    return store.from_json(values, generation)


def _trace(request: TraceRequest, regime: Regime) -> Any:
    """Trace a request now; return the trace as JSON values.

    Where torch has a device, a backward pass starts threads for it, also one on tensors without data. A process that
    has them can fork no workers that use the device (torch/csrc/autograd/engine.cpp: track_bad_autograd_forks), so the
    pass is in a process of its own there, unless this one has run another before.

    Raises:
        RequestError: the model cannot be made, as in a run.
        MachineError: this process was forked from one that has run a backward pass, and so can run none.
    """
    import torch

    from trainwright.planning.trace.tracing import trace_or_bound

    def values() -> Any:
        with _use_one_thread():
            return store.to_json(trace_or_bound(request, regime))

    if torch.accelerator.current_accelerator() is None:
        return values()
    if (result := _run_in_child(lambda: values() if _can_run_backward() else None)) is not None:
        return result
    if not _can_run_backward():
        raise MachineError(
            "this process was forked from one that has run a backward pass on a device, so torch can run none in it "
            "(https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork); plan in a process that is spawned"
        )
    return values()


def _can_run_backward() -> bool:
    """Return whether this process can run a backward pass, and start the threads for it."""
    import torch

    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Compute in this thread alone: workers that are forked from a process whose OpenMP has threads wait for these."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_in_child(values: Callable[[], Any]) -> Any:
    """Return what a forked process computes. Raises TrainwrightError as it does."""
    from multiprocessing import get_context

    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def compute() -> None:
        try:
            sender.send(values())
        except TrainwrightError as error:
            sender.send(error)

    child = context.Process(target=compute)
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = None
    child.join()
    if child.exitcode:
        raise RuntimeError(f"the process that traces the model ended with status {child.exitcode}")
    if isinstance(answer, TrainwrightError):
        raise answer
    return answer


def build_trace_key(request: TraceRequest, regime: Regime) -> str:
    """Return the name under which the trace of a request is stored."""
    return store.hash_key(["trace", _select_differing(request), regime])


# GPUs whose attention of packs stands for that of others: with flash attention, and sequence by sequence.
_GPU = Device("cuda")
_WITHOUT_FLASH = Device("cuda", Platform(missing=(*ASSUMED.missing, (VARLEN.name, ""), (FLEX.name, ""))))


def normalize_request(request: TraceRequest, regime: Regime) -> TraceRequest:
    """Return the request that is traced for all that have the same operations."""
    recompute = "none" if request.recompute == "compiled" else request.recompute
    longest = 2**62 if regime.windows else 0
    hooked = request.hooked and (read_model_facts(request.model).tied or bool(request.model.adapter))
    request = dataclasses.replace(request, hooked=hooked)
    if request.rows == "equal" and any(
        kernel.memory == "scores" for kernel in _choose_kernels(request, request.device, longest)
    ):
        request = dataclasses.replace(request, rows="packed")  # which are computed one by one
    if not request.device.is_gpu:
        return dataclasses.replace(request, recompute=recompute, device=dataclasses.replace(request.device, amx=True))
    dtype: Dtype = "fp32" if request.width == 4 else "bf16"
    rows, device = request.rows, request.device
    device_kernels = _choose_kernels(request, device, longest)
    for typical in (_GPU, _WITHOUT_FLASH):
        typical_kernels = _choose_kernels(dataclasses.replace(request, dtype=dtype), typical, longest)
        if [(kernel.memory, kernel.widths(256, 256)) for kernel in device_kernels] == [
            (o.memory, o.widths(256, 256)) for o in typical_kernels
        ]:
            device = dataclasses.replace(typical, fused=device.fused)
            rows = "packed" if device_kernels and all(kernel.memory == "flash" for kernel in device_kernels) else rows
            break
    return dataclasses.replace(request, recompute=recompute, dtype=dtype, rows=rows, device=device, hooked=False)


def _choose_kernels(request: TraceRequest, device: Device, longest: int) -> list[AttentionKernel]:
    """Return the kernels of packs that a device computes the layers with."""
    if request.rows not in ("packed", "equal"):
        return []
    return [choose(needs, device.limits).kernel for needs in list_attention_needs(request, longest)]


def build_request_facts(request: TraceRequest, facts: ModelFacts | None = None) -> ModelFacts:
    """Return the facts of a request's model, with those that depend on the device."""
    facts = read_model_facts(request.model) if facts is None else facts
    chunk = FUSED_CHUNK_BYTES if request.device.fuses_loss else CHUNK_BYTES
    limits: dict[str, Any] = {"chunk_logits": chunk // request.width, "block_logits": BLOCK_BYTES // 4}
    on_cpu = not request.device.is_gpu
    return dataclasses.replace(facts, **limits, grows=not on_cpu, pads=on_cpu and request.width == 2)


def list_attention_needs(request: TraceRequest, longest: int) -> tuple[AttentionNeeds, ...]:
    """Return what kernels have to compute for sequences of at most ``longest`` tokens, for each kind of layer."""
    facts, packed = read_model_facts(request.model), request.rows in ("packed", "equal")
    return tuple(
        AttentionNeeds(
            layer.size,
            layer.value_size,
            request.dtype,
            packed=packed,
            softcap=layer.softcap,
            sinks=layer.sinks,
            dropout=layer.dropout,
            window=layer.window and facts.window < longest,
            deterministic=request.device.deterministic,
        )
        for layer in facts.attention
    )


def read_model_facts(model: TracedModel) -> ModelFacts:
    """Return the facts of a model."""
    return trace_modules(model).facts


def list_parameters(model: TracedModel) -> tuple[tuple[TracedParameter, ...], ...]:
    """Return the parameters of the embedding, every block and the head."""
    return tuple(unit.parameters for unit in trace_modules(model).list_units())


@lru_cache(maxsize=64)
def trace_modules(model: TracedModel) -> ModelTrace[Size]:
    """Return the units of a model, without their passes."""
    key = store.hash_key(["modules", _select_differing(model)])
    if (values := store.read_value(key, model.configuration)) is None:
        from trainwright.planning.trace.tracing import trace_without_passes

        with _use_one_thread():
            values = store.to_json(trace_without_passes(model))
        store.write_value(key, values)
    return store.from_json(values)


def _select_differing(value: Any) -> Any:
    """Return the fields of a dataclass that differ from their defaults, so that a new field changes no key."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: _select_differing(field_value) for field, field_value in fields if field_value != field.default}
