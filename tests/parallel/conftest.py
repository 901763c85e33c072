from __future__ import annotations

import pytest

from tests.support.runs import Runs
from tests.support.strategies import Singles, trained_singles


@pytest.fixture(scope="session")
def singles(runs: Runs) -> Singles:
    """Eight steps on one process, for whatever is spread over more to be compared with."""
    return trained_singles(runs, 8)
