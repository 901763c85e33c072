"""Choose a value for every `auto` of a recipe, give reasons, and reject what this machine cannot run.

``class_errors.json`` is made by ``bench/plan_published.py --write`` from published runs, and for CPUs from runs that
were measured there; nothing in it is written by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from trainwright.engine.checkpoints.saving import auto_reason
from trainwright.errors import MachineError, RequestError
from trainwright.machine.accelerators import with_device
from trainwright.machine.describe import Cluster, cluster_of
from trainwright.machine.machine import Machine
from trainwright.parallel.zero import deepspeed_config
from trainwright.planning.candidates import LAYOUT_KEYS, Constraints
from trainwright.planning.facts import experts_note, facts_of
from trainwright.planning.plan import RunPlan, constraints_of, installed, make_plan
from trainwright.planning.processes import in_words, on_nodes, usable_processes
from trainwright.planning.step_time.basis import basis_of
from trainwright.recipe.parallel_checks import implied_strategy
from trainwright.recipe.problems import contradictions_in
from trainwright.recipe.process_range import with_processes
from trainwright.recipe.schema import Recipe
from trainwright.recipe.sections.parallel import ProcessRange
from trainwright.utils.activity import doing
from trainwright.utils.text import say


@dataclass(frozen=True)
class Resolved:
    """A recipe without `auto`; ``reasons`` has ``key value: why`` for every choice and ``key: …`` for a remark.

    Attributes:
        chosen: keys (``section.key``) whose value was not set in the recipe.
        estimated: the lengths of the examples were estimated; they are known once the data has been prepared.
        usable: the numbers of processes that the run can go on with, in order, if the recipe leaves it open. The plan
            and the recipe here are for the largest.
    """

    recipe: Recipe
    reasons: tuple[str, ...]
    plan: RunPlan
    chosen: tuple[str, ...]
    estimated: bool = False
    usable: tuple[int, ...] = ()


def resolve(recipe: Recipe, machine: Machine, nodes: int = 1, check_gpus: bool = True) -> Resolved:
    """Fill in every `auto` for ``nodes`` machines like ``machine``.

    If nothing fits, the recipe is resolved to the nearest candidate; ``plan.refuse_shortage`` raises the error.
    ``check_gpus`` is False if GPUs are counted elsewhere: a launcher may show each process only its own.

    Raises:
        RequestError: more processes than GPUs, or batch sizes that no number of processes satisfies.
        MachineError: a device that is not present or not usable, or a precision that it cannot compute in.
    """
    requested, elastic = recipe, recipe.parallel.num_processes
    machine = with_device(machine, recipe.parallel.device)
    recipe, remarks = possible(recipe, cluster_of(machine, nodes), check_gpus)
    facts = facts_of(recipe)
    cluster = _cluster(recipe, machine, nodes)
    basis = basis_of(machine, facts.workload, doing)
    if basis.message is not None:
        say(basis.message, file=sys.stderr)
    constraints = constraints_of(recipe)
    if elastic == "auto" and nodes > 1:
        constraints = replace(constraints, worlds=on_nodes(recipe, machine, nodes))
    plan = make_plan(constraints, facts.workload, cluster, facts.assumptions, basis, installed)
    if sys.platform == "darwin" and machine.is_here:
        remarks.append("parallel.device cpu: macOS is experimental; training uses the CPU, and not Apple's GPU (MPS)")
    if recipe.checkpoint.every == "auto":
        remarks.append(auto_reason(recipe.faults.mean_time_between))
    resolved = filled(recipe, plan)
    usable: tuple[int, ...] = ()
    if isinstance(elastic, ProcessRange):
        allowed = tuple(n for n in usable_processes(resolved, elastic) if n <= plan.chosen.choice.num_processes)
        usable = _fitting(resolved, allowed, lambda one: make_plan(one, facts.workload, cluster, (), basis, installed))
        remarks.append(
            f"parallel.num_processes: the run has as many of {in_words(allowed)} processes as there are GPUs and slots"
        )
        if len(usable) < len(allowed):
            few = in_words(allowed[: -len(usable)])
            remarks.append(f"parallel.num_processes: with {few} the run does not fit, so it waits for {usable[0]}")
        requested = with_processes(requested, usable[-1])
    chosen = tuple(_different(requested, resolved))
    return Resolved(resolved, (*plan.reasons, *remarks), plan, chosen, facts.estimated, usable)


def _fitting(recipe: Recipe, allowed: tuple[int, ...], planned: Callable[[Constraints], RunPlan]) -> tuple[int, ...]:
    """Return the allowed numbers of processes on which a resolved recipe fits: with fewer, shards are larger."""
    spec = recipe.parallel.spec
    if spec is None or not spec.shards:
        return allowed
    largest, *fewer = reversed(allowed)
    fit = takewhile(lambda n: planned(constraints_of(with_processes(recipe, n))).fits, fewer)
    return (*sorted(fit), largest)


def filled(recipe: Recipe, plan: RunPlan) -> Recipe:
    """Return the recipe with every `auto` replaced by the plan's choice.

    Raises:
        RequestError: a choice contradicts the recipe or its DeepSpeed file.
    """
    values = recipe.model_dump()
    for section, chosen in chosen_values(plan).items():
        values[section].update(chosen)
    values["parallel"]["device"] = plan.cluster.device
    if recipe.checkpoint.keep_best == "auto":
        values["checkpoint"]["keep_best"] = recipe.spec.keeps_best and recipe.validates
    resolved = _checked(recipe, values)
    deepspeed_config.check_file(resolved)
    return resolved


def chosen_values(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Return the plan's values for ``auto``, by section and key of the recipe."""
    choice = plan.chosen.choice
    train = {
        "mixed_precision": choice.mixed_precision,
        "activation_checkpointing": choice.activation_checkpointing,
        "compile": choice.compile,
    }
    if not (plan.workload.packed and "gradient_accumulation_steps" in plan.constraints.fixed):
        train["micro_batch_size"] = choice.micro_batch_size
    parallel = {key: getattr(choice, key) for key in ("strategy", "num_processes", *LAYOUT_KEYS)}
    return {"train": train, "parallel": parallel}


