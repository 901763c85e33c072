from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.commands import PATIENCE, environment, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.doctor.verify import build_reference
from trainwright.recipe.loading import load_recipe


def leftovers(temporary: Path) -> list[str]:
    return [name for name in os.listdir(temporary) if name.startswith("trainwright-verify")]


@pytest.mark.parametrize(
    ("overrides", "name", "steps"),
    [
        (("parallel.num_processes=2",), "ddp x 2", 3),
        pytest.param(
            ("parallel.strategy=fsdp", "parallel.num_processes=3", "train.mixed_precision=bf16"),
            "fsdp x 3",
            3,
            marks=pytest.mark.slow,
        ),
        (
            (
                "parallel.strategy=fsdp",
                "parallel.num_processes=2",
                "train.micro_batch_size=auto",
                "train.gradient_accumulation_steps=2",
                "model.dropout=0.3",
            ),
            "fsdp x 2",
            2,
        ),
    ],
)
def test_a_recipe_is_proven_the_same_and_nothing_is_left(
    runs: Runs, tmp_path: Path, overrides: tuple[str, ...], name: str, steps: int
) -> None:
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    started = runs.command(
        "verify", str(TINY), ON_ROWS, *overrides, "--steps", str(steps), cwd=here, TMPDIR=str(temporary)
    )
    ended = started.wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1].startswith(f"the same run: over {steps} steps losses differ by at most ")
    assert any(line.startswith("single: model.model.embed_tokens.weight whole") for line in lines)
    assert any(line.startswith(f"{name}: model.model.embed_tokens.weight ") for line in lines)
    assert any("single" in line and f" {name} " in line for line in lines if line.startswith("┃"))
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    assert [int(row[0]) for row in rows] == list(range(1, steps + 1))
    assert leftovers(temporary) == []
    assert os.listdir(here) == []


DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        pytest.param(("parallel.strategy=zero2", "parallel.num_processes=2"), "whole", marks=DEEPSPEED),
        pytest.param(("parallel.strategy=zero3", "parallel.num_processes=2"), "flat over 2 ranks", marks=DEEPSPEED),
        (
            ("parallel.strategy=fsdp", "parallel.replicate_size=2", "parallel.num_processes=4"),
            "rows over 2 ranks, 2 copies",
        ),
    ],
)
def test_every_kind_of_spread_can_be_proven(runs: Runs, overrides: tuple[str, ...], layout: str) -> None:
    ended = runs.command("verify", str(TINY), ON_ROWS, *overrides, "--steps", "3").wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    strategy, count = overrides[0].partition("=")[2], overrides[-1].partition("=")[2]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith(f"{strategy} x {count}: "))
    assert layout in line
    assert ended.stdout.splitlines()[-1].startswith("the same run: over 3 steps")


