"""Give every `auto` of a recipe a value, with a reason, and refuse what this machine cannot run. Imports no torch.

A planner chooses the values, if there is one (``recipe/registries.py``, PLANNERS); otherwise they follow from simple
rules (``choose_values``), which predict neither memory nor time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainwright.engine.checkpoints.saving import explain_auto_interval
from trainwright.errors import MachineError, RequestError
from trainwright.machine.accelerators import Build, read_installed_build, restrict_to_device
from trainwright.machine.catalog import explain_no_float8, list_possible_float8
from trainwright.machine.describe import Cluster, build_cluster
from trainwright.machine.machine import Machine
from trainwright.machine.processor import explain_no_triton
from trainwright.machine.vendors import explain_missing_feature
from trainwright.models.fused.choice import is_fused, refuse_missing
from trainwright.parallel.zero import deepspeed_config
from trainwright.recipe.checks import find_implied_strategy, list_contradictions, list_usable_processes, set_processes
from trainwright.recipe.problems import extract_contradictions
from trainwright.recipe.registries import OPTIMIZERS, PLANNERS
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.parallel import ProcessRange
from trainwright.recipe.strategy_spec import load_strategies, look_up_strategy
from trainwright.utils.text import format_ranges


@dataclass(frozen=True)
class Planned:
    """What a planner has chosen for a recipe on a machine.

    Attributes:
        values: for every ``auto``, by section and key of the recipe.
        reasons: ``key value: why`` for every choice.
        summary: the plan in one line.
        document: the whole plan, as written to plan.json.
        shortage: why the run does not fit; None if it does, or if nothing was predicted.
        is_close: the largest step has to be tested before training.
        threads: of a process on a CPU; None: its share of the cores.
        estimated: the lengths of the examples were estimated; they are known once the data has been prepared.
        fits: whether a resolved recipe with another number of processes fits.
    """

    values: Mapping[str, Mapping[str, Any]]
    reasons: tuple[str, ...]
    summary: str
    document: Mapping[str, Any] = field(default_factory=dict)
    shortage: str | None = None
    is_close: bool = False
    threads: int | None = None
    estimated: bool = False
    fits: Callable[[RecipeSchema], bool] = lambda recipe: True

    def refuse_shortage(self) -> None:
        """Raise MachineError if the run does not fit."""
        if self.shortage is not None:
            raise MachineError(self.shortage)


@dataclass(frozen=True)
class Resolved:
    """A recipe without `auto`; ``reasons`` has ``key value: why`` for every choice and ``key: …`` for a remark.

    Attributes:
        chosen: keys (``section.key``) whose value was not set in the recipe.
        usable: the numbers of processes that the run can go on with, in order, if the recipe leaves it open. The plan
            and the recipe here are for the largest.
    """

    recipe: RecipeSchema
    reasons: tuple[str, ...]
    plan: Planned
    chosen: tuple[str, ...]
    usable: tuple[int, ...] = ()

    @property
    def processes(self) -> int:
        """The number of processes, or the largest of those that the run can go on with."""
        processes = self.recipe.parallel.num_processes
        assert isinstance(processes, int), "a resolved recipe has no auto left"
        return processes


def resolve(recipe: RecipeSchema, machine: Machine, nodes: int = 1, check_gpus: bool = True) -> Resolved:
    """Fill in every `auto` for ``nodes`` machines like ``machine``.

    If nothing fits, the recipe is resolved to the nearest candidate; ``Planned.refuse_shortage`` raises the error.
    ``check_gpus`` is False if GPUs are counted elsewhere: a launcher may show each process only its own.

    Raises:
        RequestError: more processes than GPUs, or batch sizes that no number of processes satisfies.
        MachineError: a device that is not present or not usable, or a precision that it cannot compute in.
    """
    requested_recipe, elastic = recipe, recipe.parallel.num_processes
    machine = restrict_to_device(machine, recipe.parallel.device)
    recipe, remarks = apply_implied_values(recipe, build_cluster(machine, nodes), check_gpus)
    planners = PLANNERS.present() or [choose_values]
    plan: Planned = planners[-1](recipe, machine, nodes)
    if sys.platform == "darwin" and machine.is_here:
        remarks.append("parallel.device cpu: macOS is experimental; training uses the CPU, and not Apple's GPU (MPS)")
    if recipe.checkpoint.every == "auto":
        remarks.append(explain_auto_interval(recipe.faults.mean_time_between))
    resolved_recipe = fill_auto_values(recipe, plan.values, machine.device)
    usable: tuple[int, ...] = ()
    if isinstance(elastic, ProcessRange):
        largest = int(resolved_recipe.parallel.processes)
        allowed_numbers = tuple(n for n in list_usable_processes(resolved_recipe, elastic) if n <= largest)
        usable = _select_fitting(resolved_recipe, allowed_numbers, plan.fits)
        numbers = format_ranges(allowed_numbers, " to ")
        remarks.append(f"parallel.num_processes: the run has as many of {numbers} processes as there are GPUs or slots")
        if len(usable) < len(allowed_numbers):
            few = format_ranges(allowed_numbers[: -len(usable)], " to ")
            remarks.append(f"parallel.num_processes: with {few} the run does not fit, so it waits for {usable[0]}")
        requested_recipe = set_processes(requested_recipe, usable[-1])
    chosen_keys = tuple(_list_changed_keys(requested_recipe, resolved_recipe))
    return Resolved(resolved_recipe, (*plan.reasons, *remarks), plan, chosen_keys, usable)


# Tokens of a micro-batch that is chosen without a plan, unless one row has more.
_MICRO_BATCH_TOKENS = 8192


def choose_values(recipe: RecipeSchema, machine: Machine, nodes: int) -> Planned:
    """Choose values without predictions: the simplest strategy, one process per GPU or two on a CPU, the precision of
    the device, and the largest micro-batch of a usual size, which is tested before training.

    Raises:
        RequestError: a value does not follow from the rest of the recipe; the message says what to write.
    """
    parallel = recipe.parallel
    if isinstance(parallel.num_processes, ProcessRange):
        processes = list_usable_processes(recipe, parallel.num_processes)[-1]
    elif parallel.num_processes == "auto":
        processes = 1 if parallel.is_one_process else list_process_counts(recipe, machine, nodes)[0]
    else:
        processes = parallel.num_processes
    strategy = _choose_simplest_strategy(processes) if parallel.strategy == "auto" else parallel.strategy
    precision = "bf16" if machine.gpus and machine.has_bf16 else "no"
    choices: dict[str, dict[str, Any]] = {
        "train": {
            "micro_batch_size": _choose_micro_batch_size(recipe, processes),
            "mixed_precision": precision,
            "activation_checkpointing": "none",
            "compile": False,
        },
        "parallel": {"strategy": strategy, "num_processes": processes},
    }
    values = {
        name: {key: value for key, value in section.items() if getattr(getattr(recipe, name), key) == "auto"}
        for name, section in choices.items()
    }
    values["parallel"]["num_processes"] = processes  # also of a range
    reasons = [
        f"{name}.{key} {str(value).lower()}: the default, as no planner is installed"
        for name, section in values.items()
        for key, value in section.items()
    ]
    summary = f"no plan, as no planner is installed: {strategy} on {processes}; memory and time are not predicted"
    return Planned(values, tuple(reasons), summary, is_close=True)


def _choose_simplest_strategy(processes: int) -> str:
    return next(
        name
        for name, spec in load_strategies().items()
        if not spec.shards and spec.least_processes <= processes <= (spec.most_processes or processes)
    )


def _choose_micro_batch_size(recipe: RecipeSchema, processes: int) -> int | str:
    train, share = recipe.train, math.ceil(recipe.batch_rows / processes)
    steps, packed = train.gradient_accumulation_steps, recipe.data.pack_length is not None
    if packed:  # how many packs a batch has depends on the data
        return 1 if steps == "auto" else "auto"
    if steps == "auto":
        return max(1, min(share, _MICRO_BATCH_TOKENS // recipe.data.max_length))
    sizes = range(share, 0, -1)
    batches = ((rows, math.ceil(math.ceil(train.global_batch_size / rows) / processes)) for rows in sizes)
    if (rows := next((rows for rows, count in batches if count == steps), None)) is None:
        raise RequestError(
            f"train.gradient_accumulation_steps: no micro-batch size gives {steps} on {processes} processes with "
            f"train.global_batch_size {train.global_batch_size}; set parallel.num_processes or set it to auto"
        )
    return rows


def list_process_counts(recipe: RecipeSchema, machine: Machine, nodes: int) -> tuple[int, ...]:
    """Return the numbers of processes to try on ``nodes`` machines like this one, as many on each.

    First the number with which each process has an example, or if the rest of the recipe does not allow it, the nearest
    smaller number that it does, or else the nearest larger one. Then all GPUs: those without examples can hold shards.
    """
    usual = len(machine.gpus) or min(2, machine.cpu_cores)  # more than two on a CPU gain nothing
    busy = max(1, min(usual, recipe.batch_rows // nodes))
    candidates = chain(range(busy, 0, -1), range(busy + 1, (len(machine.gpus) or machine.cpu_cores) + 1))
    node_processes = next((n for n in candidates if not list_contradictions(set_processes(recipe, n * nodes))), busy)
    idle = bool(machine.gpus) and not list_contradictions(set_processes(recipe, usual * nodes))
    return tuple(dict.fromkeys((node_processes * nodes, usual * nodes if idle else node_processes * nodes)))


def _select_fitting(
    recipe: RecipeSchema, allowed: tuple[int, ...], fits: Callable[[RecipeSchema], bool]
) -> tuple[int, ...]:
    """Return the allowed numbers of processes on which a resolved recipe fits: with fewer, shards are larger."""
    spec = recipe.parallel.spec
    if spec is None or not spec.shards:
        return allowed
    largest, *fewer = reversed(allowed)
    return (*sorted(takewhile(lambda n: fits(set_processes(recipe, n)), fewer)), largest)


def fill_auto_values(recipe: RecipeSchema, chosen: Mapping[str, Mapping[str, Any]], device: str) -> RecipeSchema:
    """Return the recipe with every `auto` replaced by the value that was chosen, by section and key.

    Raises:
        RequestError: a choice contradicts the recipe or its DeepSpeed file.
    """
    values = recipe.model_dump()
    for section, choices in chosen.items():
        values[section].update(choices)
    values["parallel"]["device"] = device
    if recipe.checkpoint.keep_best == "auto":
        values["checkpoint"]["keep_best"] = recipe.spec.keeps_best and recipe.validates
    resolved_recipe = _check_recipe(recipe, values)
    deepspeed_config.check_file(resolved_recipe)
    return resolved_recipe


def _list_changed_keys(requested: RecipeSchema, resolved: RecipeSchema) -> Iterator[str]:
    before, after = requested.model_dump(), resolved.model_dump()
    for section, values in after.items():
        if isinstance(values, dict):
            yield from (f"{section}.{key}" for key, value in values.items() if value != before[section].get(key))


def apply_implied_values(
    recipe: RecipeSchema, cluster: Cluster, check_gpus: bool = True
) -> tuple[RecipeSchema, list[str]]:
    """Return the recipe with the strategy and precision that its keys imply, and remarks about running it on
    ``cluster``.

    Raises:
        RequestError: more processes than GPUs.
        MachineError: a precision that the devices cannot compute in, or offloading, TF32 or fused kernels without a GPU
            that has them.
    """
    remarks: list[str] = []
    device = recipe.parallel.device
    if device not in ("auto", cluster.device):
        raise MachineError(
            f"parallel.device: {device}, but the plan for {cluster.name} uses its "
            f"{('GPUs' if device == 'cpu' else 'CPU')}; set it to {cluster.device} or auto"
        )
    recipe = _set_implied_precision(_set_implied_strategy(recipe, remarks), remarks)
    _check_offload(recipe, cluster)
    _check_libraries(recipe, cluster)
    _check_processes(recipe, cluster, remarks, check_gpus)
    _check_precision(recipe, cluster, remarks)
    _check_tf32(recipe, cluster, remarks)
    _check_kernels(recipe, cluster, remarks)
    _check_float8(recipe, cluster, remarks)
    return recipe, remarks


def _set_implied_strategy(recipe: RecipeSchema, remarks: list[str]) -> RecipeSchema:
    """Return the recipe with the strategy that a strategy-specific key implies."""
    if (implied_choice := find_implied_strategy(recipe.parallel)) is None:
        return recipe
    name, key = implied_choice
    remarks.append(f"parallel.strategy {name}: required by {key}")
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"strategy": name})})


def _set_implied_precision(recipe: RecipeSchema, remarks: list[str]) -> RecipeSchema:
    """Return the recipe with the precision of weights that are kept in bf16."""
    if recipe.optimizer.master_weights or recipe.train.mixed_precision != "auto":
        return recipe
    remarks.append("train.mixed_precision bf16: required by optimizer.master_weights false")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"mixed_precision": "bf16"})})


def _check_recipe(recipe: RecipeSchema, values: dict[str, Any]) -> RecipeSchema:
    """Validate the recipe again, because choices may contradict its values."""
    try:
        return type(recipe).model_validate(values)
    except ValidationError as error:
        contradictions = extract_contradictions(error)
        assert contradictions, "every value was valid before"
        raise RequestError("\n".join(f"{item.keys[0]}: {item.message}" for item in contradictions)) from error


def _check_processes(recipe: RecipeSchema, cluster: Cluster, remarks: list[str], check_gpus: bool) -> None:
    processes, rows = recipe.parallel.num_processes, recipe.batch_rows
    if not isinstance(processes, int):  # a range begins with those that are there
        return
    if cluster.has_gpus:
        gpus = cluster.devices
        if check_gpus and processes > gpus:
            raise RequestError(
                f"parallel.num_processes: {processes} processes for {gpus} GPU{'s' * (gpus > 1)}; "
                f"set it to {gpus} or auto, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
    elif processes > (cores := cluster.cpu_cores * cluster.nodes):
        share = f"{processes} processes share {cores} core{'s' * (cores > 1)}"
        remarks.append(f"parallel.num_processes: {share}: correct, but slower than fewer")
    if processes > rows:
        remarks.append(
            f"parallel.num_processes: a step has {rows} example{'s' * (rows > 1)} for {processes} processes: correct, "
            f"but {processes - rows} of them {('are' if processes - rows > 1 else 'is')} idle"
        )


def _check_precision(recipe: RecipeSchema, cluster: Cluster, remarks: list[str]) -> None:
    precision, card = recipe.train.mixed_precision, cluster.card
    if precision == "bf16" and "bf16" not in card.rates:
        if cluster.has_gpus and card.capability < (8, 0):
            raise MachineError(
                f"train.mixed_precision: {card.name} does not compute in bf16; set it to auto, fp16 or no"
            )
        if cluster.device == "cpu":
            remarks.append("train.mixed_precision: bf16 is emulated by this CPU, correct but slower than no (fp32)")
    if precision == "fp16" and cluster.device == "cpu":
        remarks.append("train.mixed_precision: a CPU computes fp16 through fp32, correct but slower than no (fp32)")


def _check_tf32(recipe: RecipeSchema, cluster: Cluster, remarks: list[str]) -> None:
    if not recipe.train.tf32:
        return
    if cluster.device == "cpu":
        raise MachineError("train.tf32: there is no GPU, and a CPU does not compute in TF32; set it to false")
    card = cluster.card
    if (why := explain_missing_feature(card.vendor, "tf32")) is not None:
        raise MachineError(f"train.tf32 {why}")
    if "tf32" not in card.rates and card.capability < (8, 0):
        raise MachineError(
            f"train.tf32: {card.name} does not compute in TF32, which needs compute capability 8.0 or higher; set it "
            "to false"
        )
    if card.rates.get("tf32", math.inf) <= card.rates.get("fp32", 0.0):
        remarks.append(f"train.tf32: {card.name} computes in TF32 no faster than in fp32, and less precisely")


def _check_kernels(recipe: RecipeSchema, cluster: Cluster, remarks: list[str]) -> None:
    kernels = recipe.model.kernels
    vendor = "CPU" if cluster.device == "cpu" else cluster.card.vendor
    refuse_missing(kernels, vendor, cluster.card.capability, explain_no_triton() if cluster.is_here else None)
    if is_fused(kernels):
        remarks.append(
            "model.kernels triton: the loss is one kernel, and so are norms, rotary positions and gated activations "
            "where their formula is the kernel's"
        )


def _check_float8(recipe: RecipeSchema, cluster: Cluster, remarks: list[str]) -> None:
    scales = recipe.train.float8
    if scales == "no":
        return
    if cluster.device == "cpu":
        remarks.append("train.float8: a CPU rounds as a GPU does, correct but slower than no")
    elif (why := explain_no_float8(cluster.card, scales)) is not None:
        raise MachineError(f"train.float8: {why}; set it to {next(iter(list_possible_float8(cluster.card)), 'no')}")
    elif recipe.train.compile is False:
        remarks.append("train.float8: without train.compile, rounding takes longer than products in float8 save")


def _check_libraries(recipe: RecipeSchema, cluster: Cluster) -> None:
    """Refuse what needs a library that has no kernels for the devices."""
    strategy = recipe.parallel.strategy
    library = None if strategy == "auto" else look_up_strategy(strategy).library
    if library is not None and (why := explain_missing_feature(cluster.card.vendor, library.module)) is not None:
        raise MachineError(f"parallel.strategy: {strategy} {why}")
    missing = explain_no_bitsandbytes(cluster.card.vendor, read_installed_build()) if cluster.is_here else None
    quantization, optimizer = recipe.model.adapter.quantization, OPTIMIZERS.get(recipe.optimizer.name).library
    if missing is not None and quantization != "none":
        raise MachineError(f"model.adapter.quantization: {quantization} is not possible here: {missing}")
    if missing is not None and optimizer is not None and optimizer.module == "bitsandbytes":
        raise MachineError(f"optimizer.name: {recipe.optimizer.name} is not possible here: {missing}")


def explain_no_bitsandbytes(vendor: str, build: Build) -> str | None:
    """Return why bitsandbytes has no kernels for the GPUs of a vendor here, or None: its wheels have some for ROCm."""
    if vendor == "Intel" and (why := explain_no_triton()) is not None:
        return f"bitsandbytes {why}"  # its kernels that quantize are Triton's
    spec = find_spec("bitsandbytes")
    if vendor != "AMD" or build.hip is None or spec is None or spec.origin is None:
        return None
    release = "".join(build.hip.split(".")[:2])
    if (Path(spec.origin).parent / f"libbitsandbytes_rocm{release}.so").is_file():
        return None
    return f"the installed bitsandbytes has no kernels for ROCm {build.hip}"


def _check_offload(recipe: RecipeSchema, cluster: Cluster) -> None:
    if recipe.train.activation_offload and cluster.device == "cpu":
        raise MachineError(
            "train.activation_offload: there is no GPU, so activations are already in the host's memory; set it to "
            "false, or train.activation_checkpointing to full to save memory"
        )
    keys = ("train.activation_offload", "parallel.offload_parameters", "parallel.offload_optimizer")
    offloads = [key for key in keys if getattr(getattr(recipe, key.partition(".")[0]), key.partition(".")[2])]
    if offloads and cluster.unified:
        raise MachineError(
            f"{offloads[0]}: {cluster.card.name} computes in the host's memory, so offloading to it saves none; set "
            "it to false"
        )
