"""Consistency checks before the first step: every process is compared with the recipe and with the others.

There are two checks, because a strategy can only be built by processes that agree: ``check_agreement`` compares recipe,
data, weights, devices and software after the rendezvous, ``check_layout`` the resulting strategy and precision.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright import __version__
from trainwright.data.stream.stream import MicroBatch
from trainwright.engine.task import Task
from trainwright.errors import MachineError
from trainwright.machine.accelerators import HIDE, ON_PURPOSE, refuse_unusable, restrict_to_device
from trainwright.machine.machine import Machine
from trainwright.parallel.layout import ModelLayout, build_planned_layout, count_copies
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import RankInfo, World
from trainwright.recipe.schema import RecipeSchema
from trainwright.utils.text import format_ranks

# Variables that change numbers or what is executed, without a trace in the recipe.
_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    "TORCH_COMPILE_DISABLE",
)
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "deepspeed", "peft", "bitsandbytes")
_SAMPLED = 64  # elements of every tensor that enter its fingerprint
_LINES = 12

_ASKED = {"device": "the run was planned for"}
_FIXES = {
    "processes": "start parallel.num_processes processes, with `trainwright train` or a launcher",
    "recipe": "start every process on the same run directory",
    "device": "give every process its own GPU (LOCAL_RANK, CUDA_VISIBLE_DEVICES), or give none to any process, and "
    "start the run again to plan it for these devices",
    "data": "make every machine read the same files, and clear Trainwright's cache on machines where they changed",
    "weights": "make every machine read the same files, and clear Trainwright's cache on machines where they changed",
    "software": "install the same versions for every process",
    "settings": "set them for all processes or for none",
    "batches": "this is a bug in Trainwright; please report it",
    "layout": "this is a bug in Trainwright or a library; try another parallel.strategy",
}


@dataclass(frozen=True)
class View:
    """What one rank has, and what its recipe plans, as text; keys are (a group of `_FIXES`, a name)."""

    actual: dict[tuple[str, str], str]
    planned: dict[tuple[str, str], str]

    @classmethod
    def of(cls, actual: dict[tuple[str, str], Any], planned: dict[tuple[str, str], Any]) -> View:
        """Return the view of these values."""
        return cls({key: repr(value) for key, value in actual.items()}, {k: repr(item) for k, item in planned.items()})


def choose_device(machine: Machine, rank_info: RankInfo | None, device: str | None = None) -> str:
    """Return the type of the device to compute on, as in torch. Without a ``rank_info``, read it from the
    environment.

    Args:
        device: the recipe's ``parallel.device``, if set.

    Raises:
        MachineError: there are GPUs, but none for this process alone.
    """
    if device is None:
        refuse_unusable(machine)
    else:
        machine = restrict_to_device(machine, device)
    if machine.device == "cpu":
        return machine.device
    hide = f"or {HIDE if device is None else ON_PURPOSE}"
    if not torch.get_device_module(machine.device).is_available():
        raise MachineError(
            f"{machine.describe()}: torch {torch.__version__} cannot use them; install a build for this driver, {hide}"
        )
    rank_info, visible = rank_info or RankInfo.from_variables(), torch.accelerator.device_count()
    if rank_info.gpu >= visible:
        raise MachineError(
            f"rank {rank_info.rank} has no GPU: it is process {rank_info.local_rank} of {rank_info.local_size} on "
            f"this machine and sees {visible}; start at most one process per GPU, {hide}"
        )
    return machine.device


def check_agreement(recipe: RecipeSchema, task: Task, world: World) -> None:
    """Compare the processes before a strategy is built on them. Every rank must call.

    Raises:
        MachineError: on all ranks, naming every difference and the ranks that have it.
    """
    first = task.stream.global_batch(0)
    share = first.select_for_rank(world.rank, world.size)
    values: dict[tuple[str, str], Any] = {
        ("processes", "number"): dist.get_world_size() if dist.is_initialized() else 1,
        ("device", "type"): world.device.type,
        ("data", "train"): task.stream.dataset.fingerprint,
        ("data", "validation"): task.validation.dataset.fingerprint if task.validation is not None else None,
        ("batches", "micro-batches per step"): len(share),
        **{("software", name): version for name, version in _read_versions().items()},
        **{("settings", name): value for name, value in _read_settings().items()},
        **{("recipe", name): value for name, value in _iterate_keys(recipe)},
    }
    weights = _fingerprint_weights(task.module) if task.weights is None else task.weights.fingerprint()
    if weights is not None:
        values["weights", "fingerprint"] = weights
    planned_values: dict[tuple[str, str], Any] = {("processes", "number"): recipe.parallel.num_processes}
    if recipe.parallel.device != "auto":
        planned_values["device", "type"] = recipe.parallel.device
    steps = recipe.train.gradient_accumulation_steps
    examples = sum(len(micro.examples) for micro in first.micro_batches)
    if steps != "auto" and recipe.data.pack_length is None and examples == recipe.train.global_batch_size:
        planned_values["batches", "micro-batches per step"] = steps
    local = (View.of(values, planned_values), _identify_gpu(world.device), _list_with_targets(share))
    rank_records: list[Any] = [local] if world.alone else world.gather(local, View)
    views, gpus, deals = ([rank[part] for rank in rank_records] for part in range(3))
    dealt = _check_dealt(
        itertools.chain.from_iterable(deals), _list_with_targets(share if world.alone else first.micro_batches)
    )
    _refuse([*_iterate_differences(views), *_check_shared_gpus(gpus), *dealt], world)


def check_layout(recipe: RecipeSchema, dtype: torch.dtype, strategy: Strategy) -> ModelLayout:
    """Compare the layout of the model with the recipe's strategy; return this rank's layout. Every rank must call.

    Args:
        dtype: the recipe's data type of the forward pass.

    Raises:
        MachineError: on all ranks, naming every difference and the ranks that have it.
    """
    world = strategy.world
    masters = recipe.optimizer.master_weights
    planned_values = asdict(build_planned_layout(recipe.parallel, dtype, world.device.type, master_weights=masters))
    local = strategy.layout()
    rank_layouts: list[tuple[str, ModelLayout]] = world.gather((strategy.name, local), ModelLayout)
    layouts = [layout for _, layout in rank_layouts]
    held_copies = count_copies(layouts, [layout.held for layout in layouts], planned_values["held_copies"])
    updated_copies = count_copies(layouts, [layout.updated for layout in layouts], planned_values["updated_copies"])
    planned_keys = _build_layout_keys({"strategy": recipe.parallel.strategy, **planned_values})
    views = []
    for name, layout in rank_layouts:
        values: dict[str, Any] = {"strategy": name, **asdict(layout)}
        for of_one_rank in ("local_shape", "held", "updated"):
            del values[of_one_rank]
        values |= {} if world.alone else {"held_copies": held_copies, "updated_copies": updated_copies}
        views.append(View.of(_build_layout_keys(values), planned_keys))
    _refuse(_iterate_differences(views), world)
    return local


def _build_layout_keys(values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {("layout", name.replace("_", " ")): value for name, value in values.items()}


def _iterate_differences(views: Sequence[View]) -> Iterator[tuple[str, str]]:
    """Yield group and line for every difference of a rank from rank 0's recipe or from the other ranks."""
    planned_values = views[0].planned
    for key in dict.fromkeys(itertools.chain.from_iterable(view.actual for view in views)):
        ranks: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            if key in view.actual:
                ranks.setdefault(view.actual[key], []).append(rank)
        group, name = key
        if key in planned_values:
            wrong = {value: rank_list for value, rank_list in ranks.items() if value != planned_values[key]}
            if wrong:
                source = _ASKED.get(group, "the recipe asks for")
                yield group, f"{group}: {name}: {source} {planned_values[key]}, and it is {_describe_ranks(wrong)}"
        elif len(ranks) > 1:
            yield group, f"{group}: {name}: {_describe_ranks(ranks)}"


