"""Bugs that raise no error, planted one at a time: how many of them the fast tests catch.

They train a model wrongly, or hide a fault from the doctor.

    python bench/mutations.py                       all of them, two at a time; goes on where it was stopped
    python bench/mutations.py --list                what there is, without a run
    python bench/mutations.py --area loss --again   some of them, whatever was found before
    python bench/mutations.py --only beta --jobs 1  those that have this in their names

A bug is a piece of text of one source file and what replaces it (mutations/*.toml), after a report in an issue tracker
or a paper. It is planted in a copy of the repository, and the tests that it names are run there, after they have passed
in the copy without it. It is caught if a test fails; a test that runs out of time is counted as caught and named a
hang. Results are kept for each bug with a digest of its source file and tests, and found again while these stay.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from support.machine import describe
from support.mutation_list import ROOT, ListError, Mutation, read_list
from support.mutation_runs import Copy, Outcome
from support.results import results_directory

RESULTS = results_directory() / "mutations.json"
CAUGHT = ("caught", "hang")
ENOUGH = 0.95


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        everything = read_list()
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [m for m in everything if arguments.only in m.name and arguments.area in (None, m.area)]
    if not chosen:
        print(f"no bug of area {arguments.area} has {arguments.only!r} in its name", file=sys.stderr)
        return 2
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.area}: {mutation.name}: {mutation.bug}\n    {mutation.file}; {mutation.source}")
        return 0
    results = Results(arguments.output)
    results.keep_only(everything)
    left = [m for m in chosen if arguments.again or not results.has(m)]
    print(f"{len(chosen)} planted bugs, {len(chosen) - len(left)} of them tried before", flush=True)
    tried = _try_all(left, results, arguments.jobs)
    enough = _report([m for m in chosen if results.has(m)], results)
    return int(not (tried and enough))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="bugs whose name has this")
    parser.add_argument("--area", help="bugs of one area: the name of a file of the list")
    parser.add_argument("--list", action="store_true", help="show what would be tried, and end")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time (2)")
    parser.add_argument("--again", action="store_true", help="try also what has been tried before")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of results")
    return parser.parse_args()


class Results:
    """What is known of each bug, in a file that is whole at any time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._known: dict[str, dict[str, Any]] = found.get("mutations", {})

    def keep_only(self, mutations: Sequence[Mutation]) -> None:
        names = {mutation.name for mutation in mutations}
        self._known = {name: each for name, each in self._known.items() if name in names}

    def has(self, mutation: Mutation) -> bool:
        return self._known.get(mutation.name, {}).get("key") == mutation.key(ROOT)

    def of(self, mutation: Mutation) -> dict[str, Any]:
        return self._known[mutation.name]

    def add(self, mutation: Mutation, key: str, outcome: Outcome) -> None:
        names = {"failed": "caught", "hung": "hang", "passed": "missed"}
        with self._lock:
            self._known[mutation.name] = {
                "area": mutation.area,
                "file": mutation.file,
                "bug": mutation.bug,
                "source": mutation.source,
                "outcome": names[outcome.result],
                "test": outcome.test,
                "message": outcome.message,
                "seconds": round(outcome.seconds, 1),
                "key": key,
            }
            about = {"machine": describe([]), "mutations": dict(sorted(self._known.items()))}
            scratch = self._file.with_suffix(".part")
            scratch.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            scratch.replace(self._file)


def _try_all(mutations: Sequence[Mutation], results: Results, jobs: int) -> bool:
    """Try every bug; whether all could be tried."""
    if not mutations:
        return True
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        keys = {mutation: mutation.key(ROOT) for mutation in mutations}  # of what is copied now
        made = [Copy(ROOT, Path(temporary) / str(job)) for job in range(jobs)]
        copies: Queue[Copy] = Queue()
        for one in made:
            copies.put(one)

        def without_bug(area: str) -> bool:
            tests = dict.fromkeys(test for m in mutations if m.area == area for test in m.tests)
            copy = copies.get()
            outcome = copy.run(list(tests), stop=False)
            copies.put(copy)
            if outcome.result != "passed":
                print(f"{area}: without a bug {outcome.test} {outcome.result}: {outcome.message}", file=sys.stderr)
            print(f"{area}: its tests took {outcome.seconds:.0f} s without a bug", flush=True)
            return outcome.result == "passed"

        def with_bug(mutation: Mutation) -> bool:
            copy = copies.get()
            outcome = copy.with_bug(mutation)
            copies.put(copy)
            if outcome.result == "broken":
                print(f"{mutation.name}: its tests cannot be run: {outcome.message}", file=sys.stderr)
                return False
            results.add(mutation, keys[mutation], outcome)
            found = results.of(mutation)
            print(f"{mutation.area}: {mutation.name}: {found['outcome']} in {found['seconds']} s {found['test']}")
            print(f"    {found['message']}", flush=True)
            return True

        areas = dict.fromkeys(mutation.area for mutation in mutations)
        pool = ThreadPoolExecutor(jobs)
        try:
            sound = {area for area, passed in zip(areas, pool.map(without_bug, areas), strict=True) if passed}
            done = list(pool.map(with_bug, [m for m in mutations if m.area in sound]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for one in made:
                one.close()
            pool.shutdown()
    return len(sound) == len(areas) and all(done)


def _report(mutations: Sequence[Mutation], results: Results) -> bool:
    """Print a line for each area and the bugs that were missed; whether enough were caught."""
    found = {mutation: results.of(mutation) for mutation in mutations}
    print(f"{'area':<16}{'planted':>8}{'caught':>8}{'hangs':>7}{'missed':>8}{'seconds':>9}")
    for area in [*dict.fromkeys(m.area for m in mutations), "all"]:
        rows = [each for mutation, each in found.items() if area in ("all", mutation.area)]
        caught, hangs = (sum(row["outcome"] == kind for row in rows) for kind in CAUGHT)
        seconds = sum(row["seconds"] for row in rows)
        print(f"{area:<16}{len(rows):>8}{caught:>8}{hangs:>7}{len(rows) - caught - hangs:>8}{seconds:>9.0f}")
    missed = [mutation for mutation, each in found.items() if each["outcome"] not in CAUGHT]
    for mutation in missed:
        print(f"missed: {mutation.name} ({mutation.file}): {mutation.bug}")
    return len(missed) <= (1 - ENOUGH) * len(mutations)


if __name__ == "__main__":
    sys.exit(main())