@pytest.mark.slow
def test_runs_that_part_end_with_4_and_the_step(runs: Runs, tmp_path: Path) -> None:
    """Steps as large as the sign of the smallest gradient decides: the order of a sum is all it takes."""
    chaos = ("optimizer.learning_rate=0.5", "optimizer.eps=1.0e-30", "optimizer.warmup_steps=0", "model.dropout=0")
    passes = ("train.micro_batch_size=1", "data.pack_length=null", "parallel.num_processes=3")
    settings = (ON_ROWS, *passes, "train.mixed_precision=no", "train.max_steps=30", *chaos)
    ended = runs.command("verify", str(TINY), *settings, "--steps", "6", TMPDIR=str(tmp_path)).wait()
    assert ended.code == 4, ended.stdout + ended.stderr
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("NOT the same run: at step ") and " apart (tolerance 1e-05, relative)" in last
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_an_accelerate_file_says_what_is_compared(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\n")
    few = ("--steps", "1", "--accelerate-config", str(file))
    ended = runs.command("verify", str(TINY), ON_ROWS, *few).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert any(line.startswith("fsdp x 2: ") for line in ended.stdout.splitlines())
    file.write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 4\nnum_machines: 2\nmain_process_ip: a\n")
    ended = runs.command("verify", str(TINY), ON_ROWS, *few).wait()
    assert ended.code == 2 and "num_machines is 2" in ended.stderr


def test_what_the_second_side_lacks_is_said_before_the_first_runs(tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "deepspeed-0.17.2.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.2\n")
    path = os.pathsep.join([str(tmp_path / "site"), environment()["PYTHONPATH"]])
    overrides = (ON_ROWS, "parallel.strategy=zero2", "parallel.num_processes=2")
    ended = subprocess.run(  # an interpreter of its own, which finds the other version
        [sys.executable, "-m", "trainwright", "verify", str(TINY), *overrides],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 3
    assert "DeepSpeed 0.17.2 is not supported; pip install" in ended.stderr and ended.stdout == ""


def test_one_process_has_nothing_to_be_compared_with(runs: Runs) -> None:
    ended = runs.command("verify", str(TINY), ON_ROWS, "parallel.num_processes=1").wait()
    assert ended.code == 2
    assert ended.stderr.startswith("error: parallel.strategy: this recipe runs on one process here (single)")


def test_a_side_that_fails_ends_it_with_its_reason(runs: Runs, tmp_path: Path) -> None:
    overrides = ("parallel.num_processes=2", "optimizer.learning_rate=1.0e+30", "optimizer.warmup_steps=0")
    ended = runs.command("verify", str(TINY), ON_ROWS, *overrides, "--steps", "3", TMPDIR=str(tmp_path)).wait()
    assert ended.code == 4
    assert "training stopped: loss" in ended.stderr and "ddp x 2" not in ended.stdout
    (kept,) = leftovers(tmp_path)
    assert f"the output of both sides is in {tmp_path / kept}" in ended.stderr


def test_a_class_that_the_model_does_not_have_is_found_before_either_side(runs: Runs, tmp_path: Path) -> None:
    overrides = ("parallel.num_processes=2", "parallel.strategy=fsdp", "parallel.wrap=[Nothing]")
    ended = runs.command("verify", str(TINY), ON_ROWS, *overrides, "--steps", "1", TMPDIR=str(tmp_path)).wait()
    assert ended.code == 2 and "single:" not in ended.stdout
    assert "parallel.wrap: Nothing is not in the model; what can be wrapped is " in ended.stderr
    assert "LlamaDecoderLayer" in ended.stderr and leftovers(tmp_path) == []


def test_a_signal_ends_it_with_75_and_nothing_is_left(runs: Runs, tmp_path: Path) -> None:
    settings = ("parallel.num_processes=2", "train.max_steps=5000", "--steps", "5000")
    started = runs.command("verify", str(TINY), ON_ROWS, *settings, TMPDIR=str(tmp_path))
    shown = started.files / "stdout"
    wait_for(lambda: shown.exists() and "step 1/5000" in shown.read_text())
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert ended.code == 75
    assert "stopped; nothing was compared or kept" in ended.stderr
    assert leftovers(tmp_path) == []


def test_the_reference_has_the_same_micro_batches(tmp_path: Path) -> None:
    chosen = load_recipe(
        TINY,
        [
            "parallel.strategy=fsdp",
            "parallel.num_processes=4",
            "parallel.replicate_size=2",
            "train.micro_batch_size=auto",
            "train.gradient_accumulation_steps=2",
        ],
    )
    reference = build_reference(chosen)
    assert (reference.parallel.strategy, reference.parallel.num_processes) == ("single", 1)
    assert reference.parallel.replicate_size == 1
    assert reference.train.gradient_accumulation_steps == 8
    assert reference.train.global_batch_size == chosen.train.global_batch_size
    assert reference.model_dump(exclude={"parallel", "train"}) == chosen.model_dump(exclude={"parallel", "train"})


@pytest.mark.slow
def test_a_model_too_large_for_one_process_is_cut_on_both_sides(runs: Runs, tmp_path: Path) -> None:
    recipe = yaml.safe_load(TINY.read_text())
    recipe["model"]["config"]["num_hidden_layers"] = 12
    path = tmp_path / "deep.yaml"
    path.write_text(yaml.safe_dump(recipe))
    # 16 bytes for each of 16,640 parameters of the embeddings and the norm and 37,024 a layer: five fit in 80 %.
    memory = int(16 * (16_640 + 5.5 * 37_024) / 0.8)
    overrides = (ON_ROWS, "parallel.num_processes=2", "parallel.strategy=fsdp")
    output = tmp_path / "output"
    runs.function("tests.doctor.verify_entry:on_a_machine_with", memory, path, overrides, output)
    assert output.read_text().splitlines()[0].startswith("model: both sides use only the first 5 of 12 layers: ")
    assert output.read_text().splitlines()[-1].startswith("the same run: ")


@pytest.mark.slow
def test_a_model_that_does_not_fit_with_one_layer_is_refused(runs: Runs, tmp_path: Path) -> None:
    overrides = (ON_ROWS, "parallel.num_processes=2")
    output = tmp_path / "output"
    runs.function("tests.doctor.verify_entry:on_a_machine_with", 100_000, TINY, overrides, output)
    assert "90.6k parameters with their optimizer need 1.4 MiB, and this machine has 97.7 KiB" in output.read_text()
