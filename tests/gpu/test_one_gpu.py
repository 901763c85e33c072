"""Training on a real GPU: the losses of the CPU, the same run after a kill, and what is measured meanwhile.

`make test-gpu` runs these; on a machine without a GPU they are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import ROOT, environment
from tests.support.runs import ON_ROWS, TINY, column, difference, events
from trainwright.observe.ledger import OTHER, read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = ROOT / "recipes"
# The generators of random numbers of a CPU and of a GPU differ.
SAME = (ON_ROWS, "model.dropout=0", "parallel.num_processes=1", "train.max_steps=10", "checkpoint.every=null")
REPEATABLE = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=24", "train.deterministic=true")


def command(run: Path, *overrides: str, recipe: Path = TINY) -> list[str]:
    fixed = (f"logging.run_directory={run}", "logging.observers.tensorboard=false")
    return [sys.executable, "-m", "trainwright", "train", str(recipe), *fixed, *overrides]


def here(**more: str) -> dict[str, str]:
    """The environment of a command that sees the machine as it is."""
    variables = environment(**more)
    del variables["TRAINWRIGHT_MACHINE"]
    return variables


def train(run: Path, *overrides: str, recipe: Path = TINY, code: int = 0, **variables: str) -> str:
    """Train in ``run`` to the end; return what was printed."""
    asked = command(run, *overrides, recipe=recipe)
    ended = subprocess.run(asked, env=here(**variables), cwd=run.parent, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains on the CPU; the same recipe and overrides once."""
    known: dict[tuple[Any, ...], Path] = {}

    def trained(*overrides: str, recipe: Path = TINY) -> Path:
        key = (recipe, *overrides)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("cpu") / "run"
            train(known[key], "parallel.device=cpu", *overrides, recipe=recipe)
        return known[key]

    return trained


@pytest.mark.parametrize(
    "how",
    [
        (),
        ("data.pack_length=null",),
        ("train.compile=true",),
        ("train.activation_checkpointing=full",),
        ("train.activation_offload=true",),
        ("parallel.strategy=ddp",),
        ("parallel.strategy=fsdp",),
        ("parallel.strategy=fsdp", "parallel.offload_parameters=true"),
        ("train.micro_batch_size=1",),
    ],
    ids=lambda how: " ".join(how) or "as planned",
)
def test_the_losses_are_those_of_the_cpu(tmp_path: Path, on_cpu: Any, how: tuple[str, ...]) -> None:
    expected = on_cpu(*SAME, *(key for key in how if key.startswith("data.")))
    run = tmp_path / "run"
    train(run, *SAME, *how)
    assert events(run, "start")[0]["device"] == torch.cuda.get_device_name()
    assert column(run, "tokens") == column(expected, "tokens")
    assert difference(column(run, "loss"), column(expected, "loss")) < 1e-4


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_adapters(tmp_path: Path, on_cpu: Any, adapter: str) -> None:
    pytest.importorskip("peft")
    keys = (*SAME, f"model.adapter={{type: {adapter}, rank: 4}}")
    train(tmp_path / "run", *keys)
    assert difference(column(tmp_path / "run", "loss"), column(on_cpu(*keys), "loss")) < 1e-4


