"""SFT of SmolLM2-135M-Instruct on the same 600 `pydoc` rows: Trainwright and TRL 1.16 in turn.

    python bench/sft_vs_trl.py                five rounds of Trainwright, TRL's best in bf16 and fp32, its defaults
    python bench/sft_vs_trl.py --precisions   Trainwright in bf16 and in fp32 as well as in what it chooses
    python bench/sft_vs_trl.py --pairs 1 --steps 8  a trial
    python bench/sft_vs_trl.py --only trl           one side only

Every run is a whole process with two threads on the same two cores, the same weights and the same environment.
Trainwright trains in the precision that its plan chooses, and is held against the faster of TRL's two: which one that
is depends on the processor. Tokens are counted without padding, and the first steps of every run are left out as
warm-up. A step is about 1,024 tokens: one pack of 1,024 for TRL's best, and ten rows of some 105 tokens for
Trainwright, which counts its batches in examples; TRL's default batch is eight rows. The order within a round is
reversed every time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.comparison import OURS, fastest_best, report, summarize
from support.inputs import example_lengths, find_model, write_rows
from support.machine import describe, matrix_peak, use_cores
from support.peers import peer_python
from support.results import results_directory
from support.runs import Run, write_results
from support.trainwright_side import run_trainwright
from support.trl_side import BEST, DEFAULTS, run_trl

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RESULTS = results_directory() / "sft_vs_trl.json"
CORES = 2
EXAMPLES_PER_STEP = 10


def main() -> None:
    arguments = parse_arguments()
    cores = use_cores(CORES)
    machine = describe(cores)
    with tempfile.TemporaryDirectory(prefix="sft-vs-trl-") as temporary:
        work = arguments.work or Path(temporary)
        rows = arguments.rows or write_rows(work / "rows.jsonl")
        model = find_model(arguments.model)
        if arguments.only != "trainwright":
            peer_python("trl")  # now, so that no run waits for it
        machine["matrix_gflops"] = matrix_peak(CORES)
        print(f"Matrix products: {text_of_peak(machine)}", flush=True)
        contenders = make_contenders(arguments, model, rows, work)
        runs = run_all(contenders, arguments.pairs, arguments.warm_up)
        lengths = example_lengths(rows, model, max_length=1024)
    summary = summarize(runs, arguments.warm_up, model, lengths, machine)
    report(summary)
    results = {
        "machine": machine,
        "steps": arguments.steps,
        "warm_up_steps": arguments.warm_up,
        "set": arguments.set,
        "compile": arguments.compile,
        "rows": {"count": len(lengths), "tokens": sum(lengths), "longest": max(lengths)},
        "environment": environment(arguments),
        "summary": summary,
        "trl_best": fastest_best(summary),
        "runs": [run.as_json(arguments.warm_up) for run in runs],
    }
    write_results(arguments.output, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds; each runs every contender once (5)")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps a run (14)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps at the beginning that are not counted (2)")
    parser.add_argument("--only", choices=["trl", "trainwright"], help="run one side only")
    parser.add_argument("--precisions", action="store_true", help="run Trainwright in bf16 and in fp32 as well")
    parser.add_argument("--skip-defaults", action="store_true", help="leave out TRL with its defaults")
    parser.add_argument("--compile", choices=["auto", "true", "false"], default="auto", help="Trainwright's (auto)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    parser.add_argument(
        "--trl-set",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="argument of SFTConfig over TRL's best",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable for every run"
    )
    parser.add_argument("--model", default=MODEL, help="an id or a directory with safetensors")
    parser.add_argument("--rows", type=Path, help="JSONL with question and answer in place of the 600 pydoc rows")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"file of results ({RESULTS})")
    parser.add_argument("--work", type=Path, help="a new directory to keep every run's files in")
    arguments = parser.parse_args()
    if arguments.warm_up < 1 or arguments.steps <= arguments.warm_up:
        parser.error("at least one step is warm-up and at least one is counted")
    return arguments


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What every run's environment has beside the present one."""
    threads = {
        "OMP_NUM_THREADS": str(CORES),
        "MKL_NUM_THREADS": str(CORES),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return threads | dict(pair.split("=", 1) for pair in arguments.env)


def make_contenders(
    arguments: argparse.Namespace, model: Path, rows: Path, work: Path
) -> dict[str, Callable[[str, int], Run]]:
    """From a contender's name to what runs it once, given the name and the number of the round."""
    common: dict[str, Any] = {"model": model, "rows": rows, "steps": arguments.steps, "work": work}
    common["env"] = environment(arguments)
    best = BEST | {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in arguments.trl_set)}

    def trainwright(precision: str) -> Callable[[str, int], Run]:
        given = {"examples": EXAMPLES_PER_STEP, "compile": arguments.compile, "overrides": arguments.set, **common}
        return lambda name, pair: run_trainwright(name, pair, precision=precision, **given)

    def trl(settings: dict[str, Any]) -> Callable[[str, int], Run]:
        return lambda name, pair: run_trl(name, pair, settings, **common)

    contenders = {OURS: trainwright("auto")}
    if arguments.precisions:
        contenders |= {f"{OURS}-bf16": trainwright("bf16"), f"{OURS}-fp32": trainwright("no")}
    contenders |= {"trl-best-bf16": trl({**best, "bf16": True}), "trl-best-fp32": trl({**best, "bf16": False})}
    if not arguments.skip_defaults:
        contenders["trl-defaults"] = trl(DEFAULTS)
    if arguments.only:
        contenders = {name: run for name, run in contenders.items() if name.startswith(arguments.only)}
    return contenders


def run_all(contenders: dict[str, Callable[[str, int], Run]], pairs: int, warm_up: int) -> list[Run]:
    """Every contender once a round, the order reversed each time so that a drift of the machine hits all."""
    runs = []
    for pair in range(1, pairs + 1):
        order = list(contenders) if pair % 2 else list(reversed(contenders))
        for name in order:
            run = contenders[name](name, pair)
            runs.append(run)
            print(f"{pair}/{pairs} {name}: {run.in_words(warm_up)}", flush=True)
    return runs


def text_of_peak(machine: dict[str, Any]) -> str:
    return ", ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in machine["matrix_gflops"].items())


if __name__ == "__main__":
    main()
