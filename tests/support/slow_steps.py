"""Step policies that make steps slow, as on a slow machine, or fail, as on a broken one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from trainwright.engine.policies.base import StepPolicy


class SlowSteps(StepPolicy):
    """Sleeps for STEP_SECONDS of the environment after each step, until the file STEP_FILE exists."""

    def after(self, step: int) -> None:
        file = os.environ.get("STEP_FILE")
        if file is None or not Path(file).exists():
            time.sleep(float(os.environ.get("STEP_SECONDS", "0.5")))


class KilledSteps(StepPolicy):
    """Kills its process after the second step, whenever the run is started."""

    def after(self, step: int) -> None:
        if step >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
