"""Work in one process per device: prepared once, then shared out. Results of interrupted work are discarded."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainwright.errors import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_TRAINING,
    MachineError,
    RequestError,
    Stopped,
    TrainingError,
    TrainwrightError,
)
from trainwright.machine.accelerators import refuse_unusable
from trainwright.run.limits import check_limits
from trainwright.run.process import console, preload_libraries, prepare_environment, run_in_child
from trainwright.run.shutdown.stop import Stopping
from trainwright.utils.activity import Activity, doing

if TYPE_CHECKING:
    from trainwright.inference.answering import Done
    from trainwright.machine.machine import Machine
    from trainwright.parallel.world import World


# Ranks meet only at the end, and one may have much more to do than another.
_PATIENCE = timedelta(days=7)


def process_count(machine: Machine, requested: int | None) -> int:
    """Return one process per GPU, or one for all cores; or ``requested``. Raises MachineError if GPUs are too few."""
    refuse_unusable(machine)
    if requested is not None and 0 < len(machine.gpus) < requested:
        raise MachineError(f"--num-processes {requested}: this machine has {len(machine.gpus)} GPUs")
    return requested or len(machine.gpus) or 1


def dtype_name(requested: str, machine: Machine) -> str:
    """Return the data type to compute in. Raises RequestError if its name is unknown."""
    if requested == "auto":
        return "bf16" if machine.gpus and machine.has_bf16 else "fp32"
    if requested not in ("fp32", "bf16", "fp16"):
        raise RequestError(f"--dtype {requested}: choose from fp32, bf16, fp16, auto")
    return requested


@contextmanager
def work_directory(command: str) -> Iterator[Path]:
    """Make a directory in which processes exchange files; it is kept if a worker fails, for its logs."""
    directory = Path(tempfile.mkdtemp(prefix=f"trainwright-{command}-"))
    has_failed = False
    try:
        yield directory
    except _WorkerFailed as error:
        has_failed = True
        error.add_note(f"the output of the processes is in {directory}")
        raise
    finally:
        if not has_failed:
            shutil.rmtree(directory, ignore_errors=True)


def in_processes(
    prepare: Callable[[], None],
    entry: Callable[[World], None],
    *,
    modules: Sequence[str],
    machine: Machine,
    processes: int,
    work: Path,
) -> None:
    """Run ``prepare`` once, then ``entry`` in every process.

    Args:
        modules: what they import, imported once before forking.

    Raises:
        TrainwrightError: of ``prepare``, or of the process that failed first.
    """
    from functools import partial
    from importlib import import_module

    check_limits(processes, processes)
    prepare_environment(machine.cpu_cores, processes)
    try:
        with _StopImmediately() as stopping:
            with Activity(sys.stderr, "importing torch and transformers"):
                preload_libraries()
                for module in modules:
                    import_module(module)
            run_in_child(partial(_prepare, prepare), work / "prepare.log", stopping)
            from trainwright.run.supervisor import launch

            try:
                code = launch(partial(_work, entry), processes=processes, logs=work / "logs", stopping=stopping)
            except TrainwrightError as error:
                if error.exit_code != EXIT_TRAINING:
                    raise
                raise _WorkerFailed(str(error)) from error
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    if code == EXIT_STOPPED:
        raise Stopped("stopped; nothing was written")


class _WorkerFailed(TrainingError):
    pass


class _StopImmediately(Stopping):
    """Stop handling: the first signal ends the work, because there is nothing to save."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.flag.value = 1
        self.killed = True
        self.kill()


def _prepare(prepare: Callable[[], None]) -> None:
    with Activity(console(), "reading the model and the data"):
        prepare()


def _work(entry: Callable[[World], None]) -> int:
    from trainwright.machine.detect import detect
    from trainwright.parallel.openmp import limit_spinning
    from trainwright.parallel.world import join, leave
    from trainwright.run.group.contract import usable_device
    from trainwright.run.process import limit_product_caches

    limit_product_caches()
    limit_spinning()
    world = join(usable_device(detect(), None), timeout=_PATIENCE)
    try:
        with Activity(console()):
            entry(world)
    finally:
        leave()
    return EXIT_FINISHED


def counted(world: World, label: str, total: int) -> Done:
    """Show how many rows are done, on rank 0 only, because all ranks have about the same number."""
    stream = console()
    if stream is None or not total:
        return lambda examples: None
    from trainwright.run.observers.counting import Counting

    counting = Counting(stream, label, total)
    doing(f"the first {label}")

    def count(examples: int) -> None:
        doing("")  # the count is shown instead
        counting(examples * world.size)

    return count
