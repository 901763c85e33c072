"""Budgets of tokens: how they are written, and what they cost."""

from __future__ import annotations

import re

import pytest

from tests.support.runs import ROOT
from trainwright.errors import RequestError
from trainwright.machine.describe import parse_machine
from trainwright.planning.facts import build_facts
from trainwright.planning.plan import RunPlan, build_constraints, make_plan
from trainwright.planning.requests import describe_budget, parse_token_budget, set_budget
from trainwright.recipe.loading import load_recipe

RECIPES = ROOT / "recipes" / "pretrain"


def planned(name: str, machine: str, tokens: str | None = None, *overrides: str) -> RunPlan:
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides)
    workload = build_facts(recipe).workload
    if tokens is not None:
        workload = set_budget(workload, parse_token_budget(tokens, workload))
    return make_plan(build_constraints(recipe), workload, parse_machine(machine))


def test_a_budget_is_a_number_or_so_many_tokens_a_parameter() -> None:
    workload = build_facts(load_recipe(RECIPES / "llama-8b.yaml")).workload
    assert parse_token_budget("300B", workload) == 300e9
    assert parse_token_budget("1.5t", workload) == 1.5e12
    assert parse_token_budget("20x", workload) == parse_token_budget("20X", workload) == 20 * 8_030_261_248
    for wrong in ("0", "0x", "many", "-3B", "20 x"):
        with pytest.raises(RequestError, match="--tokens"):
            parse_token_budget(wrong, workload)


@pytest.mark.slow
def test_time_and_money_follow_from_the_speed() -> None:
    plan = planned("llama-8b", "8xH100", "20x")
    assert plan.chosen.time is not None
    said = "\n".join(describe_budget(plan, 20 * 8_030_261_248, price=2.0))
    hours = 20 * 8_030_261_248 / plan.chosen.time.tokens_per_second / 3600
    found = re.search(r"([\d,.e+]+) GPU hours, ([\d,.]+) at 2 an hour", said)
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(8 * hours, rel=0.01)
    assert float(found[2].replace(",", "")) == pytest.approx(16 * hours, rel=0.01)
    assert "20 per parameter (8,030,261,248 parameters)" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine"), [("gpt2-openwebtext", "8xA100-40GB"), ("phi3-fsdp", "8xA100-80GB"), ("llama-8b", "8xH100")]
)
def test_recipes_for_gpus_fit_the_machines_that_they_are_for(name: str, machine: str) -> None:
    assert planned(name, machine).fits


@pytest.mark.slow
def test_two_small_gpus_hold_phi3_with_its_parameters_in_the_hosts_memory_alone() -> None:
    two = ("parallel.num_processes=2",)
    without = planned("phi3-fsdp", "2xRTX4090", None, *two)
    assert not without.fits
    assert "parallel.offload_parameters=true" in [way.change for way in without.suggestions]
    assert planned("phi3-fsdp", "2xRTX4090", None, *two, "parallel.offload_parameters=true").fits
