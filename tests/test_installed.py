"""The source distribution and the wheel: each brings what it needs, far from the checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.commands import ROOT

# What Git does not have, and links to installed packages.
_LEFT_OUT = shutil.ignore_patterns(".venv", ".git", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")


def run(*words: object, cwd: Path, code: int = 0) -> str:
    """Run a command outside the checkout; return what it prints."""
    foreign = ("PYTHONPATH", "TRAINWRIGHT_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "1000"}
    command = [str(word) for word in words]
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    directory = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, directory / "checkout", symlinks=True, ignore=_LEFT_OUT)
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run(sys.executable, "-c", build, cwd=directory / "checkout")
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
def test_a_source_distribution_runs_its_tests(source: Path) -> None:
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "tests/recipe",
        "tests/docs/test_repository.py",
    )
    run("env", "PYTHONPATH=src", sys.executable, *words, cwd=source)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("constrained", [True, False], ids=["constraints", "newest"])
def test_a_wheel_trains_without_the_checkout(source: Path, tmp_path: Path, constrained: bool) -> None:
    run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    binaries = tmp_path / "environment" / "bin"
    pip = (binaries / "python", "-m", "pip")
    constraints = ("--constraint", ROOT / "constraints.txt") if constrained else ()
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    torch = metadata.version("torch").partition("+")[0]  # as another one may bring gigabytes of CUDA
    run(*pip, "install", *constraints, f"torch=={torch}", *tmp_path.glob("*.whl"), cwd=tmp_path)
    trainwright = binaries / "trainwright"
    assert "sft/tiny " in run(trainwright, "recipe", "new", "--list", cwd=tmp_path)
    assert "recipe new sft/tiny writes it" in run(trainwright, "train", "recipes/sft/tiny.yaml", cwd=tmp_path, code=2)
    run(trainwright, "recipe", "new", "sft/tiny", cwd=tmp_path)
    words = ("train.max_steps=3", "logging.run_directory=run", "parallel.num_processes=2")
    assert "finished at step 3" in run(trainwright, "train", "recipes/sft/tiny.yaml", *words, cwd=tmp_path)
    run(trainwright, "generate", "run", "--prompt", "What is a list?", cwd=tmp_path)
    said = run(trainwright, "eval", "run", "--quick", cwd=tmp_path, code=3)
    (fix,) = re.findall(r"pip install (.*)", said)
    assert "trainwright[" not in fix
    run(*pip, "install", *constraints, *shlex.split(fix), cwd=tmp_path)
    assert "loss" in run(trainwright, "eval", "run", "--quick", cwd=tmp_path)
