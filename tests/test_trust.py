"""Attacks by recipes, runs, models and data of somebody else: each would write a file here, and none does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.support.commands import ROOT, environment, trainwright
from tests.support.learners import write_histories
from trainwright.cli.main import app
from trainwright.recipe import registries
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape, save_history_model

TINY = ROOT / "recipes" / "sft" / "tiny.yaml"
# Commands that run the user's own recipe, or read no recipe.
RUN = "train under submit collect ablate unlearn-study drill launch data-alternates"
READ_NO_RECIPE = (
    "jobs stop checkpoint runs gpus watch report compare doctor tensorboard setup recipe-schema recipe-objectives "
    "recipe-new recipe-from data-prepare data-style data-tokenize data-train-tokenizer machine-cards machine-calibrate"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe of somebody else's, a run of it, and a module that writes ``executed`` when imported."""
    executes = f"open({str(tmp_path / 'executed')!r}, 'w').close()"
    (tmp_path / "evil.py").write_text(f"{executes}\ndef score(a, b): return 1.0\n")
    values = {"include": str(TINY), "evaluate": {"metrics": ["evil:score"]}, "parallel": {"strategy": "evil:SPEC"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize("named", [(), ("evaluate.metrics=[own_metrics:score]",)], ids=["own", "names code"])
def test_a_module_of_the_working_directory_is_imported_if_it_is_named_alone(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    # Libraries try to import these, of which some are not installed.
    for module in ("torch", "h2", "socks", "wandb", "flash_attn", "kernels", "hf_xet", "apex", "uvloop", "own_metrics"):
        (tmp_path / f"{module}.py").write_text(f"open('executed-{module}', 'w').close()\n")
    metric = "from trainwright import extension\n@extension('metric')\ndef score(answer, row):\n    return 1.0\n"
    with (tmp_path / "own_metrics.py").open("a") as file:
        file.write(metric)
    program = (sys.executable, "-m", "trainwright", "train", str(TINY), "--dry-run", *named)
    ended = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    executed = {file.name for file in tmp_path.glob("executed-*")}
    # With code that is named, what it may need is found too, after all that is installed.
    assert executed == set() if not named else "executed-own_metrics" in executed and "executed-torch" not in executed


@pytest.mark.parametrize(
    "command",
    [
        ("recipe", "show", "recipe.yaml"),
        ("recipe", "check", "recipe.yaml"),
        ("plan", "recipe.yaml", "--on", "2xA100-80GB"),
        ("verify", "recipe.yaml", "parallel.num_processes=2"),
        ("data", "check", "recipe.yaml"),
        ("eval", "run"),
        ("generate", "run", "--prompt", "a"),
        ("merge", "run", "--out", "merged"),
        ("export", "run", "--out", "exported"),
        ("push", "run", "somebody/model", "--dry-run"),
    ],
    ids=" ".join,
)
def test_a_command_that_reads_executes_nothing(folder: Path, command: tuple[str, ...]) -> None:
    ended = trainwright(*command, cwd=folder)
    assert not (folder / "executed").exists()
    assert ended.returncode == 2 and "strategy evil:SPEC is code" in ended.stderr, ended.stderr
    trainwright(*command, "--trust-code", cwd=folder)
    assert (folder / "executed").exists(), "it is the option that decides"


def test_a_module_beside_a_recipe_is_found_from_elsewhere_and_not_executed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    check = ("recipe", "check", str(folder / "recipe.yaml"))
    (folder / "recipe.yaml").write_text(f"include: {TINY}\nevaluate: {{metrics: ['evil:score']}}\n")
    assert trainwright(*check, cwd=elsewhere).returncode == 0
    assert not (folder / "executed").exists()
    trainwright(*check, "--trust-code", cwd=elsewhere)
    assert (folder / "executed").exists()


KEYS = {
    "task": "task=evil:SPEC",
    "strategy": "parallel.strategy=evil:SPEC",
    "adapter": "model.adapter.type=evil:SPEC",
    "optimizer": "optimizer.name=evil:SPEC",
    "schedule": "optimizer.schedule=evil:SPEC",
    "source": "data.train=evil:SOURCE",
    "metric": "evaluate.metrics=['evil:score']",
    "observer": "logging.observers=['evil:score']",
    "step policy": "train.step_policies=['evil:Policy']",
    "objective": "unlearn.objective=evil:SPEC",
    "environment": "algorithm_distillation.environment=evil:Room",
    "attention kernel": "model.attention=evil:SPEC",
    "preference loss": "dpo.loss=evil:SPEC",
}
# Of another task than the other keys.
RECIPES = {"objective": "unlearn", "preference loss": "dpo", "environment": "algorithm_distillation"}


def test_every_kind_of_extension_has_an_attack() -> None:
    assert set(KEYS) == {registry.kind for registry in registries.KEYS.values()}


@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_a_recipe_makes_a_check_execute_anything(folder: Path, key: str) -> None:
    asked = ("recipe", "check", str(ROOT / "recipes" / RECIPES.get(key, "sft") / "tiny.yaml"), KEYS[key])
    refused = trainwright(*asked, cwd=folder)
    assert not (folder / "executed").exists()
    if key in (
        "task",
        "strategy",
        "adapter",
        "optimizer",
        "schedule",
        "source",
        "objective",
        "attention kernel",
        "preference loss",
    ):  # without which the rest cannot be checked
        assert refused.returncode == 2 and "--trust-code" in refused.stderr, refused.stderr
    elif key == "step policy":
        assert refused.returncode == 2 and f"{folder / 'evil.py'} has no Policy" in refused.stderr
    else:
        assert refused.returncode == 0, refused.stderr
    trainwright(*asked, "--trust-code", cwd=folder)
    assert (folder / "executed").exists() == (key != "environment")  # which a check does not make


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cProfile:run", "os:system", "subprocess:Popen", "os.path:exists"])
@pytest.mark.parametrize("key", ["evaluate.metrics", "logging.observers", "train.step_policies"])
def test_nothing_of_the_standard_library_is_an_extension(tmp_path: Path, key: str, place: str) -> None:
    ended = trainwright("train", str(TINY), f"{key}=['{place}']", "logging.run_directory=run", cwd=tmp_path)
    assert ended.returncode == 2 and "is of Python's standard library" in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["evaluate.metrics", "logging.observers"])
def test_a_function_without_the_mark_is_no_extension(folder: Path, key: str) -> None:
    (folder / "mine.py").write_text("import os\n")
    ended = trainwright("train", str(TINY), f"{key}=['mine:os.system']", "logging.run_directory=new", cwd=folder)
    assert ended.returncode == 2 and "is not marked as one; write @extension(" in ended.stderr, ended.stderr


@pytest.mark.parametrize("module", ["torch", "yaml", "pydantic"])
def test_a_file_of_the_folder_replaces_nothing_that_is_installed(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    for words in (("recipe", "check", str(TINY)), ("train", str(TINY), "--dry-run", "logging.observers=['nowhere:A']")):
        command = [sys.executable, "-m", "trainwright", *words]
        ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert not (tmp_path / "executed").exists(), ended.stderr


def test_a_folder_with_entry_points_has_not_installed_them(folder: Path) -> None:
    information = folder / "evil-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[trainwright.tasks]\nevil = evil:score\n")
    command = [sys.executable, "-m", "trainwright", "recipe", "check", str(TINY)]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0 and not (folder / "executed").exists(), ended.stderr


def _code_as_environment(marker: Path) -> dict[str, Any]:
    tasks = [{"args": f"touch {marker}", "shell": True}]
    return {"name": "gymnasium", "options": {"entry_point": "subprocess:Popen", "tasks": tasks, "horizon": 5}}


@pytest.mark.parametrize("options", [(), ("--trust-code",)], ids=["plain", "trusted"])
@pytest.mark.parametrize("place", ["options", "name"])
def test_an_agent_s_file_names_no_code(folder: Path, place: str, options: tuple[str, ...]) -> None:
    pytest.importorskip("gymnasium")
    named = _code_as_environment(folder / "executed")
    if place == "name":
        named = {"name": "evil:score", "options": {}}
    shape = HistoryShape((4, 4), 5, 16, 1, 2, "transition", "rotary", steps=16)
    weights = HistoryModel(shape, seed=0).named_parameters()
    save_history_model(folder / "agent", shape, {"environment": named, "tried": {}}, weights)
    ended = trainwright("eval", "agent", *options, cwd=folder)
    assert ended.returncode == 2 and not (folder / "executed").exists(), ended.stderr
    assert "agent.json" in ended.stderr and "your own recipe" in ended.stderr


def test_a_file_of_histories_names_no_code(folder: Path) -> None:
    h5py = pytest.importorskip("h5py")
    pytest.importorskip("gymnasium")
    file = write_histories(folder / "tiny.h5")
    with h5py.File(file, "r+") as histories:
        histories.attrs["environment"] = json.dumps(_code_as_environment(folder / "executed"))
    values = {"environment_options": {"size": 4, "horizon": 8}, "histories": str(file)}
    (folder / "own.yaml").write_text(json.dumps({"task": "algorithm_distillation", "algorithm_distillation": values}))
    ended = trainwright("train", "own.yaml", "train.max_steps=1", "parallel.num_processes=1", cwd=folder)
    assert not (folder / "executed").exists()
    assert ended.returncode == 2 and f"{file}: attribute environment" in ended.stderr, ended.stderr


def test_every_command_either_runs_a_recipe_or_has_the_option() -> None:
    found: dict[str, bool] = {}

    def collect(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                collect(command, f"{prefix}{name}-")
            else:
                found[prefix + name] = any("--trust-code" in parameter.opts for parameter in command.params)

    collect(get_command(app), "")
    without = {name for name, has in found.items() if not has}
    assert without == {*RUN.split(), *READ_NO_RECIPE.split()}
