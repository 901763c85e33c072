"""trackio (https://huggingface.co/docs/trackio), which keeps its data on this machine unless told otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.observe.trackers.base import TrackerObserver, Values, check_installed


class Trackio:
    """A run of trackio, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this name."""
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "trainwright"),
            name=run.resolve().name,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
        )

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        self._run.log(values, step=step)

    def end(self, status: str) -> None:
        """End the run."""
        self._run.finish()


def trackio(run: Path) -> TrackerObserver:
    """Return an observer that records a run in trackio."""
    check_installed("trackio")
    return TrackerObserver("trackio", run, Trackio)
