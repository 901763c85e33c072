"""`trainwright train`: what it refuses, and that nothing is left of it then; what it prints, and where things are."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import machine_file
from tests.support.runs import ON_ROWS, TINY, Finished, Runs, events

ROW = '{"question": "What is it?", "answer": "It is this."}\n'
OTHER = '{"color": "red", "size": 3}\n'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with a recipe like `tiny` that trains on rows.jsonl, and with rows of many kinds."""
    recipe = yaml.safe_load(TINY.read_text())
    recipe["data"] = {"train": "rows.jsonl", "max_length": 128, "validation": 4}
    recipe["train"]["max_steps"] = 2
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (tmp_path / "rows.jsonl").write_text("".join(ROW.replace("it", f"it {n}") for n in range(30)))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "broken.jsonl").write_text(ROW + ROW + '{"question": "cut\n' + ROW)
    (tmp_path / "broken.json").write_text("[\n" + ROW.strip() + ",\n{]\n")
    (tmp_path / "other.jsonl").write_text(OTHER * 20)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("kept")
    return tmp_path


def files(directory: Path) -> dict[str, Any]:
    found = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in found}


def attempt(runs: Runs, here: Path, *arguments: str, **limits: Any) -> Finished:
    fixed = ("parallel.num_processes=1",) if not any("num_processes" in a for a in arguments) else ()
    return runs.command("train", *arguments, *fixed, cwd=here, **limits).wait()


