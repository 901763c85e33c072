"""Plans on machines of many kinds, described; and the tests of plans themselves as each of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import ROOT, environment
from tests.support.machines import MACHINES, write
from tests.support.runs import TINY
from tests.support.slow import slow_but
from trainwright.cli.main import app
from trainwright.errors import MachineError

# What asks for the machine, or may do so by mistake; without those that count and trace models of transformers.
TESTS = (
    *sorted(str(file) for file in Path(__file__).parent.glob("test_*.py")),
    *(
        str(ROOT / "tests" / name)
        for name in ("machine", "compatibility/accelerate", "cli/test_plan.py", "cli/test_setup.py")
    ),
)
_LEFT_OUT = ("test_on_other_machines.py",)


# One of each kind of processor, and all with GPUs.
_CORES = ("1-core", "2-cores-no-vectors", "112-cores-amx", "16-cores-zen-4", "4-cores-neon", "8-cores-apple")
FAST = (*_CORES, "rtx-4090", "8-h100", "t4-and-p100", "amd-gpus-unused")


@pytest.fixture(params=slow_but(*FAST, among=MACHINES))
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the machine that this one is taken for."""
    found: str = request.param
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(write(found, tmp_path)))
    return found


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def planned(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(shown("plan", *arguments, "--json"))
    return content


def test_a_machine_is_what_its_file_says(name: str) -> None:
    told = json.loads(shown("machine", "--json"))["machine"]
    assert {**told, "described_by": None} == json.loads(json.dumps(asdict(MACHINES[name])))
    assert Path(told["described_by"]).stem == name
    assert MACHINES[name].cpu_name in shown("machine") or MACHINES[name].gpus


@pytest.mark.slow
def test_a_plan_is_one_that_the_machine_can_run(name: str) -> None:
    machine = MACHINES[name]
    if machine.unusable:
        with pytest.raises(MachineError, match=r"(?s)AMD GPUs.*parallel\.device=cpu"):
            planned(str(TINY))
    on_cpu = () if machine.gpus else ("parallel.device=cpu",)
    found = planned(str(TINY), *on_cpu)
    chosen = found["chosen"]
    assert found["fits"] and chosen["needed_bytes"] <= chosen["available_bytes"]
    assert chosen["available_bytes"] <= (min(gpu.memory_bytes for gpu in machine.gpus or (machine,)))
    assert 1 <= chosen["num_processes"] <= (len(machine.gpus) or machine.cpu_cores)
    assert machine.gpus or chosen["num_processes"] * chosen["threads"] <= machine.cpu_cores
    assert chosen["mixed_precision"] != "bf16" or machine.has_bf16
    assert chosen["time"]["seconds"] > 0
    assert found == planned(str(TINY), *on_cpu), "the same request is the same plan"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", MACHINES)
def test_the_tests_of_plans_pass(kind: str, tmp_path: Path) -> None:
    files = [file for file in TESTS if Path(file).name not in _LEFT_OUT]
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow", f"--machine={write(kind, tmp_path)}")
    command = [sys.executable, "-m", "pytest", *options, f"--basetemp={tmp_path / 'base'}", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout[-20_000:]
