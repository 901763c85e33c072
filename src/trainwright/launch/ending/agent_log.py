"""The log of torch's elastic agent."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def quiet_agent(log: Path) -> Any:
    """Write the agent's own failure reports to a file: the console gets ours, once."""
    handler = _QuietFile(log, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()


class _QuietFile(logging.FileHandler):
    """A log file that ignores write errors: its disk may be full, or its directory deleted."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # raised when opening it
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()
