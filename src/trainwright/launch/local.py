"""Worker processes on this machine, through torch's elastic agent; on one node or as one of several.

On one node, workers meet on a free port of the loopback interface; several nodes have already met at node 0's store.

The agent provides the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, …), watches the workers and ends the
others when one fails. This module adds: workers forked from a parent that has already imported the libraries, one log
per rank, a graceful stop, and a single report of the first failure.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import record

from trainwright.engine.events import Event, Fault, Restart
from trainwright.errors import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_TRAINING,
    FaultError,
    TrainwrightError,
    error_of,
    writes_to,
)
from trainwright.launch.ending import oom_killer, stop
from trainwright.launch.ending.agent_log import quiet_agent
from trainwright.launch.ending.failure import (
    Cause,
    Ended,
    EndedEarly,
    Failure,
    RankErrorHandler,
    Slot,
    early_ends,
    ended_from_outside,
    error_file,
    error_record,
    error_records,
    first_failure,
    new_slot,
    run_to_end,
    set_done,
    slot_records,
)
from trainwright.launch.ending.stop import Stopping
from trainwright.launch.ending.stop_watcher import StopWatcher
from trainwright.launch.group.elastic import Elastic
from trainwright.launch.hangs.judge import Conflict
from trainwright.launch.hangs.watcher import HangWatcher, RunHangs, Watched
from trainwright.launch.nodes.agent import OneNode, SeveralNodes, agent_environment, agent_of
from trainwright.launch.nodes.crew import Crew
from trainwright.launch.nodes.nodes import Nodes, NodesLost
from trainwright.launch.process import enter_process, forking, threads_allowed
from trainwright.launch.relaunch import Relaunch
from trainwright.observe.ledger import count_ends
from trainwright.text import say


def launch(
    entry: Callable[[], int],
    *,
    processes: int,
    logs: Path,
    stopping: Stopping,
    crew: Crew | None = None,
    relaunch: Relaunch | None = None,
    watched: Watched | None = None,
    looking: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run `entry` in `processes` workers; return EXIT_FINISHED or EXIT_STOPPED.

    `entry` returns EXIT_FINISHED or EXIT_STOPPED, or raises; where processes are spawned instead of forked (not Linux)
    it must be picklable. `logs` receives rank-<r>.log, launcher.log, and rank-<r>.error.json for a worker that raised.
    The caller enters `stopping`. With `crew`, this is one of several nodes, each with as many workers. `relaunch`
    decides what to do after a failure, on several nodes on node 0; without it the launch ends.
    `watched` is the run that the workers train, to notice a hang. `looking` makes a context in which `stopping` looks
    for requests that the workers look for otherwise; it is entered while there are none.

    Raises:
        TrainwrightError: the first failure, of the class of its exit code.
        NodeDropped: the other nodes go on without this one.
    """
    elastic = None if relaunch is None else relaunch.elastic
    nodes = None if crew is None else crew.nodes
    once = functools.partial(launch_once, logs=logs, stopping=stopping, nodes=nodes, watched=watched, elastic=elastic)
    while True:
        ended = once(entry, processes=processes)
        if isinstance(ended, int):
            return ended
        decides = crew is None or crew.leads
        event = _decide(ended, stopping, crew, relaunch) if decides else None
        with looking():
            if crew is not None and not (processes := crew.next()):
                return crew.code
            assert relaunch is not None, "node 0 has decided by one"
            entry = relaunch.resumed(event)
            if crew is None and elastic is not None and not (processes := elastic.next()):
                return EXIT_STOPPED


