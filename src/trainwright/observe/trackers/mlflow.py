"""MLflow (https://mlflow.org/docs/latest/tracking); its variables apply, such as MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.machine.cache import try_write
from trainwright.observe.trackers.base import TrackerObserver, Values, check_installed
from trainwright.recipe.yaml_text import values_by_key

_KEPT = "mlflow-run"  # file in the run directory with the run's identity, to continue it
_LONGEST = 500  # characters of a parameter; MLflow refuses longer ones


class Mlflow:
    """A run of MLflow, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this directory."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        id_file = run / _KEPT
        if resumed and id_file.is_file():
            self._id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "trainwright")
        experiment = self._client.get_experiment_by_name(name)
        identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(identity, run_name=run.resolve().name).info.run_id
        try_write(id_file, f"{self._id}\n")
        for key, value in values_by_key(config):
            self._client.log_param(self._id, key, str(value)[:_LONGEST])

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def end(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FINISHED" if status == "finished" else "KILLED")


def mlflow(run: Path) -> TrackerObserver:
    """Return an observer that records a run in MLflow."""
    check_installed("mlflow")
    return TrackerObserver("mlflow", run, Mlflow)
