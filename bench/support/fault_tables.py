"""Tables of what becomes of runs when something fails, and of how that is noticed."""

from __future__ import annotations

import json
import statistics
from collections import Counter

from support.tables import RESULTS, Row, measured, read, table


def faults() -> str:
    lines = (RESULTS / "faults.jsonl").read_text(encoding="utf-8").splitlines()
    latest = {trial["trial"]: trial for trial in map(json.loads, lines)}
    verdicts = Counter(trial["verdict"] for trial in latest.values())
    kinds = {name.rpartition("/")[0] for name in latest}
    rows = [
        (
            f"Faults injected into real runs ({len(kinds)} kinds: kills, signals, disks, damaged and hostile files, "
            "ports, memory): handled as documented",
            "all",
            f"{verdicts['held']} of {verdicts.total()}",
            "python bench/faults.py",
        )
    ]
    return table(rows)


def drills() -> str:
    results = read("drill")
    *kinds, total = results["kinds"]
    rows: list[Row] = [
        (
            f"Faults of {sum(kind['tries'] > 0 for kind in kinds)} kinds injected into short runs of the smallest "
            "recipe (single, ddp, fsdp and zero3 on 1 to 3 processes): nothing lost, wrong, left over or unnamed",
            "all of 1,000",
            _held(total["held"], total["tries"], results["left"]),
            "python bench/drill.py",
        ),
        (
            "From such a fault to the next step, and what an undisturbed start takes to its first one; medians",
            "at most 10 s more than a start",
            f"{total['median_recovery']:.1f} s, {total['median_start']:.1f} s",
            "python bench/drill.py",
        ),
    ]
    return table(rows, results)


def jobs() -> str:
    storm = read("storm")
    held, left = storm["held"], storm["trials"] - storm["done"]
    rows: list[Row] = [
        (
            f"Runs on a real Slurm of two nodes interrupted at random moments in {storm['kinds']} ways: finished by "
            "themselves, bit-identical to the undisturbed run, at most one step done again where there was any grace",
            f"all of {storm['trials']}",
            _held(held, storm["done"], left),
            "python bench/storm.py",
        ),
    ]
    return table(rows, storm)


def checkpoints() -> str:
    results = read("checkpoints")
    rows: list[Row] = []
    for strategy in dict.fromkeys(run["strategy"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["strategy"] == strategy]
        waited, blocked = (
            statistics.median(
                seconds for run in runs if run["background"] == background for seconds in run["blocked_seconds"]
            )
            for background in (False, True)
        )
        copies = max(run["copied_bytes"] / run["state_bytes"] for run in runs if run["background"])
        rows.append(
            (
                f"What training of SmolLM2-135M waits for a checkpoint in the background, {strategy} on 2 processes",
                "at most 2% of the seconds without the background, one copy of the state in memory",
                f"{blocked / waited:.1%} ({blocked:.3f} s of {waited:.1f} s), {copies:.2f} copies",
                "python bench/checkpoints.py",
            )
        )
    return table(rows, results)


def corruption() -> str:
    results = read("replay")
    trials, cost = results["trials"], results["cost"]
    good = sum(each["found"] and each["named"] and each["same"] for each in trials)
    shares = [f"{strategy} {statistics.median(found):.2%}" for strategy, found in cost["shares"].items()]
    rows: list[Row] = [
        (
            "Mantissa bits flipped in a weight or an activation of one of two ranks: found at the next check, the rank "
            "named, and the losses of the undisturbed run in the end",
            "all",
            f"{good} of {len(trials)}",
            "python bench/replay.py",
        ),
        (
            f"Cost of a check every {cost['every']} steps, the default, in small runs of two processes",
            "1% of a step",
            ", ".join(shares),
            "python bench/replay.py --cost",
        ),
    ]
    return table(rows, results)


def hangs() -> str:
    results = read("hangs")
    rows: list[Row] = [
        (
            f"Hangs of {len(results['kinds'])} kinds in runs of two processes (ddp and fsdp): the right rank and phase "
            "named within 15 s of the expected end",
            "95%",
            f"{results['right']} of {results['trials']}; by kind, median "
            f"{min(kind['median_seconds'] for kind in results['kinds'].values()):.1f} to "
            f"{max(kind['median_seconds'] for kind in results['kinds'].values()):.1f} s after the hang began",
            "python bench/hangs.py",
        ),
    ]
    return table(rows, results)


def _held(held: int, done: int, left: int) -> str:
    return f"{held:,} of {done:,}" + (f", {left:,} not tried yet" if left else "")


def false_alarms() -> str:
    results = read("false_alarms")
    conditions = results["conditions"]
    rows: list[Row] = [
        (
            f"Healthy runs of all strategies under conditions that slow them ({', '.join(conditions)}): reported to "
            "hang",
            "none in 2 hours",
            f"{sum(each['reported'] for each in conditions.values())} of "
            f"{sum(each['runs'] for each in conditions.values())} runs in {results['minutes']:.0f} minutes",
            "python bench/false_alarms.py",
        ),
    ]
    return table(rows, results)


def heartbeat() -> str:
    models = read("heartbeat")["models"]
    rows: list[Row] = [
        (
            f"Cost of the heartbeat, the ledger and the comparison of ranks, in steps of "
            f"{found['step_seconds'] * 1000:.0f} ms of {found['strategy']} on two processes",
            "0.5% of a step",
            f"{found['cost']:+.2%} ({found['low']:+.2%} to {found['high']:+.2%}; {found['pairs']} pairs)",
            f"python bench/heartbeat.py --model {name}",
        )
        for name, found in models.items()
    ]
    return table(rows, *models.values())


def goodput() -> str:
    results = read("goodput")
    rows: list[Row] = [
        (
            f"A run whose workers are killed every {results['every']:.0f} s, {results['kills']} times, while slots "
            f"leave and come back ({min(results['world_sizes'])} to {max(results['world_sizes'])} processes): finishes "
            "by itself; difference of the losses from the undisturbed run's",
            "1e-5",
            f"{results['difference']:.1e}; {results['steps_done_again']} of {results['steps']} steps done again; "
            f"{results['goodput']:.0%} of {results['wall_seconds']:.0f} s went into steps that count",
            "python bench/goodput.py",
        ),
    ]
    return table(rows, results)


TABLES = (drills, faults, jobs, checkpoints, corruption, *measured(hangs, false_alarms, heartbeat, goodput))
