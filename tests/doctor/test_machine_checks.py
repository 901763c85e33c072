"""`trainwright doctor`: its report, what it does with checks that fail, and checks that need no planted fault."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.commands import PATIENCE, ROOT, environment, trainwright
from tests.support.doctor import checked
from tests.support.interpreted import needs_interpreter
from trainwright.doctor.checks.check import (
    CHECKS,
    CannotCheck,
    Check,
    CheckContext,
    CheckResult,
    Finding,
    MachineReport,
    Outcome,
    Severity,
    run_checks,
    select_checks,
)
from trainwright.doctor.checks.cores import _check_capped, _check_shares, _check_slow, _read_heat_counts
from trainwright.doctor.checks.disks import _read_link_rate
from trainwright.doctor.checks.gpus import _check_xids
from trainwright.doctor.checks.gpus import judge_transfers as judged_copies
from trainwright.doctor.checks.kernels import (
    TOLERANCES,
    ComparedKernel,
    compare_kernel,
    has_fused,
    iterate_float8_products,
    iterate_fused_kernels,
    iterate_kernels,
    list_float8_scales,
)
from trainwright.doctor.checks.nccl import EFFECTS, OLD_NAMES
from trainwright.doctor.checks.network import _check_adapters
from trainwright.doctor.checks.software import _check_build
from trainwright.doctor.checks.two_processes import _judge_links as judged_sums
from trainwright.errors import MachineError, RequestError
from trainwright.machine.detect import detect
from trainwright.machine.links import build_fabric_link, build_pcie_link
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.processor import explain_no_triton
from trainwright.run.shutdown.stop import Stopping

CPU = torch.device("cpu")


def fails(context: CheckContext) -> CheckResult:
    raise ZeroDivisionError("a driver without a name")


def is_not_possible(context: CheckContext) -> CheckResult:
    raise CannotCheck("only root may look")


def breaks(context: CheckContext) -> CheckResult:
    return CheckResult(("a fact",), (Finding(Severity.BROKEN, "it is broken", "nothing works", "repair it"),))


class Own(Check):
    """A check of this file."""

    def load(self):  # type: ignore[no-untyped-def]
        return globals()[self.entry_point]


def refuses(context: CheckContext) -> CheckResult:
    raise MachineError("the limit of open files is 24; raise it")


def context(work: Path, machine: Machine | None = None) -> CheckContext:
    """What checks are given, on the described machine if no other is given."""
    return CheckContext(machine or detect(), (work,), (), work, Stopping(), variables={})


def report(tmp_path: Path, *checks: Check) -> MachineReport:
    return run_checks(checks, context(tmp_path))


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
        "c must be fixed first",
        "this machine has no GPU that can be used",
    ]
    first = found.outcomes[0].findings[0]
    assert first.severity is Severity.WARNING and "ZeroDivisionError: a driver without a name" in first.what
    assert [finding.severity for finding in found.findings] == [Severity.BROKEN, Severity.WARNING]
    assert found.is_broken


def test_an_error_of_the_product_is_a_finding(tmp_path: Path) -> None:
    (finding,) = report(tmp_path, Own("a", "one", "refuses")).findings
    assert (finding.severity, finding.what) == (Severity.BROKEN, "the limit of open files is 24; raise it")


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


def test_every_variable_that_this_torch_reads_is_explained() -> None:
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(headers.glob("*.hpp")))
    read = set(re.findall(r'"((?:TORCH_)?(?:NCCL|GLOO|FR)_[A-Z0-9_]+)"', text))
    if "TORCH_NCCL_BLOCKING_WAIT" not in read:
        pytest.skip("this torch comes without the headers that name its variables")
    assert sorted(read - set(EFFECTS) - set(OLD_NAMES)) == []
    assert set(OLD_NAMES.values()) <= set(EFFECTS)


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    unknown = trainwright("doctor", "prots", cwd=tmp_path)
    assert unknown.returncode == 2 and "prots: no such check; choose from packages, torch," in unknown.stderr
    (tmp_path / "run.log").touch()
    log = trainwright("doctor", "run.log", cwd=tmp_path)
    assert log.returncode == 2 and "run.log: no such check; choose from packages, torch," in log.stderr
    assert "; to find the cause in a log, pass --explain run.log" in log.stderr
    with pytest.raises(RequestError, match=r"no such check; choose from .*killed-rank, strategies$"):
        select_checks((str(tmp_path),))
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


@pytest.mark.parametrize("kernel", list(iterate_kernels(CPU)), ids=lambda kernel: kernel.name)
def test_kernels_of_this_processor_are_right(kernel: ComparedKernel) -> None:
    assert compare_kernel(kernel, CPU, torch.float32) < TOLERANCES["fp32"]
    assert compare_kernel(kernel, CPU, torch.bfloat16) < TOLERANCES["bf16"]


@needs_interpreter
@pytest.mark.parametrize("kernel", list(iterate_fused_kernels()), ids=lambda kernel: kernel.name)
def test_fused_kernels_are_compared_with_plain_formulas(kernel: ComparedKernel) -> None:
    assert compare_kernel(kernel, CPU, torch.float32) < TOLERANCES["fp32"]


@pytest.mark.parametrize("kernel", list(iterate_float8_products()), ids=lambda kernel: kernel.name)
def test_products_in_float8_are_compared_in_bf16_with_those_of_a_cpu(kernel: ComparedKernel) -> None:
    assert (kernel.precision, compare_kernel(kernel, CPU, torch.bfloat16)) == ("bf16", 0)


def test_optional_kernels_are_checked_where_a_run_could_have_them() -> None:
    def machine(*gpus: Gpu) -> Machine:
        return Machine("here", "a CPU", 8, 2**36, gpus)

    old, new = machine(Gpu("Tesla T4", 2**34, (7, 5))), machine(Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)))
    assert [has_fused(here) for here in (machine(), old, new)] == [False, False, explain_no_triton() is None]
    newest = machine(Gpu("NVIDIA B200", 180 * 2**30, (10, 0)))
    plain, blocks = ("rowwise", "tensorwise"), ("rowwise", "tensorwise", "mxfp8", "nvfp4")
    assert [list_float8_scales(here) for here in (machine(), old, new, newest)] == [blocks, (), plain, blocks]


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

    assert compare_kernel(ComparedKernel("right", (x,), double, double), CPU, torch.float32) == 0
    for wrong in (lambda x: x * 2.001, WrongGradient.apply, lambda x: (x * 2).index_fill(0, torch.tensor([3]), 0)):
        assert compare_kernel(ComparedKernel("wrong", (x,), wrong, double), CPU, torch.float32) > TOLERANCES["fp32"]
    nothing = ComparedKernel("not a number", (x,), lambda x: x * float("nan"), double)
    assert not compare_kernel(nothing, CPU, torch.float32) <= TOLERANCES["fp32"]


def built(*kernels: str, capabilities: tuple[tuple[int, int], ...] = (), nccl: bool = True) -> dict[str, object]:
    """What a build of torch says of itself on a machine with GPUs of these capabilities."""
    return {"version": "2.7", "kernels": kernels, "capabilities": capabilities, "gloo": True, "nccl": nccl}


def test_a_torch_without_kernels_for_the_gpu_or_without_nccl() -> None:
    blackwell = ((12, 0), (12, 0))
    (missing,) = _check_build(built("sm_80", "sm_90", capabilities=blackwell), 2)
    assert missing.severity is Severity.BROKEN and "has no kernels for compute capability 12.0" in missing.what
    assert "sm_120" in missing.fix
    for right in (("sm_80", "sm_120"), ("sm_80", "compute_90")):
        assert list(_check_build(built(*right, capabilities=blackwell), 2)) == []
    (older,) = _check_build(built("sm_86", capabilities=((8, 0),)), 1)
    assert "8.0" in older.what
    (exchange,) = _check_build(built("sm_120", capabilities=blackwell, nccl=False), 2)
    assert exchange.what == "wrong torch build: 2.7 has no nccl"
    (hidden,) = _check_build(built("sm_90"), 1)
    assert "finds none of the 1 GPUs" in hidden.what and "/proc/driver/nvidia/version" in hidden.fix


def test_a_core_that_is_slower_than_the_others() -> None:
    (finding,) = _check_slow({0: 2.0e9, 1: 2.1e9, 2: 0.8e9, 3: 2.0e9})
    assert "core 2 (40%)" in finding.what and "taskset" in finding.fix
    assert list(_check_slow({0: 2.0e9, 1: 1.7e9})) == []


def test_time_that_is_lost_is_put_down_to_what_took_it() -> None:
    (stopped,) = _check_shares({"stopped": 0.5, "waited": 0.1, "stolen": 0.1, "throttled": 0.01})
    assert "was stopped for 50%" in stopped.what and "cpulimit" in stopped.fix
    (quota,) = _check_shares({"stopped": 0.5, "throttled": 0.4})
    assert "quota" in quota.what and "--cpus" in quota.fix
    (stolen,) = _check_shares({"stopped": 0.5, "stolen": 0.4})
    assert "hypervisor gave 40%" in stolen.what
    (waited,) = _check_shares({"waited": 0.5})
    assert waited.severity is Severity.NOTE


def test_clocks_and_heat_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for core, allowed in ((0, 3_000_000), (1, 1_500_000)):
        clock, heat = tmp_path / f"cpu{core}" / "cpufreq", tmp_path / f"cpu{core}" / "thermal_throttle"
        clock.mkdir(parents=True)
        heat.mkdir()
        (clock / "cpuinfo_max_freq").write_text("3000000\n")
        (clock / "scaling_max_freq").write_text(f"{allowed}\n")
        (heat / "core_throttle_count").write_text(f"{core}\n")
    (finding,) = _check_capped([0, 1], tmp_path)
    assert "the clock of 1 core is limited, of core 1 to 50%" in finding.what
    assert _read_heat_counts([0, 1, 2], tmp_path) == {0: 0, 1: 1}


def test_xid_errors_in_the_log_of_the_kernel() -> None:
    log = (
        "[ 1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=123, name=python, GPU has fallen off the bus.\n"
        "[ 2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=124, GPU has fallen off the bus.\n"
        "[ 3.0] NVRM: Xid (PCI:0000:5e:00): 31, pid=9, name=python, Ch 00000008\n"
        "[ 4.0] usb 1-1: new device\n"
    )
    bus, program = _check_xids(log)
    assert (bus.severity, program.severity) == (Severity.WARNING, Severity.NOTE)
    assert "Xid 79 for the GPU at 0000:3b:00, 2 times: the GPU has fallen off the bus" in bus.what
    assert "Xid 31" in program.what and "compute-sanitizer" in program.fix


def test_a_link_that_is_wrong_or_slow_beside_its_datasheet(tmp_path: Path) -> None:
    nvlink = build_fabric_link("nvlink", 4, 450e9, 8)
    gpu = Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0), link=nvlink)
    given = context(tmp_path, machine=replace(detect(), gpus=(gpu, gpu)))
    seconds = 2**28 / 400e9
    fast = judged_sums({"seconds": seconds, "wrong": []}, given, "cuda")
    assert fast.findings == () and fast.facts[0].startswith("400.00 GB/s each way, NVLink 4, 450 GB/s each way")
    (slow,) = judged_sums({"seconds": 20 * seconds, "wrong": []}, given, "cuda").findings
    assert slow.what == "the link between two GPUs has 4% of its rate" and "nvidia-smi topo -m" in slow.fix
    (wrong,) = judged_sums({"seconds": seconds, "wrong": [1]}, given, "cuda").findings
    assert wrong.severity is Severity.BROKEN and "wrong on rank 1" in wrong.what and "NCCL_P2P_DISABLE" in wrong.fix


def test_pinned_memory_that_is_wrong_or_slow_beside_its_slot() -> None:
    slot = build_pcie_link(5)
    right = {"wrong": 0, "to": 50e9, "from": 52e9}
    assert judged_copies(right, slot).findings == () and "PCIe 5" in judged_copies(right, slot).facts[0]
    (slow,) = judged_copies({**right, "from": 6e9}, slot).findings
    assert "10% of the slot's rate" in slow.what and slow.severity is Severity.WARNING
    (wrong,) = judged_copies({**right, "wrong": 3}, None).findings
    assert "3 of 8 copies" in wrong.what and wrong.severity is Severity.BROKEN


def test_the_rate_of_the_slot_of_a_disk(tmp_path: Path) -> None:
    (tmp_path / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (tmp_path / "current_link_width").write_text("4\n")
    assert _read_link_rate(tmp_path) == build_pcie_link(4, 4).bandwidth
    (tmp_path / "current_link_speed").write_text("Unknown\n")
    assert _read_link_rate(tmp_path) is None


def test_infiniband_ports_that_are_down(tmp_path: Path) -> None:
    for adapter, state, physical in (
        ("mlx5_0", "4: ACTIVE", "5: LinkUp"),
        ("mlx5_1", "1: DOWN", "2: Polling"),
        ("mlx5_2", "1: DOWN", "3: Disabled"),
    ):
        port = tmp_path / adapter / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "phys_state").write_text(f"{physical}\n")
    (finding,) = _check_adapters(tmp_path)
    assert finding.what == "dead interface: InfiniBand adapter mlx5_1, port 1, is DOWN"
    assert "NCCL_IB_HCA=^mlx5_1" in finding.fix


CHILD = """
import os, sys
from pathlib import Path
from tests.doctor.test_machine_checks import context
from trainwright.doctor.checks.check import CheckEnded
from trainwright.doctor.checks.check import read_answer

def work(answer):
    if sys.argv[1] == "crash":
        os.kill(os.getpid(), 4)
    if sys.argv[1] == "raise":
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    answer.write_text('{"two": 2}')

try:
    print(read_answer(work, "kernels", context(Path(sys.argv[2]))))
except CheckEnded as broken:
    print(broken.finding.what, "|", broken.finding.fix)
"""


@pytest.mark.slow
def test_work_that_crashes_is_a_finding_with_its_signal(tmp_path: Path) -> None:
    def run(kind: str) -> str:
        command = [sys.executable, "-c", CHILD, kind, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("work") == "{'two': 2}\n"
    assert run("crash").startswith("kernels: its process ended with exit code -4")
    raised = run("raise")
    assert raised.startswith("kernels: RuntimeError: CUDA error: no kernel image is available") and "torch" in raised
