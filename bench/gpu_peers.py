"""Training on one GPU beside the tools that people use, each at its best: speed, memory, loss, time to the first step.

    python bench/gpu_peers.py --install            # the peers' wheels into build/peers, once; needs a package index
    python bench/gpu_peers.py                      # at most 18 minutes of an H100 or H200; goes on where it was stopped
    python bench/gpu_peers.py --only llama-1b      # cases whose name has this in its name
    python bench/gpu_peers.py --dry-run            # tiny models, also on a CPU: whether everything runs

Nothing is downloaded: configurations are of published models, weights are random and made once, texts are random
letters, which change neither the memory nor the time of a step. Ours runs without and with compilation; where a peer's
micro-batch does not fit, it is halved until it does. Speeds are medians over steps after the first eight, without
padding; a peer that is not installed or fails is named with the end of its output. Results are written after each
contender; failed ones are tried again by the next command.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_runs import GPT2, LLAMA, LLAMA_1B, SMOLLM2, only
from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

from trainwright.engine.event_reader import read_events

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "bench" / "peers"
WARM_UP, STEPS = 8, 20
DRY_STEPS = 3
# https://huggingface.co/meta-llama/Llama-3.1-8B
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "rope_theta": 500000.0,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "tie_word_embeddings": False}  # fmt: skip
OURS = {"Trainwright": "train.compile=false", "Trainwright compiled": "train.compile=true"}
ADAPTERS = {
    "none": (),
    "lora": ("model.adapter={type: lora, rank: 16, alpha: 32, dropout: 0.0, targets: all-linear}",),
    "qlora": ("model.adapter={type: qlora, rank: 16, alpha: 32, dropout: 0.0, targets: all-linear}",),
}


@dataclass(frozen=True)
class Case:
    """What every contender trains.

    Attributes:
        pack: tokens of a pack, in which ``documents`` of at least ``shortest`` tokens stand.
        packs: of a step.
        micro_batch: packs that a peer computes at once.
        contenders: beside ours.
    """

    name: str
    config: dict[str, Any]
    pack: int
    packs: int
    micro_batch: int
    contenders: tuple[str, ...]
    adapter: str = "none"
    whole: bool = True

    def tiny(self) -> Case:
        """The same case in small, for a dry run."""
        small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        small |= {"num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 256}
        if self.config["model_type"] == "gpt":
            small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512}
            small |= {"max_position_embeddings": 256}
        return replace(self, config={**self.config, **small}, pack=128, packs=4, micro_batch=2)


CASES = (
    Case("gpt2-124m", GPT2, 1024, 64, 64, ("torch compiled",)),
    Case("smollm2-135m", SMOLLM2, 4096, 16, 8, ("TRL",), whole=False),
    Case("llama-1b", LLAMA_1B, 4096, 12, 4, ("TRL", "Unsloth")),
    Case("llama-8b lora", LLAMA_8B, 4096, 2, 2, ("TRL", "Unsloth"), adapter="lora"),
    Case("llama-8b qlora", LLAMA_8B, 4096, 2, 2, ("TRL", "Unsloth"), adapter="qlora"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--minutes", type=float, default=18.0, help="no contender starts or runs after these")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "build" / "peers", help="folder of a folder of packages for each peer"
    )
    parser.add_argument("--install", action="store_true", help="install the peers' wheels and end")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.install:
        return max(_install(options.peers / name, PEERS / f"gpu_{name}.txt") for name in ("trl", "unsloth"))
    output = options.output or results_directory() / f"gpu_peers{'_dry' * options.dry_run}.json"
    results = json.loads(output.read_text()) if output.exists() else {"machine": describe([]), "cases": {}}
    cases = [case.tiny() if options.dry_run else case for case in CASES if options.only in case.name]
    failed = measure_all(cases, results, output, options)
    report(results["cases"])
    return 1 if failed else 0


def _install(folder: Path, requirements: Path) -> int:
    arguments = ["install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder), "-r", str(requirements)]
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


def measure_all(cases: Sequence[Case], results: dict[str, Any], output: Path, options: argparse.Namespace) -> bool:
    """Measure what ``results`` lacks, and write it after each contender; return whether one of ours failed."""
    failed, end = False, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="gpu-peers-") as temporary:
        bench = Bench(Path(temporary), options.peers, DRY_STEPS if options.dry_run else STEPS)
        for case in cases:
            measured = results["cases"].setdefault(case.name, {})
            for contender in (*OURS, *case.contenders):
                if "error" not in measured.get(contender, {"error": "not measured"}):
                    continue
                if (left := end - time.monotonic()) < 20:
                    measured[contender] = {"error": "no time was left"}
                    continue
                measured[contender] = bench.measure(case, contender, left)
                failed |= contender in OURS and "error" in measured[contender]
                print(json.dumps({"case": case.name, "contender": contender, **measured[contender]}), flush=True)
                write_results(output, results)
    return failed


@dataclass
class Bench:
    """Runs contenders as whole processes, one after another. ``steps``: of each; ``peers``: the folder of a
    folder of packages for each.
    """

    work: Path
    peers: Path
    steps: int

    def measure(self, case: Case, contender: str, seconds: float) -> dict[str, Any]:
        """Return what a contender came to in a case, or why it did not."""
        directory = Path(tempfile.mkdtemp(prefix=f"{case.name}-{contender}-".replace(" ", "-"), dir=self.work))
        try:
            run = self._ours if contender in OURS else self._peer
            return self._summary(run(case, contender, directory, time.monotonic() + seconds))
        except (BenchError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}

    def _ours(self, case: Case, contender: str, directory: Path, end: float) -> dict[str, Any]:
        recipe, run = directory / "recipe.json", directory / "run"  # JSON is YAML
        gpt = case.config["model_type"] == "gpt"
        model = {"config": case.config, "tokenizer": "bytes"} if gpt else {"name": str(self._model(case))}
        data = {"train": str(self._texts(case)), "validation": None, "format": "text"}
        values = {
            "task": "sft",
            "model": model,
            "data": {**data, "max_length": case.pack, "pack_length": case.pack},
            "train": {"max_steps": self.steps, "global_batch_size": case.packs, "batch_unit": "packs"},
            "checkpoint": {"every": None},
            "parallel": {"num_processes": 1, "strategy": "single"},
            "logging": {"observers": {"tensorboard": False}, "run_directory": str(run)},
        }
        recipe.write_text(json.dumps(values))
        command = [sys.executable, "-m", "trainwright", "train", str(recipe), OURS[contender], *ADAPTERS[case.adapter]]
        started = time.time()
        _run(command, directory / "log", end)
        events = read_events(run / "events.jsonl")
        start, finish = only(events, "start"), only(events, "finish")
        steps = [event for event in events if event["event"] == "step"]
        counted = [0, *(step["tokens"] for step in steps)]
        predicted, measured = start["predicted"], finish["measured"]
        share = predicted.get("mfu") if predicted.get("nominal_peak") else None
        return {
            "started": started,
            "step_ends": [step["time"] for step in steps],
            "tokens": [after - before for before, after in pairwise(counted)],
            "losses": [step["loss"] for step in steps],
            "memory_bytes": measured.get("tensors_bytes", 0),  # of a GPU
            "settings": {key: start.get(key) for key in ("micro_batch_size", "mixed_precision", "attention")},
            "versions": start["versions"],
            "planned": {
                "tokens_per_second": predicted["tokens_per_second"],
                "memory_bytes": predicted["tensors_bytes"],
            },
            "mfu_of_a_token_per_second": share and share / predicted["tokens_per_second"],
        }

    def _peer(self, case: Case, contender: str, directory: Path, end: float) -> dict[str, Any]:
        script = {"TRL": "gpu_trl.py", "Unsloth": "gpu_unsloth.py"}.get(contender, "gpu_plain_gpt.py")
        micro_batch = case.micro_batch
        while True:
            job = {
                "texts": str(self._texts(case)),
                "pack": case.pack,
                "packs": case.packs,
                "micro_batch": micro_batch,
                "steps": self.steps,
                "adapter": case.adapter,
                "output_directory": str(directory / "output"),
                "result": str(directory / "result.json"),
                "started": time.time(),
            }
            if contender == "torch compiled":
                names = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
                names["vocab_size"] = "vocab_size"
                job["sizes"] = {ours: {**GPT2_SIZES, **case.config}[key] for ours, key in names.items()}
            else:
                job["model"] = str(self._model(case))
            (directory / "job.json").write_text(json.dumps(job))
            try:
                _run(
                    [sys.executable, str(PEERS / script), str(directory / "job.json")],
                    directory / "log",
                    end,
                    self.peers / contender.lower(),
                )
            except BenchError as error:
                if "out of memory" not in str(error).lower() or micro_batch == 1:
                    raise
                micro_batch //= 2
            else:
                result: dict[str, Any] = json.loads((directory / "result.json").read_text())
                result["settings"]["micro_batch"] = micro_batch
                return result

    def _summary(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return what the table needs of a run, in place of the times of its steps."""
        ends, tokens, losses = run.pop("step_ends"), run.pop("tokens"), run.pop("losses")
        warm_up = WARM_UP if self.steps > WARM_UP else 1
        seconds = [after - before for before, after in pairwise(ends)]
        rates = [count / step for count, step in zip(tokens[1:], seconds, strict=False)][warm_up - 1 :]
        return {
            **run,
            "tokens_per_second": statistics.median(rates),
            "first_step_seconds": ends[0] - run.pop("started"),
            "loss": losses[min(9, len(losses) - 1)] if losses else None,
        }

    def _texts(self, case: Case) -> Path:
        file = self.work / f"{case.name.replace(' ', '-')}.jsonl"
        if not file.exists():
            drawn = random.Random(0)
            shortest = case.pack if case.whole else case.pack // 8
            tokens = 0
            with file.open("w") as lines:
                while tokens < (self.steps + 2) * case.packs * case.pack:
                    length = drawn.randint(shortest, case.pack)
                    text = "".join(drawn.choices("abcdefghijklmno ", k=length - 1))  # and a token that ends it
                    lines.write(json.dumps({"text": text}) + "\n")
                    tokens += length
        return file

    def _model(self, case: Case) -> Path:
        """Return the directory of a model with random weights, made by the first contender that needs it."""
        directory = self.work / f"model-{case.config['hidden_size']}"
        if not directory.exists():
            arguments = (case.config, directory, "bfloat16" if case.adapter != "none" else "float32")
            process = multiprocessing.get_context("spawn").Process(target=save_random_model, args=arguments)
            process.start()
            process.join()
            if process.exitcode != 0:
                raise BenchError(f"the model could not be made: exit code {process.exitcode}")
        return directory


