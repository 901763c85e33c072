"""A recipe as a Python object says what the same file and overrides say."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.runs import TINY
from trainwright.recipe.loading import dump_recipe, load_recipe

SECTIONS: dict[str, Any] = {
    "task": "sft",
    "model": {"config": {"model_type": "llama"}, "tokenizer": "bytes"},
    "data": {"train": "pydoc", "max_length": 64},
}


def test_a_file_and_overrides_give_what_the_command_reads() -> None:
    recipe = tw.Recipe.load(TINY, "train.max_steps=7", "model.dropout=0.3")
    assert str(recipe) == dump_recipe(load_recipe(TINY, ["train.max_steps=7", "model.dropout=0.3"]))
    assert recipe.train.max_steps == 7 and recipe.task == "sft"


def test_mappings_override_key_by_key_and_leave_the_recipe_as_it_was() -> None:
    recipe = tw.Recipe.load(str(TINY))
    other = recipe.override("optimizer.weight_decay=0.5", train={"max_steps": 7}, optimizer={"betas": (0.8, 0.9)})
    words = ["optimizer.weight_decay=0.5", "train.max_steps=7", "optimizer.betas=[0.8, 0.9]"]
    assert other.to_dict() == load_recipe(TINY, words).model_dump()
    assert recipe == tw.Recipe.load(TINY) and recipe != other


def test_keywords_give_what_a_file_with_them_gives(tmp_path: Path) -> None:
    made = tw.Recipe(**SECTIONS, logging={"run_directory": tmp_path / "run"})
    made.save(tmp_path / "made.yaml")
    assert tw.Recipe.load(tmp_path / "made.yaml") == made == pickle.loads(pickle.dumps(made))
    assert made.logging.run_directory == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"max_stepz": 3}}, "argument train: train.max_stepz: unknown key; did you mean max_steps?"),
        ({"train": 3}, "argument train: train: expected a mapping, not 3"),
        ({"task": "sfft"}, "argument task: task: "),
        ({"train": {"max_steps": 3, "epochs": 2}}, "train.epochs"),
        ({"model": None}, "model"),
    ],
)
def test_wrong_values_are_request_errors_that_name_the_argument(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.RequestError) as refused:
        tw.Recipe(**{**SECTIONS, **changes})
    assert message in str(refused.value)


def test_the_message_of_a_wrong_override_is_the_commands() -> None:
    with pytest.raises(tw.RequestError) as of_command:
        load_recipe(TINY, ["train.max_stepz=3", "data.limit=-1"])
    with pytest.raises(tw.RequestError) as of_api:
        tw.Recipe.load(TINY).override("train.max_stepz=3", "data.limit=-1")
    assert str(of_api.value) == str(of_command.value)


def test_a_section_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(tw.Recipe.load(TINY), "optimiser")
