"""Plans of recipes that train on histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.machine.describe import parse_machine
from trainwright.planning.facts import build_facts
from trainwright.planning.plan import build_constraints, make_plan
from trainwright.planning.trace.traced import list_parameters
from trainwright.recipe.loading import load_recipe
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape

RECIPES = Path(__file__).parents[2] / "recipes" / "algorithm_distillation"


def test_a_plan_has_the_sizes_of_the_model() -> None:
    recipe = load_recipe(RECIPES / "darkroom.yaml")
    workload = build_facts(recipe).workload
    model = HistoryModel(HistoryShape((9, 9), 5, 64, 4, 4, "transition", "rotary", steps=120), seed=0)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    planned = (parameter for block in list_parameters(workload.model)[1:-1] for parameter in block)
    assert sum(parameter.numel for parameter in planned) == blocks
    assert workload.tokens == 64 * 120 and workload.steps == recipe.train.max_steps


@pytest.mark.parametrize(
    ("name", "overrides", "tokens"),
    [
        (
            "darkroom",
            ("algorithm_distillation.model.layout=parts", "algorithm_distillation.context_length=120"),
            3 * 120,
        ),
        ("darkroom-compressed", (), 2 * 80 + 2),
        (
            "darkroom-compressed",
            ("algorithm_distillation.compression=latents",),
            3 * (80 + 2 * 16),
        ),
    ],
)
def test_a_row_is_what_a_window_is_in_tokens(name: str, overrides: tuple[str, ...], tokens: int) -> None:
    assert build_facts(load_recipe(RECIPES / f"{name}.yaml", overrides)).workload.row_tokens == tokens


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_fits_a_gpu(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    made = make_plan(build_constraints(loaded), build_facts(loaded).workload, parse_machine("1xA100-40GB"))
    assert made.fits