REFUSALS = {
    "unknown key": (("train.glbal_batch_size=4",), ("train.glbal_batch_size", "global_batch_size")),
    "unknown section": (("tran.max_steps=4",), ("tran", "train")),
    "not a number": (("train.max_steps=many",), ("train.max_steps", "many")),
    "two batch sizes that contradict": (
        ("train.gradient_accumulation_steps=3", "train.global_batch_size=8", "train.micro_batch_size=2"),
        ("train.gradient_accumulation_steps", "train.global_batch_size", "train.micro_batch_size"),
    ),
    "more rows at once than a batch has": (
        ("train.micro_batch_size=9",),
        ("train.micro_batch_size", "train.global_batch_size 8"),
    ),
    "single on two processes": (
        ("parallel.strategy=single", "parallel.num_processes=2"),
        ("parallel.strategy", "parallel.num_processes"),
    ),
    "missing file": (("data.train=nowhere.jsonl",), ("data.train", "nowhere.jsonl")),
    "missing validation file": (("data.validation=nowhere.jsonl",), ("data.validation", "nowhere.jsonl")),
    "empty file": (("data.train=empty.jsonl",), ("data.train", "empty.jsonl")),
    "file without rows": (("data.train=empty.json",), ("data.train", "empty.json")),
    "broken line": (("data.train=broken.jsonl",), ("broken.jsonl:3",)),
    "broken JSON": (("data.train=broken.json",), ("broken.json:3",)),
    "other fields": (("data.train=other.jsonl",), ("other.jsonl", "color", "size", "question")),
    "fields of another format": (("data.format=messages",), ("rows.jsonl", "messages", "question, answer")),
    "longer than the model": (("data.max_length=600", "data.pack_length=null"), ("data.max_length", "600", "512")),
    "pack shorter than an example": (("data.pack_length=64",), ("data.pack_length", "data.max_length")),
    "all rows held out": (("data.validation=30",), ("data.validation", "30")),
    "directory that exists": (
        ("logging.run_directory=taken",),
        ("logging.run_directory", "taken exists; choose another directory"),
    ),
    "no such model": (
        ("model.name=nowhere/at-all", "model.config=null", "model.tokenizer=null"),
        ("model.name", "nowhere/at-all"),
    ),
    "no such architecture": (("model.config.model_type=lama",), ("model.config", "lama", "llama")),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_wrong_request_ends_with_2_and_one_message_and_leaves_nothing(runs: Runs, here: Path, why: str) -> None:
    overrides, said = REFUSALS[why]
    before = files(here)
    ended = attempt(runs, here, "recipe.yaml", *overrides)
    assert ended.code == 2, ended.stdout + ended.stderr
    assert ended.stderr.count("error:") == 1 and ended.stderr.startswith("error: ")
    for part in said:
        assert part in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    left = {name: content for name, content in files(here).items() if name != "runs"}
    assert left == before
    assert not list((here / "runs").glob("*"))


@pytest.mark.parametrize("kind", ["directory", "first row", "metric", "tracker", "strategy's library"])
def test_a_refusal_comes_before_the_machine_is_measured(runs: Runs, here: Path, kind: str) -> None:
    missing = [name for name in ("wandb", "mlflow", "trackio", "prometheus_client", "deepspeed") if not find_spec(name)]
    override, message = {
        "directory": ("logging.run_directory=taken", "taken exists; choose another directory"),
        "first row": ("data.train=broken.jsonl", "broken.jsonl:3"),
        "metric": ("evaluate.metrics=[slow:Good, nowhere:Metric]", "No module named 'nowhere'"),
        "tracker": (f"logging.observers=[{missing[0]}]" if missing else "", "is not installed"),
        "strategy's library": ("parallel.strategy=zero2" if "deepspeed" in missing else "", "needs deepspeed"),
    }[kind]
    if not override:
        pytest.skip("everything is installed here")
    (here / "slow.py").write_text("Good = 1\nraise SystemExit('imported')")
    # A file of the machine that is not there: whatever reads the machine fails.
    ended = attempt(runs, here, "recipe.yaml", override, TRAINWRIGHT_MACHINE="nowhere.json")
    assert ended.code in (2, 3) and message in ended.stderr, ended.stderr


def test_a_mistake_in_the_file_is_named_with_its_line(runs: Runs, here: Path) -> None:
    text = (here / "recipe.yaml").read_text().replace("micro_batch_size", "micro_batchsize")
    line = next(n for n, found in enumerate(text.splitlines(), 1) if "micro_batchsize" in found)
    (here / "recipe.yaml").write_text(text)
    ended = attempt(runs, here, "recipe.yaml")
    assert ended.code == 2
    assert f"recipe.yaml:{line}: train.micro_batchsize" in ended.stderr
    assert "did you mean micro_batch_size?" in ended.stderr
    assert not (here / "runs").exists()


def test_a_resume_of_what_is_no_run_is_refused(runs: Runs, here: Path) -> None:
    before = files(here)
    ended = attempt(runs, here, "--resume", "taken")
    assert ended.code == 2 and "taken is not a run" in ended.stderr
    ended = attempt(runs, here, "recipe.yaml", "--resume")
    assert ended.code == 2 and "no run of this recipe" in ended.stderr
    assert files(here) == before


@pytest.mark.slow
def test_more_processes_than_cores_run_with_a_line_about_it(runs: Runs, here: Path, tmp_path: Path) -> None:
    arguments = ("recipe.yaml", "parallel.num_processes=2", "logging.run_directory=run")
    ended = attempt(runs, here, *arguments, TRAINWRIGHT_MACHINE=machine_file(tmp_path, cpu_cores=1))
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "2 processes share 1 core" in ended.stdout
    assert events(here / "run", "start")[0]["world_size"] == 2


def test_a_run_leaves_what_it_says_and_the_recipe_reproduces_it(runs: Runs, here: Path) -> None:
    ended = attempt(runs, here, "recipe.yaml", "evaluate.prompts=[What is it 3?]".replace("?", ""))
    assert ended.code == 0, ended.stdout + ended.stderr
    (run,) = (here / "runs").iterdir()
    assert run.name.startswith("recipe-")
    assert {path.name for path in run.iterdir()} == {
        "recipe.yaml",
        "plan.json",
        "events.jsonl",
        "logs",
        "ledger",
        "tensorboard",
        "checkpoints",
        "final",
    }
    shown = ended.stdout
    for part in ("fp32", "strategy single", "step 2/2", "validation", "finished at step 2", f"runs/{run.name}/final"):
        assert part in shown, shown
    assert "\r" not in shown, "no bar where there is no terminal"
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert "auto" not in [value for s in resolved.values() if isinstance(s, dict) for value in s.values()] or (
        resolved["logging"]["run_directory"] == "auto"
    )
    assert list((run / "tensorboard").iterdir())
    assert (run / "logs" / "rank-0.log").is_file()

    again = runs.command("train", f"runs/{run.name}/recipe.yaml", cwd=here).wait()
    assert again.code == 0, again.stdout + again.stderr
    (new,) = set((here / "runs").iterdir()) - {run}
    assert re.fullmatch(r"recipe-\d{8}-\d{6}(-\d+)?", new.name)
    assert [e["loss"] for e in events(new, "step")] == [e["loss"] for e in events(run, "step")]
    assert (new / "recipe.yaml").read_text() == (run / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_run_in_a_directory_of_its_own_is_trained_again_beside_it_under_its_recipes_name(
    runs: Runs, here: Path
) -> None:
    (here / "recipe.yaml").rename(here / "mine.yaml")
    ended = attempt(runs, here, "mine.yaml", "logging.run_directory=kept/run", "logging.observers.tensorboard=false")
    assert ended.code == 0, ended.stdout + ended.stderr
    before = files(here / "kept")
    again = runs.command("train", "kept/run/recipe.yaml", cwd=here).wait()
    assert again.code == 0, again.stdout + again.stderr
    assert files(here / "kept") == before
    (new,) = (here / "runs").iterdir()
    assert re.fullmatch(r"mine-\d{8}-\d{6}", new.name)
    assert [e["loss"] for e in events(new, "step")] == [e["loss"] for e in events(here / "kept" / "run", "step")]


@pytest.mark.slow
def test_a_resumed_run_takes_up_what_may_change_tells_it_and_keeps_its_reasons(runs: Runs, here: Path) -> None:
    ended = attempt(runs, here, "recipe.yaml", "logging.observers.tensorboard=false", "logging.run_directory=run")
    assert ended.code == 0, ended.stdout + ended.stderr
    run = here / "run"
    reasons = json.loads((run / "plan.json").read_text())["reasons"]
    assert reasons
    before = files(run)
    refused = runs.command("train", "recipe.yaml", "--resume=run", "optimizer.learning_rate=5e-3", cwd=here).wait()
    assert refused.code == 2 and files(run) == before
    assert "optimizer.learning_rate: 0.001 in the run, now 0.005" in refused.stderr
    text = (here / "recipe.yaml").read_text().replace("max_steps: 2", "max_steps: 4")
    (here / "recipe.yaml").write_text(text + "checkpoint: {every: 3}\n")
    more = runs.command("train", "recipe.yaml", "--resume=run", cwd=here).wait()
    assert more.code == 0, more.stdout + more.stderr
    assert "train.max_steps 4: 2 until the run was resumed (recipe.yaml:" in more.stdout
    assert [e["step"] for e in events(run, "checkpoint")] == [2, 3, 4]
    after = json.loads((run / "plan.json").read_text())
    assert after["recipe"] == "recipe"
    kept = [line for line in reasons if not line.startswith("checkpoint.every ")]  # which holds no more
    assert after["reasons"][: len(kept)] == kept
    assert [line.partition(" ")[0] for line in after["reasons"][len(kept) :]] == [
        "train.max_steps",
        "checkpoint.every",
        "logging.observers.tensorboard",
    ]


@pytest.mark.slow
def test_resume_without_a_name_takes_the_newest_run(runs: Runs, here: Path) -> None:
    for steps in (1, 2):
        ended = attempt(runs, here, "recipe.yaml", f"train.max_steps={steps}", "logging.observers.tensorboard=false")
        assert ended.code == 0, ended.stdout + ended.stderr
    ended = runs.command("train", "recipe.yaml", "--resume", "train.max_steps=4", cwd=here).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    counts = sorted(len(events(run, "step")) for run in (here / "runs").iterdir())
    assert counts == [1, 4]


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_trained_by_another(runs: Runs) -> None:
    started = runs.train("parallel.num_processes=2", "train.max_steps=1000")
    started.wait_for_step(1)
    assert started.run is not None
    before = (started.run / "recipe.yaml").read_text()
    ended = runs.resume(started.run).wait()
    assert ended.code == 2 and "is being trained by another process" in ended.stderr
    assert (started.run / "recipe.yaml").read_text() == before
    started.kill()
    assert started.wait().code < 0
    assert json.loads((started.run / "events.jsonl").read_text().splitlines()[0])["event"] == "start"


@pytest.mark.slow
def test_summary_of_a_resumed_run_begins_where_the_run_began(runs: Runs) -> None:
    run = runs.new_directory("longer")
    asked = ("train.max_steps=3", f"logging.run_directory={run}", "logging.observers.tensorboard=false", ON_ROWS)
    first = runs.command("train", str(TINY), *asked).wait()
    assert first.code == 0, first.stderr
    second = runs.resume(run, "train.max_steps=5").wait()
    assert second.code == 0, second.stderr
    losses = [event["metrics"]["loss"] for event in events(run, "evaluate")]
    assert len(losses) == 3  # before the first step, at step 3 and at step 5
    assert f"loss           {losses[0]:.4f} -> {losses[-1]:.4f}" in second.stdout
    assert "of it since it was resumed at step 3" in second.stdout and "since it was" not in first.stdout


@pytest.mark.slow
@pytest.mark.parametrize("named", ["beside:score", "beside.py:score", "package.beside:score"])
def test_a_metric_beside_the_recipe_is_found_from_elsewhere_and_goes_with_the_run(
    runs: Runs, here: Path, tmp_path_factory: pytest.TempPathFactory, named: str
) -> None:
    module = here / ("package/beside.py" if named.startswith("package") else "beside.py")
    module.parent.mkdir(exist_ok=True)
    (module.parent / "__init__.py").touch()
    module.write_text("from trainwright import extension\n@extension('metric')\ndef score(a, b): return 0.25\n")
    elsewhere, far = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("far")
    text = (here / "recipe.yaml").read_text().replace("rows.jsonl", str(here / "rows.jsonl"))
    (here / "recipe.yaml").write_text(f"{text}evaluate: {{metrics: ['{named}'], max_new_tokens: 4}}\n")
    fixed = ("parallel.num_processes=1", "logging.observers.tensorboard=false")
    ended = runs.command("train", f"{here}/recipe.yaml", "logging.run_directory=run", *fixed, cwd=elsewhere).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    module.unlink()
    (elsewhere / "run").rename(far / "moved")
    for command in (("train", "--resume=moved", "train.max_steps=3"), ("recipe", "check", "moved/recipe.yaml")):
        ended = runs.command(*command, cwd=far).wait()
        assert ended.code == 0, ended.stdout + ended.stderr
    assert events(far / "moved", "evaluate")[-1]["metrics"][named] == 0.25
