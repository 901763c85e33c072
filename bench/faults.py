"""Put faults into real runs, and see whether anything is lost, wrong, left over or told in other than words.

    python bench/faults.py --list
    python bench/faults.py --kinds 'stop signal*' --trials 40
    python bench/faults.py --only 'a second ctrl-C/0' --again
    python bench/faults.py --trials 300 --jobs 2

A seed draws which trials there are; every verdict is kept as it comes, and a campaign that was interrupted goes on
with what has none. Exit code 1 when a promise was broken or a trial is still to do.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from support.faults import catalog  # noqa: F401
from support.faults.setting import setting
from support.results import results_directory

from trainwright.faults.drills import watched_commands
from trainwright.faults.drills.kinds import KINDS, schedule_trials, select_kinds
from trainwright.faults.drills.operations import (
    BROKEN,
    HELD,
    MISSED,
    SKIPPED,
    CampaignResults,
    format_drill_table,
    run_trials,
)


def main() -> int:
    options = _parse()
    runs = setting(options.work)
    cases = {
        name: kind.list_cases(runs.spreads, watched_commands.ALL) for name, kind in select_kinds(options.kinds).items()
    }
    trials = schedule_trials(options.seed, options.trials, cases)
    if options.only:
        trials = [trial for trial in trials if trial.name in options.only]
    if options.list:
        for trial in sorted(trials, key=lambda trial: (trial.kind, trial.ordinal)):
            print(f"{trial.name}  {trial.case}")
        print(f"{len(trials)} trials of {len({trial.kind for trial in trials})} kinds, of {len(KINDS)}")
        return 0
    results = CampaignResults(options.results)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    again = {BROKEN, MISSED} if options.again else set()
    if options.again and options.only:
        again |= {HELD, SKIPPED}
    left = [trial for trial, line in results.of(trials).items() if line is None or line["verdict"] in again]
    if len(left) < len(trials):
        print(f"{len(trials) - len(left)} of {len(trials)} trials have a verdict in {options.results}")
    for number, line in enumerate(run_trials(left, runs, options.work / "trials", options.jobs, options.keep), 1):
        results.add(line)
        verdict = f"{line['trial']} ({line['case']}): {line['verdict']}, {line['seconds']} s"
        print(f"[{number}/{len(left)}] {verdict}  {line['why'].partition(chr(10))[0][:200]}", flush=True)
    found = results.of(trials)
    print(f"\n{format_drill_table(found)}")
    held = all(line and line["verdict"] in (HELD, SKIPPED) for line in found.values())
    if not options.keep and held:
        shutil.rmtree(options.work / "trials", ignore_errors=True)
    return 0 if held else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=300, help="how many faults")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="PATTERN", help="only kinds of these names")
    parser.add_argument("--only", nargs="+", default=[], metavar="TRIAL", help="only these trials, as --list has them")
    parser.add_argument("--list", action="store_true", help="show the trials and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--again", action="store_true", help="try broken and missed ones again; any, with --only")
    parser.add_argument("--fresh", action="store_true", help="forget all verdicts first")
    parser.add_argument("--keep", action="store_true", help="keep the directories of trials that held, too")
    parser.add_argument("--results", type=Path, default=results_directory() / "faults.jsonl", metavar="FILE")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "trainwright" / "faults",
        metavar="DIRECTORY",
        help="for undisturbed runs, prepared data and the directories of trials that did not hold",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
