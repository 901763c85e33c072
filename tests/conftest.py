from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Starts training runs; tests that ask for the same finished run share it."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()
