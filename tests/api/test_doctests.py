"""The examples in the API's docstrings run, in a directory with a recipe `tiny.yaml` and its run `runs/tiny`."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright import Recipe


def examples(module: str) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]


MODULES = sorted({module for name in tw.__all__ if examples(module := getattr(tw, name).__module__)})


# Those that start torch.
SLOW = ("training", "evaluation", "generation", "merging", "publishing", "verification")
PARAMETERS = [pytest.param(name, marks=[pytest.mark.slow] * name.endswith(SLOW)) for name in MODULES]


@pytest.mark.parametrize("module", PARAMETERS)
def test_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    settings = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=4")
    Recipe.load(TINY, *settings, "logging.observers.tensorboard=false").save(tmp_path / "tiny.yaml")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(runs.trained(*settings))
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(module):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