def launch_once(
    entry: Callable[[], int],
    *,
    processes: int,
    logs: Path,
    stopping: Stopping,
    nodes: Nodes | None = None,
    watched: Watched | None = None,
    elastic: Elastic | None = None,
) -> int | Failure:
    """Launch once, like `launch`, but return any failure. `nodes` have begun the launch."""
    first, everywhere = (0, processes) if nodes is None else nodes.place()
    ranks = range(first, first + processes)
    with writes_to(logs):
        logs.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            error_file(logs, rank).unlink(missing_ok=True)
    rendezvous = OneNode(processes) if nodes is None else SeveralNodes(nodes)
    alive = functools.partial(rendezvous.alive, first)
    hangs = None if watched is None else HangWatcher.of(watched, alive, processes, everywhere, not first)
    rendezvous.checks = [each.check for each in (StopWatcher(stopping, alive), hangs, elastic) if each is not None]
    stopping.flags.fresh.value = stopping.flags.closing.value = stopping.flags.resize.value = 0
    slots = {rank: new_slot() for rank in ranks}

    def check_ends() -> None:
        for error in early_ends(slots, rendezvous.exit_codes(first)).values():
            raise error

    rendezvous.checks.append(check_ends)
    killed_for_memory = oom_killer.kills()
    codes: dict[int, int | None] = {}
    hang: dict[int, dict[str, Any]] = {}
    try:
        with quiet_agent(logs / _agent_log(nodes)), agent_environment(loopback=nodes is None):
            stopping.kill = functools.partial(_kill_workers, nodes)
            arguments = (entry, logs, os.getpid(), stopping.flags, slots)
            with forking():
                result = agent_of(rendezvous, processes, logs, _worker, arguments, stopping.flags).run()
        codes = rendezvous.exit_codes(first) | {rank: f.exitcode for rank, f in result.failures.items()}
        if not result.is_failed():
            codes = {rank: int(code or 0) for rank, code in result.return_values.items()}
            if watched is not None:
                count_ends(watched.run, ranks)
            others = nodes.finish(codes) if nodes else []
            return _joint_code([int(code or 0) for code in codes.values()] + others)
    except RunHangs as hanging:
        codes = rendezvous.exit_codes(first)
        cause = Cause.HANG if watched is not None and watched.on_hang == "restart" else None
        hang = {hanging.verdict.ranks[0]: {**error_record(FaultError(str(hanging))), "cause": cause}}
    except (NodesLost, EndedEarly):
        codes = codes or rendezvous.exit_codes(first)
    except SignalException as ending:
        return EXIT_STOPPED if stopping.killed else Failure(str(ending), EXIT_TRAINING)
    finally:
        conflict = None if hangs is None else hangs.close()
    out_of_memory = oom_killer.kills() > killed_for_memory
    early = {rank: error_record(error) for rank, error in early_ends(slots, codes).items()}
    records = error_records(logs, ranks) | slot_records(slots) | early | hang
    if nodes is None:
        return _explained(first_failure(logs, processes, codes, out_of_memory, records=records), conflict)
    failure = nodes.fail(logs, codes, records, out_of_memory)
    return EXIT_STOPPED if stopping.killed else _explained(failure, conflict)


def _explained(failure: Failure, conflict: Conflict | None) -> Failure:
    """Return the failure with the different collectives that ranks have entered, which break their connections.

    They are what the run does, and not its machine: it would happen again.
    """
    if conflict is None:
        return failure
    told = [] if conflict.detail in failure.message else [conflict.detail]
    cause = None if failure.cause is None else Cause.ERROR
    return replace(failure, message="\n".join([*told, failure.message]), exit_code=EXIT_TRAINING, cause=cause)


def _decide(failure: Failure, stopping: Stopping, crew: Crew | None, relaunch: Relaunch | None) -> Event:
    """Return the event that the next launch reports.

    Raises:
        TrainwrightError: the failure, if there is no further launch.
    """
    found: Event | Failure = failure
    if relaunch is not None and not stopping.flag.value and (crew is None or crew.may_go_on):
        fault = None if failure.ran_out is None else relaunch.decide(failure.ran_out)
        found = relaunch.restarts.decide(failure) if fault is None else Fault(**fault)
    if isinstance(found, Failure):
        _show_cursor()
        raise error_of(found.exit_code, found.message)
    if isinstance(found, Restart):
        say(found.line(), file=sys.stderr)
    return found


def _joint_code(codes: list[int]) -> int:
    others = [code for code in codes if code not in (EXIT_FINISHED, EXIT_STOPPED)]
    if others:
        return others[0]
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_FINISHED


def _worker(entry: Callable[[], int], logs: Path, parent: int, flags: stop.Flags, slots: dict[int, Slot]) -> int:
    rank = int(os.environ["RANK"])
    enter_process(logs / f"rank-{rank}.log", parent=parent, keep_console=rank == 0)
    errors = RankErrorHandler(slots[rank])
    stop.follow_launcher(flags, functools.partial(_ended_from_outside, rank, errors))
    torch.set_num_threads(threads_allowed())
    try:
        code = record(functools.partial(run_to_end, entry, rank), errors)()
        set_done(slots[rank])
        return code or EXIT_FINISHED
    except Exception as error:
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit immediately: the other ranks wait for this one, and its threads may not be joinable any more.
        os._exit(error.exit_code if isinstance(error, TrainwrightError) else EXIT_TRAINING)


def _ended_from_outside(rank: int, errors: RankErrorHandler, number: signal.Signals) -> None:
    """Record the reason like an exception: errors of other ranks about broken connections follow from it."""
    errors.record_exception(Ended(ended_from_outside(rank, number)))


def _agent_log(nodes: Nodes | None) -> str:
    return f"launcher-{nodes.index}.log" if nodes else "launcher.log"


def _kill_workers(nodes: Nodes | None) -> None:
    if nodes is not None:
        nodes.killed()
    raise SignalException("killed by a second ctrl-C", sigval=signal.SIGKILL)


def _show_cursor() -> None:
    """Show the cursor: a killed worker may have hidden it for its progress bar."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r")
