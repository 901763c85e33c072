"""`trainwright doctor`: its report, what it does with checks that fail, and checks that need no planted fault."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT, trainwright
from tests.support.doctor import checked
from trainwright.doctor.checks.check import CannotCheck, Check, Finding, Found, Outcome, Severity, Surroundings
from trainwright.doctor.checks.gpus.health import _xids
from trainwright.doctor.checks.registry import CHECKS
from trainwright.doctor.checks.report import MachineReport
from trainwright.doctor.checks.running import examine
from trainwright.doctor.checks.software.kernels import TOLERANCES, Kernel, compare, kernels
from trainwright.doctor.checks.system.cores import _capped, _heat, _slow
from trainwright.launch.ending.stop import Stopping
from trainwright.machine.detect import detect

CPU = torch.device("cpu")


def fails(surroundings: Surroundings) -> Found:
    raise ZeroDivisionError("a driver without a name")


def is_not_possible(surroundings: Surroundings) -> Found:
    raise CannotCheck("only root may look")


def breaks(surroundings: Surroundings) -> Found:
    return Found(("a fact",), (Finding(Severity.BROKEN, "it is broken", "nothing works", "repair it"),))


class Own(Check):
    """A check of this file."""

    def load(self):  # type: ignore[no-untyped-def]
        return globals()[self.place]


def report(tmp_path: Path, *checks: Check) -> MachineReport:
    surroundings = Surroundings(detect(), (tmp_path,), (), tmp_path, lambda run: None, Stopping(), variables={})
    return examine(checks, surroundings)


def test_a_check_that_fails_or_is_not_possible_does_not_end_the_others(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        Own("a", "one", "fails"),
        Own("b", "two", "is_not_possible"),
        Own("c", "three", "breaks"),
        Own("d", "four", "breaks", after=("a", "c")),
        Own("e", "five", "breaks", needs_gpu=True),
    )
    assert [outcome.skipped for outcome in found.outcomes] == [
        None,
        "only root may look",
        None,
        "c must be repaired first",
        "this machine has no GPU that can be used",
    ]
    first = found.outcomes[0].findings[0]
    assert first.severity is Severity.WARNING and "ZeroDivisionError: a driver without a name" in first.what
    assert [finding.severity for finding in found.findings] == [Severity.BROKEN, Severity.WARNING]
    assert found.is_broken


def test_the_page_has_a_line_for_each_check_and_the_worst_first() -> None:
    note = Finding(Severity.NOTE, "a note", "why not", "nothing")
    broken = Finding(Severity.BROKEN, "a wreck", "it sank", "lift it")
    outcomes = (
        Outcome("one", "the first", 0.1, ("seen", "measured"), (note,)),
        Outcome("second", "the second", 0.1, (), (broken,)),
        Outcome("third", "the third", skipped="not here"),
    )
    page = str(MachineReport("a machine", "today", "1.0", 0.25, outcomes))
    assert page == (
        "a machine (trainwright 1.0, today)\n\n"
        "one     note     seen\n"
        "                 measured\n"
        "second  broken   the second\n"
        "third   skipped: not here\n\n"
        "broken: a wreck [second]\n  why:  it sank\n  do:   lift it\n\n"
        "note: a note [one]\n  why:  why not\n  do:   nothing\n\n"
        "1 broken, 1 note: 2 checks in 250 ms, 1 skipped"
    )


def test_every_check_can_be_loaded_and_is_in_the_guide() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [name for row in re.findall(r"^\| (`.*?`) \| ", page, re.M) for name in re.findall(r"`([\w-]+)`", row)]
    assert rows == [check.name for check in CHECKS]
    names = set(rows)
    assert len(names) == len(CHECKS)
    for check in CHECKS:
        assert callable(check.load()) and set(check.after) < names


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    unknown = trainwright("doctor", "prots", cwd=tmp_path)
    assert unknown.returncode == 2 and "prots: no such check; choose from packages, torch," in unknown.stderr
    missing = trainwright("doctor", "disks", "--directory", "nowhere", cwd=tmp_path)
    assert missing.returncode == 2 and "--directory: nowhere is not a directory" in missing.stderr
    both = trainwright("doctor", "ports", "--explain", "run.log", cwd=tmp_path)
    assert both.returncode == 2 and "--explain reads a log and checks nothing" in both.stderr


def test_a_page_and_json_of_the_same(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        page = trainwright("doctor", "ports", "--port", port, cwd=tmp_path)
        values = trainwright("doctor", "ports", "--port", port, "--json", cwd=tmp_path)
    assert (page.returncode, values.returncode) == (3, 3)
    finding = checked(values.stdout, 3).finding("ports", f"port {port} is taken")
    assert f"broken: {finding['what']} [ports]\n" in page.stdout and f"  do:   {finding['fix']}\n" in page.stdout
    assert json.loads(values.stdout)["is_broken"] is True
    assert page.stdout.splitlines()[-1].startswith("1 broken: 1 check in ")


@pytest.mark.parametrize("kernel", list(kernels(CPU)), ids=lambda kernel: kernel.name)
def test_kernels_of_this_processor_are_right(kernel: Kernel) -> None:
    assert compare(kernel, CPU, torch.float32) < TOLERANCES["fp32"]
    assert compare(kernel, CPU, torch.bfloat16) < TOLERANCES["bf16"]


def test_kernels_that_are_wrong_in_the_result_or_in_a_gradient_alone() -> None:
    x = torch.randn(64, 64)

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * 2.001

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert compare(Kernel("right", (x,), double, double), CPU, torch.float32) == 0
    for wrong in (lambda x: x * 2.001, WrongGradient.apply, lambda x: (x * 2).index_fill(0, torch.tensor([3]), 0)):
        assert compare(Kernel("wrong", (x,), wrong, double), CPU, torch.float32) > TOLERANCES["fp32"]
    nothing = Kernel("not a number", (x,), lambda x: x * float("nan"), double)
    assert not compare(nothing, CPU, torch.float32) <= TOLERANCES["fp32"]


def test_a_core_that_is_slower_than_the_others() -> None:
    (finding,) = _slow({0: 2.0e9, 1: 2.1e9, 2: 0.8e9, 3: 2.0e9})
    assert "core 2 (40%)" in finding.what and "taskset" in finding.fix
    assert list(_slow({0: 2.0e9, 1: 1.7e9})) == []


def test_clocks_and_heat_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for core, allowed in ((0, 3_000_000), (1, 1_500_000)):
        clock, heat = tmp_path / f"cpu{core}" / "cpufreq", tmp_path / f"cpu{core}" / "thermal_throttle"
        clock.mkdir(parents=True)
        heat.mkdir()
        (clock / "cpuinfo_max_freq").write_text("3000000\n")
        (clock / "scaling_max_freq").write_text(f"{allowed}\n")
        (heat / "core_throttle_count").write_text(f"{core}\n")
    (finding,) = _capped([0, 1], tmp_path)
    assert "the clock of 1 core is limited, of core 1 to 50%" in finding.what
    assert _heat([0, 1, 2], tmp_path) == {0: 0, 1: 1}


def test_xid_errors_in_the_log_of_the_kernel() -> None:
    log = (
        "[ 1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=123, name=python, GPU has fallen off the bus.\n"
        "[ 2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=124, GPU has fallen off the bus.\n"
        "[ 3.0] NVRM: Xid (PCI:0000:5e:00): 31, pid=9, name=python, Ch 00000008\n"
        "[ 4.0] usb 1-1: new device\n"
    )
    bus, program = _xids(log)
    assert (bus.severity, program.severity) == (Severity.WARNING, Severity.NOTE)
    assert "Xid 79 for the GPU at 0000:3b:00, 2 times: the GPU has fallen off the bus" in bus.what
    assert "Xid 31" in program.what and "compute-sanitizer" in program.fix
