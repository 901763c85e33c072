"""Call a function in a new, separate process.

Training, evaluating and the like fork workers, limit threads, redirect output to logs and handle signals. A script or a
notebook may have torch's threads and a GPU in use, an event loop running, and its output replaced; none of that is
touched. The other process does not import the script, so no ``if __name__ == "__main__"`` is needed.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

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
from trainwright.machine.detect import detect
from trainwright.recipe.extensions import build_child_environment, set_trust
from trainwright.run.limits import check_limits
from trainwright.run.process import (
    find_console,
    limit_product_caches,
    preload_libraries,
    prepare_environment,
    run_in_child,
)
from trainwright.run.program import pass_on_signals
from trainwright.run.shutdown.stop import Stopping, signal_after_parent
from trainwright.utils.activity import Activity, begin_activity

if TYPE_CHECKING:
    from trainwright.inference.answering import Done
    from trainwright.machine.machine import Machine
    from trainwright.parallel.world import World


T = TypeVar("T")

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trainwright.api.separate_process import serve; serve(*sys.argv[2:])"
)


def run_in_process(function: Callable[..., T], *arguments: Any, progress: bool = False, trust_code: bool = True) -> T:
    """Call ``function(*arguments)`` in a separate process; return its result or raise its exception.

    Stop signals are passed on to the process, which decides how to react. If this process is killed, the other is told
    to stop (on Linux).

    Args:
        function: of a module. It, its arguments and its result are pickled.
        progress: show what it prints.
        trust_code: whether the code that recipes name as ``module:Name`` is imported.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-call-") as scratch:
        call, answer_file = Path(scratch, "call"), Path(scratch, "answer")
        call.write_bytes(pickle.dumps((function, arguments, trust_code)))
        python = [sys.executable, "-P", "-c", _CODE]
        command = [*python, json.dumps(sys.path), str(call), str(answer_file), str(os.getpid())]
        with pass_on_signals() as (programs, signal_numbers):
            process = _start_process(command, progress)
            programs.append(process)
            for line in process.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
            code = process.wait()
        outcome: Any = pickle.loads(answer_file.read_bytes()) if answer_file.exists() else (None, None)
        result, error = outcome
        if error is not None:
            raise error from None
        if signal_numbers:  # it ended without an answer, by the signal or before it arrived
            signal.raise_signal(signal_numbers[0])
        if not answer_file.exists():
            raise TrainingError(f"the separate process ended with exit code {code} and no message")
        return result


def _start_process(command: list[str], progress: bool) -> subprocess.Popen[str]:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, "encoding": "utf-8", "errors": "replace"}
    options["env"] = build_child_environment()
    if not progress:
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    elif sys.stdout is sys.__stderr__:
        options["stdout"] = 2
    elif sys.stdout is not sys.__stdout__:  # replaced by a notebook or a test
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options["env"]["PYTHONIOENCODING"] = "utf-8"
    return subprocess.Popen(command, **options)


_file: Path | None = None  # the answer file of this process; None if it was not started for a call


def answer(result: object, error: BaseException | None) -> None:
    """Send the answer of the call for which this process was started; later answers are ignored."""
    if _file is None or _file.exists():
        return
    try:
        content = pickle.dumps((result, error))
    except Exception:
        message = "".join(traceback.format_exception(error)) if error is not None else traceback.format_exc()
        content = pickle.dumps((None, TrainingError(message)))
    _file.with_name("part").write_bytes(content)
    _file.with_name("part").rename(_file)


def serve(call: str, answer_file: str, parent: str) -> None:
    """Make the call that ``run_in_process`` has written down, and send the answer."""
    global _file
    if signal_after_parent(signal.SIGTERM, int(parent)):  # the process that waits for the answer
        os._exit(1)
    _file = Path(answer_file)
    function, arguments, trust_code = pickle.loads(Path(call).read_bytes())
    result = error = None
    try:
        with set_trust(trust_code), Activity(sys.stderr, "starting", until_output=True):
            result = function(*arguments)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    answer(result, error)
    gc.freeze()  # as Python ends it looks for cycles in what is left, which takes a second after torch was imported


# Ranks meet only at the end, and one may have much more to do than another.
_PATIENCE = timedelta(days=7)


def choose_process_count(machine: Machine, requested: int | None) -> int:
    """Return one process per GPU, or one for all cores; or ``requested``. Raises MachineError if GPUs are too few."""
    refuse_unusable(machine)
    if requested is not None and 0 < len(machine.gpus) < requested:
        raise MachineError(f"--num-processes {requested}: this machine has {len(machine.gpus)} GPUs")
    return requested or len(machine.gpus) or 1


def choose_dtype(requested: str, machine: Machine) -> str:
    """Return the data type to compute in. Raises RequestError if its name is unknown."""
    if requested == "auto":
        return "bf16" if machine.gpus and machine.has_bf16 else "fp32"
    if requested not in ("fp32", "bf16", "fp16"):
        raise RequestError(f"--dtype {requested}: choose from fp32, bf16, fp16, auto")
    return requested


@contextmanager
def create_work_directory(command: str) -> Iterator[Path]:
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


def run_in_processes(
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
    with Activity(find_console(), "reading the model and the data"):
        prepare()


def _work(entry: Callable[[World], None]) -> int:
    from trainwright.parallel.openmp import limit_spinning
    from trainwright.parallel.world import join, leave
    from trainwright.run.group.contract import choose_device

    limit_product_caches()
    limit_spinning()
    world = join(choose_device(detect(), None), timeout=_PATIENCE)
    try:
        with Activity(find_console()):
            entry(world)
    finally:
        leave()
    return EXIT_FINISHED


def show_progress(world: World, label: str, total: int) -> Done:
    """Show how many rows are done, on rank 0 only, because all ranks have about the same number."""
    stream = find_console()
    if stream is None or not total:
        return lambda examples: None
    from trainwright.run.observers.progress import Counting

    counting = Counting(stream, label, total)
    begin_activity(f"the first {label}")

    def count(examples: int) -> None:
        begin_activity("")  # the count is shown instead
        counting(examples * world.size)

    return count
