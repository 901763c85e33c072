"""Weights & Biases (https://docs.wandb.ai/ref/python/); its variables apply, such as WANDB_PROJECT."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.observe.trackers.base import TrackerObserver, Values, check_installed


class Wandb:
    """A run of Weights & Biases, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this directory."""
        import wandb

        directory = os.environ.get("WANDB_DIR", str(run))
        identity = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "trainwright"),
            id=identity,
            name=run.resolve().name,
            config=dict(config),
            dir=directory,
            resume="allow" if resumed else None,
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        self._run.log(values, step=step)

    def end(self, status: str) -> None:
        """End the run."""
        self._run.summary["status"] = status
        self._run.finish()


def wandb(run: Path) -> TrackerObserver:
    """Return an observer that records a run in Weights & Biases."""
    check_installed("wandb")
    return TrackerObserver("wandb", run, Wandb)
