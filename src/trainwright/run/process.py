"""Set-up of every process of a run: it dies with its parent, writes to its log, and knows its console."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainwright import errors
from trainwright.errors import EXIT_STOPPED, Stopped, TrainingError, TrainwrightError
from trainwright.machine.cache import find_cache_root, keep_compiled_code
from trainwright.parallel.constants import CACHED_PRODUCTS
from trainwright.run.shutdown import stop
from trainwright.run.shutdown.stop import Stopping
from trainwright.utils.activity import Activity

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

_ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its older name
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h

_console: TextIO | None = None


def find_console() -> TextIO | None:
    """Return the original standard output; None if it is not kept (rank > 0)."""
    return _console


def enter_process(log: Path, *, parent: int | None, keep_console: bool) -> None:
    """Tie this process to `parent` (a pid) and redirect all its output, including that of C libraries, to `log`."""
    global _console
    if parent is not None:
        die_with_parent(parent)
        raise_oom_score()
    sys.stdout.flush()
    sys.stderr.flush()
    if keep_console:
        _console = open_lossy_text(os.dup(1), sys.stdout.encoding, "replace")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open_lossy_text(1, "utf-8", "backslashreplace")
    sys.stderr = open_lossy_text(2, "utf-8", "backslashreplace")


def ignore_closed_output() -> None:
    """Ignore failing writes to standard output and error from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = os.dup(stream.fileno())
        except (OSError, ValueError, AttributeError):  # not a file
            continue
        with suppress(OSError):
            stream.flush()
        setattr(sys, name, open_lossy_text(descriptor, stream.encoding, stream.errors))


class _LossyFile(io.FileIO):
    """A file that ignores failing writes: a full disk, or a closed pipe, does not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def open_lossy_text(descriptor: int, encoding: str | None, errors: str) -> TextIO:
    """Return a stream that ignores failing writes.

    It is flushed after every line, so that the log is useful even if the process is killed.
    """
    file = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=descriptor > 2))
    return io.TextIOWrapper(file, encoding=encoding or "utf-8", errors=errors, line_buffering=True)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` to this process when `parent` (its pid) dies in any way."""
    if not sys.platform.startswith("linux"):
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if stop.signal_after_parent(number, parent):
        os._exit(EXIT_STOPPED)


