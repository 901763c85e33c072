"""A package of another author adds one of each kind of extension, and no file of the product is changed for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, environment, machine_file
from tests.support.runs import events
from tests.support.unlearning import write_rows

PACKAGE = Path(__file__).parent / "plugin"
NAMES = ("focal", "at_once", "heavy_ball", "square_root", "sums", "bounded_ascent", "length_ratio", "losses", "by_hand")
ON_SUMS = ("data.train=sums", "data.limit=null", "train.max_steps=2", "checkpoint.every=null")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the package is installed in, by pip and with its entry points."""
    pytest.importorskip("pip")
    directory = tmp_path_factory.mktemp("plugin")
    package = shutil.copytree(PACKAGE, directory / "source", ignore=shutil.ignore_patterns("__pycache__"))
    install = ("install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", directory / "installed")
    subprocess.run([sys.executable, "-m", "pip", *install, package], check=True, capture_output=True)
    return directory / "installed"


def run(installed: Path, cwd: Path, *arguments: str, code: int = 0) -> str:
    """Run `trainwright ARGUMENTS` beside the installed package; give what it prints."""
    path = os.pathsep.join([str(installed), str(ROOT / "src"), str(ROOT)])
    variables = environment(PYTHONPATH=path, TRAINWRIGHT_MACHINE=machine_file(cwd), COLUMNS="300")
    command = [sys.executable, "-m", "trainwright", *arguments]
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def recipe(directory: Path, task: str, **sections: Any) -> str:
    file = directory / f"{task}.yaml"
    values = {"include": str(ROOT / "recipes" / "sft" / "tiny.yaml"), "task": task, **sections}
    file.write_text(json.dumps(values))
    return str(file)


def of_steps(run: Path, key: str) -> list[float]:
    return [event[key] for event in events(run, "step")]


@pytest.mark.slow
def test_the_names_are_in_the_help_the_schema_and_the_tables_of_the_docs(installed: Path, tmp_path: Path) -> None:
    help_ = run(installed, tmp_path, "train", "--help")
    assert [name for name in NAMES if name not in help_] == []
    schema = json.loads(run(installed, tmp_path, "recipe", "schema"))
    assert "focal" in schema["properties"]["task"]["anyOf"][0]["enum"]
    assert "focal: supervised fine-tuning by the focal loss" in schema["properties"]["task"]["description"]
    assert "gamma" in schema["$defs"]["FocalSection"]["properties"]
    assert [name for name in NAMES if f'"{name}"' not in json.dumps(schema)] == []
    assert "bounded_ascent gradient ascent on forget tokens until" in run(installed, tmp_path, "recipe", "objectives")


@pytest.mark.slow
def test_the_names_are_in_the_reference_of_the_docs(installed: Path) -> None:
    path = os.pathsep.join([str(installed), str(ROOT / "src"), str(ROOT / "docs")])
    print_reference = (
        sys.executable,
        "-c",
        "import hooks; print(hooks.recipe_reference(), hooks.extension_reference())",
    )
    shown = subprocess.run(
        print_reference, env=environment(PYTHONPATH=path), capture_output=True, text=True, check=True
    )
    assert "`focal`" in shown.stdout and "`focal.gamma`" in shown.stdout
    assert [name for name in NAMES if not re.search(rf"\| `{name}` .*\| trainwright-example \|", shown.stdout)] == []


@pytest.mark.slow
def test_the_task_the_strategy_the_source_and_the_metric_are_planned_and_train(installed: Path, tmp_path: Path) -> None:
    asked = ("data.validation=10", "evaluate.metrics=[length_ratio]", "evaluate.max_new_tokens=4", *ON_SUMS)
    file = recipe(tmp_path, "focal", focal={"gamma": 0})
    assert "focal of a fresh llama on sums" in run(installed, tmp_path, "recipe", "check", file, *asked)
    assert "from the characters of the first 100;" in run(installed, tmp_path, "plan", file, *asked)
    one = ("parallel.num_processes=1", "train.mixed_precision=no")
    run(installed, tmp_path, "train", file, *asked, *one, "logging.run_directory=focal")
    run(
        installed,
        tmp_path,
        "train",
        recipe(tmp_path, "sft"),
        *ON_SUMS,
        "data.validation=10",
        *one,
        "logging.run_directory=sft",
    )
    spread = ("parallel.strategy=at_once", "parallel.num_processes=2", *one[1:], "logging.run_directory=spread")
    spread = (*spread, "logging.observers=[losses]")
    run(installed, tmp_path, "train", recipe(tmp_path, "sft"), *ON_SUMS, "data.validation=10", *spread)
    assert of_steps(tmp_path / "spread", "loss") == pytest.approx(of_steps(tmp_path / "sft", "loss"), rel=1e-5)
    shown = [float(line) for line in (tmp_path / "spread" / "losses.txt").read_text(encoding="utf-8").split()]
    assert shown == of_steps(tmp_path / "spread", "loss")
    # A power of 0 leaves the loss of fine-tuning.
    assert of_steps(tmp_path / "focal", "loss") == pytest.approx(of_steps(tmp_path / "sft", "loss"), rel=1e-5)
    measured = [event["metrics"] for event in events(tmp_path / "focal", "evaluate")]
    assert all(0 <= metrics["length_ratio"] <= 1 for metrics in measured) and len(measured) == 2
    run(installed, tmp_path, "train", "--resume", "focal", "train.max_steps=3")
    assert len(of_steps(tmp_path / "focal", "loss")) == 3
    asked = ("--data", "sums", "--metrics", "length_ratio", "--limit", "2", "--max-new-tokens", "2")
    assert "length_ratio" in run(installed, tmp_path, "eval", "focal", *asked)


