"""Neither tests nor what they test read the processor, the load, the memory or the clock of where they run, unasked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from trainwright.machine.detect import detect

# What tells of the machine and of the moment. Tests that mean this machine ask for the fixture `this_machine`; what
# takes time is waited for by `wait_for`.
_HOST = {
    *("os.cpu_count", "os.process_cpu_count", "os.getloadavg", "os.sched_getaffinity", "os.sysconf", "os.times"),
    *("multiprocessing.cpu_count", "psutil.cpu_count", "psutil.cpu_percent", "psutil.cpu_freq", "psutil.cpu_times"),
    *("psutil.virtual_memory", "psutil.disk_usage", "shutil.disk_usage", "platform.processor", "platform.machine"),
    *("platform.node", "socket.gethostname", "torch.cuda.is_available", "torch.cuda.device_count"),
    *("torch.cpu.is_avx512_bf16_supported", "torch.cpu.is_amx_tile_supported", "torch.get_num_threads"),
}
_MOMENT = {
    *("time.time", "time.monotonic", "time.perf_counter", "time.process_time", "time.thread_time"),
    *("time.localtime", "time.strftime", "datetime.now", "datetime.today", "date.today", "datetime.datetime.now"),
}
_USER = {"Path.home", "pathlib.Path.home", "getpass.getuser", "os.getlogin", "locale.getlocale", "locale.setlocale"}
_FILES = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "TRAINWRIGHT_MACHINE")

# Of the tests, the files that may, and why.
_ALLOWED = {
    "conftest.py": "says which machine tests see",
    "test_portable.py": "lists them",
    "support/commands.py": "gives up waiting after a time that is far beyond what anything takes",
    "support/conditions.py": "makes the conditions, and says how long each took",
    "support/machines.py": "names the variable",
    "support/interruptions.py": "tells Slurm when a job ends",
    "support/storm.py": "says how long a trial took, and gives up waiting for its end",
    "support/slurm.py": "names this machine to its controller",
    "support/terminal.py": "says for how long a terminal showed nothing, and gives up waiting",
    "engine/test_background_checkpoints.py": "kills at any moment of a write, as long as it takes here",
    "support/launch_entries.py": "has each worker say how many threads it was given",
    "models/test_recompute.py": "leaves out what takes a GPU",
    "gpu/test_one_gpu.py": "runs on the GPU that is here, and gives up waiting for a checkpoint",
    "machine/test_described.py": "tests the variable",
    "machine/test_quick.py": "tests what a described machine brings",
    "parallel/test_world.py": "gives ranks unequal memory",
    "observe/watching/test_hostile_runs.py": "shows that hostile runs cost little time",
    "doctor/test_hostile_logs.py": "shows that hostile logs cost seconds",
    "compatibility/accelerate/test_machine.py": "gives this machine two GPUs",
    "run/test_strangers.py": "floods a run for a time, and gives up waiting",
    "run/test_variables.py": "names variables of jobs",
    "observe/test_ledger.py": "has a launcher count the seconds since a line",
    "planning/test_on_other_machines.py": "sets the variable",
    "parallel/test_openmp.py": "keeps every core busy",
}
# Of the package, the files outside of machine/ that may, and why.
_MEASURING = {
    "doctor/calibrate.py": "what other programs use while this machine is measured",
    "doctor/checks/network.py": "where the name of this machine leads",
    "doctor/checks/cores.py": "the speed of each core",
    "engine/trainer.py": "what a run has had",
    "run/run_worker.py": "the threads that a run has and its plan is compared with, and the names of its machines",
    "engine/policies/stragglers.py": "whether a slow rank computes with fewer threads than the others",
    "engine/out_of_memory.py": "what was free when memory ran out",
    "engine/checkpoints/background.py": "whether training leaves a core to the thread that writes",
    "models/fused/blocked.py": "the threads that compute a part of the tokens together",
    "planning/trace/traced.py": "gives back the threads that it computes without",
    "parallel/openmp.py": "the threads that wait for one another",
    "run/group/device_slots.py": "whether members of one job share cores",
    "run/nodes.py": "names this machine to others",
    "run/joined.py": "names this machine to others",
    "run/group/rendezvous.py": "names this machine to others",
    "run/group/contract.py": "names this machine to others",
    "data/sources/pydoc_rows.py": "the text of Python's own documentation, which differs by platform",
}


def _uses(file: Path, names: set[str]) -> Iterator[str]:
    """Names in ``file`` that are among ``names``, and strings that name files of the machine, with their lines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    attributes = {name.rpartition(".")[2] for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in attributes and (dotted := ast.unparse(node)) in names:
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {dotted}"
        elif isinstance(node, ast.ImportFrom):
            for found in (f"{node.module}.{each.name}" for each in node.names):
                if found in names:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: {found}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            for found in _FILES:
                if found in node.value:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: {found}"


def _found(directory: Path, allowed: dict[str, str], names: set[str]) -> list[str]:
    files = sorted(directory.rglob("*.py"))
    assert not (unused := set(allowed) - {str(file.relative_to(directory)) for file in files}), unused
    return [use for file in files if str(file.relative_to(directory)) not in allowed for use in _uses(file, names)]


@pytest.mark.slow
def test_no_test_reads_where_or_when_it_runs() -> None:
    assert _found(ROOT / "tests", _ALLOWED, _HOST | _MOMENT | _USER) == []


def test_the_package_looks_at_its_machine_in_one_place() -> None:
    """The rest of it asks `trainwright.machine`, which a description can stand in for."""
    package = ROOT / "src" / "trainwright"
    own = {str(file.relative_to(package)): "" for file in (package / "machine").rglob("*.py")}
    assert _found(package, {**_MEASURING, **own}, _HOST) == []


def test_looking_at_this_machine_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_MACHINE")
    with pytest.raises(AssertionError, match="this_machine"):
        detect()
