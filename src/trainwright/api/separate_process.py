"""Call a function in a new, separate process.

Training, evaluating and the like fork workers, limit threads, redirect output to logs and handle signals. A script or a
notebook may have torch's threads and a GPU in use, an event loop running, and its output replaced; none of that is
touched. The other process does not import the script, so no ``if __name__ == "__main__"`` is needed.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

from trainwright.errors import TrainingError
from trainwright.recipe.extensions import inherited_environment, trusting
from trainwright.run.program import passing_on
from trainwright.utils.activity import Activity
from trainwright.utils.parent import signal_after_parent

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
        call, answered = Path(scratch, "call"), Path(scratch, "answer")
        call.write_bytes(pickle.dumps((function, arguments, trust_code)))
        command = [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), str(call), str(answered), str(os.getpid())]
        with passing_on() as (programs, requested):
            process = _started(command, progress)
            programs.append(process)
            for line in process.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
            code = process.wait()
        outcome: tuple[Any, BaseException | None] = (None, None)
        if answered.exists():
            outcome = pickle.loads(answered.read_bytes())
        result, error = outcome
        if error is not None:
            raise error from None
        if requested:  # it ended without an answer, by the signal or before it arrived
            signal.raise_signal(requested[0])
        if not answered.exists():
            raise TrainingError(f"the process of {function.__name__} ended with exit code {code} and no message")
        return result


def as_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's arguments as the command has them: paths and steps as text, several names as one text."""

    def text(name: str, value: Any) -> Any:
        if isinstance(value, PathLike):
            return fspath(value)
        if name == "checkpoint" and value is not None:
            return str(value)
        return ",".join(value) if isinstance(value, (list, tuple)) else value

    return {name: text(name, value) for name, value in arguments.items() if name not in ("progress", "trust_code")}


def _started(command: list[str], progress: bool) -> subprocess.Popen[str]:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, "encoding": "utf-8", "errors": "replace"}
    options["env"] = inherited_environment()
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
    _stop_with(int(parent))
    _file = Path(answer_file)
    function, arguments, trust_code = pickle.loads(Path(call).read_bytes())
    result = error = None
    try:
        with trusting(trust_code), Activity(sys.stderr, "starting", until_output=True):
            result = function(*arguments)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    answer(result, error)


def _stop_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the process that waits for the answer dies in any way (prctl(2))."""
    signal_after_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
