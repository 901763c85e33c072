"""Run a user's own Accelerate or torch script in several processes, on one or several nodes, as reliably as a run.

A worker starts the script like `python SCRIPT` and stops it like ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainwright.compatibility.accelerate.launcher import build_worker_environment
from trainwright.compatibility.accelerate.machine import (
    choose_processes,
    is_run_as_ddp,
    refuse_count_of_one_machine,
    require,
)
from trainwright.compatibility.accelerate.reading import (
    AccelerateConfig,
    build_default_config,
    locate_default_file,
    read,
)
from trainwright.compatibility.accelerate.translation import interpret
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, MachineError, RequestError, TrainwrightError
from trainwright.machine.accelerators import refuse_unusable
from trainwright.machine.detect import detect
from trainwright.recipe.files import describe_missing_file
from trainwright.run import run_directory
from trainwright.run.group.addresses import format_address
from trainwright.run.group.environment import NodeRendezvous, refuse_worker
from trainwright.run.limits import check_limits
from trainwright.run.process import find_console, prepare_environment
from trainwright.run.shutdown.failure import Failure, raise_failure
from trainwright.run.shutdown.stop import Stopping, stop_requested
from trainwright.utils.activity import Activity
from trainwright.utils.text import quote_word, say

if TYPE_CHECKING:
    from trainwright.run.nodes import LinkedStopping

_NOTICE = "stopping: the script is interrupted; ctrl-C again kills it"
_POLL_SECONDS = 0.1
_SHOW_SECONDS = 2.0  # how long the console output may lag when the script has ended
_NOT_THE_SCRIPTS = (__file__, "<frozen runpy>", runpy.__file__)


@dataclass(frozen=True)
class NodeOptions:
    """``--nodes``, ``--node-rank``, ``--rendezvous`` and ``--rendezvous-timeout``, as far as they are given."""

    nodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    seconds: float | None = None

    def met(self) -> NodeRendezvous | None:
        """Return where the nodes meet; None for one node. Raises RequestError."""
        return NodeRendezvous.of(self.nodes or 1, self.node_rank, self.rendezvous, self.seconds)


@dataclass(frozen=True)
class ScriptOptions:
    """What a command asks of the processes of a script.

    Attributes:
        config_file: an Accelerate file. Default: Accelerate's default file, if it exists.
        num_processes: on all nodes. Default: from the file, otherwise one per GPU.
        cpu: use the CPU even if there are GPUs.
        nodes: how this machine takes part as one of several; by default by the file, otherwise alone.
        settings: top-level keys of Accelerate's file that replace the file's.
    """

    config_file: Path | None = None
    num_processes: int | None = None
    cpu: bool = False
    nodes: NodeOptions = NodeOptions()
    settings: Mapping[str, str] = field(default_factory=dict)


def launch_script(
    script: str, arguments: tuple[str, ...], options: ScriptOptions, *, module: bool, logs: Path | None
) -> int:
    """Run the script to its end; return its exit code. Changes this process.

    Args:
        module: ``script`` is a module, as with ``python -m``.
        logs: directory for one log per process. Default: a new one under ``runs/``.

    Raises:
        RequestError: the script does not exist, or the file is invalid.
        MachineError: the machine lacks what is asked for.
        TrainwrightError: the script failed; the exit code is its own if it sets one.
    """
    refuse_worker("launch", options.nodes.nodes or 1)
    check_script(script, module)
    plan = _build_plan(options)
    code = _run(script, module, arguments, plan, logs)
    if code == EXIT_STOPPED:
        say(f"stopped: {script} was interrupted", file=sys.stderr)
    return code


@dataclass(frozen=True)
class ScriptPlan:
    """The workers on this machine, their device and variables, the file that sets them, and where nodes meet."""

    processes: int
    on_cpu: bool
    variables: dict[str, str]
    file: str | None
    cores: int
    gpus: int
    met: NodeRendezvous | None

    @property
    def everywhere(self) -> int:
        """The number of workers on all nodes."""
        return self.processes * (self.met.nodes if self.met else 1)


def check_script(script: str, module: bool) -> None:
    """Raise RequestError if there is no such script."""
    if not module:
        if not Path(script).is_file():
            raise RequestError(describe_missing_file(Path(script)))
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())
    if find_spec(script.partition(".")[0]) is None:
        raise RequestError(f"--module: no module {script} in this directory or installed")


def make_logs(script: str, module: bool, logs: Path | None) -> Path:
    """Return the directory for the logs of a script, which is made: ``logs``, or a new one under ``runs/``."""
    stem = script.rpartition(".")[2] if module else Path(script).stem
    directory = logs or run_directory.create("auto", stem) / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _build_plan(options: ScriptOptions) -> ScriptPlan:
    config_file = options.config_file
    if config_file is None and locate_default_file().is_file():
        config_file = locate_default_file()
    if config_file is not None or options.settings:
        source = build_default_config(options.cpu or not detect().gpus) if config_file is None else read(config_file)
        return _build_plan_from_file(source.replace_settings(options.settings), options)
    met = options.nodes.met()
    variables = {"CUDA_VISIBLE_DEVICES": ""} if options.cpu else {}
    os.environ.update(variables)
    machine = detect()
    refuse_unusable(machine)
    processes = _divide_processes(options.num_processes, met) or choose_processes(machine)
    gpus = len(machine.gpus)
    if gpus and processes > gpus:
        raise MachineError(
            f"--num-processes: {processes} processes, but there {('are' if gpus > 1 else 'is')} {gpus} "
            f"GPU{'s' * (gpus > 1)}; use --num-processes {gpus}, or --cpu"
        )
    if not machine.gpus:
        variables["ACCELERATE_USE_CPU"] = "true"
    return ScriptPlan(processes, not machine.gpus, variables, None, machine.cpu_cores, gpus, met)


def _divide_processes(processes: int | None, met: NodeRendezvous | None) -> int | None:
    """Return how many of all processes are on this machine. Raises RequestError if they cannot be divided."""
    if processes is None or met is None:
        return processes
    if processes % met.nodes:
        raise RequestError(
            f"--num-processes: {processes} processes cannot be divided over {met.nodes} nodes equally; set it to "
            f"{max(1, processes // met.nodes) * met.nodes}"
        )
    return processes // met.nodes


def _build_plan_from_file(source: AccelerateConfig, options: ScriptOptions) -> ScriptPlan:
    nodes, translation = options.nodes, interpret(source)
    translation.refuse_problems(for_script=True)
    if nodes.nodes is None and translation.nodes > 1:
        rank = translation.node_rank if nodes.node_rank is None else nodes.node_rank
        nodes = NodeOptions(translation.nodes, rank, nodes.rendezvous or translation.rendezvous, nodes.seconds)
    met = nodes.met()
    translation = replace(translation, nodes=met.nodes if met else 1)
    if options.num_processes is not None:
        translation = replace(translation, processes=options.num_processes)
    if options.cpu:
        translation = replace(translation, device="cpu")
    machine = detect()
    if options.num_processes is None:
        refuse_count_of_one_machine(translation, machine)
    require(translation, machine, for_script=True)
    os.environ.update(translation.build_device_environment())
    refuse_unusable(detect())
    on_cpu = translation.device == "cpu" or not machine.gpus
    if is_run_as_ddp(translation, machine):
        raise MachineError(
            f"{translation.source}: on a CPU Accelerate runs {translation.distributed_type} as plain DDP, without "
            "sharding; set distributed_type: MULTI_CPU to accept that. Recipes are also sharded on CPUs: trainwright "
            f"train RECIPE --accelerate-config {quote_word(translation.source)}"
        )
    processes = _divide_processes(translation.processes, met) or choose_processes(detect())
    variables = build_worker_environment(source, translation, on_cpu=on_cpu)
    gpus = len(detect().gpus)
    return ScriptPlan(processes, on_cpu, variables, source.name, machine.cpu_cores, gpus, met)


def _run(script: str, module: bool, arguments: tuple[str, ...], plan: ScriptPlan, logs: Path | None) -> int:
    os.environ.update(plan.variables)
    check_limits(plan.processes, plan.everywhere)
    prepare_environment(plan.cores, plan.processes)

    def make() -> Path:
        directory = make_logs(script, module, logs)
        _announce(script, plan, directory)
        return directory

    if plan.met is not None:
        # Imports torch, so it comes after the thread limit and before the workers are forked.
        from trainwright.run.nodes import LinkedStopping

        entry = functools.partial(run_script, Script(script, module, arguments))
        command = json.dumps([script, module, arguments, plan.variables])
        with LinkedStopping(_NOTICE) as linked_stopping:
            return run_as_node(entry, command, plan.processes, plan.gpus, plan.met, make, linked_stopping)
    with Stopping(_NOTICE) as stopping:
        # Imports torch, so it comes after the thread limit and before the workers are forked.
        from trainwright.run.supervisor import launch as launch_workers

        entry = functools.partial(run_script, Script(script, module, arguments))
        return launch_workers(entry, processes=plan.processes, logs=make(), stopping=stopping)


def _announce(script: str, plan: ScriptPlan, logs: Path) -> None:
    number = f"{plan.everywhere} process{'es' * (plan.everywhere > 1)}"
    number += f" on {plan.met.nodes} nodes," if plan.met else ""
    by = f", by {plan.file}" if plan.file else ""
    device = "the CPU" if plan.on_cpu else f"GPU{'s' * (plan.processes > 1)}"
    say(f"{script}: {number} on {device}{by}; logs: {logs}", file=sys.stderr)


def run_as_node(
    entry: Callable[[], int],
    command: str,
    processes: int,
    gpus: int,
    met: NodeRendezvous,
    make: Callable[[], Path],
    stopping: LinkedStopping,
) -> int:
    """Run ``entry`` in ``processes`` workers here, and in as many on each other node; return the exit code.

    Args:
        command: the same on all nodes.
        gpus: of this machine.
        make: returns the directory for logs, on node 0; the others write into one at the same path.

    Raises:
        TrainwrightError: the script failed on any node, or a node was lost.
    """
    from trainwright.run.launches import NodeLaunches, take_part
    from trainwright.run.nodes import NodeInfo, NodeRules, Nodes
    from trainwright.run.supervisor import run_workers

    mine = NodeInfo.here(processes, gpus, command, resume=False)
    rules = NodeRules(may_lose=False, on_hang="warn")
    with Activity(sys.stderr, f"waiting for the other nodes at {format_address(met.host, met.port)}"):
        nodes = Nodes.meet(met, mine, stopping, rules)
    with take_part(nodes):
        logs = nodes.open(lambda: (make(), command), _create_logs)
        launches = NodeLaunches(None, nodes, (processes * met.nodes,), lambda: processes, stopping)
        if local_processes := launches.first():
            result = run_workers(entry, processes=local_processes, logs=logs, stopping=stopping, nodes=nodes)
            if not isinstance(result, Failure):
                return result
            if launches.leads:
                raise_failure(result)
            launches.next()
        return launches.code


def _create_logs(logs: Path, command: str, node: int) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    return logs


class ScriptExit(TrainwrightError):
    """The script called sys.exit with a failure; the launch ends with the same code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class Script:
    """The script to run: a file or, as with `python -m`, a module; and its arguments."""

    target: str
    module: bool
    arguments: tuple[str, ...]


