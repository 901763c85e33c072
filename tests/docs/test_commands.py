"""Every command in the guides, tutorials and the README is one that there is; the small ones are run."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.docs.doc_commands import GUIDES, NOT_RUN, TUTORIALS, Command, commands_of
from tests.support.commands import ROOT, environment, trainwright
from trainwright.cli.main import app
from trainwright.recipe.loading import build_recipe, load_recipe
from trainwright.tasks.unlearn.evaluation.study_file import load_study

ALL = [command for file in [*GUIDES, *TUTORIALS] for command in commands_of(file)]
IN_GUIDES = {command.text: command for file in GUIDES for command in commands_of(file)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The tutorial that fast tests run; the others are slow.
FAST = "sft"
_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with what the commands of the guides use of the repository."""
    for part in ("recipes", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    return tmp_path


def test_the_pages_have_commands() -> None:
    assert len(ALL) > 100
    assert {file.stem for file in TUTORIALS} == {command.file.stem for command in ALL if command.file in TUTORIALS}


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command_is_one_that_there_is(command: Command) -> None:
    program, *words = command.words
    if program == "trainwright":
        _check_trainwright(tuple(words))
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in words if "=" not in word} <= set(targets)
    elif program == "pip":
        extras = {extra.strip() for group in re.findall(r"\[([\w, -]+)\]", command.text) for extra in group.split(",")}
        assert extras <= set(PROJECT["optional-dependencies"])
    elif program == "python" and words[0].endswith(".py"):
        source = (ROOT / words[0]).read_text()
        options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == []
    elif program != "git":
        assert words[words.index("-m") + 1] in ("trainwright.worker", "trainwright", "pytest")


def test_the_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text().partition("| Command |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w-]+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:]))
    commands = _program()
    assert sorted(named) == sorted(commands.commands)


@pytest.mark.parametrize("pattern", NOT_RUN)
def test_every_reason_not_to_run_a_command_has_one(pattern: str) -> None:
    assert any(re.search(pattern, command.text) for command in ALL)


def _run(command: Command, cwd: Path) -> None:
    result = trainwright(*command.words[1:], cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


@pytest.mark.slow
def test_the_guides_commands_run(checkout: Path) -> None:
    run = [command for command in IN_GUIDES.values() if command.reason_not_to_run is None]
    assert len(run) > 10
    for command in run:
        _run(command, checkout)


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.stem, marks=[] if file.stem == FAST else pytest.mark.slow) for file in TUTORIALS],
)
def test_a_tutorials_commands_run_in_order(file: Path, checkout: Path) -> None:
    run = [command for command in commands_of(file) if command.reason_not_to_run is None]
    assert len(run) > 1
    for command in run:
        _run(command, checkout)


@pytest.mark.slow
def test_the_page_about_own_data_runs(checkout: Path) -> None:
    page = ROOT / "docs" / "own-data.md"
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S))
    for name, kind in (("format.jinja", "jinja"), ("metrics.py", "python"), ("tickets.yaml", "yaml")):
        (checkout / name).write_text(blocks[kind])
    shutil.rmtree(checkout / "recipes")
    row = blocks["json"].strip()
    rows = [row.replace("7", str(printer)) for printer in range(40)]
    (checkout / "my.jsonl").write_text("\n".join(rows) + "\n")
    for command in commands_of(page):
        newest = max(checkout.glob("runs/*/recipe.yaml"), key=lambda file: file.stat().st_mtime, default=page).parent
        words = [str(newest) if word == "RUN" else word for word in command.words]
        _run(replace(command, words=tuple(words)), checkout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("reference/api", r"True\nfinished [\d.]+ .*final\n"),
        ("getting-started", r"True\n\[.*\]\n"),
        ("python", r"machine .*step 10/10.*\nfinished \{'loss': .*\n0\.0001\n"),
    ],
)
def test_python_of_the_pages_runs(page: str, shown: str, checkout: Path) -> None:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), re.M | re.S)
    code = "".join(block for block in found if "stopped" not in block)  # nothing stops it here
    file = checkout / "example.py"
    file.write_text(code)
    command = [sys.executable, str(file)]
    result = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(shown, result.stdout, re.S), result.stdout


@functools.cache
def _program() -> Any:
    return typer.main.get_command(app)


@functools.cache  # many commands are on several pages
def _check_trainwright(arguments: tuple[str, ...]) -> None:
    """Parse the words by the command line's own parser, read the recipe they name, and apply their overrides."""
    words = list(arguments)
    command = _program()
    context = typer.Context(command, info_name="trainwright")
    path = []
    while getattr(command, "commands", None) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
        context = typer.Context(command, info_name=command.name, parent=context)
        path.append(command.name)
    assert path, f"no command: {words}"
    if path[0] in ("launch", "tensorboard", "under"):
        words = [word for word in words if not word.startswith("-")] or words
    command.parse_args(context, words)
    values = [
        each for value in context.params.values() for each in (value if isinstance(value, (list, tuple)) else [value])
    ]
    given = [str(value) for value in values]
    recipes = [word for word in given if word.startswith("recipes/")]
    # Of ablate's KEY=VALUE,VALUE the first value; the index in an array is a number.
    words = [word.replace("{element}", "0") for word in given if _OVERRIDE.match(word)]
    overrides = [word.partition(",")[0] if path[0] == "ablate" else word for word in words]
    overrides = [] if path[0] == "data" and not recipes else overrides
    if not recipes:
        _check_overrides(path, overrides)
    for recipe in recipes:
        load = load_study if path[0] == "unlearn-study" else load_recipe
        load(ROOT / recipe, overrides)


def _check_overrides(path: list[str], overrides: list[str]) -> None:
    """Overrides of a recipe that the reader has: each is valid over a small recipe of some task."""
    if path[0] not in ("train", "plan", "verify", "ablate", "recipe") or path == ["recipe", "from"]:
        return
    base = ["task=sft", "model.name=x", "data.train=rows.jsonl", "train.max_steps=1", "train.global_batch_size=1"]
    for override in overrides:
        build_recipe([*base, *([] if "adapter." not in override else ["model.adapter=lora"]), override], "the guide")
