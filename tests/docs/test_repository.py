"""The files by which other programs know the repository: CI, pre-commit, templates of issues, the changelog."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from tests.support.commands import ROOT
from tests.test_rooms import ROOMS
from trainwright import __version__
from trainwright.recipe.registries import KEYS

TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def _yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_both_hosts_run_what_ci_runs() -> None:
    steps = _yaml(".github/workflows/ci.yml")["jobs"]["check"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert _yaml(".gitlab-ci.yml")["check"]["script"] == [".ci/run"]
    targets = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert {"lint", "test"} <= set(targets) <= set(_targets())


def test_actions_are_named_by_commit() -> None:
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for action in re.findall(r"uses: (\S+)", file.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{file.name}: {action} can be moved to other code"


def test_paths_and_names_in_printed_commands_are_quoted() -> None:
    """A directory may have a name such as ``a; rm -r b``, and commands in messages are pasted into shells."""
    options = "resume|logdir|config-file|accelerate-config"
    begins = rf"(?:trainwright (?!doctor)[a-z-]+(?: --?[a-z-]+)*|--(?:{options})) "
    command = re.compile(begins + r"\{(?!(?:text\.)?quote_word\()")
    for file in sorted((ROOT / "src").rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert not command.search(line), f"{file}:{number}: quote what is in the command, with text.quote_word"


def test_pre_commit_runs_the_tools_of_lint() -> None:
    hooks = _yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in hooks:
        program, *words = shlex.split(hook["entry"])
        script = next((word for word in words if word.endswith(".py")), None)
        name = program.removeprefix(".venv/bin/") if script is None else script
        assert name in lint and hook["language"] == "system", hook["id"]
        assert script is None or (ROOT / script).is_file()
    assert {"ruff", "mypy", "import-linter"} <= {hook["id"] for hook in hooks}


@pytest.mark.parametrize("template", [each for each in TEMPLATES if each.stem != "config"], ids=lambda path: path.stem)
def test_templates_of_issues_are_as_github_wants_them(template: Any) -> None:
    content = yaml.safe_load(template.read_text())
    assert content["name"] and content["description"]
    ids = [field["id"] for field in content["body"]]
    assert len(ids) == len(set(ids)) > 1
    for field in content["body"]:
        assert field["type"] in ("textarea", "checkboxes") and field["attributes"]["label"]


def test_the_changelog_is_one_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[?([^\]\s]+)\]?(?: - \d{4}-\d\d-\d\d)?$", text, re.M)
    assert versions[0] == "Unreleased" and len(versions) == len(set(versions))
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def _targets() -> list[str]:
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)


def _section(page: str, title: str) -> str:
    """The text under a heading of a page of the root, up to the next heading of its level."""
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("tour", "files"), [("Tour of a run", 12), ("Tour of a row", 12), ("A key, from the recipe to the optimizer", 7)]
)
def test_a_tour_of_the_architecture_has_few_files_that_define_what_it_names(tour: str, files: int) -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", _section("ARCHITECTURE.md", tour), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1)) and 0 < len(rows) <= files
    for _, where in rows:
        file, *names = re.findall(r"`([\w/.]+)`", where)
        source = (ROOT / "src" / "trainwright" / file).read_text()
        for name in names:
            assert re.search(rf"^ *(def|class) {name.rpartition('.')[2]}\b", source, re.M), (file, name)
        assert names, where


def test_places_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 150
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert "/" not in file or any((at / file).is_file() for at in (ROOT, ROOT / "src" / "trainwright")), file


def test_the_architecture_has_every_package_and_the_rooms_that_a_test_deletes() -> None:
    core, _, rooms = _section("ARCHITECTURE.md", "Packages").partition("\n| Room")
    of_core, of_rooms = (
        [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
        for table in (core, rooms)
    )
    sources = (ROOT / "src" / "trainwright").iterdir()
    there = [path.stem for path in sources if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert sorted([*of_core, *of_rooms]) == sorted(name for name in there if not name.startswith("__"))
    assert sorted(of_rooms) == sorted(ROOMS)


def test_the_worked_examples_are_code_of_the_package_that_is_trained_with() -> None:
    """tests/test_plugin.py installs it, and plans and trains with it."""
    section = _section("CONTRIBUTING.md", "Add an extension")
    sources = [file.read_text() for file in (ROOT / "tests" / "plugin").rglob("*") if file.suffix in (".py", ".toml")]
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", section, re.M | re.S)
    assert [block for block in blocks if not any(block in source for source in sources)] == []
    defined = re.findall(r"^(?:class |def )?(\w+)\b[^\n]*(?:=|:$)", "".join(blocks), re.M)
    assert {"FOCAL", "Focal", "SGD", "sgd", "SQUARE_ROOT", "AT_ONCE", "Losses"} <= set(defined)
    named = set(re.findall(r"`(trainwright\.\w+)`", section))
    assert {registry.group for registry in KEYS.values()} <= named


def test_a_package_has_at_most_24_modules_at_one_level() -> None:
    sources = ROOT / "src" / "trainwright"
    for package in (sources, *(path for path in sources.rglob("*") if path.is_dir())):
        modules = [path for path in package.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 24, f"{package}: {len(modules)} modules; group some of them in a folder"
