"""The GPUs that answer now: one may fall off the bus while a program runs, and come back."""

from __future__ import annotations

import os

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_visible_at_start = os.environ.get(_VISIBLE)


def show_answering_gpus() -> int:
    """Show processes that are started from now on only the GPUs that answer; return their number."""
    answers = _answers()
    answering = [name for name in answers if name is not None]
    if len(answering) < len(answers):
        os.environ[_VISIBLE] = ",".join(answering)
    elif _visible_at_start is None:
        os.environ.pop(_VISIBLE, None)
    else:
        os.environ[_VISIBLE] = _visible_at_start
    return len(answering)


def _answers() -> list[str | None]:
    """Return the UUID of each GPU that was visible at the start, None for one that does not answer."""
    import pynvml

    def uuid(name: str) -> str | None:
        by_index = name.isdigit()
        try:
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            pynvml.nvmlDeviceGetUtilizationRates(handle)
            return str(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError_NotSupported:  # a slice of a GPU
            return name
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotFound):  # CUDA also reads the beginning of a UUID
            return None if by_index else name
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [None]
    try:
        if _visible_at_start is not None:
            return [uuid(name.strip()) for name in _visible_at_start.split(",")]
        return [uuid(str(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
