"""Measure `trainwright watch` and `trainwright runs` on many long runs, with and without what they keep in the cache.

    python bench/watching.py --runs 20 --steps 10000    # a trial
    python bench/watching.py                            # 200 runs of 100,000 steps: 5.7 GB, and minutes of reading

The runs are written as a training leaves them. A first server begins with an empty cache; a second one has what the
first has kept. The page counts as there when its HTML, script, styles and the row of every run have arrived; while the
first server still reads, the page is asked for again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from support.machine import describe, use_cores
from support.results import results_directory
from support.runs import write_results
from support.synthetic_runs import write_runs

PAGE_SECONDS, SERVER_BYTES = 1.0, 500 * 2**20
OVERLAID = 5  # curves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--work", type=Path, help="where the runs are written; they are removed afterwards")
    parser.add_argument("--output", type=Path, default=results_directory() / "watching.json")
    options = parser.parse_args()
    machine = describe(use_cores(2))
    work = Path(tempfile.mkdtemp(prefix="watching-", dir=options.work))
    try:
        write_runs(work / "runs", options.runs, options.steps)
        size = sum(file.stat().st_size for file in (work / "runs").rglob("events.jsonl"))
        print(f"{options.runs} runs, {size / 1e9:.1f} GB of events", flush=True)
        caches = {name: work / f"cache-{name}" for name in ("watch", "runs")}
        found: dict[str, Any] = {
            "cold": served(work / "runs", caches["watch"], options.runs),
            "warm": served(work / "runs", caches["watch"], options.runs),
            "runs_cold_seconds": listed(work / "runs", caches["runs"], options.runs),
            "runs_warm_seconds": listed(work / "runs", caches["runs"], options.runs),
        }
    finally:
        shutil.rmtree(work)
    print(json.dumps(found, indent=1))
    write_results(
        options.output,
        {"machine": machine, "runs": options.runs, "steps": options.steps, "bytes": size, **found},
    )
    kept = all(
        each["page_seconds"] <= PAGE_SECONDS and each["peak_bytes"] <= SERVER_BYTES
        for each in (found["cold"], found["warm"])
    )
    return 0 if kept else 1


def served(root: Path, cache: Path, runs: int) -> dict[str, float]:
    """Start a server, and measure it until it has read everything."""
    with _server(root, cache) as (address, process):
        begun = time.monotonic()
        first = _page(address)
        while len(_rows(address)) < runs:
            time.sleep(0.05)
        all_rows = time.monotonic() - begun
        pages, peak = [], 0
        while True:
            began = time.monotonic()
            rows = _page(address)
            pages.append(time.monotonic() - began)
            peak = max(peak, psutil.Process(process.pid).memory_info().rss)
            if len(rows) == runs and all(row["read"] == 1 for row in rows.values()):
                break
            time.sleep(1.0)
        everything = time.monotonic() - begun
        names = list(rows)[:OVERLAID]
        asked = urllib.parse.urlencode([("curve", "loss"), ("axis", "tokens"), *(("run", name) for name in names)])
        began = time.monotonic()
        _get(address, "curves", asked)
        return {
            "rows_in_first_page": len(first),
            "all_rows_seconds": all_rows,
            "page_seconds": statistics.median(pages),
            "slowest_page_seconds": max(pages),
            "curves_seconds": time.monotonic() - began,
            "everything_seconds": everything,
            "peak_bytes": max(peak, psutil.Process(process.pid).memory_info().rss),
        }


def listed(root: Path, cache: Path, runs: int) -> float:
    """The seconds of `trainwright runs`."""
    command = [sys.executable, "-m", "trainwright", "runs", str(root), "--json"]
    began = time.monotonic()
    ended = subprocess.run(command, env=_environment(cache), capture_output=True, text=True, check=True)
    assert len(json.loads(ended.stdout)) == runs
    return time.monotonic() - began


@contextmanager
def _server(root: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "trainwright", "watch", str(root)]
    process = subprocess.Popen(command, env=_environment(cache), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield next(line for line in process.stderr if "http" in line).split()[-1], process
    finally:
        process.terminate()
        process.wait()


def _page(address: str) -> dict[str, Any]:
    for path in ("", "page.js", "page.css"):
        _get(address, path)
    return _rows(address)


def _rows(address: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_get(address, "runs"))
    return found


def _get(address: str, path: str, query: str = "") -> bytes:
    place, _, token = address.partition("/?")
    with urllib.request.urlopen(f"{place}/{path}?{token}&{query}", timeout=60) as answer:
        body: bytes = answer.read()
    return body


def _environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "TRAINWRIGHT_CACHE": str(cache)}


if __name__ == "__main__":
    sys.exit(main())
