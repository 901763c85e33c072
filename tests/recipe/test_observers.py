"""The observers that a recipe names: settings, lists of names, and the keys that the last version had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT
from trainwright.recipe import observer_spec
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.observer_spec import ObserverSpec
from trainwright.recipe.registries import OBSERVERS

TINY = ROOT / "recipes" / "sft" / "tiny.yaml"
DEFAULTS = {"tensorboard": True, "report": "auto"}


def settings(*overrides: str, recipe: Path = TINY) -> dict[str, Any]:
    return load_recipe(recipe, overrides).logging.observers


def test_a_function_can_be_built_in_and_takes_any_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBSERVERS._builtin, "losses", "tests.support.runs:Losses")
    monkeypatch.setitem(OBSERVERS._loaded, "losses", lambda run, **options: print)
    assert settings() == DEFAULTS
    assert settings("logging.observers={losses: {path: x}}") == DEFAULTS | {"losses": {"path": "x"}}


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ((), {}),
        (("logging.observers=[wandb]",), {"wandb": True}),
        (("logging.observers={tensorboard: false, mlflow: true}",), {"tensorboard": False, "mlflow": True}),
        (("logging.observers.report=true",), {"report": True}),
        (("logging.observers.prometheus=true",), {"prometheus": True}),
        (("logging.observers.prometheus.address=9100",), {"prometheus": {"address": 9100}}),
        (("logging.observers={a.b:C: {path: x}}",), {"a.b:C": {"path": "x"}}),
    ],
)
def test_a_recipe_turns_observers_on_and_off_and_gives_them_options(
    overrides: tuple[str, ...], more: dict[str, Any]
) -> None:
    assert settings(*overrides) == DEFAULTS | more


def test_a_list_replaces_what_another_list_names_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"include: {TINY}\nlogging: {{observers: [wandb, mlflow]}}\n")
    own = tmp_path / "own.yaml"
    own.write_text("include: base.yaml\nlogging: {observers: {tensorboard: false, report: true}}\n")
    assert settings(recipe=own) == {"tensorboard": False, "report": True, "wandb": True, "mlflow": True}
    kept = {"tensorboard": False, "report": True}
    assert settings("logging.observers=[trackio]", recipe=own) == kept | {"trackio": True}
    assert settings("logging.observers=[]", recipe=own) == kept


@pytest.mark.parametrize(
    ("old", "more"),
    [
        ("logging.tensorboard=false", {"tensorboard": False}),
        ("logging.report=false", {"report": False}),
        ("logging.prometheus=9100", {"prometheus": {"address": 9100}}),
        ("logging.prometheus=null", {"prometheus": False}),
        ("logging={observers: [mlflow], tensorboard: false}", {"tensorboard": False, "mlflow": True}),
    ],
)
def test_keys_of_the_last_version_are_read_with_a_notice(
    old: str, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings(old) == DEFAULTS | more
    assert settings("logging.observers=[wandb]", old).items() >= more.items()
    said = " ".join(capsys.readouterr().err.split())
    assert f"note: override '{old}': logging." in said and "is now logging.observers." in said


def test_a_run_of_the_last_version_is_read_without_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    old = "{run_directory: auto, tensorboard: false, report: auto, observers: [wandb], prometheus: null}"
    recipe.write_text(f"include: {TINY}\nlogging: {old}\n")
    (tmp_path / "events.jsonl").touch()
    assert settings(recipe=recipe) == {"tensorboard": False, "report": "auto", "wandb": True, "prometheus": False}
    assert capsys.readouterr().err == ""


def test_a_library_that_is_missing_is_named_whoever_has_registered_the_observer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OBSERVERS._loaded, "somebody:SPEC", ObserverSpec("", library="no_such_library"))
    with pytest.raises(observer_spec.RequestError, match="somebody:SPEC: no_such_library is not installed"):
        observer_spec.check_installed({"somebody:SPEC": True})
