"""Plans beside training runs that others measured and published: by class, for both sides of the figures.

    python bench/plan_published.py
    python bench/plan_published.py --runs             each run that the planning model was mended on, with its sources

The planning model is mended on the figures of some sources and checked on those of the others, whose errors are shown
as a whole only, so that nothing is mended on them. Columns: runs, how many; speeds and memories, how many of
them measured it, with the median error; of those that ran, how many a plan refuses; of those that ran out of memory,
how many it accepts; last, how many cannot be planned, their model or card being unknown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from support.runs import print_table, write_results  # noqa: E402

from tests.support.published_table import HALVES, HEADER, by_class, compared, print_runs  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "plan_published.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true", help="each run that the planning model was mended on")
    if parser.parse_args().runs:
        print_runs()
        return
    results = {}
    for half in HALVES:
        found = compared(half)
        classes = by_class(found)
        print(f"\n{half}: {len(found)} runs of {len({one.figure['source']['url'] for one in found})} sources")
        print_table(HEADER, [summary.row(name) for name, summary in classes.items()])
        results[half] = {name: summary.as_json() for name, summary in classes.items()}
    write_results(RESULTS, results)


if __name__ == "__main__":
    main()