@pytest.mark.parametrize("name", ["cpt/tiny", "dpo/tiny", "pretrain/stdlib-tiny"])
def test_other_tasks(tmp_path: Path, on_cpu: Any, name: str) -> None:
    recipe = RECIPES / f"{name}.yaml"
    keys = ["model.dropout=0", "parallel.num_processes=1", "train.max_steps=6", "checkpoint.every=null"]
    if name == "cpt/tiny":
        keys.append(f"data.train={ROOT / 'docs'}")  # which the recipe names relative to the working directory
    expected = on_cpu(*keys, recipe=recipe)
    train(tmp_path / "run", *keys, recipe=recipe)
    assert difference(column(tmp_path / "run", "loss"), column(expected, "loss")) < 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_close(tmp_path: Path, on_cpu: Any, precision: str) -> None:
    run = tmp_path / "run"
    train(run, *SAME, f"train.mixed_precision={precision}")
    assert difference(column(run, "loss"), column(on_cpu(*SAME), "loss")) < 0.02


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, precision: str, strategy: str) -> None:
    keys = (*REPEATABLE, f"train.mixed_precision={precision}", f"parallel.strategy={strategy}")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    train(undisturbed, *keys)
    asked = command(killed, *keys, "checkpoint={every: 3, background: true}")
    process = subprocess.Popen(asked, env=here(), cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
    ends = time.monotonic() + 200
    while not (killed / "checkpoints" / "step-00000006" / "manifest.json").exists():
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "final").exists()
    resume = [sys.executable, "-m", "trainwright", "train", "--resume", str(killed)]
    ended = subprocess.run(resume, env=here(), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert events(killed, "start")[-1]["resumed_from"] >= 6
    for name in ("loss", "grad_norm", "tokens"):
        assert column(killed, name) == column(undisturbed, name), name
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (killed, undisturbed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_ledger_has_the_gpu_and_every_second(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, ON_ROWS, "parallel.num_processes=1", "train.max_steps=300", "train.mixed_precision=bf16")
    lines = [json.loads(line) for line in (run / "ledger" / "rank-0.jsonl").read_text().splitlines()]
    samples = [line["system"]["gpu"] for line in lines if "gpu" in line.get("system", {})]
    assert samples, "the GPU was sampled"
    for sample in samples:
        assert 0 <= sample["used"] <= 1 and 0 < sample["memory"] <= torch.cuda.get_device_properties(0).total_memory
        assert sample["power"] > 0 and sample["temperature"] > 0 and 0 < sample["clock"] <= sample["highest_clock"]
    (ledger,) = read_ledger(run)
    known = sum(ledger.seconds.values())
    first, last = lines[0]["started"], max(line["time"] for line in lines)
    assert known - ledger.seconds.get(OTHER, 0.0) >= 0.97 * (last - first), dict(ledger.seconds)
    assert ledger.seconds["forward"] > 0 and ledger.seconds["backward"] > 0 and ledger.seconds["optimizer"] > 0


def test_recorded_steps_have_kernels_and_a_snapshot_of_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *SAME, "train.profile={steps: [4, 5]}", "train.mixed_precision=bf16")
    (profile,) = events(run, "profile")
    assert Path(profile["path"]).exists()
    assert profile["operators"] and not any(each["name"].startswith("aten::") for each in profile["operators"])
    (snapshot,) = profile["memory"]
    assert Path(snapshot).stat().st_size > 1000


def test_a_hang_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    policy = "train.step_policies=['tests.support.hanging:Hanging']"
    keys = (*SAME, policy, "faults.on_hang=stop", "train.global_batch_size=4", "train.mixed_precision=bf16")
    begun = time.monotonic()
    said = train(run, *keys, code=5, HANG="forward:0:6", HANG_FILE=str(tmp_path / "hangs"))
    assert time.monotonic() - begun < 120
    assert "rank 0 has made no progress" in said and "in phase forward of step 6" in said


def test_a_full_gpu_is_met_with_smaller_micro_batches(tmp_path: Path) -> None:
    wide = ("model.config.intermediate_size=24576", "model.config.num_hidden_layers=1", "data.pack_length=null")
    keys = (*SAME, *wide, "train.global_batch_size=16", "train.micro_batch_size=8")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    train(undisturbed, *keys)
    train(run, *keys, "train.step_policies=['tests.gpu.policies:FillsMemory']")
    assert any("micro-batch 8 -> 4" in event["action"] for event in events(run, "fault")), events(run, "fault")
    assert difference(column(run, "loss"), column(undisturbed, "loss")) < 1e-5
