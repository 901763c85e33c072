"""Plans beside training runs that others measured and published: by class, for both sides of the figures.

    python bench/plan_published.py
    python bench/plan_published.py --runs             each run that the planning model was mended on, with its sources
    python bench/plan_published.py --write            and keep the errors of each kind, which plans show

The planning model is mended on the figures of some sources and checked on those of the others, whose errors are shown
as a whole only, so that nothing is mended on them. Columns: runs, how many; speeds and memories, how many of
them measured it, with the median error, and how many of both are left out because they measured something else than
what is predicted (what is reserved after rows of many lengths); of those that ran, how many a plan refuses; of those
that ran out of memory, how many it accepts; of how many of both it says that they are close; last, how many cannot be
planned, their model or card being unknown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import report  # noqa: E402
from support.runs import print_table, write_results  # noqa: E402

from tests.support.class_errors import class_errors  # noqa: E402
from tests.support.published_table import HALVES, HEADER, by_class, compared, print_runs  # noqa: E402
from trainwright.planning.errors import FILE  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "plan_published.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true", help="each run that the planning model was mended on")
    parser.add_argument("--write", action="store_true", help=f"keep the results, the page and {FILE.name}")
    arguments = parser.parse_args()
    if arguments.runs:
        print_runs()
        return
    if arguments.write:
        made = class_errors([one for half in HALVES for one in compared(half)])
        FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    results = {}
    for half in HALVES:
        found = compared(half)
        classes = by_class(found)
        print(f"\n{half}: {len(found)} runs of {len({one.figure['source']['url'] for one in found})} sources")
        print_table(HEADER, [summary.row(name) for name, summary in classes.items()])
        results[half] = {name: summary.as_json() for name, summary in classes.items()}
    if arguments.write:
        write_results(RESULTS, results)
        report.PAGE.write_text(report.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
