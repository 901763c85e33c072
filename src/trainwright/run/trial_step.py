"""A trial of the largest step of a run, in workers of its own, which shows whether the plan fits this machine."""

from __future__ import annotations

import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trainwright.engine.event_reader import read_events
from trainwright.errors import EXIT_FINISHED, MachineError, Stopped
from trainwright.recipe.loading import load_recipe
from trainwright.run import run_directory
from trainwright.run.shutdown.oom_killer import raise_oom_score
from trainwright.run.shutdown.stop import Stopping

_STEPS = 2  # the second step also has the optimizer state in memory
_FIRST_TO_BE_KILLED = 1000


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe. `memory_bytes` is the largest peak of any rank and `step_time` that of the last step, in
    seconds; both None if no step was finished. `error` describes why not, whether memory ran out or for another reason.
    """

    fits: bool
    memory_bytes: int | None = None
    step_time: float | None = None
    out_of_memory: bool = False
    error: str | None = None


def probe(recipe: str, stopping: Stopping, processes: int | None = None) -> ProbeResult:
    """Take the step with the largest micro-batch twice, for the resolved `recipe` (YAML) on this machine.

    Data and weights must be in the cache and the libraries imported, as before `launch`; nothing is kept.

    Args:
        processes: number of workers; by default, as many as the recipe has.

    Raises:
        Stopped: a stop was requested meanwhile.
    """
    from trainwright.run.supervisor import run_workers

    run = Path(tempfile.mkdtemp(prefix="trainwright-probe-"))
    try:
        run_directory.record(run, recipe, run.name, [])
        processes = processes or int(load_recipe(run / run_directory.RECIPE).parallel.processes)
        work = functools.partial(_trial_run, run)
        ended = run_workers(work, processes=processes, logs=run / "logs", stopping=stopping)
        if stopping.requested:
            raise Stopped()
        memory_bytes, step_time = _trial_figures(run)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    if not isinstance(ended, int):
        ran_out = ended.ran_out is not None
        return ProbeResult(False, memory_bytes, step_time, ran_out, ended.message)
    assert ended == EXIT_FINISHED, "a trial run that nobody stops is finished"
    return ProbeResult(True, memory_bytes, step_time)


def fit(run: Path, stopping: Stopping, processes: int) -> None:
    """Try the largest step of a new run in `processes`, and halve its micro-batch until it fits.

    Data and weights must be in the cache and the libraries imported, as before `launch`. Other failures are left to the
    run itself to report.

    Raises:
        MachineError: even one row per micro-batch does not fit.
        Stopped: a stop was requested meanwhile.
    """
    from trainwright.engine.policies.micro_batch_halving import (  # torch, which a refusal does not wait for
        halved,
        with_rows,
    )

    while True:
        text = (run / run_directory.RECIPE).read_text(encoding="utf-8")
        probed = probe(text, stopping, processes)
        if probed.fits or not probed.out_of_memory:
            return
        recipe = load_recipe(run / run_directory.RECIPE)
        rows = recipe.train.micro_batch_size
        if not isinstance(rows, int) or rows == 1:
            raise MachineError(
                f"the run's largest step was tested and does not fit: {probed.error}; `trainwright plan` shows what "
                "would fit"
            )
        why = f"train.micro_batch_size {halved(rows)}: the largest step ran out of memory with {rows}"
        run_directory.change(run, run_directory.recipe_text(with_rows(recipe, halved(rows))), why)


def _trial_run(run: Path) -> int:
    """Run in every worker."""
    from trainwright.run.run_worker import TrialRun, Worker, run_worker

    raise_oom_score(_FIRST_TO_BE_KILLED)
    return run_worker(Worker(run), trial=TrialRun(_STEPS, largest=True))


def _trial_figures(run: Path) -> tuple[int | None, float | None]:
    """Return the peak memory in bytes and the time in seconds of the last finished step."""
    try:
        steps = [event for event in read_events(run / "events.jsonl") if event["event"] == "step"]
    except OSError:
        return None, None
    return (steps[-1]["memory_bytes"], steps[-1]["step_time"]) if steps else (None, None)
