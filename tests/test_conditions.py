"""The tests pass on other machines and for other users: a part of them under each condition of support/conditions.py.

`make test-conditions` runs all of them.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.support.conditions import CONDITIONS, NotHere, run

# Of every area, what meets the machine and the user: files, paths, clocks, terminals, processes; and a whole run.
PART = (
    "tests/test_janitor.py",
    "tests/test_text.py",
    "tests/recipe/test_files.py",
    "tests/recipe/test_command.py",
    "tests/machine/test_cgroups.py",
    "tests/machine/test_described.py",
    "tests/machine/test_describe.py",
    "tests/data/test_sources.py",
    "tests/data/test_raw.py",
    "tests/data/test_templates.py",
    "tests/models/test_resolve.py",
    "tests/engine/test_checkpoint_writing.py",
    "tests/launch/test_process.py",
    "tests/launch/test_local.py",
    "tests/launch/test_rendezvous.py",
    "tests/launch/accelerate/test_reading.py",
    "tests/observe/test_console.py",
    "tests/observe/test_remaining.py",
    "tests/cli/test_main.py",
    "tests/cli/test_plan.py",
    "tests/cli/test_setup.py",
    "tests/cli/test_terminal.py",
    "tests/cli/test_train.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_tests_pass(name: str) -> None:
    try:
        done = run(name, [*PART, "-m", "not slow"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    except NotHere as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stdout[-20_000:]
