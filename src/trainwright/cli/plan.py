"""``trainwright plan``: what fits, how fast and why, before anything is launched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.activity import Activity, doing
from trainwright.errors import RequestError
from trainwright.text import columns, say

if TYPE_CHECKING:
    from trainwright.planning.facts import Facts
    from trainwright.planning.plan import Plan
    from trainwright.recipe.schema import Recipe

_TOKENS = 2048  # of a row of a model by itself


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [SECTION.KEY=VALUE]...",
            help="The recipe to plan, and values that replace its own; or --model instead.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan without a recipe: a known model, a directory or a config.json."),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=2, help="With --model: tokens of a row; 2048, or what the model is made for if that is less."),
    ] = None,
    global_batch_size: Annotated[int, typer.Option(min=1, help="With --model: rows of an optimizer step.")] = 64,
    steps: Annotated[int | None, typer.Option(min=1, help="With --model: optimizer steps of the run.")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Plan for this machine, such as 8xH100 or 4x8xA100-40GB, or a FILE.json that "
            "`trainwright machine --json` wrote, not for the one at hand.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="BUDGET", help="Tokens to train on: 300B, or 20x for 20 a parameter.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="With --tokens: what an hour of a device costs, in any money.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show every candidate.")] = False,
    chart: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw memory by part.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what fits, how fast it is and why, and what `auto` would become.

    Ends with 0: something fits, 2: wrong request, 3: nothing fits.
    """
    with Activity(sys.stderr, "reading the recipe, its model and its data"):
        recipe = _asked(arguments or [], model, sequence_length, global_batch_size, steps)
        facts = _facts(recipe, full=model is not None)
    if price is not None and tokens is None:
        raise RequestError("--price: is of a budget; give --tokens too, such as 20x")
    budget = None
    if tokens is not None:
        from trainwright.planning.budget import tokens_of, with_budget

        if steps is not None:
            raise RequestError("--tokens, --steps: both say how long the run is; give one")
        budget = tokens_of(tokens, facts.workload)
        facts = facts._replace(workload=with_budget(facts.workload, budget))
    with Activity(sys.stderr, "planning"):
        made = _made(recipe, facts, on)
    if chart is not None:
        from trainwright.planning.chart import draw

        draw(made, chart)
    if as_json:
        import json

        found = made.as_json()
        if budget is not None:
            from trainwright.planning.budget import cost

            found["budget"] = cost(made, budget, price)
        say(json.dumps(found, indent=2), wrap=False)
    else:
        _show(made, compare)
        if budget is not None:
            from trainwright.planning import budget as budgets

            for number, line in enumerate(budgets.words(made, budget, price)):
                say(f"{'' if number else 'budget':<14} {line}")
    if not made.fits:
        raise typer.Exit(3)


def _asked(
    arguments: list[str], model: str | None, sequence_length: int | None, global_batch_size: int, steps: int | None
) -> Recipe:
    """What is planned; of a model by itself, a recipe that says no more than what was given."""
    from trainwright.recipe.loading import load_recipe, recipe_of

    files = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    if len(files) != (model is None):
        raise RequestError("plan one recipe, or a model with --model, such as --model meta-llama/Llama-3.1-8B")
    if model is None:
        return load_recipe(Path(files[0]), overrides)
    from trainwright.planning.facts import architecture_named, packs

    length = sequence_length or min(_TOKENS, architecture_named(model).positions)
    asked = [
        "task=sft",
        f"model.name={model}",
        "data={train: pydoc, validation: null}",
        f"data.max_length={length}",
        f"data.pack_length={length if packs(model, length) else 'null'}",
        f"train.global_batch_size={global_batch_size}",
        *([f"train.max_steps={steps}"] if steps is not None else []),
    ]
    return recipe_of([*asked, *overrides], "--model")


def _facts(recipe: Recipe, full: bool) -> Facts:
    """``full``: the recipe's data does not matter, every row is full."""
    from trainwright.planning.facts import facts_of, full_rows

    return full_rows(recipe) if full else facts_of(recipe)


def _made(recipe: Recipe, facts: Facts, on: str | None) -> Plan:
    from dataclasses import replace

    from trainwright.machine.describe import cluster_of
    from trainwright.machine.written import machine_of
    from trainwright.planning.basis import Basis, basis_of
    from trainwright.planning.plan import installed, make_plan, wishes_of
    from trainwright.planning.resolve import filled, possible

    here: dict[str, Any] = {}
    if on is not None:
        cluster, calibration, measurement = machine_of(on)
        here = {"basis": Basis(calibration, measurement)}
    else:
        from trainwright.machine.accelerators import with_device
        from trainwright.machine.detect import detect

        machine = with_device(detect(), recipe.parallel.device)
        cluster = cluster_of(machine)
        basis = basis_of(machine, facts.workload, doing)
        if basis.said is not None:
            say(basis.said, file=sys.stderr)
        here = {"basis": basis, "available": installed}
    recipe, remarks = possible(recipe, cluster)
    made = make_plan(wishes_of(recipe), facts.workload, cluster, facts.assumptions, **here)
    filled(recipe, made)  # refuses what a run would be refused for
    return replace(made, reasons=(*made.reasons, *remarks))


def _show(made: Plan, compare: bool) -> None:
    from trainwright.planning.table import table, words

    if made.basis.trouble is not None:
        say(made.basis.trouble)
    say(f"{'machine':<14} {made.cluster.name}")
    if made.cluster.planned_only:
        say(f"{'':<14} {made.cluster.planned_only}")
    say()
    width = columns(sys.stdout) if sys.stdout.isatty() else None
    for line in table(made, compare, width):
        say(line)
    say()
    for line in words(made):
        say(line)
