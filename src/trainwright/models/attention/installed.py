"""The attention kernels that the software of this machine lacks. Imports no torch."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from trainwright.machine.processor import why_no_triton
from trainwright.models.attention.kernels import Platform

_SOFT_CAPS = (2, 6)  # version of flash-attn with soft caps and a deterministic backward pass
_ABSENT = "is not installed"
_NOT_ASSUMED = "is not assumed to be installed"
# A machine that is not here is planned with PyTorch and a compiler alone.
ASSUMED = Platform(missing=(("flash_attn_3", _NOT_ASSUMED), ("flash_attn", _NOT_ASSUMED)))


@cache
def missing_kernels() -> tuple[tuple[str, str], ...]:
    """Return the names of kernels for GPUs that cannot be used here, each with the reason."""
    reasons = {"flash_attn_3": _without_third(), "flash_attn": _without_second(), "flex": why_no_triton()}
    return tuple((name, why) for name, why in reasons.items() if why is not None)


def _without_third() -> str | None:
    return None if find_spec("flash_attn_interface") is not None else _ABSENT


def _without_second() -> str | None:
    if find_spec("flash_attn") is None:
        return _ABSENT
    try:
        installed = version("flash_attn")
    except PackageNotFoundError:
        return "has no version"
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    return None if numbers >= _SOFT_CAPS else f"{installed} is older than {'.'.join(map(str, _SOFT_CAPS))}"
