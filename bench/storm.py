"""Interrupt 100 runs on a real Slurm of two nodes, each once, at a random moment.

    python bench/storm.py --minutes 60      a piece; the next start goes on with the trials that have no verdict
    python bench/storm.py --only 7 --again  one trial once more
    python bench/storm.py --report          only the summary of the verdicts so far

A seed draws what interrupts which run when. Each run has to finish by itself, bit-identical to the undisturbed one,
with at most one step done again where it was given any time, and to leave no job. Verdicts are kept in
results/storm.jsonl. Needs root and Slurm's daemons (apt-get install slurmctld slurmd slurm-client munge). Exit code 1
when a trial is broken, missed or still to do.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.machine import describe
from support.results import results_directory
from support.runs import write_results

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import storm  # noqa: E402
from tests.support.slurm import Slurm, why_not  # noqa: E402
from trainwright.faults.drills.operations import CampaignResults  # noqa: E402
from trainwright.faults.drills.trial_settings import hash_product_code  # noqa: E402

RESULTS = results_directory() / "storm.jsonl"


def main() -> int:
    options = _parse()
    results = CampaignResults(options.results)
    trials = storm.drawn(options.seed, options.trials)
    known = results.read()
    again = (storm.BROKEN, storm.MISSED) if options.again else ()
    left = [trial for trial in trials if trial.key not in known or known[trial.key]["verdict"] in again]
    if options.only:
        left = [trial for trial in trials if trial.name in options.only]
    if not options.report and left:
        if reason := why_not():
            print(reason)
            return 3
        storm.make_references(options.work)
        over = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # trials that have begun are finished, and the clusters ended
            signal.signal(number, lambda *_: over.set())
        for line in _lines(left, options.work, options.jobs, time.monotonic() + 60 * options.minutes, over):
            results.add({**line, "code": hash_product_code()})
            why = line["why"].strip().splitlines()
            print(f"{line['trial']} ({line['case']}): {line['verdict']}, {line['seconds']} s  {why[:1]}", flush=True)
    known = results.read()
    found = [known[trial.key] for trial in trials if trial.key in known]
    print(f"\n{storm.in_words(found)}\n{len(found)} of {len(trials)} trials have a verdict in {options.results}")
    held = sum(line["verdict"] == storm.HELD for line in found)
    counts = {"trials": len(trials), "done": len(found), "held": held, "kinds": len(storm.KINDS)}
    machine = describe(sorted(os.sched_getaffinity(0)))
    write_results(options.results.with_suffix(".json"), {"machine": machine, "seed": options.seed, **counts})
    return 0 if len(found) == len(trials) and all(line["verdict"] == storm.HELD for line in found) else 1


def _lines(
    trials: Sequence[storm.Trial], work: Path, jobs: int, end: float, over: threading.Event
) -> Iterator[dict[str, Any]]:
    """Perform the trials until the time is over, on as many clusters at once; yield each verdict as it comes."""
    waiting: queue.SimpleQueue[storm.Trial] = queue.SimpleQueue()
    done: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    for trial in trials:
        waiting.put(trial)
    threads = [threading.Thread(target=_work, args=(i, waiting, done, work, end, over)) for i in range(jobs)]
    for thread in threads:
        thread.start()
    going = len(threads)
    while going:
        line = done.get()
        if line is None:
            going -= 1
        else:
            yield line


def _work(
    number: int,
    waiting: queue.SimpleQueue[storm.Trial],
    done: queue.SimpleQueue[dict[str, Any] | None],
    work: Path,
    end: float,
    over: threading.Event,
) -> None:
    slurm = None
    try:
        while time.monotonic() < end and not over.is_set():
            try:
                trial = waiting.get_nowait()
            except queue.Empty:
                break
            if slurm is None:
                place = work / f"slurm-{number}"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                slurm = Slurm(place, storm.variables(work))
            line = storm.perform(trial, slurm, work)
            done.put(line)
            if not slurm.is_idle():  # after a trial that did not hold
                slurm.close()
                slurm = None
    finally:
        if slurm is not None:
            slurm.close()
        done.put(None)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no trial after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="clusters of two nodes at once")
    parser.add_argument("--only", nargs="+", default=[], metavar="NUMBER", help="only these trials, whatever is known")
    parser.add_argument("--again", action="store_true", help="repeat trials that did not hold")
    parser.add_argument("--report", action="store_true", help="begin no trial")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "trainwright" / "storm")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
