"""The losses of preference tuning of SmolLM2-135M-Instruct on the same eight rows: Trainwright and TRL 1.16.

    python bench/dpo_vs_trl.py                 DPO, IPO and KTO, four steps each; some minutes
    python bench/dpo_vs_trl.py --losses dpo    one of them

Both train the same weights in fp32 with the same optimizer, and all rows are in every step, so each step's loss is of
the same batch under the same weights. At the first step the model is its reference; the further ones compare what the
losses are made of. The rows are texts for TRL, rendered here, as its own templating would also train on the line break
after an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from support.inputs import find_model
from support.machine import describe, use_cores
from support.peers import peer_python
from support.processes import run_measured
from support.results import results_directory
from support.runs import print_table, write_results

import trainwright as tw

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RESULTS = results_directory() / "dpo_vs_trl.json"
SCRIPT = Path(__file__).parent / "peers" / "trl_dpo.py"
CORES = 2
ROWS, MAX_LENGTH, BETA, LEARNING_RATE = 8, 512, 0.1, 1e-5
TOLERANCE = 1e-5  # of a loss, relative to it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=["dpo", "ipo", "kto"], help="which (dpo ipo kto)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (4)")
    parser.add_argument("--model", default=MODEL, help="an id or a directory with safetensors")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"file of results ({RESULTS})")
    arguments = parser.parse_args()
    machine = describe(use_cores(CORES))
    os.environ |= {"OMP_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "false"}  # of both sides
    peer_python("trl")  # now, so that no run waits for it
    model, found = find_model(arguments.model), {}
    with tempfile.TemporaryDirectory(prefix="dpo-vs-trl-") as temporary:
        for loss in arguments.losses:
            work = Path(temporary) / loss
            work.mkdir()
            ours, theirs = trainwright(loss, model, arguments.steps, work), trl(loss, model, arguments.steps, work)
            apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
            found[loss] = {"trainwright": ours, "trl": theirs, "apart": apart}
            print_table(
                [loss, "Trainwright", "TRL", "apart"],
                [
                    [f"step {step}", f"{a:.8f}", f"{b:.8f}", f"{c:.1e}"]
                    for step, (a, b, c) in enumerate(zip(ours, theirs, apart, strict=True), start=1)
                ],
            )
    write_results(arguments.output, {"machine": machine, "rows": ROWS, "tolerance": TOLERANCE, "losses": found})
    if worst := [loss for loss, each in found.items() if max(each["apart"]) > TOLERANCE]:
        raise SystemExit(f"not the same to {TOLERANCE:g}: {', '.join(worst)}")


def pairs() -> list[dict[str, str]]:
    from trainwright.data.sources.pydoc_rows import build_pydoc_pairs

    short = (row for row in build_pydoc_pairs() if max(map(len, row.values())) < 700)
    return [row for row, _ in zip(short, range(ROWS), strict=False)]


def rows_of(loss: str) -> list[dict[str, Any]]:
    """Pairs; for KTO every second one's chosen answer, and the others' rejected one."""
    if loss != "kto":
        return list(pairs())
    return [
        {"prompt": row["prompt"], "completion": row["rejected" if index % 2 else "chosen"], "label": index % 2 == 0}
        for index, row in enumerate(pairs())
    ]


def trainwright(loss: str, model: Path, steps: int, work: Path) -> list[float]:
    """Losses of every step of `tw.train`."""
    rows = work / "rows.jsonl"
    # An answer goes to the prompt before its own here and to the one after it there, around the end.
    given = rows_of(loss)[::-1] if loss == "kto" else rows_of(loss)
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    recipe = tw.Recipe(
        task="dpo",
        dpo={"loss": loss, "beta": BETA},
        model={"name": model},
        data={"train": rows, "validation": None, "max_length": MAX_LENGTH},
        optimizer={"learning_rate": LEARNING_RATE, "schedule": "constant", "max_grad_norm": 1.0},
        train={
            "max_steps": steps,
            "global_batch_size": ROWS,
            "micro_batch_size": 2,
            "mixed_precision": "no",
            "compile": False,
        },
        parallel={"strategy": "single", "num_processes": 1},
        logging={"run_directory": work / "run", "observers": {"tensorboard": False}},
    )
    os.environ["TRAINWRIGHT_CACHE"] = str(work / "cache")
    losses: list[float] = tw.train(recipe).columns()["loss"]
    return losses


def trl(loss: str, model: Path, steps: int, work: Path) -> list[float]:
    """Losses of every step of TRL's trainer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def rendered(row: dict[str, Any]) -> dict[str, Any]:
        asked = [{"role": "user", "content": row["prompt"]}]
        return {**row, "prompt": tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)}

    texts, result = work / "texts.jsonl", work / "trl.json"
    texts.write_text("".join(json.dumps(rendered(row)) + "\n" for row in rows_of(loss)))
    job = {
        "model": str(model),
        "rows": str(texts),
        "loss": loss,
        "steps": steps,
        "threads": CORES,
        "beta": BETA,
        "max_length": MAX_LENGTH,
        "learning_rate": LEARNING_RATE,
        "output_directory": str(work / "trl"),
        "result": str(result),
    }
    (work / "job.json").write_text(json.dumps(job))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")}
    command, log = [str(peer_python("trl")), str(SCRIPT), str(work / "job.json")], work / "trl.log"
    usage = run_measured(command, env=offline, log=log)
    if usage.exit_code != 0:
        raise SystemExit(f"TRL ended with exit code {usage.exit_code}:\n{log.read_text()[-3000:]}")
    losses: list[float] = json.loads(result.read_text())
    return losses


if __name__ == "__main__":
    main()
