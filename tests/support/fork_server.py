"""A process that has imported everything once and forks whatever a test asks to run; see forked.py.

It reads one JSON object a line and answers each with the pid of the child it started. A child leads a process group
of its own, and its exit code is written to the file `status` when it ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    _import_everything()
    started: dict[int, Path] = {}
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.01)
        if readable:
            received = os.read(0, 65536)
            if not received:
                return
            pending += received
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _child(request)
            started[pid] = Path(request["status"])
            print(pid, flush=True)
        _reap(started)


# What runs import by and by, on the way to their first step; transformers' own modules are loaded when they are used.
_OWN = (
    *("trainwright.cli.main", "trainwright.run.supervisor", "trainwright.run.run_worker", "trainwright.tasks.sft.task"),
    *("trainwright.worker", "trainwright.run.observers.tensorboard", "trainwright.run.observers.console"),
    *(
        "trainwright.planning.output",
        "trainwright.planning.planner",
        "trainwright.data.check",
        "trainwright.api.training",
    ),
    *("trainwright.planning.memory.replicated", "trainwright.planning.memory.fsdp", "trainwright.planning.memory.zero"),
    *("trainwright.planning.trace.catalog", "trainwright.planning.plan_watch", "trainwright.faults.hangs.watcher"),
    *("trainwright.parallel.replicated.replicated", "trainwright.parallel.replicated.spec"),
    *("trainwright.parallel.fsdp.spec", "trainwright.engine.optimizers.plain", "trainwright.observe.report"),
    *("trainwright.compatibility.accelerate.translation", "trainwright.clusters.slurm.job_step"),
    *("trainwright.observe.ledger", "trainwright.observe.specs", "trainwright.run.program", "trainwright.run.hub"),
    *(f"trainwright.tasks.{task}.spec" for task in ("algorithm_distillation", "dpo", "pretrain", "unlearn")),
    *("trainwright.tasks.unlearn.benchmarks", "trainwright.tasks.unlearn.section", "tests.support.training"),
)
_MODULES = (
    *("multiprocessing.heap", "multiprocessing.popen_fork", "multiprocessing.sharedctypes", "pydantic.dataclasses"),
    *("torch._subclasses.schema_check_mode", "typer._click.decorators"),
    *(f"transformers.models.{name}" for name in ("llama.modeling_llama", "gpt2.modeling_gpt2")),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "multiprocessing.queues", "peft"),
)


def _import_everything() -> None:
    """Without starting a thread or running an operation: what is forked must be as good as new."""
    from trainwright.run.process import preload_libraries

    logging.disable(logging.WARNING)  # of libraries that are not there
    preload_libraries()
    for name in _OWN:
        importlib.import_module(name)
    for name in _MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "importing has started a thread"
    # Every process that saves a model would make the expressions for the names of all architectures' weights.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()  # a collection in a child would go through all of it, and copy its pages


def _child(request: dict[str, Any]) -> None:
    """Run the request as a process that had been started for it would."""
    code: Any = 1
    try:
        os.setsid()
        _redirect(request)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # some library has asked for it already, and it may be another one in this environment
        if "function" in request:
            module, name = request["function"].split(":")
            code = getattr(importlib.import_module(module), name)(*request["arguments"]) or 0
        elif "python" in request:
            code = _python(*request["python"]) or 0
        else:
            from trainwright.cli.main import main as command

            sys.argv = ["trainwright", *request["arguments"]]
            command()
            code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _python(script: str, *arguments: str) -> None:
    """What `python SCRIPT ARGUMENTS` does, or `python -c CODE ARGUMENTS`, or `python -m MODULE ARGUMENTS`."""
    if script == "-m":
        sys.argv = list(arguments)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    if script != "-c":
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        return
    sys.argv = ["-c", *arguments[1:]]
    sys.path.insert(0, "")
    exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})


def _redirect(request: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for source, target in (
        (os.open(os.devnull, os.O_RDONLY), 0),
        (os.open(request["stdout"], flags), 1),
        (os.open(request["stderr"], flags), 2),
    ):
        os.dup2(source, target)
        os.close(source)


def _reap(started: dict[int, Path]) -> None:
    while started:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        path = started.pop(pid)
        scratch = path.with_name(f"{path.name}.part")
        scratch.write_text(str(os.waitstatus_to_exitcode(status)))
        scratch.replace(path)


if __name__ == "__main__":
    main()
