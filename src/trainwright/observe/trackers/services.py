"""Trackers that are services or programs of their own: Weights & Biases, MLflow and trackio. Their variables apply."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.machine.cache import try_write
from trainwright.observe.trackers.base import TrackerObserver, Values
from trainwright.recipe.yaml_text import values_by_key
from trainwright.run.observers.hooks import ObservedRun

_OURS = "trainwright"  # the project, unless a variable names another
_MLFLOW_RUN = "mlflow-run"  # file in the run directory with the identity of MLflow's run, to continue it
_LONGEST = 500  # characters of a parameter; MLflow refuses longer ones


def wandb(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that records a run in Weights & Biases (https://docs.wandb.ai/ref/python/)."""
    return TrackerObserver("wandb", run.directory, Wandb)


def mlflow(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that records a run in MLflow (https://mlflow.org/docs/latest/tracking)."""
    return TrackerObserver("mlflow", run.directory, Mlflow)


def trackio(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that records a run in trackio (https://huggingface.co/docs/trackio), by default here."""
    return TrackerObserver("trackio", run.directory, Trackio)


class _Logged:
    """A run of a library whose runs have ``log``."""

    _run: Any

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        self._run.log(values, step=step)

    def end(self, status: str) -> None:
        """End the run."""
        self._run.finish()


class Wandb(_Logged):
    """A run of Weights & Biases, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this directory."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _OURS),
            id=hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16],
            name=run.resolve().name,
            config=dict(config),
            dir=os.environ.get("WANDB_DIR", str(run)),
            resume="allow" if resumed else None,
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )

    def end(self, status: str) -> None:
        """End the run."""
        self._run.summary["status"] = status
        super().end(status)


class Trackio(_Logged):
    """A run of trackio, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this name."""
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _OURS),
            name=run.resolve().name,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
        )


class Mlflow:
    """A run of MLflow, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this directory."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        id_file = run / _MLFLOW_RUN
        if resumed and id_file.is_file():
            self._id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _OURS)
        experiment = self._client.get_experiment_by_name(name)
        identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(identity, run_name=run.resolve().name).info.run_id
        try_write(id_file, f"{self._id}\n")
        for key, value in values_by_key(config):
            self._client.log_param(self._id, key, str(value)[:_LONGEST])

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def end(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FINISHED" if status == "finished" else "KILLED")
