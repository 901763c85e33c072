"""What is said and done on systems other than Linux, as far as Linux can show it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, environment
from tests.support.runs import ON_ROWS, TINY
from trainwright.machine.accelerators import Build, Nvml, explain_unusable
from trainwright.machine.allocator import convert_peak_resident
from trainwright.machine.detect import detect
from trainwright.recipe.loading import load_recipe
from trainwright.run.resolve import resolve

TWO = (ON_ROWS, "parallel.num_processes=2", "parallel.strategy=ddp")
SPAWNING = Path(__file__).parent / "support" / "spawning.py"
# Windows: its name, and without the modules that it lacks.
WINDOWS = """
import runpy, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
sys.argv = ["trainwright", *sys.argv[1:]]
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.parametrize("arguments", [("train", str(TINY)), ("--help",), ("runs",)])
def test_on_windows_a_sentence_names_wsl(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = python("-c", f"{WINDOWS}runpy.run_module('trainwright', run_name='__main__')", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert "Trainwright does not run on Windows itself" in done.stderr and "wsl --install" in done.stderr


def test_on_windows_an_import_says_the_same(tmp_path: Path) -> None:
    done = python("-c", f"{WINDOWS}import trainwright as tw\ntw.train('recipe.yaml')", cwd=tmp_path)
    assert done.returncode == 3 and "WSL" in done.stderr and "Traceback" not in done.stderr


def test_on_macos_the_cpu_is_used_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, machine = load_recipe(TINY), replace(detect(), is_here=True)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert "Apple" not in "; ".join(explain_unusable(0, Nvml(error="no driver"), Build("2.13.0", None), variables={}))
    resolved = resolve(recipe, machine)
    assert resolved.recipe.parallel.device == "cpu"
    (remark,) = (reason for reason in resolved.reasons if "macOS" in reason)
    assert "experimental" in remark and "CPU" in remark and "MPS" in remark


def test_the_peak_of_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert convert_peak_resident(1000) == 1_024_000
    monkeypatch.setattr("sys.platform", "darwin")
    assert convert_peak_resident(1000) == 1000


@pytest.mark.slow
def test_verify_with_spawned_processes(tmp_path: Path) -> None:
    done = python(str(SPAWNING), "verify", str(TINY), "--steps", "2", *TWO, cwd=tmp_path)
    assert done.returncode == 0 and "the same run" in done.stdout, done.stderr


@pytest.mark.slow
def test_train_with_spawned_processes(tmp_path: Path) -> None:
    done = python(
        str(SPAWNING), "train", str(TINY), "train.max_steps=3", *TWO, "logging.run_directory=run", cwd=tmp_path
    )
    assert done.returncode == 0 and (tmp_path / "run" / "final").is_dir(), done.stderr