def run_script(script: Script) -> int:
    """Run the script as ``__main__`` in this worker; rank 0's output also goes to the console.

    Returns EXIT_FINISHED, or EXIT_STOPPED if it was interrupted. Raises what the script raises, and ScriptExit if it
    exits with a failure.
    """
    _interrupt_on_stop()
    interrupt: BaseException | None = None
    with _copy_to_console(), contextlib.ExitStack() as ending:
        # A forked process would skip these at its end, and trackers rely on them to finish their runs.
        ending.callback(atexit._run_exitfuncs)
        try:
            _run_as_main(script)
        except SystemExit as exit_:
            _check_exit(exit_.code, script)
        except BaseException as error:
            if not stop_requested():
                raise _describe_error(error, script) from error.__cause__
            interrupt = error
    if interrupt is None:
        return EXIT_FINISHED
    # The interrupt, or a collective that the interrupted ranks have left: write it to the log alone.
    traceback.print_exception(interrupt)
    return EXIT_STOPPED


def _run_as_main(script: Script) -> None:
    sys.argv = [script.target, *script.arguments]
    first = os.getcwd() if script.module else str(Path(script.target).resolve().parent)
    if not sys.flags.safe_path:
        sys.path[0] = first
    if script.module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script.target, run_name="__main__")


