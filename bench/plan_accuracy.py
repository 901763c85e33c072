"""How right a plan is about memory: peaks of live tensors, predicted and measured, over many small runs.

    python bench/plan_accuracy.py                     all cases, some minutes on two cores
    python bench/plan_accuracy.py --only fsdp --only gemma2
    python bench/plan_accuracy.py --seed 7            other cases, drawn anew

Every case is a run of the product's own workers, three steps long. On a CPU the peak is counted from every allocation
that torch makes, by rank; on a GPU it is torch's own count. Cases cover model families, sizes, lengths, micro-batches,
accumulation, packing, strategies, recomputation and precision; each draws its factors from a seeded generator, the
strategies and families in turn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from support import plan_runs
from support.machine import describe, use_cores

from trainwright.machine.describe import cluster_of
from trainwright.machine.detect import detect
from trainwright.planning.architecture import from_config
from trainwright.planning.memory import memory_of
from trainwright.planning.workload import Choice, Workload

RESULTS = Path(__file__).parent / "results"
CASES = 72
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mistral",
    "gpt2",
    "smollm3",
    "olmo2",
    "gpt_neox",
)
STRATEGIES = (("single", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2))


@dataclass(frozen=True)
class Case:
    """``documents``: their lengths in tokens, over and over. ``pack``: tokens of a pack, None for padded rows."""

    config: dict[str, Any]
    strategy: str
    processes: int
    precision: str
    documents: tuple[int, ...]
    pack: int | None
    micro_batch: int
    accumulation: int
    recompute: str | int

    @property
    def name(self) -> str:
        kind, hidden = self.config["model_type"], self.config.get("hidden_size") or self.config["n_embd"]
        shape = f"{kind} {hidden}x{self.config.get('num_hidden_layers') or self.config['n_layer']}"
        rows = f"pack {self.pack}" if self.pack else f"rows to {max(self.documents)}"
        batch = f"{self.micro_batch}x{self.accumulation}"
        return f"{shape}, {self.strategy} on {self.processes}, {self.precision}, {rows}, {batch}, {self.recompute}"


def draw(seed: int, count: int) -> list[Case]:
    """Cases with the strategies and families in turn and all else at random."""
    chance = random.Random(seed)
    strategies = [s for s in STRATEGIES if not s[0].startswith("zero") or find_spec("deepspeed")]
    return [_case(chance, FAMILIES[i % len(FAMILIES)], *strategies[i % len(strategies)]) for i in range(count)]


def _case(chance: random.Random, family: str, strategy: str, processes: int) -> Case:
    documents = chance.choice([(64,), (200,), (100, 60, 30, 90), (500, 20, 40, 20)])
    packed = chance.random() < 0.6
    return Case(
        config=_config(chance, family),
        strategy=strategy,
        processes=processes,
        precision=chance.choice(["no", "bf16"]),
        documents=documents,
        pack=chance.choice([512, 1024]) if packed else None,
        micro_batch=chance.choice([1, 2, 4]),
        accumulation=chance.choice([1, 1, 2]),
        recompute=chance.choice(["none", "none", "full", "selective", 2]),
    )


def _config(chance: random.Random, family: str) -> dict[str, Any]:
    hidden, layers = chance.choice([128, 256, 384]), chance.choice([2, 4, 6])
    vocabulary = chance.choice([512, 4000, 20000])
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": hidden // 32, "n_positions": 1024}
        return {**_GPT2, **sizes, "vocab_size": vocabulary}
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": chance.choice([2, 3]) * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        **({} if family == "gpt_neox" else {"num_key_value_heads": chance.choice([2, hidden // 32])}),
        "max_position_embeddings": 1024,
        "vocab_size": vocabulary,
        "tie_word_embeddings": chance.random() < 0.5,
        **({"head_dim": 32} if family in ("qwen3", "gemma2", "gemma3_text") else {}),
        **({"pad_token_id": 0} if family == "phi3" else {}),
    }


def measure(case: Case, work: Path) -> dict[str, Any]:
    """Predicted and measured bytes of the fullest rank."""
    directory = work / hashlib.sha256(repr(case).encode()).hexdigest()[:12]
    per_row = case.pack * len(case.documents) // sum(case.documents) if case.pack else 1
    rows = case.micro_batch * case.accumulation * case.processes
    recipe = {
        "task": "sft",
        "model": {"config": case.config, "tokenizer": "bytes"},
        "data": {
            "train": str(_rows(case.documents, work)),
            "validation": None,
            "format": "text",
            "max_length": max(case.documents),
            "pack_length": case.pack,
        },
        "train": {
            "max_steps": 3,
            "global_batch_size": int(rows * per_row),
            "micro_batch_size": case.micro_batch,
            "mixed_precision": case.precision,
            "activation_checkpointing": case.recompute,
            "compile": False,
        },
        "parallel": {"strategy": case.strategy, "num_processes": case.processes},
    }
    found = plan_runs.run(recipe, directory, work / "cache")
    measured = max(max(rank["phases"].values()) for rank in found["ranks"])
    batches = [batch for rank in found["ranks"] for batch in rank["batches"]]
    predicted = _predicted(case, batches, directory)
    return {"case": case.name, "predicted": predicted, "measured": measured, "seconds": found["seconds"]}


def _predicted(case: Case, batches: list[dict[str, Any]], directory: Path) -> int:
    """For the shape of the fullest micro-batch that was run."""
    architecture = from_config(case.config)
    assert architecture is not None
    lengths = max((batch["lengths"] for batch in batches), key=sum)
    tokens, rows = sum(lengths), max(batch["rows"] for batch in batches)
    workload = Workload(
        architecture=architecture,
        row_tokens=-(-tokens // rows) if case.pack else max(lengths),
        global_batch_rows=rows * case.accumulation * case.processes,
        packed=case.pack is not None,
        document_tokens=tokens / len(lengths),
        longest_document=max(lengths),
        evaluates=False,
    )
    resolved = yaml.safe_load((directory / "recipe.yaml").read_text())["parallel"]
    choice = Choice(
        strategy=case.strategy,  # type: ignore[arg-type]
        num_processes=case.processes,
        micro_batch_size=rows,
        gradient_accumulation_steps=case.accumulation,
        mixed_precision=case.precision,  # type: ignore[arg-type]
        activation_checkpointing=case.recompute,  # type: ignore[arg-type]
        reshard_after_forward=resolved["reshard_after_forward"],
        threads=1,
    )
    return memory_of(workload, choice, cluster_of(detect())).tensors


def _rows(documents: tuple[int, ...], work: Path) -> Path:
    """Texts of these many bytes, over and over; each is closed by a token of its own."""
    file = work / f"rows-{'-'.join(map(str, documents))}.jsonl"
    if not file.exists():
        letters = random.Random(0)
        texts = ["".join(letters.choices("abcdefgh ijklmno", k=documents[i % len(documents)] - 1)) for i in range(96)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="which cases are drawn (0)")
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many ({CASES})")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases with this in their name")
    parser.add_argument("--output", type=Path, help="file of results (results/plan_accuracy_SEED.json)")
    arguments = parser.parse_args()
    machine = describe(use_cores(2))
    cases = [case for case in draw(arguments.seed, arguments.cases) if all(w in case.name for w in arguments.only)]
    results = []
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as work:
        for case in cases:
            try:
                result = measure(case, Path(work))
            except (SystemExit, ValueError) as error:  # a combination that the model itself does not run
                print(f"   did not run   {case.name}: {str(error).splitlines()[0][:90]}", flush=True)
                continue
            error = result["predicted"] / result["measured"] - 1
            results.append({**result, "error": error})
            print(f"{error:+7.1%}  {result['measured'] / 2**20:8.1f} MiB  {case.name}", flush=True)
    report(results)
    output = arguments.output or RESULTS / f"plan_accuracy_{arguments.seed}.json"
    output.write_text(json.dumps({"machine": machine, "seed": arguments.seed, "cases": results}, indent=1) + "\n")
    print(f"All numbers: {output}")


def report(results: list[dict[str, Any]]) -> None:
    """Median, 95th percentile, and how many were predicted too small."""
    if not results:
        return
    errors = sorted(abs(result["error"]) for result in results)
    under = sum(result["error"] < -0.03 for result in results) / len(results)
    print(
        f"\n{len(results)} cases: median error {statistics.median(errors):.1%} (3 % wanted), 95th percentile "
        f"{errors[min(len(errors) - 1, int(0.95 * len(errors)))]:.1%} (5 %), under by more than 3 %: {under:.1%} (1 %)"
    )


if __name__ == "__main__":
    main()
