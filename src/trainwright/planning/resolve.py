"""Choose whatever a recipe leaves to `auto`, say why, and refuse what this machine cannot do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trainwright.errors import MachineError, RequestError
from trainwright.machine.detect import Machine
from trainwright.planning.processes import choose_processes
from trainwright.recipe.problems import contradictions_in
from trainwright.recipe.schema import Recipe

# Tokens of a micro-batch: enough to keep the matrix units busy, little enough to leave memory for the model.
_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class Resolved:
    """A recipe without `auto`; for every choice that was made ``key value: why``, and ``key: …`` for a remark."""

    recipe: Recipe
    reasons: tuple[str, ...]


def resolve(recipe: Recipe, machine: Machine) -> Resolved:
    """Fill in every `auto` for ``machine``.

    Raises:
        RequestError: more processes than GPUs, or batch sizes that no number of processes here goes with.
        MachineError: a precision the device cannot compute in.
    """
    reasons: list[str] = []
    _check_offload(recipe, machine)
    processes = _processes(recipe, machine, reasons)
    parallel = {"num_processes": processes, "strategy": _strategy(recipe, processes, reasons)}
    train = {
        "mixed_precision": _precision(recipe, machine, reasons),
        "activation_checkpointing": _recompute(recipe, reasons),
        "compile": _compile(recipe, reasons),
        "micro_batch_size": _micro_batch(recipe, machine, processes, reasons),
    }
    values = recipe.model_dump()
    values["parallel"].update(parallel)
    values["train"].update(train)
    if recipe.checkpoint.keep_best == "auto":
        values["checkpoint"]["keep_best"] = recipe.data.validation is not None
    return Resolved(_checked(recipe, values, processes), tuple(reasons))


def _checked(recipe: Recipe, values: dict[str, Any], processes: int) -> Recipe:
    """Validated anew: what was chosen may contradict what was written."""
    try:
        return type(recipe).model_validate(values)
    except ValidationError as error:
        found = contradictions_in(error)
        assert found, "every value was valid before"
        lines = [f"{item.keys[0]}: {item.message}" for item in found]
        if recipe.parallel.num_processes == "auto":
            lines.append(f"(parallel.num_processes is auto: {processes} for this machine, and no other number fits)")
        raise RequestError("\n".join(lines)) from error


def _processes(recipe: Recipe, machine: Machine, reasons: list[str]) -> int:
    asked, gpus = recipe.parallel.num_processes, len(machine.gpus)
    if asked != "auto":
        if gpus and asked > gpus:
            raise RequestError(
                f"parallel.num_processes: {asked} processes for {gpus} GPU{'s' * (gpus > 1)}; "
                f"set it to {gpus} or auto, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        if not gpus and asked > machine.cpu_cores:
            share = f"{asked} processes share {machine.cpu_cores} core{'s' * (machine.cpu_cores > 1)}"
            reasons.append(f"parallel.num_processes: {share}: correct, but slower than fewer")
        return asked
    if recipe.parallel.strategy == "single":
        return 1
    count, why = choose_processes(recipe, machine)
    reasons.append(f"parallel.num_processes {count}: {why}")
    return count


def _strategy(recipe: Recipe, processes: int, reasons: list[str]) -> str:
    if recipe.parallel.strategy != "auto":
        return recipe.parallel.strategy
    name, why = ("ddp", "several processes") if processes > 1 else ("single", "one process")
    reasons.append(f"parallel.strategy {name}: {why}")
    return name


def _precision(recipe: Recipe, machine: Machine, reasons: list[str]) -> str:
    asked = recipe.train.mixed_precision
    if asked == "bf16" and not machine.has_bf16:
        if machine.gpus:
            raise MachineError(f"train.mixed_precision: {machine.gpus[0].name} does not compute in bf16; set it to no")
        reasons.append("train.mixed_precision: bf16 is emulated by this CPU, correct but slower than no (fp32)")
    if asked == "fp16" and not machine.gpus:
        reasons.append("train.mixed_precision: a CPU computes fp16 through fp32, correct but slower than no (fp32)")
    if asked != "auto":
        return asked
    name = "bf16" if machine.has_bf16 else "no"
    why = "the hardware multiplies in it" if machine.has_bf16 else "no bf16 units here, so fp32"
    reasons.append(f"train.mixed_precision {name}: {why}")
    return name


def _check_offload(recipe: Recipe, machine: Machine) -> None:
    if recipe.train.activation_offload and not machine.gpus:
        raise MachineError(
            "train.activation_offload: there is no GPU here, so activations are in the host's memory already; "
            "set it to false, or train.activation_checkpointing to full to save memory"
        )


def _recompute(recipe: Recipe, reasons: list[str]) -> str | int:
    asked = recipe.train.activation_checkpointing
    if asked != "auto":
        return asked
    reasons.append("train.activation_checkpointing none: recomputing costs a third more time")
    return "none"


def _compile(recipe: Recipe, reasons: list[str]) -> bool:
    if recipe.train.compile != "auto":
        return recipe.train.compile
    reasons.append("train.compile false: compiling takes a minute at the start; worth setting true for long runs")
    return False


def _micro_batch(recipe: Recipe, machine: Machine, processes: int, reasons: list[str]) -> int | str:
    train, data = recipe.train, recipe.data
    if train.micro_batch_size != "auto":
        return train.micro_batch_size
    share = math.ceil(train.global_batch_size / processes)
    if train.gradient_accumulation_steps != "auto":
        if data.pack_length is not None:
            return "auto"  # each global batch's packs are divided into that many micro-batches
        size = math.ceil(share / train.gradient_accumulation_steps)
        reasons.append(f"train.micro_batch_size {size}: from train.gradient_accumulation_steps")
        return size
    row = data.pack_length or data.max_length
    size = min(share, max(1, _MICRO_BATCH_TOKENS[machine.device] // row))
    kind = "packs" if data.pack_length else "examples"
    reasons.append(f"train.micro_batch_size {size}: {kind} of up to {row} tokens, {size * row} at a time")
    return size
