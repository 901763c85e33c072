"""Put 1,000 faults into short runs of the smallest recipe, with several strategies and 1 to 3 processes.

    python bench/drill.py --minutes 60      a piece; the next start goes on with the faults that have no verdict
    python bench/drill.py --report          only the summary of the verdicts so far

`trainwright drill` does the work. Verdicts are kept in results/drill.jsonl. Exit code 1 when a promise was broken or a
fault missed its moment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from support.machine import describe
from support.results import results_directory
from support.runs import write_results

import trainwright as tw
from trainwright.faults.drills.operations import CampaignResults

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
OVERRIDES = (
    f"data.train={ROOT / 'tests' / 'engine' / 'golden' / 'rows.jsonl'}",
    "evaluate.prompts=['What is a list?']",
)
RESULTS = results_directory()
NO_TIME = 1e-9  # minutes; no fault begins
STRATEGIES, PROCESSES = ("single", "ddp", "fsdp", "zero3"), (1, 2, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no fault after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="faults at once")
    parser.add_argument("--report", action="store_true", help="begin no fault")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "trainwright" / "drill")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    work, verdicts = options.work, RESULTS / "drill.jsonl"
    if not work.exists():  # as on another machine
        drill(options, minutes=NO_TIME)
    join(verdicts, work / "trials.jsonl")
    found = drill(options, minutes=NO_TIME if options.report else options.minutes)
    lines = CampaignResults(work / "trials.jsonl").read().values()
    verdicts.write_text("".join(json.dumps(line).replace(f"{work}/", "") + "\n" for line in lines))
    print(found)
    machine = describe(sorted(os.sched_getaffinity(0)))
    write_results(RESULTS / "drill.json", {"machine": machine, "seed": options.seed, **found.values()})
    return 0 if found.held else 1


def drill(options: argparse.Namespace, minutes: float) -> tw.Drill:
    """Go on with the faults that have no verdict in the work directory, which is made if it does not exist."""
    return tw.drill(
        RECIPE,
        *OVERRIDES,
        output=options.work,
        seed=options.seed,
        tries=options.tries,
        minutes=minutes,
        strategies=STRATEGIES,
        processes=PROCESSES,
        jobs=options.jobs,
        resume=options.work.exists(),
        progress=True,
    )


def join(kept: Path, own: Path) -> None:
    """Add the verdicts of earlier pieces to those of a piece that may have been interrupted."""
    files = [file.read_text().splitlines() for file in (kept, own) if file.exists()]
    own.write_text("".join(f"{line}\n" for line in dict.fromkeys(line for lines in files for line in lines)))


if __name__ == "__main__":
    sys.exit(main())
