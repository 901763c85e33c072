"""A strategy of another package: installed beside the product, it is listed, checked, planned and trained with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment
from tests.support.runs import ON_ROWS, TINY, Runs, column, difference
from trainwright.engine.event_reader import read_events

CODE = Path(__file__).parent / "extension"
Install = Callable[..., Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Put a package with an entry point into the directory ``site``; its code is the test's or ``files``."""

    def put(package: str = "trainwright-flat", entry: str = "flat = flat_spec:SPEC", **files: str) -> Path:
        site = tmp_path / "site"
        shutil.copytree(CODE, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for module, text in files.items():
            (site / f"{module}.py").write_text(text)
        information = site / f"{package.replace('-', '_')}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[trainwright.strategies]\n{entry}\n")
        return site

    return put


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python with what is installed in ``site``."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src"), str(ROOT)])
        variables = environment(PYTHONPATH=path, TRAINWRIGHT_CACHE=str(tmp_path / "cache"))
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, cwd=tmp_path)

    return command


FLAT = ("-m", "trainwright", "train", str(TINY), ON_ROWS, "parallel.strategy=flat", "train.max_steps=3")


@pytest.mark.slow
def test_it_trains_to_the_losses_of_ddp(install: Install, run: Run, runs: Runs, tmp_path: Path) -> None:
    install()
    where = f"logging.run_directory={tmp_path / 'run'}"
    same = ("parallel.num_processes=2", "train.mixed_precision=no", "logging.observers.tensorboard=false")
    ended = run(*FLAT, *same, where)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    start = next(event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "start")
    assert (start["strategy"], start["world_size"]) == ("flat", 2) and "2 copies" in start["layout"]
    ddp = runs.trained(ON_ROWS, "parallel.strategy=ddp", "train.max_steps=3", *same)
    for name in ("loss", "grad_norm"):
        assert difference(column(tmp_path / "run", name), column(ddp, name)) < 1e-6
    assert "strategy: flat" in (tmp_path / "run" / "recipe.yaml").read_text()


def test_it_is_planned_by_what_its_spec_says(install: Install, run: Run) -> None:
    """One all-reduce that nothing hides, and a copy of all gradients: slower than ddp, and more memory."""
    install()
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16}
    config = json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes})
    plan = ("-m", "trainwright", "plan", str(TINY), "--on", "2xA100-80GB", "--json", f"model.config={config}")
    chosen = {}
    for name in ("flat", "ddp"):
        ended = run(*plan, "train.mixed_precision=no", f"parallel.strategy={name}")
        assert ended.returncode == 0, ended.stderr
        chosen[name] = json.loads(ended.stdout)["chosen"]
        assert (chosen[name]["strategy"], chosen[name]["num_processes"]) == (name, 2)
    flat, ddp = chosen["flat"], chosen["ddp"]
    assert flat["time"]["parts"]["communication"] > 2 * ddp["time"]["parts"]["communication"] > 0
    assert flat["memory"]["phases"]["backward"] > ddp["memory"]["phases"]["backward"]


@pytest.mark.slow
def test_it_is_listed_beside_the_others(install: Install, run: Run) -> None:
    install()
    schema = run("-m", "trainwright", "recipe", "schema").stdout
    strategy = json.loads(schema)["$defs"]["ParallelSection"]["properties"]["strategy"]
    assert "flat" in strategy["anyOf"][0]["enum"]
    assert "flat: every process has the whole model, and gradients are summed in one piece." in strategy["description"]
    reference = run("-c", "from docs.hooks import extension_reference as page; print(page())").stdout
    assert any("`flat`" in line and "trainwright-flat" in line for line in reference.splitlines())


def test_its_limits_are_checked(install: Install, run: Run) -> None:
    install()
    check = ("-m", "trainwright", "recipe", "check", str(TINY), "parallel.strategy=flat")
    for override, said in (
        ("train.mixed_precision=bf16", "train.mixed_precision: flat sums gradients in fp32 alone; set it to no"),
        ("parallel.num_processes=1", "flat needs at least 2 processes, but parallel.num_processes is 1"),
        ("parallel.replicate_size=2", "has no effect with parallel.strategy flat, only with fsdp"),
    ):
        ended = run(*check, override)
        assert ended.returncode == 2 and said in ended.stderr, ended.stderr


@pytest.mark.slow
def test_a_place_needs_no_entry_point(install: Install, run: Run) -> None:
    install(entry="")
    plan = ("plan", str(TINY), "--on", "2xA100-80GB", "parallel.strategy=flat_spec:SPEC", "--trust-code")
    ended = run("-m", "trainwright", *plan)
    assert ended.returncode == 0 and "flat_spec:SPEC" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("entry", "files", "said"),
    [
        (
            "flat = flat_spec:SPEC",
            {"flat_spec": "import no_such_library"},
            "package trainwright-flat: strategy flat (entry point flat_spec:SPEC of trainwright.strategies) cannot be "
            "imported: No module named 'no_such_library'",
        ),
        (
            "flat = flat_spec:SPEC",
            {"flat_spec": "class SPEC:\n    summary = 'x'"},
            "strategy flat (entry point flat_spec:SPEC of trainwright.strategies) lacks implementation, memory",
        ),
        pytest.param(
            "flat = flat_spec:SPEC",
            {"flat_strategy": "class Flat:\n    def backward(self, loss, last): pass"},
            "strategy flat (entry point flat_spec:SPEC of trainwright.strategies): its implementation "
            "flat_strategy:Flat lacks gradient_norm, step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flat = other_spec:SPEC",
            {
                "other_spec": "from dataclasses import replace\nfrom flat_spec import SPEC\n"
                "SPEC = replace(SPEC, memory='flat_strategy:Flat')"
            },
            "(entry point other_spec:SPEC of trainwright.strategies): its memory model flat_strategy:Flat is no "
            "trainwright.planning.memory.strategies.StrategyMemory",
            marks=pytest.mark.slow,
        ),
        ("ddp = flat_spec:SPEC", {}, "strategy ddp (entry point flat_spec:SPEC of trainwright.strategies) is also"),
    ],
)
def test_a_faulty_one_ends_with_2_and_says_where_it_is_from(
    install: Install, run: Run, entry: str, files: dict[str, str], said: str
) -> None:
    install(entry=entry, **files)
    ended = run(*FLAT, "parallel.num_processes=2", "train.mixed_precision=no")
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_packages_with_one_strategy_are_refused(install: Install, run: Run) -> None:
    install()
    install(package="other")
    ended = run("-m", "trainwright", "recipe", "check", str(TINY), "parallel.strategy=flat")
    assert ended.returncode == 2 and "is also registered by" in ended.stderr, ended.stderr
    assert "package other" in ended.stderr and "package trainwright-flat" in ended.stderr
