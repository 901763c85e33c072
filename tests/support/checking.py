"""Checkpoints that take long to verify, and the phase in which they are."""

from __future__ import annotations

import os
import time
from io import BufferedReader
from pathlib import Path
from typing import Any

from trainwright.engine.checkpoints import checkpoint
from trainwright.engine.policies.base import RewindRequested, StepPolicy, TrainingContext
from trainwright.utils import heartbeat

_CHECKED = checkpoint.compute_checksum


class SlowChecking(StepPolicy):
    """Takes CHECKING_SECONDS longer to verify a checkpoint, and writes the phase meanwhile to the file CHECKING_FILE.

    It goes back once at step 5 if the variable CHECKING_REWINDS is set.
    """

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self.rewinds = "CHECKING_REWINDS" in os.environ
        self.slow = True
        checkpoint.compute_checksum = self._checksum

    def before(self, step: int, batch: Any, gradients: Any) -> None:
        self.slow = True
        if step == 5 and self.rewinds:
            self.rewinds = False
            raise RewindRequested("non_finite", 0, "a test goes back")

    def _checksum(self, file: BufferedReader) -> tuple[int, str]:
        time.sleep(float(os.environ["CHECKING_SECONDS"]) if self.slow else 0.0)
        self.slow = False
        own = heartbeat.find_own_heartbeat()
        assert own is not None
        with Path(os.environ["CHECKING_FILE"]).open("a") as out:
            out.write(f"{own.use.phase}\n")
        return _CHECKED(file)
