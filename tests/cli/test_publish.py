"""``trainwright merge`` and ``export`` of what runs leave, as a user runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import PATIENCE, environment
from tests.support.runs import ON_ROWS, ROOT, Finished, Runs
from tests.support.unlearning import write_rows

FEW = (ON_ROWS, "train.max_steps=6", "checkpoint.every=3", "parallel.num_processes=1", "optimizer.learning_rate=1e-2")
ADAPTERS = {
    "lora": "model.adapter={type: lora, rank: 4}",
    "dora": "model.adapter={type: dora, rank: 4}",
    "qlora": "model.adapter={type: qlora, rank: 4}",
}


@pytest.fixture(scope="module")
def base(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of two blocks that was trained for a moment, under a path of its own."""
    trained = runs.trained("train.max_steps=2", ON_ROWS, "parallel.num_processes=1")
    return Path(shutil.copytree(trained / "final", tmp_path_factory.mktemp("models") / "base"))


def adapted(runs: Runs, base: Path, kind: str) -> Path:
    plain = (f"model.name={base}", "model.config=null", "model.tokenizer=null")
    return runs.trained(*FEW, *plain, ADAPTERS[kind])


def ended(runs: Runs, *arguments: object) -> Finished:
    return runs.command(*map(str, arguments)).wait()


def logits(directory: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([list(b"What is 7 times 8?")])).logits


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind == "qlora" else pytest.param(kind, marks=pytest.mark.slow) for kind in ADAPTERS]
)
def test_a_run_is_merged_into_its_whole_base_which_stays_as_it_is(
    runs: Runs, base: Path, tmp_path: Path, kind: str
) -> None:
    run, before = adapted(runs, base, kind), contents(base)
    done = ended(runs, "merge", run, "--out", tmp_path / "merged")
    assert done.code == 0, done.stderr
    assert "14 matrices merged" in done.stdout and "sample output: " in done.stdout
    merged = logits(tmp_path / "merged")
    torch.testing.assert_close(merged, logits(base, run / "final"), rtol=1e-4, atol=1e-4)
    assert (merged - logits(base)).abs().max() > 0.01
    assert contents(base) == before
    asked = ("--prompt", "What is 7 times 8?", "--max-new-tokens", "16", "--dtype", "fp32")
    if kind != "qlora":  # whose run answers with the rounded base
        assert ended(runs, "generate", tmp_path / "merged", *asked) == ended(runs, "generate", run, *asked)


@pytest.mark.slow
def test_a_run_becomes_a_gguf_file_that_answers_as_it_does(runs: Runs, base: Path, tmp_path: Path) -> None:
    run = adapted(runs, base, "lora")
    for dtype in ("f32", "f16"):
        done = ended(runs, "export", run, "--to", "gguf", "--dtype", dtype, "--out", tmp_path / f"{dtype}.gguf")
        assert done.code == 0, done.stderr
        assert "read back by transformers with the same tokens and logits" in done.stdout
    asked = ("--prompt", "What is 7 times 8?", "--max-new-tokens", "16", "--dtype", "fp32")
    own = ended(runs, "generate", run, *asked)
    assert own.code == 0 and own.stdout == ended(runs, "generate", tmp_path / "f32.gguf", *asked).stdout


