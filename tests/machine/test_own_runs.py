from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.machine.machine import Machine
from trainwright.machine.measured.own_runs import Correction, OwnRun, OwnRuns, read_own_runs, remember_run

HERE = Machine("here", "a processor", 2, 16 * 2**30, (), is_here=True)
RUN = OwnRun("llama", "ddp", "measurement", 1.5, 1.0)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))


def test_runs_are_kept_by_machine_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_run(HERE, RUN)
    remember_run(HERE, replace(RUN, way="single"))
    assert read_own_runs(HERE).runs == (RUN, replace(RUN, way="single"))
    assert read_own_runs(replace(HERE, cpu_cores=4)) == OwnRuns()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert read_own_runs(HERE) == OwnRuns()


def test_no_more_than_a_hundred_runs_are_kept_and_none_that_is_impossible() -> None:
    for number in range(105):
        remember_run(HERE, replace(RUN, way=str(number)))
    assert [run.way for run in read_own_runs(HERE).runs] == [str(number) for number in range(5, 105)]
    for seconds in (float("nan"), float("inf"), 0.0, 50.0):
        remember_run(HERE, replace(RUN, way="impossible", seconds=seconds))
    assert not any(run.way == "impossible" for run in read_own_runs(HERE).runs)


def test_a_damaged_file_is_as_none() -> None:
    remember_run(HERE, RUN)
    for text in ("", "[]", "{}", '{"form": 1, "runs": [{"color": 1}]}'):
        for file in Path(own_runs_directory()).iterdir():
            file.write_text(text)
        assert read_own_runs(HERE) == OwnRuns()


def own_runs_directory() -> Path:
    from trainwright.machine.cache import find_cache_root

    return find_cache_root() / "runs"


def test_the_median_of_the_last_runs_of_a_way_corrects_it() -> None:
    runs = OwnRuns(tuple(replace(RUN, seconds=seconds) for seconds in (9.0, 9.0, 1.0, 1.1, 1.2, 1.3, 1.4)))
    assert runs.correction("llama", "ddp", "measurement") == Correction(1.2, 5, pytest.approx(1 / 6), True)
    assert runs.correction("gpt2", "ddp", "measurement") == Correction()
    assert runs.correction("llama", "ddp", "calibration") == Correction()


def test_another_way_is_corrected_by_all_ways_of_the_model_each_of_which_counts_once() -> None:
    many = tuple(replace(RUN, way="single", seconds=2.0) for _ in range(5))
    runs = OwnRuns((*many, replace(RUN, way="ddp", seconds=1.0)))
    found = runs.correction("llama", "fsdp", "measurement")
    assert (found.seconds, found.runs, found.exact) == (1.5, 2, False)
