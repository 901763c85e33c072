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
    "tests/run/test_process.py",
    "tests/run/test_local.py",
    "tests/run/test_rendezvous.py",
    "tests/compatibility/accelerate/test_reading.py",
    "tests/observe/test_console.py",
    "tests/observe/test_remaining.py",
    "tests/cli/test_main.py",
    "tests/cli/test_plan.py",
    "tests/cli/test_setup.py",
    "tests/cli/test_terminal.py",
    "tests/cli/test_train.py",
)


# Every condition once, several at a time: a run takes minutes, and where one fails each can be tried alone. no-root is
# in read-only-home (the user) and surroundings (the file mode).
TOGETHER = (
    "one-core+path+zone-east",
    "busy+locale-turkish+zone-west",
    "read-only-home+surroundings",
    "nameless-user+locale-posix",
)


def test_every_condition_is_in_a_run() -> None:
    assert {name for several in TOGETHER for name in several.split("+")} == set(CONDITIONS) - {"no-root"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_the_tests_pass(name: str) -> None:
    try:
        done = run(name, [*PART, "-m", "not slow"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    except NotHere as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stdout[-20_000:]
