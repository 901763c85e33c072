"""The planner: choose a value for every `auto` of a recipe by predicted memory and time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainwright.machine.describe import Cluster, build_cluster
from trainwright.machine.machine import Machine
from trainwright.planning.candidates import LAYOUT_KEYS
from trainwright.planning.facts import Facts, build_facts, list_expert_notes
from trainwright.planning.output import summarize_plan
from trainwright.planning.plan import RunPlan, build_constraints, explain_missing_library, make_plan
from trainwright.planning.reasons import describe_shortage
from trainwright.planning.step_time.basis import Basis, build_basis
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.resolve import Planned, list_process_counts
from trainwright.utils.activity import begin_activity
from trainwright.utils.text import say


def plan_recipe(recipe: RecipeSchema, machine: Machine, nodes: int) -> Planned:
    """Return the plan of a recipe for ``nodes`` machines like ``machine``.

    If nothing fits, it is that of the nearest candidate.

    Raises:
        RequestError: the model's configuration cannot be found, or no number of processes satisfies the recipe.
        MachineError: the blocks are to be compiled, but this machine has no compiler.
    """
    facts = build_facts(recipe)
    cluster = _build_cluster(recipe, machine, nodes)
    basis = build_basis(machine, facts.workload, begin_activity)
    if basis.message is not None:
        say(basis.message, file=sys.stderr)
    chooses_world = recipe.parallel.num_processes == "auto" and nodes > 1
    worlds = list_process_counts(recipe, machine, nodes) if chooses_world else None
    plan = plan_on(cluster, recipe, facts, basis, explain_missing_library, worlds)
    return Planned(
        values=collect_chosen_values(plan),
        reasons=plan.reasons,
        summary=summarize_plan(plan),
        document=plan.as_json(),
        shortage=None if plan.fits else describe_shortage(plan.chosen, plan.cluster, plan.suggestions),
        is_close=plan.is_close,
        threads=plan.chosen.choice.threads,
        estimated=facts.estimated,
        fits=lambda one: plan_on(cluster, one, facts, basis, explain_missing_library).fits,
    )


def plan_on(
    cluster: Cluster,
    recipe: RecipeSchema,
    facts: Facts,
    basis: Basis = Basis(),  # noqa: B008
    available: Callable[[str], str | None] = lambda strategy: None,
    worlds: tuple[int, ...] | None = None,
) -> RunPlan:
    """Return the plan of a recipe that is possible on ``cluster``; the arguments are those of ``make_plan``.

    Args:
        worlds: the numbers of processes to choose from; None: those that the recipe allows.
    """
    constraints = build_constraints(recipe)
    if worlds is not None:
        constraints = replace(constraints, worlds=worlds)
    plan = make_plan(constraints, facts.workload, cluster, facts.assumptions, basis, available)
    return replace(plan, reasons=(*plan.reasons, *list_expert_notes(recipe.model)))


def collect_chosen_values(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Return the plan's values for ``auto``, by section and key of the recipe."""
    choice = plan.chosen.choice
    train = {key: getattr(choice, key) for key in ("mixed_precision", "activation_checkpointing", "compile")}
    if not (plan.workload.packed and "gradient_accumulation_steps" in plan.constraints.fixed):
        train["micro_batch_size"] = choice.micro_batch_size
    parallel = {key: getattr(choice, key) for key in ("strategy", "num_processes", *LAYOUT_KEYS)}
    return {"train": train, "parallel": parallel}


def _build_cluster(recipe: RecipeSchema, machine: Machine, nodes: int) -> Cluster:
    cluster = build_cluster(machine, nodes)
    processes = recipe.parallel.processes
    if processes == "auto" or not machine.gpus:
        return cluster
    return replace(cluster, devices_per_node=max(cluster.devices_per_node, -(-processes // nodes)))