def _describe_ranks(ranks: dict[str, list[int]]) -> str:
    return ", ".join(f"{value} on {format_ranks(rank_list)}" for value, rank_list in ranks.items())


def _check_shared_gpus(gpus: Sequence[str | None]) -> Iterator[tuple[str, str]]:
    for gpu in dict.fromkeys(gpus):
        ranks = [rank for rank, rank_gpu in enumerate(gpus) if rank_gpu == gpu]
        if gpu is not None and len(ranks) > 1:
            yield "device", f"device: {format_ranks(ranks)} are on the same GPU ({gpu}), instead of one each"


def _list_with_targets(micro_batches: Iterable[MicroBatch]) -> list[int]:
    """Return the indices of the micro-batches that are not zero-weight passes."""
    return [micro.index for micro in micro_batches if micro.weight]


def _check_dealt(dealt: Iterable[int], expected: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the micro-batches of the first global batch that are missing or assigned twice."""
    together = sorted(dealt)
    if together != sorted(expected):
        yield "batches", f"batches: the first step is micro-batches {sorted(expected)}; the ranks have {together}"


def _refuse(lines: Iterable[tuple[str, str]], world: World) -> None:
    differences = list(lines)
    if not differences:
        return
    shown_lines = [line for _, line in differences[:_LINES]]
    if len(differences) > _LINES:
        shown_lines.append(f"and {len(differences) - _LINES} more")
    fixes = dict.fromkeys(_FIXES[group] for group, _ in differences)
    raise MachineError(
        f"the {world.size} process{'es' * (world.size > 1)} would not run what the recipe asks for:\n  "
        + "\n  ".join(shown_lines)
        + "\nto fix it: "
        + "; ".join(fixes)
    )


def _iterate_keys(recipe: RecipeSchema) -> Iterator[tuple[str, Any]]:
    """Yield every key except where the run is written, which may differ between machines."""
    for section, values in recipe.model_dump(exclude={"logging"}).items():
        if isinstance(values, dict):
            yield from ((f"{section}.{key}", value) for key, value in values.items())
        else:
            yield section, values


def _read_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "trainwright": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": torch.version.xpu,
    }
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _read_settings() -> dict[str, Any]:
    """Return the settings outside the recipe that change numbers."""
    return {
        "default dtype": str(torch.get_default_dtype()),
        "precision of fp32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **{name: os.environ.get(name) for name in _VARIABLES},
    }


def _identify_gpu(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    return f"{platform.node()} {torch.get_device_module(device).get_device_properties(device).uuid}"


def _fingerprint_weights(module: nn.Module) -> str:
    """Return a fingerprint of the names, shapes and a sample of the weights."""
    digest = hashlib.sha256()
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)]
        digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
