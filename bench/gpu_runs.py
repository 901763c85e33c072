"""Train models of real sizes with random weights on one GPU, as planned; compare memory and speed with the plan.

    python bench/gpu_runs.py
    python bench/gpu_runs.py --only llama-1b

Nothing is downloaded: configurations are of published models, weights are random, and texts are random bytes, which
changes neither the memory nor the time of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

from trainwright.engine.event_reader import EventRecord, read_events
from trainwright.observe.ledger import read_ledger

LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 8192, "tie_word_embeddings": True}
# https://huggingface.co/HuggingFaceTB/SmolLM2-135M, https://huggingface.co/meta-llama/Llama-3.2-1B, and GPT-2 as
# nanoGPT trains it, https://github.com/karpathy/nanoGPT
SMOLLM2 = {**LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
           "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
LLAMA_1B = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
GPT2 = {"model_type": "gpt", "variant": "gpt2", "vocab_size": 50304, "bias": False, "max_position_embeddings": 1024}
LORA = "model.adapter={type: lora, rank: 16, dropout: 0.0}"
FULL = "train.activation_checkpointing=full"
# Name: configuration, tokens of a pack, documents of a step, other keys.
CASES: dict[str, tuple[dict[str, Any], int, int, tuple[str, ...]]] = {
    "smollm2-135m": (SMOLLM2, 4096, 32, ()),
    "smollm2-135m compiled": (SMOLLM2, 4096, 32, ("train.compile=true",)),
    "gpt2-124m": (GPT2, 1024, 64, ()),
    "gpt2-124m compiled": (GPT2, 1024, 64, ("train.compile=true",)),
    "llama-1b": (LLAMA_1B, 4096, 12, ()),
    "llama-1b recomputed": (LLAMA_1B, 8192, 6, (FULL,)),
    "llama-1b fsdp": (LLAMA_1B, 4096, 12, ("parallel.strategy=fsdp",)),
    "llama-1b lora": (LLAMA_1B, 4096, 12, (LORA,)),
    "llama-1b fp32": (LLAMA_1B, 2048, 4, ("train.mixed_precision=no",)),
}
STEPS = 14


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--skip", default="-", help="cases whose name has this")
    parser.add_argument("--output", type=Path, default=results_directory() / "gpu_runs.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a GPU")
    found, failed = [], []
    for name in (each for each in CASES if options.only in each and options.skip not in each):
        with tempfile.TemporaryDirectory(prefix="gpu-runs-") as directory:
            case = measure(name, Path(directory))
        (failed if "error" in case else found).append(case)
        print(json.dumps(case), flush=True)
    rows = [
        (
            each["name"],
            f"{each['tokens_per_second']:,.0f} ({each['tokens_per_second'] / each['predicted_tokens_per_second']:.2f})",
            f"{each['memory_bytes'] / 2**30:.2f} ({each['memory_bytes'] / each['predicted_bytes'] - 1:+.1%})",
            f"{each['mfu']:.1%}",
        )
        for each in found
    ]
    print_table(("", "tokens/s (of plan's)", "GiB (beside plan)", "MFU"), rows)
    write_results(options.output, {"machine": describe([]), "steps": STEPS, "cases": found, "failed": failed})
    return 1 if failed else 0


def measure(name: str, directory: Path) -> dict[str, Any]:
    """Train; return what was planned and measured."""
    config, pack, documents, keys = CASES[name]
    recipe, run = directory / "recipe.json", directory / "run"  # JSON is YAML
    recipe.write_text(json.dumps(recipe_of(config, pack, documents, directory)))
    command = [sys.executable, "-m", "trainwright", "train", str(recipe), f"logging.run_directory={run}", *keys]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        return {"name": name, "error": (ended.stdout + ended.stderr)[-3000:]}
    events = read_events(run / "events.jsonl")
    start, finish = (only(events, kind) for kind in ("start", "finish"))
    measured, predicted = finish["measured"], start["predicted"]
    (ledger,) = read_ledger(run)
    speed = measured["tokens_per_second"]
    return {
        "name": name,
        "micro_batch_size": start["micro_batch_size"],
        "accumulation": start["gradient_accumulation_steps"],
        "strategy": start["strategy"],
        "precision": start["mixed_precision"],
        "attention": start.get("attention"),
        "torch": start["versions"]["torch"],
        "step_time": measured["step_time"],
        "tokens_per_second": speed,
        "predicted_tokens_per_second": predicted["tokens_per_second"],
        "mfu": _share_of_datasheet(predicted) * speed / predicted["tokens_per_second"],
        "memory_bytes": measured["tensors_bytes"],
        "predicted_bytes": predicted["tensors_bytes"],
        "seconds": dict(ledger.seconds),
    }


def _share_of_datasheet(predicted: dict[str, float]) -> float:
    if not predicted.get("nominal_peak"):
        raise SystemExit("this GPU has no datasheet in machine/cards.json, so there is no peak rate to compare with")
    return predicted["mfu"]


def recipe_of(config: dict[str, Any], pack: int, documents: int, directory: Path) -> dict[str, Any]:
    drawn, texts = random.Random(0), directory / "texts.jsonl"
    lengths = [drawn.randrange(pack // 8, pack) for _ in range(400)]
    rows = ("".join(drawn.choices("abcdefghijklmno ", k=length - 1)) for length in lengths)
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return {
        "task": "sft",
        "model": {"config": config, "tokenizer": "bytes"},
        "data": {"train": str(texts), "validation": None, "format": "text", "max_length": pack, "pack_length": pack},
        "train": {"max_steps": STEPS, "global_batch_size": documents},
        "checkpoint": {"every": None},
        "logging": {"observers": {"tensorboard": False}},
    }


def only(events: list[EventRecord], kind: str) -> EventRecord:
    (found,) = (event for event in events if event["event"] == kind)
    return found


if __name__ == "__main__":
    sys.exit(main())
