"""Triton's interpreter, which runs kernels on a CPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton, interpreted (tests/conftest.py), for kernels on a CPU",
)
