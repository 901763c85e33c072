"""NPO of SmolLM2-135M-Instruct against a straightforward loop: padded, with the reference in memory beside the model.

    python bench/unlearn_vs_plain.py                     three pairs of runs in turn; 10 to 15 minutes
    python bench/unlearn_vs_plain.py --pairs 1 --steps 6 # a trial
    python bench/unlearn_vs_plain.py --precision no      # fp32 on both sides

The loop (peers/plain_npo.py) is what one writes by hand: rows padded to the longest of a micro-batch, the model's own
loss, a frozen copy that computes its log-probabilities anew in every step, autocast where the precision is bf16. Both
train on the same pairs of a forget row and a retain row, the same number of them a step, on two cores. Trainwright's
pass over the reference comes before its first step; a rate with it, spread over a run of ten epochs, stands beside.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.inputs import find_model
from support.machine import describe, use_cores
from support.processes import run_measured
from support.results import results_directory
from support.runs import Spread, print_table, write_results
from support.trainwright_side import COMMAND

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HERE = Path(__file__).parent
RESULTS = results_directory() / "unlearn_vs_plain.json"
CORES, WARM_UP, EPOCHS = 2, 2, 10
FORGET, RETAIN, PAIRS_A_STEP, MICRO_BATCH, MAX_LENGTH, BETA, LEARNING_RATE = 64, 192, 8, 4, 512, 0.1, 1e-5
FASTER, SMALLER = 1.5, 0.7

RECIPE = """\
task: unlearn
model: {{name: "{model}"}}
data: {{forget: "{forget}", retain: "{retain}", validation: null, max_length: {max_length}, pack_length: 1024}}
unlearn: {{objective: npo, beta: {beta}}}
optimizer: {{learning_rate: {learning_rate}, weight_decay: 0.01, schedule: constant, max_grad_norm: 1.0}}
train: {{max_steps: {steps}, global_batch_size: {count}, mixed_precision: "{precision}", compile: false}}
parallel: {{strategy: single, num_processes: 1}}
logging: {{run_directory: "{run}", observers: {{tensorboard: false}}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each, in turn (3)")
    parser.add_argument("--steps", type=int, default=12, help=f"optimizer steps, {WARM_UP} of them warm-up (12)")
    parser.add_argument("--precision", choices=["bf16", "no"], default="bf16", help="(bf16)")
    parser.add_argument("--model", default=MODEL, help="an id or a directory with safetensors")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"file of results ({RESULTS})")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps: the first {WARM_UP} are not counted; ask for more")
    machine = describe(use_cores(CORES))
    model, found = find_model(arguments.model), {"trainwright": [], "plain": []}
    with tempfile.TemporaryDirectory(prefix="unlearn-vs-plain-") as temporary:
        work = Path(temporary)
        write_rows(work)
        for pair in range(arguments.pairs):
            for contender, run in (("trainwright", trainwright), ("plain", plain)):
                directory = work / f"{contender}-{pair}"
                directory.mkdir()
                found[contender].append(run(model, arguments.steps, arguments.precision, work, directory))
                print(f"{contender}: {in_words(found[contender][-1])}", flush=True)
    faster, smaller = report(found)
    figures = {"times_as_fast": faster.median, "times_the_memory": smaller.median}
    write_results(arguments.output, {"machine": machine, "precision": arguments.precision, **figures, "runs": found})


def write_rows(work: Path) -> None:
    """Forget and retain rows: a fixed choice from the built-in `pydoc` rows."""
    from trainwright.data.sources.pydoc_rows import build_pydoc_rows

    chosen = random.Random(0).sample(build_pydoc_rows(), FORGET + RETAIN)
    for name, rows in (("forget", chosen[:FORGET]), ("retain", chosen[FORGET:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trainwright(model: Path, steps: int, precision: str, work: Path, directory: Path) -> dict[str, Any]:
    """Seconds of each step of ``trainwright train``, of its pass over the reference, and the peak memory."""
    recipe, run = directory / "recipe.yaml", directory / "run"
    rows = {name: work / f"{name}.jsonl" for name in ("forget", "retain")}
    numbers = {"max_length": MAX_LENGTH, "beta": BETA, "learning_rate": LEARNING_RATE, "count": PAIRS_A_STEP}
    recipe.write_text(RECIPE.format(model=model, **rows, run=run, steps=steps, precision=precision, **numbers))
    # The command and not `tw.train`: the peak memory of the whole process is measured from outside, as the loop's is.
    # Its own cache, so that the pass over the reference is made in every run.
    usage = finish([*COMMAND, "train", str(recipe)], {"TRAINWRIGHT_CACHE": str(directory / "cache")}, directory)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    taken = [event for event in events if event["event"] == "step"]
    said = " ".join(event["message"] for event in events if event["event"] == "notice")
    took = re.search(r"the reference took ([\d.]+) s", said)
    assert took is not None, said
    return {
        "times": [event["step_time"] for event in taken],
        "losses": [event["loss"] for event in taken],
        "reference_seconds": float(took[1]),
        **usage,
    }


def plain(model: Path, steps: int, precision: str, work: Path, directory: Path) -> dict[str, Any]:
    """The same of the loop by hand."""
    result = directory / "result.json"
    job = {
        "model": str(model),
        "forget": str(work / "forget.jsonl"),
        "retain": str(work / "retain.jsonl"),
        "result": str(result),
        "steps": steps,
        "pairs": PAIRS_A_STEP,
        "micro_batch": MICRO_BATCH,
        "max_length": MAX_LENGTH,
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
        "precision": precision,
        "threads": CORES,
    }
    (directory / "job.json").write_text(json.dumps(job))
    usage = finish([sys.executable, str(HERE / "peers" / "plain_npo.py"), str(directory / "job.json")], {}, directory)
    return {**json.loads(result.read_text()), **usage}


def finish(command: list[str], env: dict[str, str], directory: Path) -> dict[str, Any]:
    """Run a command to its end. Raises SystemExit with what it said when it fails."""
    threads = {"OMP_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    log = directory / "log"
    usage = run_measured(command, env={**threads, **env}, log=log)
    if usage.exit_code != 0:
        raise SystemExit(f"{command[0]} ended with exit code {usage.exit_code}:\n{log.read_text()[-3000:]}")
    return {"peak_memory": usage.peak_memory, "others_seconds": usage.others_seconds}


def rate(run: dict[str, Any]) -> float:
    """Steps a second after the warm-up."""
    times = run["times"][WARM_UP:]
    return len(times) / sum(times)


def rate_with_reference(run: dict[str, Any]) -> float:
    """The same of a run of ten epochs, with the pass over the reference before it."""
    steps = EPOCHS * FORGET / PAIRS_A_STEP
    return steps / (steps / rate(run) + run.get("reference_seconds", 0.0))


def in_words(run: dict[str, Any]) -> str:
    return (
        f"{rate(run):.3f} steps/s, {run['peak_memory'] / 1e9:.2f} GB, loss {run['losses'][0]:.3f} to "
        f"{run['losses'][-1]:.3f} (others on the machine {run['others_seconds']:.0f} s)"
    )


def report(found: dict[str, list[dict[str, Any]]]) -> tuple[Spread, Spread]:
    """Print the two sides and how they compare, pair by pair."""
    ours, theirs = found["trainwright"], found["plain"]
    faster = Spread.of([rate(a) / rate(b) for a, b in zip(ours, theirs, strict=True)])
    counted = Spread.of([rate_with_reference(a) / rate(b) for a, b in zip(ours, theirs, strict=True)])
    smaller = Spread.of([a["peak_memory"] / b["peak_memory"] for a, b in zip(ours, theirs, strict=True)])
    rows = [
        ["steps per second", faster, f"at least {FASTER}", faster.median >= FASTER],
        ["with the pass over the reference", counted, "", None],
        ["peak memory", smaller, f"at most {SMALLER}", smaller.median <= SMALLER],
    ]
    print_table(
        ["Trainwright / plain loop", "median", "range", "wanted", ""],
        [
            [name, f"{s.median:.2f}", f"{s.low:.2f} to {s.high:.2f}", wanted, "" if ok is None else _verdict(ok)]
            for name, s, wanted, ok in rows
        ],
    )
    return faster, smaller


def _verdict(kept: bool) -> str:
    return "kept" if kept else "MISSED"


if __name__ == "__main__":
    main()