class BenchError(Exception):
    """A contender failed; with the end of its output."""


# What the configuration of GPT-2 in gpu_runs.py leaves to its defaults.
GPT2_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


def save_random_model(config: dict[str, Any], directory: Path, dtype: str) -> None:
    """Save a model with random weights, and a tokenizer of bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainwright.models.tokenization import build_bytes_tokenizer

    torch.manual_seed(0)
    tokenizer = build_bytes_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    fields = {**config, **special}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype))
    temporary = directory.with_suffix(".tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(directory)


def _run(command: Sequence[str], log: Path, end: float, packages: Path | None = None) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if packages is not None:
        paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(timeout=max(1.0, end - time.monotonic()))
        finally:
            process.kill()
            process.wait()
    if code:
        raise BenchError(log.read_text(errors="replace")[-1500:])


def report(cases: dict[str, dict[str, Any]]) -> None:
    """Print a table of all that is measured."""
    rows = []
    for name, contenders in cases.items():
        ours = [contenders.get(each, {}) for each in OURS]
        best = max((each.get("tokens_per_second", 0.0) for each in ours), default=0.0)
        per_token = next((each["mfu_of_a_token_per_second"] for each in ours if "tokens_per_second" in each), None)
        for contender, run in contenders.items():
            if "error" in run:
                rows.append((name, contender, "-", "", "", "", run["error"].strip().splitlines()[-1][-60:]))
                continue
            speed = run["tokens_per_second"]
            rows.append(
                (
                    name,
                    contender,
                    f"{speed:,.0f}",
                    f"{best / speed:.2f}",
                    f"{run['memory_bytes'] / 2**30:.2f}",
                    "-" if per_token is None else f"{per_token * speed:.1%}",
                    f"{run['first_step_seconds']:.0f} s, {run['loss'] or math.nan:.3f}",
                )
            )
    header = ("case", "", "tokens/s", "our best", "GiB", "MFU", "first step, loss")
    print_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