def _different(requested: Recipe, resolved: Recipe) -> Iterator[str]:
    before, after = requested.model_dump(), resolved.model_dump()
    for section, values in after.items():
        if isinstance(values, dict):
            yield from (f"{section}.{key}" for key, value in values.items() if value != before[section].get(key))


def possible(recipe: Recipe, cluster: Cluster, check_gpus: bool = True) -> tuple[Recipe, list[str]]:
    """Return the recipe with the strategy that its keys imply, and remarks about running it on ``cluster``.

    Raises:
        RequestError: more processes than GPUs.
        MachineError: a precision that the devices cannot compute in, or offloading or TF32 without a GPU.
    """
    remarks: list[str] = []
    device = recipe.parallel.device
    if device not in ("auto", cluster.device):
        raise MachineError(
            f"parallel.device: {device}, but the plan for {cluster.name} uses its "
            f"{('GPUs' if device == 'cpu' else 'CPU')}; set it to {cluster.device} or auto"
        )
    recipe = _with_implied_strategy(recipe, remarks)
    _check_offload(recipe, cluster)
    _check_processes(recipe, cluster, remarks, check_gpus)
    _check_precision(recipe, cluster, remarks)
    _check_tf32(recipe, cluster, remarks)
    if (left_out := experts_note(recipe.model)) is not None:
        remarks.append(left_out)
    return recipe, remarks


def _with_implied_strategy(recipe: Recipe, remarks: list[str]) -> Recipe:
    """Return the recipe with the strategy that a strategy-specific key implies."""
    if (implied := implied_strategy(recipe.parallel)) is None:
        return recipe
    name, key = implied
    remarks.append(f"parallel.strategy {name}: required by {key}")
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"strategy": name})})


def _cluster(recipe: Recipe, machine: Machine, nodes: int) -> Cluster:
    cluster = cluster_of(machine, nodes)
    processes = recipe.parallel.processes
    if processes == "auto" or not machine.gpus:
        return cluster
    return replace(cluster, devices_per_node=max(cluster.devices_per_node, -(-processes // nodes)))


def _checked(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """Validate the recipe again, because choices may contradict its values."""
    try:
        return type(recipe).model_validate(values)
    except ValidationError as error:
        contradictions = contradictions_in(error)
        assert contradictions, "every value was valid before"
        raise RequestError("\n".join(f"{item.keys[0]}: {item.message}" for item in contradictions)) from error


def _check_processes(recipe: Recipe, cluster: Cluster, remarks: list[str], check_gpus: bool) -> None:
    processes, rows = recipe.parallel.num_processes, recipe.train.global_batch_size
    if not isinstance(processes, int):  # a range begins with those that are there
        return
    if cluster.device == "cuda":
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


def _check_precision(recipe: Recipe, cluster: Cluster, remarks: list[str]) -> None:
    precision, card = recipe.train.mixed_precision, cluster.card
    if precision == "bf16" and "bf16" not in card.rates:
        if cluster.device == "cuda" and card.capability < (8, 0):
            raise MachineError(
                f"train.mixed_precision: {card.name} does not compute in bf16; set it to auto, fp16 or no"
            )
        if cluster.device == "cpu":
            remarks.append("train.mixed_precision: bf16 is emulated by this CPU, correct but slower than no (fp32)")
    if precision == "fp16" and cluster.device == "cpu":
        remarks.append("train.mixed_precision: a CPU computes fp16 through fp32, correct but slower than no (fp32)")


def _check_tf32(recipe: Recipe, cluster: Cluster, remarks: list[str]) -> None:
    if not recipe.train.tf32:
        return
    if cluster.device == "cpu":
        raise MachineError("train.tf32: there is no GPU, and a CPU does not compute in TF32; set it to false")
    card = cluster.card
    if "tf32" not in card.rates and card.capability < (8, 0):
        raise MachineError(
            f"train.tf32: {card.name} does not compute in TF32, which needs compute capability 8.0 or higher; set it "
            "to false"
        )
    if card.rates.get("tf32", math.inf) <= card.rates.get("fp32", 0.0):
        remarks.append(f"train.tf32: {card.name} computes in TF32 no faster than in fp32, and less precisely")


def _check_offload(recipe: Recipe, cluster: Cluster) -> None:
    if recipe.train.activation_offload and cluster.device == "cpu":
        raise MachineError(
            "train.activation_offload: there is no GPU, so activations are already in the host's memory; set it to "
            "false, or train.activation_checkpointing to full to save memory"
        )
    keys = ("train.activation_offload", "parallel.offload_parameters", "parallel.offload_optimizer")
    offloaded = [key for key in keys if getattr(getattr(recipe, key.partition(".")[0]), key.partition(".")[2])]
    if offloaded and cluster.unified:
        raise MachineError(
            f"{offloaded[0]}: {cluster.card.name} computes in the host's memory, so offloading to it saves none; set "
            "it to false"
        )
