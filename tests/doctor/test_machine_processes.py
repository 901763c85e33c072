"""Checks of `trainwright doctor` that start processes of training: real ones, which fail or are stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.commands import descendants, environment, wait_for
from tests.support.doctor import checked, doctor
from tests.support.runs import Runs


def test_a_rank_that_is_killed_is_named(runs: Runs) -> None:
    ended = runs.command("doctor", "killed-rank", "--json").wait()
    found = checked(ended.stdout, ended.code).check("killed-rank")
    assert (ended.code, found["findings"]) == (0, [])
    assert found["facts"][0].endswith(": rank 1 was killed by an external SIGKILL")


@pytest.mark.slow
def test_ranks_that_fail_on_purpose_are_named_and_sums_are_right(runs: Runs) -> None:
    ended = runs.command("doctor", "links", "out-of-memory", "killed-rank", "--json").wait()
    found = checked(ended.stdout, ended.code)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert [check["findings"] for check in found.report["checks"]] == [[], [], []]
    memory, killed = (found.check(name)["facts"][0] for name in ("out-of-memory", "killed-rank"))
    assert ": rank 1 failed: RuntimeError: " in memory and "alloc" in memory
    assert killed.endswith(": rank 1 was killed by an external SIGKILL")
    assert "GB/s each way through the memory" in found.check("links")["facts"][0]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_peer_that_is_stopped_is_named(runs: Runs, tmp_path: Path, rank: int) -> None:
    started = runs.command("doctor", "links", "--json", TMPDIR=str(tmp_path))

    def workers() -> list[psutil.Process]:
        found = sorted(descendants(started.pid), key=lambda process: process.pid)
        return found if len(found) == 2 else []

    chosen = wait_for(workers, every=0.001)[rank].pid
    os.kill(chosen, signal.SIGSTOP)
    ended = started.wait()
    finding = checked(ended.stdout, ended.code).finding("links", f"rank {rank} (process {chosen}) is stopped")
    assert ended.code == 3 and finding["severity"] == "broken" and "kill -CONT" in finding["fix"]
    assert not psutil.pid_exists(chosen)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_signal_ends_the_checks_and_nothing_is_left(runs: Runs, tmp_path: Path) -> None:
    started = runs.command("doctor", "strategies", TMPDIR=str(tmp_path))
    wait_for(lambda: len(descendants(started.pid)) >= 2)
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert ended.code == 75 and "the checks were not finished" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_all_checks_on_this_machine(runs: Runs, tmp_path: Path) -> None:
    ended = runs.command("doctor", "--json", TMPDIR=str(tmp_path)).wait()
    found = checked(ended.stdout, ended.code)
    for name in ("kernels", "links", "out-of-memory", "killed-rank", "strategies"):
        assert found.check(name)["skipped"] is None and found.check(name)["findings"] == []
    assert ended.code == (3 if found.report["is_broken"] else 0)
    compared = found.check("strategies")["facts"]
    assert [fact.partition(":")[0] for fact in compared if "from those of one process" in fact][:2] == ["ddp", "fsdp"]
    assert not [fact for fact in compared if fact.startswith("not run for lack of time")]
    assert [path for path in tmp_path.iterdir() if path.name.startswith("trainwright")] == []


WRONG = """
from dataclasses import replace
from trainwright.parallel.replicated.spec import DDP

DOUBLED = replace(DDP, summary="wrong rate", implementation="wrong_strategies:Doubled")
RAISING = replace(DDP, summary="fails on one rank", implementation="wrong_strategies:Raising")

def __getattr__(name):
    from trainwright.parallel.replicated.replicated import Replicated

    class Doubled(Replicated):
        def step(self, learning_rate, scale):
            super().step(2 * learning_rate, scale)

    class Raising(Replicated):
        def gradient_norm(self):
            if self.world.rank == 1:
                raise RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")
            return super().gradient_norm()

    if name in ("Doubled", "Raising"):
        return {"Doubled": Doubled, "Raising": Raising}[name]
    raise AttributeError(name)
"""


@pytest.mark.slow
def test_strategies_that_are_wrong_or_fail_are_named(tmp_path: Path) -> None:
    installed = tmp_path / "installed"  # not the working directory, whose entry points are not followed
    metadata = installed / "wrong_strategies-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-strategies\nVersion: 1\n")
    names = "doubled = wrong_strategies:DOUBLED\nraising = wrong_strategies:RAISING\n"
    (metadata / "entry_points.txt").write_text(f"[trainwright.strategies]\n{names}")
    (installed / "wrong_strategies.py").write_text(WRONG)
    before = ["env", f"PYTHONPATH={installed}{os.pathsep}{environment()['PYTHONPATH']}"]
    found = doctor("strategies", cwd=tmp_path, before=before)
    wrong = found.finding("strategies", "two ranks of doubled has other losses than one process", "at step 2")
    failed = found.finding("strategies", "two ranks of raising cannot train", "NCCL error: unhandled system error")
    assert found.code == 3 and wrong["severity"] == failed["severity"] == "broken"
    assert "kernels and links" in wrong["fix"] and "NCCL_DEBUG=INFO" in failed["fix"]
    facts = found.check("strategies")["facts"]
    assert "raising: failed" in facts and any(fact.startswith("fsdp: ") and "differ by" in fact for fact in facts)
