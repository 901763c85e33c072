"""The site of the documentation: its generated pages have everything, its links and its navigation lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.support.commands import ROOT
from trainwright.cli.main import app
from trainwright.cli.recipe import recipe_json_schema
from trainwright.compatibility.conversion.convert import list_tools, load_table

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), ROOT / "bench" / "README.md"]
GENERATED = ("recipe", "commands", "extensions", "other-tools")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _keys(properties: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe, by walking the schema without the code under test."""
    for key, value in properties.items():
        yield prefix + key
        for name in dict.fromkeys(re.findall(r"#/\$defs/(\w+)", str(value))):
            yield from _keys(schema["$defs"][name].get("properties", {}), schema, f"{prefix}{key}.")


def test_the_reference_has_every_key_of_a_recipe_with_its_description(hooks: Any) -> None:
    page, schema = hooks.recipe_reference(), recipe_json_schema()
    keys = list(_keys(schema["properties"], schema))
    assert len(keys) > 150 and "model.adapter.rank" in keys
    assert [key for key in keys if f"| `{key}` |" not in page] == []
    rows = [row for row in page.splitlines() if re.match(r"\| `[\w.]+` \|", row)]
    assert [row for row in rows if not row.rpartition(" | ")[2].strip(" |")] == [], "keys without a description"
    row = next(row for row in rows if row.startswith("| `train.global_batch_size` |"))
    assert "integer" in row


def test_the_reference_has_every_option_of_every_command(hooks: Any) -> None:
    page = hooks.command_reference()

    def options(command: Any) -> Iterator[str]:
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):  # old spellings
                yield from (name for name in parameter.opts if name.startswith("--"))
        for each in getattr(command, "commands", {}).values():
            yield from options(each)

    found = set(options(typer.main.get_command(app)))
    assert {"--resume", "--reference-log", "--deduplicate"} <= found
    assert sorted(option for option in found if option not in page) == []
    assert "## `trainwright train`" in page and "### `trainwright data prepare`" in page


def test_the_reference_of_extensions_has_every_registered_name_with_a_description(hooks: Any) -> None:
    page, registries = hooks.extension_reference(), hooks.all_registries()
    kinds = {registry.kind for registry in registries}
    assert {"task", "strategy", "objective", "metric", "source", "environment"} <= kinds
    rows = re.findall(r"^\| `([\w -]+)` \| (.*) \| (.*) \|$", page, re.M)
    assert [name for name, _, _ in rows] == [name for registry in registries for name in registry.names()]
    assert [name for name, summary, package in rows if not summary.strip() or not package] == []


def test_pages_of_the_root_link_to_pages_of_the_site(hooks: Any) -> None:
    for name, target in hooks.ROOT_FILES.items():
        for link in _LINK.findall(hooks.root_page(name)):
            if "://" not in link and not link.startswith("#"):
                page = link.partition("#")[0]
                assert page in hooks.ROOT_FILES.values() or (DOCS / page).is_file(), f"{target}: {link}"


def test_the_reference_has_every_key_of_other_tools(hooks: Any) -> None:
    page = hooks.conversion_reference()
    for name in list_tools():
        part = page.partition(f"\n## {load_table(name).name}\n")[2].partition("\n## ")[0]
        assert [key for key in load_table(name).rules if f"| `{key}` | " not in part] == []
    assert [row for row in page.splitlines() if row.endswith("|  |")] == [], "keys without a word"
    (row,) = [row for row in page.splitlines() if row.startswith("| `train.micro_batch_size` |")]
    assert "Axolotl `micro_batch_size`" in row and "TRL `per_device_train_batch_size`" in row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    generated = {DOCS / "reference" / f"{name}.md" for name in GENERATED}
    for link in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target in generated, link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_the_descriptions_of_the_code_name_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"[`>]([\w.-]+/[\w./*-]+)(?=[`\"<])", text)
    assert len(named) > 5
    roots = (ROOT, ROOT / "src" / "trainwright")
    assert [path for path in named if not any(any(root.glob(path.rstrip("/"))) for root in roots)] == []


def test_the_navigation_has_every_page(hooks: Any) -> None:
    text = re.sub(r"!!python/name:\S+", "null", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == written | set(hooks.ROOT_FILES.values()) | {f"reference/{name}.md" for name in GENERATED}


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown both make them of plain words."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