def prepare_environment(cores: int, processes: int, threads: int | None = None) -> int:
    """Set variables that torch reads when it is loaded, unless the user has set them. Call this before importing it.

    OMP_NUM_THREADS shares the cores among the processes. The allocator of GPUs may enlarge its segments, so that blocks
    of memory of different sizes, as of packs, do not leave gaps that nothing fits into. Later runs of a
    model find its compiled code.

    Args:
        threads: per process, if a plan has found another number to be faster.
    """
    if not any(name in os.environ for name in _ALLOCATOR_OPTIONS):
        os.environ[_ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"
    keep_compiled_code()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or max(1, cores // processes)))
    return count_allowed_threads()


def set_threads(before: int | None, threads: int | None) -> None:
    """Set the threads per process for another plan than the one with ``before``, unless the user has set them."""
    if threads is not None and os.environ.get("OMP_NUM_THREADS") == str(before):
        os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_freed_memory() -> None:
    """Have glibc reuse the memory of freed tensors (mallopt(3)) instead of returning it and faulting it in again.

    Measured on a 135M-parameter model: half the system time and 5 % of a step, and another 5 to 10 % as the gradient
    of the embeddings is not mapped anew. The bound on free memory at the end of the heap limits idle memory: without
    it the same speed took 10 % more. Huge pages (torch's THP_MEM_ALLOC_ENABLE) save nothing beside that: in a step of
    such a model, system time was 0.2 % of the processor's time without them, and 4.5 % with them.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_ARENA_MAX, 1)
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def limit_product_caches() -> None:
    """Limit the memory of code for products of varied shapes (models/linear_losses.py), unless the user has done so."""
    # How many shapes of products oneDNN and torch cache code for; 1,024 by default. Read at the first product.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(CACHED_PRODUCTS))


def count_allowed_threads() -> int:
    """Return OMP_NUM_THREADS as a number; the first of a list (one value per nesting level); 1 if unset."""
    first = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else 1


def preload_libraries() -> None:
    """Import once, in the parent, what every forked process needs. Starts no Python thread and runs no operation."""
    # Ask the driver's management library whether there are GPUs: initializing CUDA itself in the parent
    # would make it unusable in every forked worker.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import transformers.modeling_layers  # noqa: F401  most of the time that importing any model takes
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def preload_worker(recipe: RecipeSchema) -> None:
    """Import what every worker of the recipe needs before they are forked: otherwise each would import it again."""
    with Activity(sys.stderr, "importing torch and transformers"):
        preload_libraries()
        import_module("trainwright.run.run_worker")
        from trainwright.engine.task import import_task_module

        import_task_module(recipe)


def run_in_child(work: Callable[[], None], log: Path, stopping: Stopping) -> None:
    """Run `work` in a separate process, so that the threads it starts do not remain in this one.

    A TrainwrightError is raised again here, with its type and message. Raises TrainingError with the traceback for any
    other exception or when the process is killed, Stopped when a stop is requested.
    """
    context: Any = multiprocessing.get_context(stop.START_METHOD)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(work, log, os.getpid(), sender), name="prepare")
    with freeze_for_forks():
        child.start()
    sender.close()
    try:
        answer = _await_answer(receiver, stopping)
    except BaseException:  # a stop, or `stopping` has heard that another node has failed
        child.kill()
        raise
    finally:
        child.join()
    if answer is None and (stopping.requested or -child.exitcode in stop.STOP_SIGNALS):  # or the child got it
        raise Stopped()
    if answer is None:
        raise TrainingError(f"preparation ended with exit code {child.exitcode} and no message; see {log}")
    kind, message = answer
    if kind == "done":
        return
    raise getattr(errors, kind, TrainingError)(message)


@contextmanager
def freeze_for_forks() -> Iterator[None]:
    """Exclude existing objects from garbage collection in processes forked meanwhile.

    An object may join its threads when it is collected, as torch's TCPStore does; a forked process does not have those
    threads and would wait forever. A launch leaves such a store behind in a reference cycle.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _await_answer(receiver: multiprocessing.connection.Connection, stopping: Stopping) -> tuple[str, str] | None:
    while not receiver.poll(0.1):
        if stopping.requested:
            raise Stopped()
    try:
        answer: tuple[str, str] = receiver.recv()
    except EOFError:
        return None
    return answer


def _run_child(work: Callable[[], None], log: Path, parent: int, sender: multiprocessing.connection.Connection) -> None:
    stop.restore_default_signals()
    # A ctrl-C at the terminal reaches the parent too, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter_process(log, parent=parent, keep_console=True)
    try:
        work()
        answer = ("done", "")
    except TrainwrightError as error:
        # Use a class that the parent knows: another module may have derived its own.
        kinds = (kind.__name__ for kind in type(error).__mro__)
        answer = (next(name for name in kinds if hasattr(errors, name)), str(error))
    except Exception as error:
        traceback.print_exc()
        answer = ("", f"preparation failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    sender.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's shutdown: threads of libraries may not be joinable.
    os._exit(0)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(EXIT_STOPPED)


def prepare(run: Path) -> None:
    """Prepare once what every worker of the run needs: data and weights in the cache. Raises RequestError."""
    from trainwright.engine.task import import_task_module
    from trainwright.recipe.loading import load_recipe
    from trainwright.run.run_directory import RECIPE

    with Activity(find_console(), "preparing the model and the data") as activity:
        if find_console() is not None:  # long operations are shown
            logging.getLogger("trainwright").addHandler(_ActivityHandler(activity))
            logging.getLogger("trainwright").setLevel(logging.INFO)
        recipe = load_recipe(run / RECIPE)
        import_task_module(recipe).prepare_once(recipe, find_cache_root())


class _ActivityHandler(logging.Handler):
    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self._activity = activity

    def emit(self, record: logging.LogRecord) -> None:
        self._activity.say(self.format(record))


_OOM_SCORE = Path("/proc/self/oom_score_adj")
_SCORE_OF_WORKERS = 500  # of 1000, the score of a process that uses all memory


def raise_oom_score(score: int = _SCORE_OF_WORKERS) -> None:
    """Have the kernel kill this process before others, so that its launcher survives to report it (proc(5)).

    Raising the score needs no privileges; a higher score is kept.
    """
    with suppress(OSError, ValueError):
        if int(_OOM_SCORE.read_text(encoding="ascii")) < score:
            _OOM_SCORE.write_text(str(score), encoding="ascii")