def _check_exit(code: object, script: Script) -> None:
    if code is None or code == 0:
        return
    number = code & 0xFF if isinstance(code, int) else 1
    reason = "" if isinstance(code, int) else f": {code}"
    rank = os.environ.get("RANK", "0")
    raise ScriptExit(f"rank {rank}: {script.target} exited with code {number}{reason}", number)


def _describe_error(error: BaseException, script: Script) -> Exception:
    """Return the error for the launcher to report, with its traceback from the script's first line on."""
    if not isinstance(error, Exception):
        return RuntimeError(f"{script.target} ended by {type(error).__name__}")
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename in _NOT_THE_SCRIPTS:
        inner = inner.tb_next
    return error.with_traceback(inner or error.__traceback__)


def _interrupt_on_stop() -> None:
    """Interrupt the script once when the launch is asked to stop, by any signal to any process.

    A script that handles SIGTERM receives it; any other receives the KeyboardInterrupt of a ctrl-C.
    """
    due = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if due.is_set():  # otherwise a ctrl-C at the terminal, which the launcher also received and passes on
            due.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    ours = signal.getsignal(signal.SIGTERM)
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        while not stop_requested():
            time.sleep(_POLL_SECONDS)
        if signal.getsignal(signal.SIGTERM) is not ours:
            signal.pthread_kill(main, signal.SIGTERM)
        else:
            due.set()
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _copy_to_console() -> Iterator[None]:
    """Copy what this process writes to its log to the console too, if it has one.

    A separate process copies, so that the last lines arrive even if this one is killed. After the context only the log
    is written: the launcher reports an error once.
    """
    stream = find_console()
    if stream is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.dup(1)
    read, write = os.pipe()
    copier = os.fork()
    if copier == 0:
        os.close(write)
        _copy(read, (log, stream.fileno()))
    os.close(read)
    for descriptor in (1, 2):
        os.dup2(write, descriptor)
    os.close(write)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        # A process that the script left running keeps the pipe open; do not wait for it.
        deadline = time.monotonic() + _SHOW_SECONDS
        while os.waitpid(copier, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.005)


def _copy(source: int, targets: tuple[int, ...]) -> None:
    """Copy until all writers have closed the pipe, then end this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    open_targets = list(targets)
    try:
        while data := os.read(source, 1 << 16):
            for target in tuple(open_targets):
                try:
                    rest = data
                    while rest:
                        rest = rest[os.write(target, rest) :]
                except OSError:  # the console is gone: continue with the log
                    open_targets.remove(target)
    finally:
        os._exit(0)
