"""Real training steps on the CPU, whose allocations and products traces are compared with."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from trainwright.data.stream.batch import Batch
from trainwright.models.adapters.attaching import attach_adapter
from trainwright.models.adapters.files import list_fully_trained
from trainwright.models.causal_lm import CausalLM, RouterLoss
from trainwright.models.float8 import use_float8
from trainwright.models.quantization import quantize
from trainwright.models.recompute import save_activation_memory
from trainwright.planning.trace.request import TraceRequest
from trainwright.planning.trace.units import BatchShape, Operation, SizedModel
from trainwright.recipe.sections.model import AdapterSection, ModelSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def real_model(request: TraceRequest) -> CausalLM:
    """Build the model of a request with real weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**json.loads(request.model.configuration))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if request.model.adapter:
        fields = json.loads(request.model.configuration)
        adapter = AdapterSection(**json.loads(request.model.adapter))
        if adapter.quantization != "none":
            keep = list_fully_trained(adapter)
            quantize(
                model,
                adapter.quantization,
                double=adapter.double_quantization,
                keep=keep,
                experts=adapter.quantize_experts,
            )
        attach_adapter(model, ModelSection(config=fields, tokenizer="bytes", adapter=adapter), 0)
    balance = RouterLoss(1.0, config.num_experts_per_tok) if request.model.router_loss else None
    lm = CausalLM(model, packed=request.rows in ("packed", "equal"), router_loss=balance)
    for parameter in lm.parameters():
        parameter.data = parameter.data.to(DTYPES[request.dtype])
    use_float8(lm.blocks(), request.model.float8)
    save_activation_memory(lm.blocks(), request.recompute)
    return lm.train()


def batch_of(lengths: tuple[int, ...], packed: bool, vocabulary: int, targets: int | None = None) -> Batch:
    from trainwright.data.stream.batch import collate
    from trainwright.data.stream.stream import Stream, StreamSettings
    from trainwright.data.tokens.dataset import TokenDataset

    examples = []
    for length in lengths:
        trained = [True] * length if targets is None else [False] * (length - targets) + [True] * targets
        examples.append(([1 + i % (vocabulary - 1) for i in range(length)], trained))
    dataset = TokenDataset.from_examples(examples, "probe")
    pack = sum(lengths) if packed else None
    settings = StreamSettings(
        global_batch_size=len(dataset), seed=0, rows=len(dataset), pack_length=pack, shuffle=False
    )
    micro = Stream(dataset, settings).global_batch(0).micro_batches[0]
    return collate(dataset, micro, packed=packed, pad_token_id=0)


def shape_of(batch: Batch) -> BatchShape:
    """Return the shape that a plan has for a batch."""
    rows, length = batch.input_ids.shape
    if batch.boundaries is not None:
        sequences = tuple((n, 1) for n in batch.lengths)
        return BatchShape(1, length, sequences, len(batch.targets), True, False)
    masked = len(set(batch.lengths)) > 1
    return BatchShape(rows, length, ((length, rows),), len(batch.targets), False, masked)


def measured(lm: CausalLM, batch: Batch) -> dict[str, int]:
    """Return the most bytes of a step's allocations, those inside kernels too, without parameters, and of an
    evaluation; and the FLOPs of products.
    """
    peaks = {"step": peak_of(lm, batch), "evaluation": _peak(_evaluation, lm, batch)}
    products = torch.ops.aten._scaled_mm_v2, torch.ops.trainwright.block_product
    float8: dict[Any, Any] = dict.fromkeys(products, _flops_of_float8)
    with FlopCounterMode(display=False, custom_mapping=float8) as counter:
        _step(lm, batch)
    return {**peaks, "flops": counter.get_total_flops()}


def _flops_of_float8(a: Any, b: Any, scales: Any, *_: Any, **__: Any) -> int:
    halves = isinstance(scales, torch.Size) and a[1] == 8 * scales[1]  # bytes of two numbers, of which 16 have a scale
    return int(2 * a[0] * a[1] * b[1]) * (2 if halves else 1)


def peak_of(lm: CausalLM, batch: Batch) -> int:
    """Return the most bytes of a step's allocations, those inside kernels too, without parameters."""
    return _peak(_step, lm, batch)


def _peak(run: Callable[[CausalLM, Batch], None], lm: CausalLM, batch: Batch) -> int:
    run(lm, batch)
    lm.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(lm, batch)
    found: Any = recorded.profiler
    events = sorted(found.kineto_results.events(), key=lambda event: event.start_ns())
    lm.zero_grad(set_to_none=True)
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def _step(lm: CausalLM, batch: Batch) -> None:
    lm.train()
    (lm(batch) / batch.weight).backward()


def _evaluation(lm: CausalLM, batch: Batch) -> None:
    lm.eval()
    with torch.no_grad():
        lm(batch, statistics=True)


def _counted(operation: Operation[int]) -> bool:
    """Return whether torch counts an operation: products, but not the grouped ones of experts."""
    return operation.kind == "product" and not ("experts" in operation.name and operation.times > 1)


def planned(model: SizedModel) -> dict[str, int]:
    """Return the same as ``measured`` from a trace, if gradients stay until the end of the step."""
    units = model.list_units()
    live = peak = ready = flops = 0
    for unit, part in [*((u, u.forward) for u in units), *((u, u.backward) for u in reversed(units))]:
        bytes_of = {p.name: p.numel * p.width for p in unit.parameters}
        for moment in part.moments:
            peak = max(peak, live + ready + moment.live[0])
            ready += bytes_of.get(moment.gradient, 0)
        live += part.moments[-1].after
        flops += sum(one.flops for one in part.operations if _counted(one))
    evaluation = begun = 0
    for unit in units:
        for moment in unit.evaluation.moments:
            evaluation = max(evaluation, begun + moment.live[0])
            after = moment.after
        begun += after
    return {"step": peak, "evaluation": evaluation, "flops": flops}
