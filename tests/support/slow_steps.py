"""A step policy that makes every step take as long as a slow machine's."""

from __future__ import annotations

import os
import time

from trainwright.engine.policies.base import StepPolicy


class SlowSteps(StepPolicy):
    """Sleeps for STEP_SECONDS of the environment after each step."""

    def after(self, step: int) -> None:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.5")))