@pytest.mark.slow
def test_an_optimizer_and_a_schedule_are_the_same_everywhere_and_resume(installed: Path, tmp_path: Path) -> None:
    """By ddp and fsdp on two processes, and resumed, as by one process; the rates and the first step by hand."""
    asked = ("optimizer.name=heavy_ball", "optimizer.schedule=square_root", "optimizer.options.nesterov=true")
    asked = (*asked, "optimizer.momentum=0.9", "optimizer.learning_rate=0.1", "optimizer.warmup_steps=0")
    asked = (*asked, *ON_SUMS, "train.max_steps=4", "data.validation=null", "train.mixed_precision=no")
    file = recipe(tmp_path, "sft", model={"dropout": 0.0})

    def train(name: str, *words: str, code: int = 0) -> None:
        run(installed, tmp_path, "train", file, *asked, f"logging.run_directory={name}", *words, code=code)

    train("one", "parallel.num_processes=1")
    rates = [0.1 * (1 - step / 4) ** 0.5 for step in range(4)]
    assert of_steps(tmp_path / "one", "learning_rate") == pytest.approx(rates, rel=1e-12)
    losses = of_steps(tmp_path / "one", "loss")
    for strategy in ("ddp", "fsdp"):
        train(
            strategy,
            "parallel.num_processes=2",
            f"parallel.strategy={strategy}",
            "checkpoint.every=2",
            "train.max_steps=4",
        )
        assert of_steps(tmp_path / strategy, "loss") == pytest.approx(losses, rel=1e-5)
    train("stopped", "parallel.num_processes=1", "--until", "step 2", code=75)
    run(installed, tmp_path, "train", "--resume", "stopped")
    assert of_steps(tmp_path / "stopped", "loss") == losses
    state = {
        name: _state_bytes(installed, tmp_path, file, f"optimizer.name={name}") for name in ("heavy_ball", "adamw")
    }
    assert state["heavy_ball"] == pytest.approx(state["adamw"] / 2, rel=0.01)


@pytest.mark.slow
def test_an_attention_kernel_is_chosen_by_its_name_and_computes_the_same(installed: Path, tmp_path: Path) -> None:
    file = recipe(tmp_path, "sft", model={"dropout": 0.0})
    asked = (*ON_SUMS, "data.validation=null", "train.mixed_precision=no", "parallel.num_processes=1")
    for name in ("by_hand", "eager"):
        run(installed, tmp_path, "train", file, *asked, f"model.attention={name}", f"logging.run_directory={name}")
    (line,) = events(tmp_path / "by_hand", "start")[0]["attention"]
    assert line.startswith("attention by hand") and "plain operations" not in line.partition("(")[0]
    assert of_steps(tmp_path / "by_hand", "loss") == pytest.approx(of_steps(tmp_path / "eager", "loss"), rel=1e-5)
    refused = run(
        installed, tmp_path, "train", file, *asked, "model.attention=by_hand", "data.pack_length=null", code=2
    )
    assert "attention by hand is for packs, see data.pack_length" in refused


def test_a_kind_of_rows_reads_the_rows_of_a_task(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "5"}\n' * 8)
    asked = ("data.train=sums.jsonl", "data.validation=null", "train.max_steps=1")
    refused = run(installed, tmp_path, "train", recipe(tmp_path, "focal"), *asked, code=2)
    assert "sums.jsonl:1: 2 + 2 is not 5; correct the row" in refused


