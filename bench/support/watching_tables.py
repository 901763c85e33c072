"""Tables of what runs tell of themselves: the ledger, slow ranks, the live page."""

from __future__ import annotations

from support.tables import Row, measured, read, table


def ledger() -> str:
    results = read("ledger")
    cases = results["cases"]
    ranks = [rank for case in cases.values() for rank in case["ranks"]]
    phases = [rank for case in cases.values() for rank in case["phases"]]
    rows: list[Row] = [
        (
            f"The life of each rank's process, measured from outside, that the ledger has in a named category "
            f"({', '.join(cases)})",
            "99%",
            f"{min(rank['attributed'] for rank in ranks):.1%} to {max(rank['attributed'] for rank in ranks):.1%}; "
            f"`other` at most {max(rank['other'] for rank in ranks):.1%}, missing at most "
            f"{max(0.0, *(rank['missing'] for rank in ranks)):.1%}",
            "python bench/ledger.py",
        ),
        (
            "The seconds of its phases of steps beside those of torch.profiler's trace",
            "within 5%",
            f"{min(rank['difference'] for rank in phases):+.1%} to {max(rank['difference'] for rank in phases):+.1%}",
            "python bench/ledger.py",
        ),
    ]
    return table(rows, results)


def stragglers() -> str:
    results = read("stragglers")
    summary = results["summary"]
    rows: list[Row] = [
        (
            "One of two ranks stopped for 30 to 70% of every tenth of a second: named within 20 steps; healthy runs in "
            "which a rank is named",
            "20 of 20; none of 20",
            f"{summary['named_within_20_steps']} of {summary['slowed']} (median after {summary['steps']:.0f} steps); "
            f"{summary['healthy_named']} of {summary['healthy']}",
            "python bench/stragglers.py --trials 20",
        ),
        (
            "The part of the step time that a run would save without the slow rank, as predicted, beside the measured "
            "one: median error",
            "10%",
            f"{summary['gain_error']:.1%} (largest {summary['gain_error_most']:.0%})",
            "python bench/stragglers.py --trials 20",
        ),
    ]
    return table(rows, results)


def watching() -> str:
    results = read("watching")
    size = f"{results['runs']} runs of {results['steps']:,} steps ({results['bytes'] / 1e9:.1f} GB)"
    rows: list[Row] = [
        (
            f"`trainwright watch` on {size}, {title}: page with every run, memory of the server",
            "1 s, 500 MiB",
            f"{case['page_seconds']:.2f} s (slowest {case['slowest_page_seconds']:.1f} s), "
            f"{case['peak_bytes'] / 2**20:.0f} MiB; everything read after {case['everything_seconds']:.0f} s",
            "python bench/watching.py",
        )
        for title, case in (("the first time", results["cold"]), ("later", results["warm"]))
    ]
    return table(rows, results)


def submit() -> str:
    results = read("submit")
    rows: list[Row] = [
        (
            "From `trainwright submit --to slurm` to the first step, compared with `srun` of the bare worker",
            "3 s more",
            f"{results['median']:+.1f} s ({min(results['over']):+.1f} to {max(results['over']):+.1f} s over "
            f"{len(results['over'])} pairs)",
            "python bench/submit.py",
        ),
    ]
    return table(rows, results)


TABLES = tuple(measured(ledger, stragglers, watching, submit))
