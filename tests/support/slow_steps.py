"""A step policy that makes every step take as long as a slow machine's."""

from __future__ import annotations

import os
import time
from pathlib import Path

from trainwright.engine.policies.base import StepPolicy


class SlowSteps(StepPolicy):
    """Sleeps for STEP_SECONDS of the environment after each step, until the file STEP_FILE exists."""

    def after(self, step: int) -> None:
        file = os.environ.get("STEP_FILE")
        if file is None or not Path(file).exists():
            time.sleep(float(os.environ.get("STEP_SECONDS", "0.5")))
