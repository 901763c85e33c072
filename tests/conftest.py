from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support import commands
from tests.support.commands import MACHINE
from tests.support.forked import fork_server
from tests.support.janitor import Janitor
from tests.support.processes import Processes
from tests.support.runs import Runs
from tests.support.traces import share, shared_directory
from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import Heartbeat, Use

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
    "TRAINWRIGHT_QUIET": "1",  # how long something takes is up to the machine, and what takes long is told
    "PYTHONUTF8": "1",  # what commands print is read as that, whatever the locale
}
# Without a GPU Triton's kernels are interpreted, which it decides when it is imported.
if not Path("/dev/nvidiactl").exists():
    _SET["TRITON_INTERPRET"] = "1"
_janitor = pytest.StashKey[Janitor]()


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "the machine that tests take theirs for: a file as `trainwright machine --json` writes it"
    parser.addoption("--machine", metavar="FILE", default=str(MACHINE), help=told)
    forked = "run the files of tests side by side in so many processes, forked when all tests are collected"
    parser.addoption("--processes", type=int, metavar="N", default=1, help=forked)


def pytest_configure(config: pytest.Config) -> None:
    """Tests see a described machine and empty caches on any machine, and nothing that they start outlives them."""
    limit = float(config.getoption("timeout", None) or config.getini("timeout") or 300)
    commands.PATIENCE = max(commands.PATIENCE, min(limit / 2, 500))  # what sleeps until it is killed does so for 600 s
    # A shell ignores some signals in what it starts in the background, and so would all that is started from here.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = None
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist have this one's environment
        for name in [name for name in os.environ if name.startswith(_NOT_INHERITED)]:
            del os.environ[name]
        directory = Path(tempfile.mkdtemp(prefix="trainwright-tests-"))
        caches = {
            "TRAINWRIGHT_CACHE": str(directory / "cache"),
            "HF_HOME": str(directory / "huggingface"),
            "NLTK_DATA": str(directory),
        }
        kept = getattr(config, "cache", None)  # nothing is kept with `-p no:cacheprovider`
        traces = shared_directory(kept.mkdir("traces") if kept is not None else Path(tempfile.mkdtemp(dir=directory)))
        share(directory / "cache", traces)
        machine = {"TRAINWRIGHT_MACHINE": str(Path(config.getoption("machine")).absolute())}
        os.environ.update({**_SET, **caches, **machine})
        sys.dont_write_bytecode = False  # as in what is started from here
    config.stash[_janitor] = Janitor(directory)
    if (processes := config.getoption("processes")) > 1:
        config.pluginmanager.register(Processes(processes))
        fork_server()  # it imports while tests are collected, and is one for all
    gc.disable()  # until all is imported: there is no garbage among it, and much to look through


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start most runs come first: a process that takes a long one at the end would work alone."""
    runs = Counter(item.path for item in items if "runs" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: -runs[item.path])


def pytest_unconfigure(config: pytest.Config) -> None:
    if fork_server.cache_info().currsize:
        fork_server().close()
    if (janitor := config.stash.get(_janitor, None)) is not None:
        janitor.close()


@pytest.fixture(autouse=True)
def _asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that looks at what it runs on without asking for that has lost the description: let it fail."""

    def look() -> NoReturn:
        raise AssertionError("this test looks at the machine it runs on: ask for the fixture this_machine")

    if "this_machine" not in request.fixturenames:
        monkeypatch.setattr("trainwright.machine.detect._inspect", look)


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests run on is looked at, in place of the described machine."""
    monkeypatch.delenv("TRAINWRIGHT_MACHINE")


@pytest.fixture
def told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is told."""
    monkeypatch.delenv("TRAINWRIGHT_QUIET")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is the one that is usual here, also where `--machine` names another."""
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(MACHINE))


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Use]:
    """The marks in the heartbeat of this process, which is a worker."""
    own, found = Heartbeat(None), list[Use]()
    own.changed = lambda use, step, micro_batch: found.append(use)
    monkeypatch.setattr(heartbeat, "_own", own)
    return found


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Starts training runs; tests that ask for the same finished run share it."""
    shared = Path(os.environ["TRAINWRIGHT_CACHE"]).with_name("trained")
    shared.mkdir(exist_ok=True)
    made = Runs(tmp_path_factory.mktemp("runs"), shared)
    share(made.directory / "cache")
    yield made
    made.close()
