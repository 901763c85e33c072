"""Checks with two processes of a run: each strategy's losses, their link, and faults of one of them."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from trainwright.doctor.checks.check import (
    CannotCheck,
    CheckContext,
    CheckEnded,
    CheckResult,
    Finding,
    Severity,
    build_explained_finding,
)
from trainwright.errors import EXIT_FINISHED, Stopped, TrainwrightError
from trainwright.machine.vendors import look_up_processor
from trainwright.run.limits import check_limits
from trainwright.run.process import preload_libraries, preload_worker, prepare, prepare_environment, run_in_child
from trainwright.run.shutdown.failure import Failure
from trainwright.utils.text import format_seconds

if TYPE_CHECKING:
    from trainwright.doctor.verify import ComparedRun
    from trainwright.recipe.schema import RecipeSchema


_STEPS = 2
_SECONDS = 120.0  # of one run; DeepSpeed compiles at its first
_RECIPE = """
task: sft
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, max_position_embeddings: 512, tie_word_embeddings: true}
  tokenizer: bytes
data: {max_length: 128}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 0}
train: {max_steps: 2, global_batch_size: 4, micro_batch_size: 1, mixed_precision: "no", compile: false,
  activation_checkpointing: none}
logging: {observers: {tensorboard: false}}
"""


def check_strategies(context: CheckContext) -> CheckResult:
    """Compare the first steps of every strategy on two ranks with those on one process."""
    from trainwright.recipe.strategy_spec import load_strategies

    prepare_workers(context)
    specs = load_strategies()
    names = [n for n, spec in specs.items() if spec.least_processes <= 2 <= (spec.most_processes or 2)]
    missing = {n: spec.library for n in names if (spec := specs[n]).library is not None and spec.library.is_missing}
    alone = next(name for name, spec in specs.items() if spec.is_one_process)
    reference = _train_side(context, alone, 1)
    preload_worker(reference.recipe)
    work = functools.partial(_prepare, context, reference.recipe)
    run_in_child(work, context.work / "prepare.log", context.stopping)
    if (finding := _run(context, reference, f"one process ({alone})")) is not None:
        return CheckResult((), (finding,))
    facts, findings, late = [], [], []
    for name in (name for name in names if name not in missing):
        if time.monotonic() > context.end:
            late.append(name)
            continue
        try:
            fact, new_findings = _compare_strategy(context, reference, name)
        except CannotCheck:
            late.append(name)
            continue
        facts.append(fact)
        findings += new_findings
    facts += [f"not run: {name}: {library.title} is not installed" for name, library in missing.items() if library]
    facts += [f"not run, time limit reached: {', '.join(late)}"] if late else []
    return CheckResult(tuple(facts), tuple(findings))


def _train_side(context: CheckContext, strategy: str, processes: int) -> ComparedRun:
    """Return the run of the tiny recipe under a strategy."""
    from trainwright.doctor.verify import ComparedRun
    from trainwright.recipe.loading import load_recipe
    from trainwright.run.resolve import resolve

    file, rows = context.work / "recipe.yaml", context.work / "rows.jsonl"
    file.write_text(_RECIPE, encoding="utf-8")
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in _iterate_rows()), encoding="utf-8")
    device = choose_device_type(context)
    overrides = (
        f"data.train={rows}",
        f"parallel.strategy={strategy}",
        f"parallel.num_processes={processes}",
        f"parallel.device={device}",
    )
    # A machine given by name is not measured: the plan only fills in values.
    recipe = resolve(load_recipe(file, overrides), replace(context.machine, is_here=False)).recipe
    name = strategy + (f" x {processes}" if processes > 1 else "")
    return ComparedRun(name, recipe, context.work / f"run-{strategy}")


def _iterate_rows() -> Iterator[dict[str, str]]:
    for number in range(8):
        yield {"question": f"What is {number} times {number}?", "answer": f"{number * number}, which is {number}^2."}


def _prepare(context: CheckContext, recipe: RecipeSchema) -> None:
    """Prepare data and weights in a child process."""
    from trainwright.recipe.loading import dump_recipe
    from trainwright.run import run_directory

    directory = context.work / "prepared"
    directory.mkdir()
    run_directory.record(directory, dump_recipe(recipe), directory.name, [])
    prepare(directory)


def _run(context: CheckContext, side: ComparedRun, what: str) -> Finding | None:
    """Run a side; return a finding if it fails."""
    from trainwright.doctor.verify import run_side

    try:
        with watch_launches(what, _SECONDS, context.end):
            run_side(side, _STEPS, context.stopping, is_shown=False)
    except CheckEnded as broken:
        return broken.finding
    except Stopped:
        raise
    except TrainwrightError as error:
        return _describe_failure(what, str(error))
    return None


def _compare_strategy(context: CheckContext, reference: ComparedRun, name: str) -> tuple[str, list[Finding]]:
    from trainwright.doctor.verify import TOLERANCES, Comparison

    start, subject = time.monotonic(), f"two ranks of {name}"
    try:
        side = _train_side(context, name, 2)
    except Stopped:
        raise
    except TrainwrightError as error:
        return f"{name}: not possible", [_describe_failure(subject, str(error))]
    if (finding := _run(context, side, subject)) is not None:
        return f"{name}: failed", [finding]
    comparison = Comparison.of_runs((reference.name, side.name), (reference.run, side.run), TOLERANCES["no"])
    fact = f"{name}: {format_seconds(time.monotonic() - start)}, with {_STEPS} steps whose losses differ by at most "
    fact += f"{comparison.worst('loss'):.0e} from those of one process"
    if comparison.is_same:
        return fact, []
    what = f"{subject} has other losses than one process: {comparison.verdict()}"
    why = "gradients are exchanged or summed incorrectly on this machine"
    fix = "see the checks kernels and links; choose another parallel.strategy, and report it with the output of --json"
    return fact, [Finding(Severity.BROKEN, what, why, fix)]


def _describe_failure(what: str, message: str) -> Finding:
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(("log:", "- "))]
    reason = next(
        (line for line in reversed(lines) if "Error" in line.partition(":")[0]), lines[0] if lines else message
    )
    why = "runs with this strategy will fail in the same way"
    fix = "the first line of the error says which part is missing; choose another parallel.strategy until it is fixed"
    return build_explained_finding(f"{what} cannot train: {reason[:300]}", message, why, fix)


_LINK_SECONDS = 30.0
_BYTES = {"cpu": 2**24, "gpu": 2**28}
_ROUNDS = 5
_LOW = 0.3  # of the link's rate


def check_links(context: CheckContext) -> CheckResult:
    """Sum tensors over two processes."""
    device = prepare_workers(context)
    from trainwright.run.supervisor import launch

    logs, answer = context.work / "links", context.work / "links.json"
    try:
        with watch_launches("two processes that sum tensors", _LINK_SECONDS, context.end):
            entry = functools.partial(_time_links, device, answer)
            launch(entry, processes=2, logs=logs, stopping=context.stopping)
    except TrainwrightError as error:
        message = str(error)
        lines = [line for line in message.splitlines() if line.strip() and not line.startswith("log:")]
        what = f"two processes cannot sum tensors: {lines[-1].strip()}"
        why = "runs on more than one process will fail in the same way"
        fix = "see the whole message with `trainwright doctor links --json`"
        return CheckResult((), (build_explained_finding(what, message, why, fix),))
    return _judge_links(json.loads(answer.read_text(encoding="utf-8")), context, device)


def _time_links(device: str, answer: Path) -> int:
    import torch
    import torch.distributed as dist

    from trainwright.doctor.undisturbed import Stopwatch, choose_shortest
    from trainwright.parallel.world import join, leave

    world = join(device)
    count = _BYTES[look_up_processor(world.device.type)] // 4
    tensor = torch.full((count,), float(world.rank + 1), device=world.device)
    clock = Stopwatch()

    def add() -> None:
        dist.all_reduce(tensor)
        if world.device.type != "cpu":
            torch.accelerator.synchronize()

    add()
    is_right = bool((tensor == 3.0).all())
    tensor.zero_()
    clock.start()
    times = []
    for _ in range(_ROUNDS):
        world.barrier()
        times.append(clock.time(add))
    rows = world.gather_floats([choose_shortest(times).seconds, float(is_right)])
    if world.is_main:
        figures = {"seconds": max(row[0] for row in rows), "wrong": [r for r, row in enumerate(rows) if not row[1]]}
        answer.write_text(json.dumps(figures), encoding="utf-8")
    leave()
    return EXIT_FINISHED


def _judge_links(values: dict[str, Any], context: CheckContext, device: str) -> CheckResult:
    # Of two processes each sends the whole tensor once, half in reducing and half in gathering.
    rate = _BYTES[look_up_processor(device)] / values["seconds"]
    link = context.machine.gpus[0].link if device != "cpu" else None
    reference = (
        f", {link.describe()} by the datasheet" if link is not None else " through the memory of this machine (Gloo)"
    )
    facts = (f"{rate / 1e9:.2f} GB/s each way{reference}",)
    findings = []
    if values["wrong"]:
        what = f"the sum of two processes is wrong on rank {', '.join(map(str, values['wrong']))}"
        why = "gradients would be wrong, without an error"
        fix = "turn off direct access between GPUs (NCCL_P2P_DISABLE=1) and run this again: if it is right then, turn "
        fix += "off the IOMMU or ACS of the machine"
        findings.append(Finding(Severity.BROKEN, what, why, fix))
    if link is not None and rate < _LOW * link.bandwidth:
        what = f"the link between two GPUs has {rate / link.bandwidth:.0%} of its rate"
        why = "collectives take several times as long"
        fix = "`nvidia-smi topo -m` and `nvidia-smi nvlink --status`; look at `trainwright doctor nccl`; on virtual "
        fix += "machines, ACS or the IOMMU may prevent direct access"
        findings.append(Finding(Severity.WARNING, what, why, fix))
    return CheckResult(facts, tuple(findings))


_FAULT_SECONDS = 30.0
_FAULTY = 1  # the rank that fails
_HEADROOM, _ASKED = 2**28, 2**32  # bytes that rank 1 may still allocate, and that it asks for


def check_out_of_memory(context: CheckContext) -> CheckResult:
    """Make one rank run out of memory: on a CPU by a limit, on a GPU by requesting more than it has."""
    return _provoke_fault(context, "out of memory on one rank", _exhaust_memory, _is_out_of_memory)


def check_killed_rank(context: CheckContext) -> CheckResult:
    """Kill one rank, as the kernel or a scheduler would."""
    return _provoke_fault(context, "a rank that is killed", _kill_self, _is_killed)


def _provoke_fault(
    context: CheckContext, what: str, fault: Callable[[], None], is_named: Callable[[Failure], bool]
) -> CheckResult:
    device = prepare_workers(context)
    from trainwright.run.supervisor import run_workers

    logs = context.work / fault.__name__
    start = time.monotonic()
    with watch_launches(what, _FAULT_SECONDS, context.end):
        entry = functools.partial(_fail_second_rank, device, fault, logs)
        result = run_workers(entry, processes=PROCESSES, logs=logs, stopping=context.stopping)
    failed_at = float((logs / "failed-at").read_text(encoding="ascii")) if (logs / "failed-at").exists() else start
    took = time.monotonic() - failed_at
    message = result.message if isinstance(result, Failure) else "the launch ended without an error"
    findings = []
    if not isinstance(result, Failure) or not is_named(result):
        findings.append(_describe_unnamed_rank(what, message))
    if survivors := [child.pid for child in multiprocessing.active_children()]:
        findings.append(_describe_survivors(what, survivors))
    return CheckResult((f"reported after {format_seconds(took)}: {_shorten_message(message)}",), tuple(findings))


def _shorten_message(message: str) -> str:
    """Return the rank and its error, without the traceback and the advice."""
    first, *more = message.splitlines()
    error = next((line for line in more if "Error" in line.partition(":")[0]), "")
    return f"{first.partition(':')[0]}{': ' if error else ''}{error[:120]}"


def _is_out_of_memory(failure: Failure) -> bool:
    return failure.ran_out is not None and failure.ran_out.rank == _FAULTY


def _is_killed(failure: Failure) -> bool:
    return failure.message.startswith(f"rank {_FAULTY} was killed")


def _fail_second_rank(device: str, fault: Callable[[], None], logs: Path) -> int:
    """Run in each of the two workers; the second one fails while the first waits in a collective."""
    from trainwright.parallel.world import join, leave

    world = join(device)
    world.barrier()
    if world.rank == _FAULTY:
        (logs / "failed-at").write_text(repr(time.monotonic()), encoding="ascii")
        fault()
    world.barrier()
    leave()
    return EXIT_FINISHED


def _exhaust_memory() -> None:
    import torch

    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module = torch.get_device_module(device)
        if module.is_initialized():
            torch.empty(2 * module.get_device_properties(0).total_memory, dtype=torch.uint8, device=device)
            return
    usage = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (usage + _HEADROOM, resource.RLIM_INFINITY))
    torch.empty(_ASKED, dtype=torch.uint8).fill_(1)


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _describe_unnamed_rank(what: str, message: str) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what} is not reported as rank {_FAULTY}: {message.splitlines()[0]}",
        "the cause of a failed run must be searched for in the logs of all ranks",
        "in a container, run an init process (docker run --init) and allow signals between processes; report it with "
        "the output of --json",
    )


def _describe_survivors(what: str, survivors: list[int | None]) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what}: process {', '.join(map(str, survivors))} is left over",
        "it keeps its memory, its GPU and its ports",
        "kill it; in a container, run an init process (docker run --init)",
    )


_LOOKS = 0.25  # seconds between checks
_STILL_SECONDS = 2.0  # seconds for which a process may be stopped
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@contextmanager
def watch_launches(what: str, seconds: float, end: float) -> Iterator[None]:
    """Watch the launches of the body, from the main thread's timer signal (setitimer(2)).

    Args:
        what: a name of the launch for messages.
        seconds: how long the body may take.
        end: time.monotonic() at which all checks must have ended.

    Raises:
        CheckEnded: a process was stopped, or did not end within ``seconds``; all of them have been killed.
        CannotCheck: time was up for all checks.
    """
    limit = time.monotonic() + seconds
    watch = _Watch(min(limit, end), what)
    before = signal.signal(signal.SIGALRM, watch.look)
    signal.setitimer(signal.ITIMER_REAL, _LOOKS, _LOOKS)
    try:
        yield
    except Exception:
        if watch.finding is None:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    if watch.finding is not None:
        if watch.is_late and end < limit:
            raise CannotCheck("the time limit was reached before it finished; run it alone")
        raise CheckEnded(watch.finding)


class _Watch:
    def __init__(self, end: float, what: str) -> None:
        self.finding: Finding | None = None
        self.is_late = False
        self._end = end
        self._what = what
        self._workers: dict[int, int] = {}  # pid by the number in the name of the process
        self._still: dict[int, float] = {}  # by rank: since when it is stopped

    def look(self, number: int, frame: FrameType | None) -> None:
        """Check every process; end the launch if one is stopped."""
        now = time.monotonic()
        for rank, pid in self._ranks():
            if _read_status(pid) not in _STOPPED:
                self._still.pop(rank, None)
            elif now - self._still.setdefault(rank, now) >= _STILL_SECONDS:
                self._end_with(_describe_stopped_rank(self._what, rank, pid))
        if now > self._end:
            self.is_late = self.finding is None
            self._end_with(self._late())

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Yield rank and pid of each worker; they are started in the order of the ranks, and numbered."""
        for child in multiprocessing.active_children():
            number = child.name.rpartition("-")[2]
            if number.isdigit() and child.pid is not None:
                self._workers[int(number)] = child.pid
        yield from enumerate(pid for _, pid in sorted(self._workers.items()))

    def _late(self) -> Finding:
        states = ", ".join(f"rank {rank} is {_read_status(pid) or 'gone'}" for rank, pid in self._ranks())
        return Finding(
            Severity.BROKEN,
            f"{self._what}: the ranks did not finish in time ({states or 'none is left'})",
            "they may wait for each other, the disk or the network",
            "run it alone on an idle machine, `trainwright doctor strategies`; usual causes are a firewall on the "
            "loopback interface, a disk that does not answer, and a driver that hangs (dmesg)",
        )

    def _end_with(self, finding: Finding) -> None:
        if self.finding is None:
            self.finding = finding
            raise CheckEnded(finding)


def _read_status(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def _describe_stopped_rank(what: str, rank: int, pid: int) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what}: rank {rank} (process {pid}) is stopped",
        "the other ranks wait for it in a collective, until they time out",
        "find what stops processes on this machine (SIGSTOP, ctrl-Z, a debugger, a scheduler that suspends jobs); a "
        "stopped process continues with `kill -CONT PID`",
    )


PROCESSES = 2


def prepare_workers(context: CheckContext) -> str:
    """Raise limits, divide the cores and import what workers need; return the device type of the workers.

    Raises:
        MachineError: a limit is too low.
    """
    check_limits(PROCESSES, PROCESSES)
    prepare_environment(context.machine.cpu_cores, PROCESSES)
    preload_libraries()
    return choose_device_type(context)


def choose_device_type(context: CheckContext) -> str:
    """Return the type of the GPUs if there is one for each of the two workers, otherwise "cpu"."""
    return context.machine.device if len(context.machine.gpus) >= PROCESSES else "cpu"
