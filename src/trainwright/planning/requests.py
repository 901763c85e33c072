"""Planning: what fits, how fast it is and why, before anything runs; a budget of tokens; and simulations of runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.api.recipe import Recipe, extract_source
from trainwright.errors import RequestError
from trainwright.utils.activity import Activity, begin_activity
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.machine.describe import Written
    from trainwright.planning.facts import Facts
    from trainwright.planning.plan import RunPlan as Details
    from trainwright.planning.simulation.report import Simulation
    from trainwright.planning.simulation.start import SimulationRequest
    from trainwright.planning.workload import Workload
    from trainwright.recipe import schema


_TOKENS = 2048  # of a row, when planning a model without a recipe


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe on a machine; ``str()`` gives what ``trainwright plan`` prints.

    Attributes:
        details: the chosen candidate, all others, and their predicted memory and time.
        budget: the token budget, if given, and the ``price`` of an hour of a device.
    """

    details: Details
    budget: float | None = None
    price: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether any candidate fits. If not, this is the plan that comes closest."""
        return self.details.fits

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why each value was chosen: ``key value: why``."""
        return self.details.reasons

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """Return the values chosen for ``auto``, by section and key of a recipe."""
        from trainwright.planning.planner import collect_chosen_values

        return collect_chosen_values(self.details)

    @property
    def predicted(self) -> dict[str, float]:
        """Return the predictions, such as ``memory_bytes`` per process, ``step_time`` and ``tokens_per_second``."""
        return self.details.predicted()

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values, as ``trainwright plan --json`` prints it."""
        values = self.details.as_json()
        if self.budget is not None:
            values["budget"] = estimate_cost(self.details, self.budget, self.price)
        return values

    def draw(self, path: str | PathLike[str]) -> None:
        """Plot memory by part to a PNG file."""
        from trainwright.planning.output import draw_plan

        draw_plan(self.details, Path(path))

    def lines(self, compare: bool = False, width: int | None = None) -> Iterator[str]:
        """Yield the plan as text.

        Args:
            compare: include every candidate, not only the best of each strategy.
            width: columns of a terminal; None: any.
        """
        from trainwright.planning.output import describe_plan, format_candidates

        details = self.details
        if details.basis.trouble is not None:
            yield details.basis.trouble
        yield f"{'machine':<14} {details.cluster.name}"
        if details.cluster.planned_only:
            yield f"{'':<14} {details.cluster.planned_only}"
        yield ""
        yield from format_candidates(details, compare, width)
        yield ""
        yield from describe_plan(details)
        if self.budget is not None:
            for number, line in enumerate(describe_budget(details, self.budget, self.price)):
                yield f"{'' if number else 'budget':<14} {line}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def plan(
    recipe: Recipe | str | PathLike[str] | None = None,
    *overrides: str,
    model: str | None = None,
    sequence_length: int | None = None,
    global_batch_size: int = 64,
    steps: int | None = None,
    on: str | PathLike[str] | Written | None = None,
    tokens: str | None = None,
    price: float | None = None,
    progress: bool = False,
) -> Plan:
    """Plan a recipe, or a model without one; what ``trainwright plan`` does. Trains nothing and needs no GPU.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        model: plan without a recipe: a known model, a directory or a ``config.json``.
        sequence_length: with a model: tokens per row. Default: 2048, or the model's maximum if that is less.
        global_batch_size: with a model: rows per optimizer step.
        steps: with a model: optimizer steps of the run.
        on: plan for this machine, such as ``8xH100`` or a file of ``trainwright machine --json``, instead of this one;
            or for what ``machine.describe.resolve_machine`` returns for these.
        tokens: a budget of tokens to train on: ``300B``, or ``20x`` for 20 per parameter.
        price: with ``tokens``: the price of an hour of a device.
        progress: show operations that take long.

    Raises:
        RequestError: the recipe or the arguments are invalid.
        MachineError: the machine does not support the recipe. If nothing fits, nothing is raised; see `Plan.fits`.

    Examples:
        >>> import trainwright as tw
        >>> plan = tw.plan(model="gpt2", on="1xH100")
        >>> plan.fits, plan.values["train"]["mixed_precision"]
        (True, 'bf16')
    """
    from trainwright.machine.describe import resolve_machine
    from trainwright.recipe.arguments import check_argument
    from trainwright.recipe.sections.fields import Count

    check_argument("global_batch_size", Count, global_batch_size)
    if price is not None and tokens is None:
        raise RequestError("--price: needs --tokens, such as 20x")
    with Activity(sys.stderr if progress else None, "reading the recipe, its model and its data"):
        to_plan = _choose_recipe(recipe, overrides, model, sequence_length, global_batch_size, steps)
        from trainwright.planning.facts import assume_full_rows, build_facts

        # Without a recipe there is no data, and every row is taken to be full.
        facts, budget = build_facts(to_plan) if model is None else assume_full_rows(to_plan), None
        if tokens is not None:
            if steps is not None:
                raise RequestError("--tokens, --steps: both set the length of the run; pass only one")
            budget = parse_token_budget(tokens, facts.workload)
            facts = facts._replace(workload=set_budget(facts.workload, budget))
        begin_activity("planning")
        details = _make_plan(to_plan, facts, on if on is None or isinstance(on, tuple) else resolve_machine(str(on)))
    if progress and details.basis.message is not None:
        say(details.basis.message, file=sys.stderr)
    return Plan(details, budget, price)


def _choose_recipe(
    recipe: Recipe | str | PathLike[str] | None,
    overrides: tuple[str, ...],
    model: str | None,
    sequence_length: int | None,
    global_batch_size: int,
    steps: int | None,
) -> schema.RecipeSchema:
    """Return the recipe to plan; for a model without one, a recipe of the given values only."""
    from trainwright.recipe.loading import build_recipe, load_recipe

    if recipe is not None and model is None:
        return load_recipe(extract_source(recipe), overrides)
    if recipe is not None or model is None:
        raise RequestError("pass one recipe, or a model with --model, such as --model meta-llama/Llama-3.1-8B")
    from trainwright.planning.facts import can_pack, read_named_configuration
    from trainwright.planning.trace.request import TracedModel
    from trainwright.planning.trace.traced import read_model_facts

    positions = read_model_facts(TracedModel.of(read_named_configuration(model))).positions or _TOKENS
    length = sequence_length or min(_TOKENS, positions)
    settings = [
        "task=sft",
        f"model.name={model}",
        "data={train: pydoc, validation: null}",
        f"data.max_length={length}",
        f"data.pack_length={length if can_pack(model, length) else 'null'}",
        f"train.global_batch_size={global_batch_size}",
        *([f"train.max_steps={steps}"] if steps is not None else []),
    ]
    return build_recipe([*settings, *overrides], "--model")


def _make_plan(recipe: schema.RecipeSchema, facts: Facts, on: Written | None) -> Details:
    from trainwright.machine.describe import build_cluster
    from trainwright.planning.plan import explain_missing_library
    from trainwright.planning.planner import collect_chosen_values, plan_on
    from trainwright.planning.step_time.basis import Basis, build_basis
    from trainwright.run.resolve import apply_implied_values, fill_auto_values

    options: dict[str, Any] = {}
    if on is not None:
        cluster, calibration, measurement = on
        options = {"basis": Basis(calibration, measurement)}
    else:
        from trainwright.machine.accelerators import restrict_to_device
        from trainwright.machine.detect import detect

        machine = restrict_to_device(detect(), recipe.parallel.device)
        cluster = build_cluster(machine)
        options = {"basis": build_basis(machine, facts.workload, begin_activity), "available": explain_missing_library}
    recipe, remarks = apply_implied_values(recipe, cluster)
    run_plan = plan_on(cluster, recipe, facts, **options)
    # Raises the errors that a run would raise.
    fill_auto_values(recipe, collect_chosen_values(run_plan), cluster.device)
    return replace(run_plan, reasons=(*run_plan.reasons, *remarks))


def simulate(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    on: str,
    steps: int = 2,
    force: bool = False,
    progress: bool = False,
    accelerate_config: str | PathLike[str] | None = None,
) -> Simulation:
    """Run a recipe on simulated GPUs, from the first step to the export; what ``trainwright train --simulate`` does.

    Nothing is computed, no GPU is needed, and no weights are read: tensors have shapes, dtypes and devices, but no
    memory. One rank is simulated, rank 0 of a world of any size. It finds operations that mix devices or dtypes, and
    gives the peak memory of every phase, the collectives, and where the host waits for the device.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        on: the machine, such as ``8xH100`` or ``128x8xH100``, or a file of ``trainwright machine --json``.
        steps: optimizer steps to take; from the second one on, they are alike.
        force: simulate even if the plan says that the run does not fit.
        progress: show what is being done.
        accelerate_config: a file of ``accelerate config``, for the number of processes, the strategy and so on.

    Raises:
        RequestError: the recipe or the machine is wrong.
        MachineError: the recipe does not fit the machine, or there is no C++ compiler here.

    Examples:
        >>> import trainwright as tw
        >>> tw.simulate("tiny.yaml", on="8xH1000")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: --simulate: H1000: no such card in the catalog...
    """
    from trainwright.api.separate_process import run_in_process
    from trainwright.planning.simulation.start import SimulationRequest

    file = None if accelerate_config is None else Path(accelerate_config)
    request = SimulationRequest(extract_source(recipe), overrides, on, steps, force, file)
    return run_in_process(_start_simulation, request, progress=progress)


def _start_simulation(request: SimulationRequest) -> Simulation:
    from trainwright.planning.simulation.start import simulate as start

    with Activity(sys.stderr, "reading the recipe"):
        return start(request)


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)([KMBTx]?)", re.IGNORECASE)
# Hoffmann et al., arXiv 2203.15556, section D.3: loss in nats of a model of N parameters after D tokens of web text.
_IRREDUCIBLE, _A, _ALPHA, _B, _BETA = 1.69, 406.4, 0.34, 410.7, 0.28


def parse_token_budget(written: str, workload: Workload) -> float:
    """Parse a budget of tokens: 300B, or 20x for 20 tokens per parameter (about 20 are compute-optimal).

    Raises:
        RequestError: it is neither, or zero.
    """
    match = _WRITTEN.fullmatch(written.strip())
    if match is None:
        raise RequestError(f"--tokens {written}: use a number such as 300B, or 20x for 20 tokens per parameter")
    number, unit = float(match[1]), match[2].upper()
    tokens = number * (workload.facts.total if unit == "X" else _UNITS[unit])
    if tokens < 1:
        raise RequestError(f"--tokens {written}: the budget must be above zero")
    return tokens


def set_budget(workload: Workload, tokens: float) -> Workload:
    """Return the workload with the number of steps that the tokens require."""
    return replace(workload, steps=max(1, -(-round(tokens) // round(workload.tokens))))


def estimate_cost(plan: Details, tokens: float, price: float | None) -> dict[str, float]:
    """Return the time and cost of training on ``tokens``, and the expected loss; ``price``: per device and hour.

    Empty if nothing fits.
    """
    time, size = plan.chosen.time, plan.workload.facts.total
    if not plan.fits or time is None:
        return {}
    assert plan.workload.steps is not None
    hours = plan.workload.steps * time.seconds / 3600
    devices = plan.chosen.choice.num_processes if plan.cluster.has_gpus else 1
    figures = {
        "tokens": tokens,
        "tokens_per_parameter": tokens / size,
        "hours": hours,
        "device_hours": hours * devices,
        "expected_loss": _IRREDUCIBLE + _A / size**_ALPHA + _B / tokens**_BETA,
    }
    return figures if price is None else {**figures, "cost": hours * devices * price}


def describe_budget(plan: Details, tokens: float, price: float | None) -> Iterator[str]:
    """Yield the values of ``estimate_cost`` as text."""
    figures = estimate_cost(plan, tokens, price)
    if not figures:
        return
    size, steps = plan.workload.facts.total, plan.workload.steps
    unit = "GPU hours" if plan.cluster.has_gpus else "hours of the machine"
    ratio = figures["tokens_per_parameter"]
    yield f"{tokens:.3g} tokens, {ratio:.3g} per parameter ({size:,} parameters), in {steps:,} steps"
    line = f"{figures['hours']:,.3g} hours, {figures['device_hours']:,.3g} {unit}"
    yield line if price is None else f"{line}, {figures['cost']:,.2f} at {price:g} an hour"
    yield f"about {figures['expected_loss']:.2f} nats per token of web text, by the fit of arXiv 2203.15556"
