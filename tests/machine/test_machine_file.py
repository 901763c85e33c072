"""What ``machine --json`` writes is a machine that plans take; what is wrong in such a file is named by its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.cli.machine import app
from trainwright.errors import RequestError
from trainwright.machine.describe import parse_machine, read_machine, resolve_machine
from trainwright.planning.facts import assume_full_rows
from trainwright.planning.plan import build_constraints, make_plan
from trainwright.recipe.loading import build_recipe

Change = Callable[[dict[str, Any]], None]


def written(tmp_path: Path, *arguments: str) -> Path:
    file = tmp_path / "machine.json"
    file.write_text(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).output)
    return file


@pytest.mark.parametrize("name", ["8xH100", "4x8xA100-40GB@8x200Gb", "2xMI300X", "1xRTX4090"])
def test_a_described_machine_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    assert read_machine(written(tmp_path, "--on", name)) == (parse_machine(name), None, None)


def test_this_machine_comes_back_and_is_written_alike(tmp_path: Path) -> None:
    first = written(tmp_path).read_text()
    again = CliRunner().invoke(app, ["--on", str(tmp_path / "machine.json"), "--json"], catch_exceptions=False)
    assert {**json.loads(again.output), "machine": None} == {**json.loads(first), "machine": None}


def test_a_plan_for_the_file_is_the_plan_for_the_machine(tmp_path: Path) -> None:
    cluster, *_ = resolve_machine(str(written(tmp_path, "--on", "8xH100")))
    recipe = build_recipe(["task=sft", "model.name=gpt2", "data={train: pydoc, validation: null}"], "a test")
    facts = assume_full_rows(recipe)
    plans = [
        make_plan(build_constraints(recipe), facts.workload, one, facts.assumptions)
        for one in (cluster, parse_machine("8xH100"))
    ]
    assert plans[0].as_json() == plans[1].as_json()


def changed(key: str, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        *above, last = key.split(".")
        for part in above:
            content = content[part]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return change


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("nodes", "four", 'nodes: expected a whole number, not "four"'),
        ("nodes", 0, "nodes: expected a number of at least 1, not 0"),
        ("nodes", 2, "network: is null, and 2 nodes need one"),
        ("cpu_cores", ..., "cpu_cores: is missing"),
        ("card", None, "card: expected a mapping, not null"),
        ("card.memory_bytes", -5, "card.memory_bytes: expected a number of at least 1, not -5"),
        ("card.rates.bf16", "fast", 'card.rates.bf16: expected a number, not "fast"'),
        ("card.memory_bandwidth", 0, "card.memory_bandwidth: expected a finite number above 0, not 0"),
        ("card.color", "green", "card.color: unknown key"),
        ("link.kind", "pci", "did you mean pcie?"),
        ("devices", 9, "devices: 9 contradicts the other keys, which make it 8"),
        ("calibration", 5, "calibration: of another version of Trainwright, or no calibration; set it to null"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path: Path, key: str, value: Any, says: str) -> None:
    file = written(tmp_path, "--on", "8xH100")
    content = json.loads(file.read_text())
    changed(key, value)(content)
    file.write_text(json.dumps(content))
    with pytest.raises(RequestError) as caught:
        read_machine(file)
    assert str(caught.value).startswith(f"{file}: ") and says in str(caught.value)


def test_a_file_that_is_not_there_or_is_no_machine(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    for name, says in (("list.json", "not a machine"), ("lst.json", r"did you mean .*list\.json")):
        with pytest.raises(RequestError, match=says):
            resolve_machine(str(tmp_path / name))
