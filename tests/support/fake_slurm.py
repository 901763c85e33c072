"""Commands in the place of Slurm's, and a file of clusters, for tests without a Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ALL = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")


def commands(here: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put commands of this name into PATH, in the place of Slurm's; the others fail."""
    (here / "bin").mkdir()
    for name, script in {**dict.fromkeys(_ALL, "exit 1"), **scripts}.items():
        (here / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (here / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")


def clusters(here: Path, text: str) -> None:
    """Write clusters.yaml."""
    file = here / "config" / "trainwright" / "clusters.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