@pytest.mark.slow
def test_an_adapter_and_a_checkpoint_are_exported(runs: Runs, base: Path, tmp_path: Path) -> None:
    run = adapted(runs, base, "lora")
    done = ended(runs, "export", run, "--to", "adapter", "--out", tmp_path / "adapter")
    assert done.code == 0 and contents(tmp_path / "adapter") == contents(run / "final")
    whole = runs.trained(ON_ROWS, "train.max_steps=4", "checkpoint.every=2", "parallel.num_processes=1")
    done = ended(runs, "export", whole, "--checkpoint", "newest", "--out", tmp_path / "whole")
    assert done.code == 0, done.stderr
    assert torch.equal(logits(tmp_path / "whole"), logits(whole / "final"))


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(runs: Runs, base: Path, tmp_path: Path) -> None:
    run, before = adapted(runs, base, "qlora"), contents(base)

    def refused(*arguments: object, out: Path = tmp_path / "out") -> str:
        done = ended(runs, "merge", *arguments, "--out", out)
        assert done.code == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr, done.stderr
        assert contents(base) == before and not (tmp_path / "out").exists()
        return done.stderr

    assert "is the base model, which is never overwritten" in refused(run, out=base)
    assert f"no adapter to merge: {base} is a full model" in refused(base)
    assert "MODEL: nowhere was not found" in refused("nowhere")
    unfinished = runs.copied(run)
    shutil.rmtree(unfinished / "final")
    assert f"--resume {unfinished}" in refused(unfinished)
    other = Path(shutil.copytree(base, tmp_path / "other"))
    change(other)
    said = refused(other, "--adapter", run / "final")
    assert str(base) in said and str(other) in said and "--adapter: " in said
    stored = Path(shutil.copytree(base, tmp_path / "stored"))
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (stored / "config.json").write_text(json.dumps(config))
    said = refused(stored, "--adapter", run / "final")
    assert "quantized weights, which cannot be trained or merged into" in said


def change(directory: Path) -> None:
    """Other weights of the same shapes."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.slow
def test_a_real_model_trained_on_4_bits_and_merged_is_better_than_its_base(runs: Runs, tmp_path: Path) -> None:
    few = ("train.max_steps=6", "train.global_batch_size=4", "data.limit=300", "evaluate.prompts=[Hi]")
    recipe = ROOT / "recipes" / "sft" / "qlora.yaml"
    run = runs.trained(*few, "parallel.num_processes=1", recipe=recipe)
    done = ended(runs, "merge", run, "--out", tmp_path / "merged")
    assert done.code == 0 and "sample output: " in done.stdout, done.stderr
    # On the rows that the run held out, which are those of the merged model too.
    rows = ("--metrics", "loss", "--against", "HuggingFaceTB/SmolLM2-135M-Instruct")
    done = ended(runs, "eval", run, *rows, "--out", tmp_path / "run")
    assert done.code == 0, done.stderr
    held = [json.loads(line)["row"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    from trainwright.data.sources.registry import load_registered_rows

    pydoc = load_registered_rows("pydoc")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pydoc[number - 1]) + "\n" for number in held))
    done = ended(
        runs, "eval", tmp_path / "merged", "--data", tmp_path / "rows.jsonl", *rows, "--out", tmp_path / "merged-loss"
    )
    assert done.code == 0, done.stderr
    difference = json.loads((tmp_path / "merged-loss" / "metrics.json").read_text())["against"]["difference"]["loss"]
    assert difference["high"] < 0


FEW_ROWS = ("data.limit=40", "data.validation=4", "train.global_batch_size=2")
CARDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "whole": ("sft/tiny.yaml", ()),
    "pretrained GPT": ("pretrain/stdlib-tiny.yaml", (ON_ROWS, "data.validation=8", "model.tokenizer=bytes")),
    "adapter on 4 bits of a GGUF file": ("sft/qlora.yaml", FEW_ROWS),
    "adapter on a GGUF file": ("sft/lora.yaml", FEW_ROWS),
    "unlearned": ("", ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CARDS)
def test_the_python_of_the_card_of_a_run_runs_offline(runs: Runs, tmp_path: Path, kind: str) -> None:
    name, more = CARDS[kind]
    recipe = ROOT / "recipes" / name if name else write_rows(tmp_path / "rows")
    run = runs.trained("train.max_steps=2", "parallel.num_processes=1", *more, recipe=recipe)
    shown = ended(runs, "push", run, "me/model", "--dry-run")
    assert shown.code == 0, shown.stderr
    (block,) = re.findall(r"^```python\n(.*?)^```", shown.stdout, re.DOTALL | re.MULTILINE)
    shutil.copytree(run / "final", tmp_path / "me" / "model")
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
