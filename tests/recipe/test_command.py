"""``trainwright recipe show|check|schema``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import ROOT
from tests.support.runs import TINY
from trainwright.cli import main
from trainwright.cli.recipe import app
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe, read_merged
from trainwright.recipe.schema import RecipeSchema

SMALLEST = "task: sft\nmodel: {name: some/model}\ndata: {train: pydoc}\n"

Write = Callable[..., Path]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def check_recipe(*arguments: str) -> str:
    return run("check", *arguments)


def plan_recipe(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, ["plan", "--on", "2xA100-80GB", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_prints_the_whole_recipe(write: Write) -> None:
    path = write(SMALLEST)
    shown = run("show", str(path), "train.max_steps=3", "optimizer.learning_rate=1e-3")
    assert "max_steps: 3  # override 'train.max_steps=3'" in shown
    assert "train: pydoc  # run.yaml:3" in shown
    again = write(shown, "shown.yaml")
    assert load_recipe(again) == load_recipe(path, ["train.max_steps=3", "optimizer.learning_rate=1e-3"])


def test_check_says_in_a_line_what_would_run(write: Write) -> None:
    assert run("check", str(write(SMALLEST)), "train.max_steps=3") == (
        "run.yaml: valid, but the model was not checked: sft of some/model on pydoc, 3 steps of 16 examples\n"
        "note: model.name: some/model: neither its configuration nor its files are on this machine, so whether they "
        "fit the recipe was not checked\n"
    )


def test_check_refuses_packs_of_a_model_that_mixes_documents(write: Write) -> None:
    """As a plan does, and a run before it starts."""
    path = write(SMALLEST.replace("some/model", "tiiuae/falcon-7b"))
    assert "falcon-7b" in run("check", str(path), "train.max_steps=3")
    said = "falcon does not keep packed sequences apart: its attention does not know where sequences begin; set it to"
    with pytest.raises(RequestError, match=said):
        run("check", str(path), "train.max_steps=3", "data.pack_length=2048")


def test_check_refuses_what_is_wrong(write: Write) -> None:
    path = write(SMALLEST)
    with pytest.raises(RequestError, match="did you mean max_steps"):
        run("check", str(path), "train.max_stepps=3")


def test_check_and_plan_refuse_a_deepspeed_file_that_training_refuses(write: Write) -> None:
    path, file = write(TINY.read_text()), write('{"flops_profiler": {"enabled": true}}', "ds.json")
    zero = ("parallel.strategy=zero2", "parallel.num_processes=2", "parallel.deepspeed_config=ds.json")
    for command in (check_recipe, plan_recipe):
        with pytest.raises(RequestError, match=r"^ds\.json: flops_profiler: is not supported here; remove it$"):
            command(str(path), *zero)
    file.write_text('{"gradient_clipping": 3.5}')  # which agrees with some recipe
    assert "ok" in check_recipe(str(path), *zero)
    with pytest.raises(RequestError, match=r"^ds\.json: gradient_clipping: 3\.5 contradicts optimizer\.max_grad_norm"):
        plan_recipe(str(path), *zero)


def test_check_looks_at_the_first_rows(write: Write) -> None:
    path = write(SMALLEST.replace("pydoc", "rows.jsonl"))
    rows = write('{"question": "Q", "answer": "A"}\n', "rows.jsonl")
    assert "sft of some/model on rows.jsonl" in run("check", str(path))
    rows.write_text('{"color": "red"}\n')
    with pytest.raises(RequestError, match=r"^data\.train: rows\.jsonl: the rows have the fields color"):
        run("check", str(path))
    rows.unlink()
    with pytest.raises(RequestError, match=r"^data\.train: no file rows\.jsonl"):
        run("check", str(path))


def test_schema_describes_every_key() -> None:
    schema = json.loads(run("schema"))
    sections = {key for key, _ in _properties(schema)}
    assert sections >= set(RecipeSchema.model_fields)
    for key, description in _properties(schema):
        assert description.get("description") or "$ref" in description, key


def test_schema_lets_no_unknown_key_pass_and_requires_none() -> None:
    schema = json.loads(run("schema"))
    assert schema["additionalProperties"] is False
    assert all(section["additionalProperties"] is False for section in schema["$defs"].values())
    assert "required" not in json.dumps(schema).replace("is required", "")
    assert "include" in schema["properties"]


def test_schema_keeps_the_bounds_and_the_choices() -> None:
    sections = json.loads(run("schema"))["$defs"]
    assert sections["ModelSection"]["properties"]["dropout"]["anyOf"][0]["exclusiveMaximum"] == 1
    assert sections["TrainSection"]["properties"]["mixed_precision"]["enum"] == ["auto", "no", "bf16", "fp16"]
    assert sections["TrainSection"]["properties"]["micro_batch_size"]["anyOf"][0]["minimum"] == 1


def _properties(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "properties":
                yield from value.items()
            yield from _properties(value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_that_is_listed_can_be_written_and_loaded(folder: Path) -> None:
    names = [line.split()[0] for line in run("new", "--list").splitlines()]
    assert {f"recipes/{name}.yaml" for name in names} == {
        str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/*/*.yaml")
    }
    for name in names:
        assert f"wrote recipes/{name}.yaml" in run("new", name)
        assert not read_merged(Path(f"recipes/{name}.yaml"), ()).problems


def test_a_recipe_brings_those_that_it_includes_and_replaces_none(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"dpo/tiny.yaml: no such file; trainwright recipe new dpo/tiny writes it"):
        load_recipe(Path("recipes/dpo/tiny.yaml"))
    run("new", "dpo/tiny")
    run("new", "dpo/tiny")
    changed = Path("recipes/sft/tiny.yaml")
    changed.write_text("task: sft\n")
    with pytest.raises(RequestError, match=r"recipes/sft/tiny.yaml: exists with another content"):
        run("new", "dpo/tiny")
    assert changed.read_text() == "task: sft\n"
    with pytest.raises(RequestError, match=r"dpo/tinny: .*did you mean dpo/tiny"):
        run("new", "dpo/tinny")
