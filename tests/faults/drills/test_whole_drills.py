"""Whole drills of several recipes: everything that can be tried holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.runs import ON_ROWS, ROOT, TINY
from trainwright.errors import RequestError
from trainwright.faults.drills.operations import SKIPPED


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_holds_and_can_be_continued(tmp_path: Path) -> None:
    """Five minutes of faults, in two pieces."""
    output = tmp_path / "drill"
    settings = {"output": output, "processes": (1, 2), "jobs": 2}
    first = tw.drill(TINY, ON_ROWS, **settings, minutes=2.5)
    assert first.held and first.left
    with pytest.raises(RequestError, match="another recipe"):
        tw.drill(TINY, ON_ROWS, "train.seed=5", **settings, resume=True)
    second = tw.drill(TINY, ON_ROWS, **settings, resume=True, minutes=2.5)
    assert second.held and second.rows[-1]["tries"] > first.rows[-1]["tries"]
    assert json.loads((output / "drill.json").read_text())["kinds"] == list(second.rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overrides", [("model.adapter=lora",), ("train.mixed_precision=bf16",)], ids=["lora", "bf16"])
def test_wrong_numbers_hold_in_any_recipe(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Frozen weights and copies in bf16 are left alone, and the recipe's own faults and copies are not used."""
    own = (
        "faults={on_non_finite: rewind, on_corruption: stop, restarts: off}",
        f"checkpoint.copies=[{tmp_path / 'copies'}]",
        "train.max_steps=5000",
        "optimizer.warmup_steps=2000",
    )
    kinds = ("NaN*", "a flipped bit of a weight")
    found = tw.drill(TINY, ON_ROWS, *overrides, *own, output=tmp_path / "drill", kinds=kinds, tries=2, processes=(2,))
    assert found.held, found
    assert not (tmp_path / "copies").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [(TINY, (ON_ROWS, "train.compile=true")), (ROOT / "recipes" / "dpo" / "tiny.yaml", ("dpo.loss=kto",))],
    ids=["compiled", "kto"],
)
def test_passes_with_wrong_numbers_hold_in_any_recipe(tmp_path: Path, recipe: Path, overrides: tuple[str, ...]) -> None:
    """Compiled blocks see no hooks that are added later, and KTO has passes before those that are checked."""
    kinds = ("NaN*", "a flipped bit of an activation")
    found = tw.drill(recipe, *overrides, output=tmp_path / "drill", kinds=kinds, tries=2, processes=(2,))
    assert found.held and found.rows[-1]["tries"] == 2, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drill_may_be_in_a_directory_of_any_name(tmp_path: Path) -> None:
    output = tmp_path / "drill+ (1) [a"
    found = tw.drill(TINY, ON_ROWS, output=output, kinds=("a run directory*",), tries=1, processes=(1,))
    assert found.held, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_number_of_processes_holds_in_bf16(tmp_path: Path) -> None:
    settings = (ON_ROWS, "train.mixed_precision=bf16")
    found = tw.drill(TINY, *settings, output=tmp_path / "drill", kinds=("another*",), tries=2, processes=(1, 2))
    assert found.held, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_strategy_that_the_recipe_cannot_be_trained_with_is_left_out(tmp_path: Path) -> None:
    """DeepSpeed does not support Muon: no kind is tried with it, and no run is resumed with it."""
    settings = {"output": tmp_path / "drill", "strategies": ("zero3", "ddp"), "processes": (1, 2)}
    kinds = ("another*", "processes that leave*", "a clock*")
    # Of this seed, two kinds are drawn for zero3, and the third is resumed with it first.
    found = tw.drill(TINY, ON_ROWS, "optimizer.name=muon", **settings, kinds=kinds, seed=4)
    assert found.held and [row["tries"] for row in found.rows] == [1, 1, 1, 3], found
    assert set(found.refused) == {"zero3 on 1", "zero3 on 2"} and not found.rows[-1][SKIPPED]
    assert all(f"not tried here: {name}: " in str(found) for name in found.refused)
