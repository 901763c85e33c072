"""What the kernel counts is read, and from it what made a process slow: everything that did, and nothing else."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import environment
from tests.support.doctor import driver
from tests.support.kernel_files import State
from trainwright.machine import counters, detect
from trainwright.machine.counters import Counters, read_clocks
from trainwright.machine.measured import calibration
from trainwright.machine.slowdowns import describe_causes, find_causes
from trainwright.machine.usage import UsageSampler, format_figures

PRESSURE = {"cpu": 10.0, "io": 20.0, "memory": 30.0}
NONE = {"cpu": 0.0, "io": 0.0, "memory": 0.0}
BEFORE = State(wall=1000.0, others=50.0, ran=100.0, queued=7.0, faults=90, pressure=PRESSURE, heat=(3.0, 5))
BUSY = BEFORE.then(wall=1010.0, ran=110.0)  # ten seconds of computing and nothing else
ON_TEN = {"cores": 2, "threads": 2, "processes": 1}


def since(tmp_path: Path, after: State, before: State = BEFORE, parent: int | None = None) -> dict[str, float]:
    first = before.counters(tmp_path, parent)
    return after.counters(tmp_path, parent).since(first)


def test_what_happened_since_then(tmp_path: Path) -> None:
    after = BEFORE.then(
        **{"wall": 1010.0, "others": 62.0, "ran": 104.0, "queued": 9.0, "faults": 190, "swapped": 100, "stolen": 1.0},
        **{"pressure": {"cpu": 15.0, "io": 23.0, "memory": 30.0}, "periods": (100, 40), "heat": (4.0, 8)},
    )
    assert since(tmp_path, after) == pytest.approx(
        {
            **{"cpu": 0.4, "other_cores": 1.2, "host_cpu": 16 / 19, "waited": 2 / 6, "stolen": 0.05, "throttled": 0.4},
            **{"pressure_cpu": 0.5, "pressure_io": 0.3, "pressure_memory": 0.0, "asleep": 0.4, "disk": 0.3},
            **{"faults": 10.0, "swap_in": 10.0 * mmap.PAGESIZE, "swap_out": 0.0, "read": 0.0, "written": 0.0},
            **{"heat": 0.1, "heat_events": 3},
        }
    )


def test_the_ranks_of_a_run_and_their_children_are_not_other_programs(tmp_path: Path) -> None:
    family = {5: (9.0, (11, 12)), 11: (40.0, ()), 12: (30.0, (13,)), 13: (1.0, ())}
    before = State(wall=0.0, family=family)
    after = State(wall=10.0, others=5.0, family={**family, 11: (50.0, ()), 12: (34.0, (13,)), 13: (2.0, ())})
    assert since(tmp_path, after, before, parent=5)["other_cores"] == pytest.approx(0.5)


def test_delays_of_disks_are_those_of_this_process_where_the_kernel_counts_them(tmp_path: Path) -> None:
    before = BEFORE.then(delay=1.0)
    after = before.then(wall=1010.0, ran=102.0, delay=3.0, pressure={**PRESSURE, "io": 29.0})
    assert since(tmp_path, after, before)["disk"] == pytest.approx(0.2)


def test_without_pressure_disks_are_waited_for_while_cores_wait_for_them(tmp_path: Path) -> None:
    before = BEFORE.then(pressure=None)
    assert since(tmp_path, before.then(wall=1010.0, ran=105.0, iowait=4.0), before)["disk"] == pytest.approx(0.4)


def test_a_machine_that_shows_nothing_is_no_error(tmp_path: Path) -> None:
    nothing = Counters.now(1, tmp_path, 0.0)
    assert Counters.now(1, tmp_path, 10.0).since(nothing) == {}
    assert dict(read_clocks(tmp_path)) == {}
    assert UsageSampler(parent=1, root=tmp_path)() == {}


CAUSES: dict[str, tuple[dict[str, Any], dict[str, float], str]] = {
    "quota": ({"periods": (100, 60), "queued": 12.0, "ran": 105.0}, {}, "stopped the process in 60% of its periods"),
    "load": (
        {"others": 64.0, "queued": 11.0, "ran": 106.0},
        {},
        "waited for a core 40% of the time: other programs use this machine, 1.4 cores on average",
    ),
    "own threads": (
        {"queued": 12.0, "ran": 105.0},
        {"threads": 4, "processes": 2},
        "2 processes of 4 threads share 2 cores; lower OMP_NUM_THREADS",
    ),
    "hypervisor": ({"stolen": 4.0}, {}, "gave 20% of its CPU time to others"),
    "disk": ({"ran": 104.0, "pressure": {**PRESSURE, "io": 26.0}}, {}, "waited for disks 60% of the time"),
    "memory": (
        {"ran": 105.0, "faults": 5090, "swapped": 5000, "pressure": {**PRESSURE, "io": 25.0, "memory": 35.0}},
        {},
        "memory is low: 500 pages per second were read from disk, ",
    ),
    "heat": ({"heat": (6.0, 9)}, {}, "heat slowed down its processors for 30% of the time"),
    "stopped": ({"ran": 103.0, "pressure": PRESSURE}, {}, "did not run for 70% of the time"),
    "threads": ({}, {"threads": 1, "planned": 2}, "1 thread per process, where 2 were expected"),
}


def found_causes(tmp_path: Path, changes: dict[str, Any], known: dict[str, float]) -> list[Any]:
    found = {**ON_TEN, **since(tmp_path, BUSY.then(**changes)), **known}
    return find_causes(found, planned_threads=known.get("planned"), sleeps=False)


@pytest.mark.parametrize("kind", CAUSES)
def test_each_cause_is_the_only_one_where_only_it_holds(tmp_path: Path, kind: str) -> None:
    changes, known, words = CAUSES[kind]
    (cause,) = found_causes(tmp_path, changes, known)
    assert cause.kind == kind and words in cause.words


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"others": 65.0},  # on the other core
        {"queued": 7.5, "ran": 109.5},
        {"pressure": {"cpu": 18.0, "io": 29.0, "memory": 39.0}},  # of others: this process slept for none of it
        {"faults": 5090},  # files that are read for the first time, at once
        {"periods": (100, 5), "stolen": 0.5, "heat": (3.1, 6)},
    ],
)
def test_a_process_that_computes_has_no_cause(tmp_path: Path, changes: dict[str, Any]) -> None:
    causes = found_causes(tmp_path, changes, {})
    assert causes == [] and describe_causes(causes) == "no cause shows on its machine"


def test_a_process_that_waits_for_other_ranks_or_its_gpu_is_not_stopped(tmp_path: Path) -> None:
    asleep = {**ON_TEN, **since(tmp_path, BUSY.then(ran=103.0, pressure={**PRESSURE, "io": 26.0}))}
    assert [cause.kind for cause in find_causes(asleep, sleeps=False)] == ["disk"]
    assert find_causes(asleep, elsewhere=0.7, sleeps=False) == []
    assert find_causes({**asleep, "disk": 0.0}) == []


def test_every_cause_that_holds_is_named_the_largest_first(tmp_path: Path) -> None:
    changes = {"others": 64.0, "queued": 10.0, "ran": 104.0, "stolen": 2.0, "pressure": {**PRESSURE, "io": 22.0}}
    causes = found_causes(tmp_path, changes, {"threads": 1, "planned": 4})
    assert [cause.kind for cause in causes] == ["threads", "load", "disk", "hypervisor"]
    assert describe_causes(causes).count("; ") == 3


def test_foreign_load_and_too_many_threads_of_the_run_share_the_waiting(tmp_path: Path) -> None:
    changes = {"others": 60.0, "queued": 12.0, "ran": 105.0}
    causes = found_causes(tmp_path, changes, {"threads": 2, "processes": 2})
    assert {cause.kind: cause.share for cause in causes} == pytest.approx({"own threads": 1 / 3, "load": 1 / 6})


def test_a_clock_below_the_base_clock(tmp_path: Path) -> None:
    BEFORE.then(clock=(1_100_000, 2_200_000)).counters(tmp_path)
    assert dict(read_clocks(tmp_path)) == {"clock": 1100.0, "usual_clock": 2200.0}
    (cause,) = find_causes(dict(read_clocks(tmp_path)))
    assert (cause.kind, cause.share) == ("clock", 0.5)
    assert cause.words == "its processors run at 1100 MHz, below the usual 2200 MHz"
    assert find_causes({"clock": 2300.0, "usual_clock": 2200.0}) == []


def test_a_sample_has_what_the_machine_shows(tmp_path: Path) -> None:
    before = BEFORE.then(clock=(1_500_000, 2_200_000))
    before.counters(tmp_path)
    chip = tmp_path / "sys/class/hwmon/hwmon1"
    chip.mkdir(parents=True)
    for name, text in {"name": "coretemp", "temp1_input": "71500", "temp1_label": "Package id 0"}.items():
        (chip / name).write_text(f"{text}\n")
    (chip / "temp2_input").write_text("99000\n")  # of a core
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    sampler = UsageSampler(root=tmp_path)
    before.then(faults=190, periods=(10, 5)).counters(tmp_path)
    found = sampler()
    assert {"clock": 1500, "temperature": 71.5, "host_memory_free": 2**21, "throttled": 0.5}.items() <= found.items()
    assert found["faults"] > 0.0


class Library:
    """What stands in for pynvml: a GPU that tells these values, and no others."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        """What it raises."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, f"nvmlDevice{name}", lambda *_, value=value: self._told(value))

    def _told(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError
        return value


GPU = {"GetPowerUsage": 700_000, "GetClockInfo": 1200, "GetMaxClockInfo": 1980, "GetTemperature": 88}


@pytest.mark.parametrize(
    ("bits", "name", "limited"),
    [
        (0x24, "GetCurrentClocksEventReasons", ["its power limit", "heat (driver)"]),
        (0x48, "GetCurrentClocksThrottleReasons", ["a hardware slowdown", "heat (hardware)"]),
        (0x1, "GetCurrentClocksEventReasons", []),
    ],
)
def test_a_gpu_tells_what_lowers_its_clock(bits: int, name: str, limited: list[str]) -> None:
    state = counters.read_gpu_state(Library(**GPU, **{name: bits}), None)
    expected = {"power": 700.0, "clock": 1200, "highest_clock": 1980, "temperature": 88, "limited": limited}
    assert state == expected  # what it does not tell is left out
    causes = find_causes({"asleep": 0.9}, gpu=state)
    if not limited:  # it is idle
        assert causes == []
    else:
        (cause,) = causes
        assert cause.kind == "GPU" and cause.share == pytest.approx(1 - 1200 / 1980)
        assert f"runs at 1200 of 1980 MHz, limited by {' and '.join(limited)}, at 88 °C" in cause.words


def test_a_gpu_near_its_highest_clock_is_not_limited() -> None:
    state = {"clock": 1755, "highest_clock": 1980, "limited": ["its power limit"]}
    assert counters.find_low_clock(state) is None
    assert counters.find_low_clock({**state, "limited": ["heat (driver)"]}) is not None
    assert counters.find_low_clock({"clock": 900, "highest_clock": 1980}) is not None  # it does not tell why


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is a library of Linux")
@pytest.mark.parametrize(("visible", "shown"), [("0", "gpu 97%  4/80 GiB  350 W  91 °C"), ("", "cpu ")])
def test_a_rank_samples_its_gpu_unless_it_runs_on_the_cpu(tmp_path: Path, visible: str, shown: str) -> None:
    program = """if True:
        from trainwright.machine.usage import UsageSampler, format_figures
        print("  ".join(format_figures([UsageSampler("0000:17:00.0")()]).values()))
    """
    command = [*driver(tmp_path), sys.executable, "-c", program]
    variables = environment(CUDA_VISIBLE_DEVICES=visible)
    assert subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.startswith(shown)


def test_figures_leave_out_what_no_sample_has_and_what_is_damaged() -> None:
    assert format_figures([]) == format_figures([{"gpu": "damaged", "cpu": "x", "memory": float("nan")}]) == {}
    assert format_figures([{"gpu": {"memory": 2**29}}, {"cpu": 1.0}]) == {"memory": "0.5 GiB"}
    assert format_figures([{"gpu": {"power": 10**400, "temperature": 64}, "temperature": 30}]) == {
        "temperature": "64 °C"
    }


def test_without_nvidias_library_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert counters.read_gpu_by_address("0000:17:00.0") == {}
    assert "gpu" not in UsageSampler("0000:17:00.0")()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, nvml = detect._list_nvidia_gpus()
    assert found == () and "nvidia-ml-py cannot be imported" in str(nvml.error)
    assert calibration._read_driver_version() is None
