"""Kernels that a step of one GPU launches and the bytes that they move, counted without a GPU.

    python bench/launches.py                       # some minutes: traces that are not in the cache are made
    python bench/launches.py --only smollm2        # cases whose name has this in its name

Passes are the traces that plans are made from: the run's own modules on tensors without data, one micro-batch of the
cases of gpu_peers.py, with plain operations and with `model.kernels: triton`. The update is that of the strategy
`single` itself, on tensors that say they are on a GPU. An operator is one launch, and one over lists of tensors as many
as torch's multi_tensor_apply (ATen/native/cuda/MultiTensorApply.cuh) divides it into.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_peers import ADAPTERS, CASES, Case
from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.parallel.replicated.replicated import Replicated
from trainwright.parallel.strategy import StrategyConfig
from trainwright.parallel.world import World
from trainwright.planning.trace import store
from trainwright.planning.trace.request import Device, TracedModel, TraceRequest
from trainwright.planning.trace.traced import list_parameters, size_model
from trainwright.planning.trace.units import BatchShape, Operation
from trainwright.recipe.schema import OptimizerSection
from trainwright.recipe.sections.model import AdapterSection
from trainwright.recipe.sections.parallel import ParallelSection

COUNTED = ("gpt2-124m", "smollm2-135m", "llama-1b", "llama-8b lora")
KERNELS = ("eager", "triton")
OPTIMIZERS = ("adamw", "muon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this")
    output = results_directory() / "launches.json"
    options = parser.parse_args()
    store.SHIPPED = Path()  # today's code is traced
    results: dict[str, Any] = {"machine": describe([]), "cases": {}}
    for case in CASES:
        if case.name not in COUNTED or options.only not in case.name:
            continue
        model = model_of(case)
        counted: dict[str, Any] = {"packs": case.micro_batch, "pack": case.pack}
        counted["passes"] = {kernels: of_passes(model, case, kernels) for kernels in KERNELS}
        names = OPTIMIZERS if case.adapter == "none" else OPTIMIZERS[:1]
        counted["update"] = {name: of_update(model, name) for name in names}
        results["cases"][case.name] = counted
        report(case.name, counted)
    write_results(output, results)
    print(f"All numbers: {output}")


def model_of(case: Case) -> TracedModel:
    """Return the model of a case with its adapter."""
    model = TracedModel.of(case.config)
    if case.adapter == "none":
        return model
    import yaml

    (setting,) = ADAPTERS[case.adapter]
    return model.add_adapter(AdapterSection(**yaml.safe_load(setting.partition("=")[2])))


def of_passes(model: TracedModel, case: Case, kernels: str) -> dict[str, float]:
    """Return what the passes over one micro-batch launch and move."""
    packs, tokens = case.micro_batch, case.pack * case.micro_batch
    batch = BatchShape(1, tokens, ((case.pack, packs),), tokens - packs, True, False)
    request = TraceRequest(model, Device("cuda", fused=kernels == "triton"), "bf16", "packed")
    units = size_model(request, batch).list_units()
    operations = [o for unit in units for part in (unit.forward, unit.backward) for o in part.operations]
    others = [operation for operation in operations if operation.kind not in ("product", "attention")]
    return {
        "launches": sum(operation.launches for operation in operations),
        "bytes": _moved(operations),
        "launches_of_others": sum(operation.launches for operation in others),
        "bytes_of_others": _moved(others),
    }


def _moved(operations: Iterable[Operation[int]]) -> int:
    return sum(operation.read + operation.written for operation in operations)


def of_update(model: TracedModel, name: str) -> dict[str, float]:
    """Return what an update in bf16 with fp32 master weights launches and moves, after a step of one micro-batch."""
    with FakeTensorMode():
        module = _OnDevice()
        for unit, parameters in enumerate(list_parameters(model)):
            block = nn.Module()
            module.add_module("embed" if unit == 0 else f"layers_{unit}", block)
            for parameter in parameters:
                if parameter.trainable:
                    tensor = torch.empty(parameter.shape, device="cuda:0")
                    block.register_parameter(parameter.name.replace(".", "_"), nn.Parameter(tensor))
        world = World(0, 1, 0, 1, torch.device("cuda:0"))
        make = build_optimizer_factory(OptimizerSection(name=name, learning_rate=1e-3, max_grad_norm=1.0))
        config = StrategyConfig(ParallelSection(strategy="single"), world, module, make, torch.bfloat16)
        strategy = Replicated(config)
        for _ in range(2):  # the first also makes the state
            for parameter in module.parameters():
                parameter.grad = torch.empty_like(parameter)
            with Launches() as counted:
                strategy.gradient_norm()
                strategy.step(1e-3, 0.5)
    return {"launches": counted.launches, "bytes": counted.moved}


class _OnDevice(nn.Module):
    """A module that need not be moved: tensors without data cannot be."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self


# Of torch's multi_tensor_apply: elements of a chunk, chunks of a launch, and tensors of a launch by its lists.
_CHUNK, _BLOCKS, _TENSORS = 65_536, 320, (110, 64, 48, 36, 30)


class Launches(TorchDispatchMode):
    """Count launches, and the bytes of what operators read and write."""

    launches = moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace not in ("aten", "trainwright") or "empty" in func.overloadpacket.__name__:
            return out
        results = [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, torch.Tensor)]
        lists = [list(x) for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], torch.Tensor)]
        singles = [x for x in args if isinstance(x, torch.Tensor)]
        tensors = [*singles, *(x for each in lists for x in each)]
        if tensors or results:
            written = results
            if any(argument.is_write for argument in func._schema.arguments):
                written = [x for a, x in zip(func._schema.arguments, args, strict=False) if a.is_write]
                written = [x for each in written for x in (each if isinstance(each, list | tuple) else [each])]
            self.launches += _launches(lists) if lists and "stack" not in str(func) else 1
            overwritten = {id(x) for x in written} if "copy" in func.overloadpacket.__name__ else set()
            read = [x for x in tensors if id(x) not in overwritten]
            self.moved += sum(x.numel() * x.element_size() for x in (*read, *written))
        return out


def _launches(lists: Sequence[Sequence[torch.Tensor]]) -> int:
    """Return into how many launches one over lists of tensors is divided."""
    first = lists[0]
    limit = _TENSORS[min(len([x for x in lists if len(x) == len(first)]), len(_TENSORS)) - 1]
    chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in first)
    return max(-(-len(first) // limit), -(-chunks // _BLOCKS))


def report(name: str, counted: dict[str, Any]) -> None:
    """Print a case."""
    rows = []
    for kernels, numbers in counted["passes"].items():
        rows.append([f"passes, {kernels}", f"{numbers['launches']:,}", f"{numbers['bytes'] / 1e9:,.1f} GB",
                     f"{numbers['bytes_of_others'] / 1e9:,.1f} GB"])  # fmt: skip
    for optimizer, numbers in counted["update"].items():
        rows.append([f"update, {optimizer}", f"{numbers['launches']:,}", f"{numbers['bytes'] / 1e9:,.1f} GB", ""])
    print_table([name, "launches", "bytes", "but for products and attention"], rows)


if __name__ == "__main__":
    main()