def _state_bytes(installed: Path, cwd: Path, file: str, *words: str) -> float:
    plan = run(installed, cwd, "plan", file, *ON_SUMS, "parallel.num_processes=1", *words, "--json")
    return float(json.loads(plan)["chosen"]["memory"]["parts"]["optimizer state"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optimizer.momentum=0.5",), "optimizer.momentum: has no effect with optimizer adamw"),
        (("optimizer.options.nesterov=true",), "optimizer.options: has no effect with optimizer adamw"),
        (
            ("optimizer.name=heavy_ball", "optimizer.betas=[0.8, 0.9]"),
            "optimizer.betas: has no effect with optimizer heavy_ball",
        ),
        (
            ("optimizer.name=heavy_ball", "parallel.strategy=zero2", "parallel.num_processes=2"),
            "use parallel.strategy ddp or fsdp",
        ),
        (("optimizer.name=heavy_bal",), "did you mean heavy_ball?"),
        (("optimizer.schedule=square_rot",), "did you mean square_root?"),
    ],
)
def test_keys_that_an_optimizer_does_not_read_are_refused(
    installed: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in run(installed, tmp_path, "recipe", "check", recipe(tmp_path, "sft"), *ON_SUMS, *words, code=2)


@pytest.mark.slow
def test_the_objective_is_what_is_minimized(installed: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path)
    asked = ("unlearn.objective=bounded_ascent", "unlearn.alpha=0", "train.max_steps=2", "parallel.num_processes=1")
    run(installed, tmp_path, "train", str(file), *asked, "unlearn.beta=1000", "logging.run_directory=run")
    last = events(tmp_path / "run", "evaluate")[-1]["metrics"]
    assert last["forget_loss"] == pytest.approx(-last["forget_nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("task=focl",), "did you mean focal?"),
        (("task=focal_loss",), "did you mean focal?"),
        (("focal.gama=1",), "focal.gama: unknown key; did you mean gamma?"),
        (("task=sft", "focal.gamma=1"), "focal: has no effect with task sft; remove it, or set task to focal"),
        (("task=trainwright_example:FOCUS",), "task: task trainwright_example:FOCUS cannot be imported: module 'train"),
        (("task=trainwright_example:length_ratio",), "task trainwright_example:length_ratio lacks name, summary"),
        (("task=trainwright_example:FOCAL", "focal.gamma=high"), "focal.gamma: expected a number, not"),
        (("evaluate.metrics=[length_ration]",), "did you mean length_ratio?"),
    ],
)
def test_what_is_wrong_is_refused_as_of_the_product_s_own(
    installed: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    assert said in run(
        installed, tmp_path, "recipe", "show", "--trust-code", recipe(tmp_path, "focal"), *overrides, code=2
    )


def test_without_the_package_its_place_does(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed / "trainwright_example", tmp_path / "trainwright_example")
    places = ("task=trainwright_example:FOCAL", "data.train=trainwright_example:SUMS", "data.limit=null")
    metric = "evaluate.metrics=['trainwright_example:length_ratio']"
    asked = ("recipe", "check", "--trust-code", recipe(tmp_path, "sft"), *places, metric)
    shown = run(tmp_path / "nothing", tmp_path, *asked)
    assert "trainwright_example:FOCAL of a fresh llama on trainwright_example:SUMS" in shown
    assert "focal.gamma: expected a number, not" in run(
        tmp_path / "nothing", tmp_path, *asked, "focal.gamma=high", code=2
    )
    said = run(tmp_path / "nothing", tmp_path, *asked, "data.train=trainwright_example:PRODUCTS", code=2)
    assert said.startswith("error: data.train: source trainwright_example:PRODUCTS cannot be imported:")


def test_a_name_that_two_packages_register_is_refused(installed: Path, tmp_path: Path) -> None:
    both = shutil.copytree(installed, tmp_path / "installed")
    (information,) = both.glob("*.dist-info")
    other = Path(shutil.copytree(information, both / "another_example-1.0.dist-info"))
    metadata = (other / "METADATA").read_text().replace("Name: trainwright-example", "Name: another-example")
    (other / "METADATA").write_text(metadata)
    said = run(both, tmp_path, "recipe", "schema", code=2)
    assert "is also registered by package" in said
    assert "package another-example" in said and "package trainwright-example" in said


def test_an_extension_that_cannot_be_imported_is_named(installed: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(installed, tmp_path / "installed")
    (broken / "trainwright_example" / "__init__.py").write_text("import no_such_library\n")
    said = run(broken, tmp_path, "recipe", "schema", code=2)
    assert (
        "package trainwright-example: task focal (entry point trainwright_example:FOCAL of trainwright.tasks)" in said
    )
    assert "cannot be imported: No module named 'no_such_library'" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "FOCAL = object()",
            "(entry point trainwright_example:FOCAL of trainwright.tasks) lacks name, summary, module",
        ),
        (
            "SUMS = None",
            "data.train: package trainwright-example: source sums (entry point trainwright_example:SUMS of "
            "trainwright.sources) lacks rows, key",
        ),
        ("length_ratio = 1", "(entry point trainwright_example:length_ratio of trainwright.metrics) lacks __call__"),
        ("BOUNDED_ASCENT = 1", "(entry point trainwright_example:BOUNDED_ASCENT of trainwright.objectives) lacks line"),
    ],
)
def test_what_an_extension_lacks_is_said(installed: Path, tmp_path: Path, line: str, said: str) -> None:
    broken = shutil.copytree(installed, tmp_path / "installed")
    with (broken / "trainwright_example" / "__init__.py").open("a") as module:
        module.write(f"{line}\n")
    metric, unlearning = "evaluate.metrics=[length_ratio]", write_rows(tmp_path)
    asked = (str(unlearning), "unlearn.objective=bounded_ascent")
    if line.startswith(("SUMS", "length_ratio")):
        asked = (recipe(tmp_path, "sft"), *ON_SUMS, *([metric] if "ratio" in line else []))
    shown = run(broken, tmp_path, "recipe", "check", *asked, code=2)
    assert "package trainwright-example" in shown and said in shown and "Value error" not in shown
