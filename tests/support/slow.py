"""Values of parameters of which the fast tests take some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(*fast: Any, among: Iterable[Any]) -> list[Any]:
    """All values, with the mark of slow tests on those that are not in ``fast``."""
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in among]
