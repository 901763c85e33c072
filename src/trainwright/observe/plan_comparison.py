"""Compare the measurements of a run with its plan, and give the known reasons for differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from trainwright import text
from trainwright.text import plural

# From this factor between measured and planned step time on, reasons are given.
_FAR = 1.5
# From these fractions of the time on, something counts as a reason.
WAITED, THROTTLED, STOLEN = 0.1, 0.1, 0.05


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield label, prediction and measurement of everything that has both."""
    # The measured peak of a GPU counts tensors only, without its libraries.
    memory = "tensors_bytes" if "tensors_bytes" in predicted and "tensors_bytes" in measured else "memory_bytes"
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("memory", memory, text.size),
        ("step time", "step_time", lambda seconds: f"{seconds:.3g} s"),
        ("speed", "tokens_per_second", lambda rate: f"{text.count(rate)} tokens/s"),
    )
    for label, name, words in shown:
        if name in measured and predicted.get(name):
            expected, found = predicted[name], measured[name]
            yield label, f"{words(expected)} predicted, {words(found)} measured ({_off(found / expected)})"


def _off(ratio: float) -> str:
    if 0.5 <= ratio <= 2:
        return f"{ratio - 1:+.0%}".replace("%", " %")
    return f"{text.times(ratio)} times the plan"


def reasons_of(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    """Yield the known reasons why steps took much longer than planned; nothing if they did not."""
    expected, found = predicted.get("step_time"), measured.get("step_time")
    if not expected or found is None or found < _FAR * expected:
        return
    if measured.get("throttled", 0.0) >= THROTTLED:
        yield (
            f"the container's limit on CPU time stopped the run in {measured['throttled']:.0%} of its periods: it may "
            "use fewer cores than it sees"
        )
    if measured.get("waited", 0.0) >= WAITED:
        yield f"the process waited for a core {measured['waited']:.0%} of the time: {_other_load(measured)}"
    if measured.get("stolen", 0.0) >= STOLEN:
        yield f"the host of this virtual machine gave {measured['stolen']:.0%} of its CPU time to others"
    planned, threads = predicted.get("threads"), measured.get("threads")
    if planned is not None and threads is not None and threads < planned:
        counted = plural(int(threads), "thread")
        yield (
            f"{counted} per process, but the plan assumed {planned:.0f}: OMP_NUM_THREADS is set, or there are fewer "
            "cores"
        )
    if measured.get("steps") == 0:
        yield "only the first steps were measured, which are slower than the rest"
    if predicted.get("calibrated") == 0 and not predicted.get("measured"):
        yield "the plan's times are from nominal rates; `trainwright machine calibrate` measures those of this machine"


def _other_load(measured: Mapping[str, float]) -> str:
    """Return what else uses the cores."""
    processes, threads, cores = (int(measured.get(name, 0)) for name in ("processes", "threads", "cores"))
    if not processes * threads > cores > 0:
        return "other programs use this machine"
    own = f"{plural(processes, 'process', 'processes')} of {plural(threads, 'thread')}"
    return f"{own} share {plural(cores, 'core')}; lower OMP_NUM_THREADS or parallel.num_processes"
