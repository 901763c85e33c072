from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import MACHINE
from tests.support.janitor import Janitor
from tests.support.runs import Runs

# What the shell that starts the tests may have set for something else: a batch system's step, a launcher's process,
# a terminal. Commands under test would follow it.
_NOT_INHERITED = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "NODE_RANK", "TORCHELASTIC_"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "ACCELERATE_", "FSDP_", "DEEPSPEED_"),
    *("CUDA_VISIBLE_DEVICES", "TRAINWRIGHT_", "COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE"),
)
# Tests start several processes: threads for every core in each would only get in the others' way. Compiled modules are
# to be kept, as every process imports the same ones.
_SET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONUTF8": "1",  # what commands print is read as that, whatever the locale
    "TRAINWRIGHT_MACHINE": str(MACHINE),
}
_janitor = pytest.StashKey[Janitor]()


def pytest_configure(config: pytest.Config) -> None:
    """Tests see a described machine and empty caches on any machine, and nothing that they start outlives them."""
    directory = None
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist have this one's environment
        for name in [name for name in os.environ if name.startswith(_NOT_INHERITED)]:
            del os.environ[name]
        directory = Path(tempfile.mkdtemp(prefix="trainwright-tests-"))
        caches = {"TRAINWRIGHT_CACHE": str(directory / "cache"), "HF_HOME": str(directory / "huggingface")}
        os.environ.update({**_SET, **caches})
    config.stash[_janitor] = Janitor(directory)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start most runs come first: pytest-xdist deals files, and a long one at the end would be alone."""
    runs = Counter(item.path for item in items if "runs" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: -runs[item.path])


def pytest_unconfigure(config: pytest.Config) -> None:
    if (janitor := config.stash.get(_janitor, None)) is not None:
        janitor.close()


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests run on is looked at, in place of the described machine."""
    monkeypatch.delenv("TRAINWRIGHT_MACHINE")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Starts training runs; tests that ask for the same finished run share it."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()
