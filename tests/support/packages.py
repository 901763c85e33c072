"""Virtual environments with packages that are no dependency of this project, made when a test first needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def environment_with(directory: Path, *packages: str) -> Path:
    """Return the Python of a new environment with the packages; skip the test if they cannot be installed."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {last}")
    return python
