"""``trainwright plan`` as a user runs it, and ``train`` where nothing fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import environment
from trainwright.cli.main import app
from trainwright.errors import MachineError, RequestError, TrainwrightError

TINY = Path(__file__).parents[2] / "recipes" / "sft" / "tiny.yaml"
LLAMA = ("--model", "meta-llama/Llama-3.1-8B", "--sequence-length", "8192", "--on", "8xH100")
HERE = "parallel.device=cpu"  # which any machine can train on
HUGE = (  # for any machine that runs tests
    HERE,
    "train.micro_batch_size=100000",
    "train.global_batch_size=100000",
    "train.activation_checkpointing=none",
    "model.config.hidden_size=4096",
    "data.pack_length=null",
    "parallel.strategy=single",
)


def shown(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout  # what a slow plan says of its progress is on the other


def test_a_model_is_planned_without_a_recipe() -> None:
    text = shown(*LLAMA, "--steps", "100")
    assert "*fsdp" in text and "chosen" in text
    assert "parallel.strategy fsdp: the fastest that fits; ddp needs" in text
    assert "100 steps, 52.4M tokens in" in text and "kWh" in text


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["muse", "tofu", "wmdp"])
def test_recipes_of_unlearning_benchmarks_are_planned_offline(recipe: str) -> None:
    file = TINY.parents[1] / "unlearn" / f"{recipe}.yaml"
    assert "chosen" in shown(str(file), "--on", "2xA100-80GB")


def test_every_candidate_is_shown_with_why_it_lost() -> None:
    few, all_of_them = shown(*LLAMA).splitlines(), shown(*LLAMA, "--compare").splitlines()
    assert len(all_of_them) > len(few)
    rows = [line for line in all_of_them if " x " in line and line[:1] in "* "]
    assert [line[0] for line in rows].count("*") == 1
    assert any("times as long per step, mostly because of " in line for line in rows)
    assert any(" needs " in line for line in rows)


def test_a_plan_is_json_for_other_programs() -> None:
    content = json.loads(shown(str(TINY), "--json", "--on", "2xT4"))
    assert content["fits"] and content["machine"] == "2xT4"
    assert content["chosen"]["micro_batch_size"] == 2  # as the recipe has it
    memory = content["chosen"]["memory"]
    workspaces = memory["overhead"].get("workspaces of matrix products", 0)
    assert sum(memory["parts"].values()) + workspaces == content["predicted"]["tensors_bytes"]
    assert sum(content["chosen"]["time"]["parts"].values()) == pytest.approx(content["predicted"]["step_time"])


def test_memory_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown(str(TINY), HERE, "--chart", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="--chart"):
        shown(str(TINY), HERE, "--chart", str(tmp_path / "nowhere" / "plan.png"))


def test_the_chart_marks_the_chosen_row_and_has_the_speeds(tmp_path: Path) -> None:
    lines = shown(str(TINY), "--on", "2xA100-80GB", "--compare", "--chart", str(tmp_path / "plan.svg")).splitlines()
    texts = re.findall("<!-- (.*?) -->", (tmp_path / "plan.svg").read_text())
    first = next(line for line in lines if line.startswith("*"))
    assert texts.count("chosen") == 1 and "tokens/s" in texts
    name = first[1:].split()[0]
    assert texts[texts.index("chosen") - 1].startswith(f"{name} on 2"), "the label of the row before it"
    assert any(text in first.split() for text in texts if "," in text), "the speed of the row"


def test_a_recipe_may_have_an_equals_sign_in_its_path(tmp_path: Path) -> None:
    recipe = tmp_path / "rate=1e-3.yaml"
    recipe.write_text(TINY.read_text())
    assert shown(str(recipe), HERE) == shown(str(TINY), HERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((), RequestError, "pass one recipe, or a model with --model"),
        ((str(TINY), "--model", "x"), RequestError, "pass one recipe, or a model with --model"),
        ((*LLAMA[:-1], "8xH10O"), RequestError, "did you mean H100"),
        ((*LLAMA[:-1], "H100x8"), RequestError, r"write \[NODES x\] DEVICES x CARD"),
        ((*LLAMA[:-1], "4x8xH100@fast"), RequestError, "fast after the @ is not a network"),
        ((*LLAMA, "model.name=meta-llama/Llama-3.1-9B"), RequestError, "did you mean meta-llama/Llama-3.1-8B"),
        ((*LLAMA, "parallel.strategy=ddpp"), RequestError, "did you mean ddp"),
        ((*LLAMA, "parallel.num_processes=9"), RequestError, "9 processes for 8 GPUs; set it to 8 or auto"),
        (
            (str(TINY), "data.pack_length=null", "train.gradient_accumulation_steps=3", "parallel.num_processes=2"),
            RequestError,
            "is not equal to train.global_batch_size 8",
        ),
        ((*LLAMA[:-1], "1xT4", "train.mixed_precision=bf16"), MachineError, "T4 .* set it to auto, fp16 or no"),
        ((*LLAMA, "--sequence-length", "200000"), RequestError, "200000 exceeds the model's 131072 positions"),
        ((*LLAMA, "train.activation_checkpointing=33"), RequestError, "the model has 32 blocks, so there is no 33th"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], kind: type[TrainwrightError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        shown(*arguments)


@pytest.mark.slow
def test_a_model_that_cannot_be_packed_is_planned_on_padded_rows() -> None:
    plan = json.loads(shown("--model", "mosaicml/mpt-7b", "--on", "8xH100", "--json"))
    assert plan["workload"]["packed"] is False and plan["workload"]["row_tokens"] == 2048
    assert plan["workload"]["facts"]["family"] == "mpt"
    with pytest.raises(RequestError, match=r"data\.pack_length: .* \(ALiBi\); set it to null"):
        shown("--model", "mosaicml/mpt-7b", "--on", "8xH100", "data.pack_length=2048")


def test_what_training_does_not_run_on_is_planned_only() -> None:
    text = shown("--model", "HuggingFaceTB/SmolLM2-135M", "--on", "8xGaudi3")
    assert text.splitlines()[1].strip().startswith("planning only: training runs on NVIDIA, AMD and Intel GPUs")
    found = json.loads(shown("--model", "HuggingFaceTB/SmolLM2-135M", "--on", "8xH100", "--json"))
    assert found["planned_only"] is None


@pytest.mark.slow
def test_rows_are_no_longer_than_the_model_is_made_for_unless_asked() -> None:
    assert "packs of up to 1024 tokens" in shown("--model", "gpt2", "--on", "1xT4")
    assert "packs of up to 2048 tokens" in shown("--model", "HuggingFaceTB/SmolLM2-135M", "--on", "1xT4")


def test_the_rates_of_this_machine_are_told_in_one_line() -> None:
    lines = shown(str(TINY), HERE).splitlines()
    assert sum("trainwright machine calibrate" in line for line in lines) <= 1


def test_a_configuration_with_missing_numbers_says_which(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    missing = r"config\.json: num_attention_heads, vocab_size are missing"
    with pytest.raises(RequestError, match=missing):
        shown("--model", str(tmp_path), "--on", "8xH100")


@pytest.mark.slow
def test_where_nothing_fits_it_ends_with_3_and_suggestions() -> None:
    text = shown("--model", "google/gemma-2-27b", "--on", "1xL4", "--global-batch-size", "16", code=3)
    assert "the run does not fit 1xL4: the nearest is" in text and "Changes that would make it fit:" in text
    assert "model.adapter=qlora" in text


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_train_refuses_what_cannot_fit_before_anything_is_launched(tmp_path: Path) -> None:
    def train(*more: str) -> Any:
        arguments = ["train", str(TINY), *HUGE, f"logging.run_directory={tmp_path / 'run'}", *more]
        return CliRunner().invoke(app, arguments, catch_exceptions=False)

    with pytest.raises(
        MachineError, match=r"(?s)needs .* Changes that would make it fit:.*train\.micro_batch_size=auto"
    ) as refused:
        train()
    assert refused.value.exit_code == 3 and "--force" in str(refused.value)
    assert not (tmp_path / "run").exists()
    forced = train("--force", "--dry-run")
    assert forced.exit_code == 0 and "it does not fit" in forced.output


def test_planning_a_known_model_imports_nothing_heavy() -> None:
    program = (
        "import sys; from trainwright.cli.main import app\n"
        f"app(['plan', *{LLAMA!r}], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'numpy', 'rich', 'pynvml', 'huggingface_hub', 'trainwright.run.process', "
        "'trainwright.engine.events'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.endswith("set()\n")
