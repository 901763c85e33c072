"""Signals that ask a run to stop or suspend its processes, and connections that are cut."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from trainwright.faults.drills import invariants, phases
from trainwright.faults.drills.faults.kills import RESTARTS, started
from trainwright.faults.drills.invariants import Missed, require
from trainwright.faults.drills.kinds import ANY, SEVERAL, fault
from trainwright.faults.drills.trial_environment import FAILED, FAULT, FINISHED, STOPPED, Scene
from trainwright.faults.drills.watched_commands import CommandResult

_STOPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@fault("stop signal to the launcher", spreads=ANY, phases=phases.ALL, variants=_STOPS, share=4)
def stop_launcher(scene: Scene) -> None:
    """The run stops after a checkpoint, or before the first step without one, and can be continued."""
    command = started(scene)
    command.send(getattr(signal, scene.variant))
    _stopped_and_resumed(scene, scene.wait(command))


@fault("stop signal to the whole group", spreads=ANY, phases=phases.ALL, variants=_STOPS, share=3)
def stop_group(scene: Scene) -> None:
    """Like Ctrl-C in a terminal, or a scheduler that signals every process."""
    command = started(scene)
    command.send_group(getattr(signal, scene.variant))
    _stopped_and_resumed(scene, scene.wait(command))


@fault("stop signal to one worker", spreads=ANY, phases=phases.TRAINING, variants=_STOPS, share=3)
def stop_worker(scene: Scene) -> None:
    """The run stops, fails and names that rank, or ignores it; continued, it equals the undisturbed run."""
    command = started(scene)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(getattr(signal, scene.variant), workers[rank])
    ended = scene.wait(command)
    scene.expect(ended, (FINISHED, STOPPED, FAILED), f"rank {rank}" if ended.code == FAILED else "resume")
    invariants.none_lost(scene.run)
    scene.resumes() if ended.code else scene.as_undisturbed()


@fault("stop signal before the imports are done", variants=_STOPS, share=1)
def stop_start(scene: Scene) -> None:
    """During start-up the interpreter itself may end it; nothing half-written is left."""
    command = scene.train()
    time.sleep(scene.draw.uniform(0.0, 1.2))
    number = getattr(signal, scene.variant)
    command.send(number)
    ended = scene.wait(command)
    by_default = ended.seconds < 1.2 and ended.code in (-number, 128 + number)
    if not by_default:
        scene.expect(ended, (STOPPED,), "stopp")
    scene.resumes()


@fault("a second ctrl-C", spreads=ANY, phases=phases.TRAINING, share=1)
def second_interrupt(scene: Scene) -> None:
    """The second signal kills; complete checkpoints stay."""
    command = started(scene)
    for worker in command.workers().values():
        command.send(signal.SIGSTOP, worker)  # it would be done before the second
    command.send(signal.SIGINT)
    time.sleep(1.3)
    command.send(signal.SIGINT)
    ended = scene.wait(command)
    scene.expect(ended, (STOPPED, FAILED), "resume" if ended.code == STOPPED else "killed|ctrl-C")
    invariants.checkpoints_complete(scene.run)
    scene.resumes()


@fault(
    "a stopped worker, then SIGTERM", spreads=ANY, phases=(phases.STEP, phases.FIRST_STEP, phases.CHECKPOINT), share=1
)
def frozen_worker(scene: Scene) -> None:
    """A worker that does not respond does not prevent the run from ending."""
    command = started(scene)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGSTOP, workers[rank])
    time.sleep(0.3)
    command.send(signal.SIGTERM)
    ended = scene.wait(command)
    scene.expect(ended, (STOPPED, FAILED), "resume" if ended.code == STOPPED else f"rank {rank}")
    invariants.checkpoints_complete(scene.run)
    scene.resumes()


@fault("a worker stopped for ever", spreads=ANY, phases=phases.TRAINING, variants=("restart", "stop"), share=1.5)
def hanging_worker(scene: Scene) -> None:
    """The rank is named within seconds, and the run continues by itself or, with on_hang: stop, when it is resumed."""
    command = started(scene, f"faults.on_hang={scene.variant}", "faults.restarts=3 per hour")
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGSTOP, workers[rank])
    ended = scene.wait(command)
    ranks = [event["rank"] for event in invariants.faults(scene.run, "hang")]
    require(ranks == [rank], f"rank {rank} was stopped, the faults are of ranks {ranks}: {ended}")
    if scene.variant == "restart":
        scene.stays_undisturbed(ended)
        return
    scene.expect(ended, (FAILED, FAULT), rf"rank {rank}\b")
    invariants.none_lost(scene.run)
    scene.resumes()


@fault("a worker stopped for a while", spreads=SEVERAL, phases=phases.TRAINING, share=1)
def paused_worker(scene: Scene) -> None:
    """SIGSTOP and SIGCONT change nothing."""
    command = started(scene)
    workers = scene.workers(command)
    victim = scene.draw.choice(list(workers.values()))
    command.send(signal.SIGSTOP, victim)
    time.sleep(scene.draw.uniform(0.2, 2.0))
    command.send(signal.SIGCONT, victim)
    scene.stays_undisturbed(scene.wait(command))


def _stopped_and_resumed(scene: Scene, ended: CommandResult) -> None:
    if ended.code == FINISHED:
        # Only a run whose last step was done when the signal came may finish.
        invariants.complete_and_same(scene.run, scene.reference(), exact=True)
        if scene.phase != phases.EXPORT:
            raise Missed("the run had finished when the signal came")
        return
    scene.expect(ended, (STOPPED,), "stop")
    if any(event["event"] == "step" for event in invariants.lines(scene.run)):
        reached, saved = invariants.last_step(scene.run), invariants.checkpoint_steps(scene.run)
        require(saved and saved[-1] == reached, f"stopped at step {reached}, checkpoints are of steps {saved}")
        invariants.none_lost(scene.run)
    scene.resumes()


_PIDFD_GETFD = 438  # the number of the system call, the same on all architectures since Linux 5.6
_ESTABLISHED = "01"  # include/net/tcp_states.h


@functools.cache
def cut_refused() -> str | None:
    """Return why this process cannot cut the connections of its children; None if it can."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as child:
        try:
            os.close(_file_of(child.pid, 0))
        except (OSError, AttributeError) as error:
            return f"no access to the connections of other processes: {error}"
        finally:
            child.kill()
    return None


@fault(
    "connections that are cut", spreads=SEVERAL, phases=phases.TRAINING, variants=RESTARTS, share=2, needs=cut_refused
)
def cut_connections(scene: Scene) -> None:
    """Every rank ends in bounded time, and the run goes on, by itself or resumed."""
    command = started(scene, RESTARTS[scene.variant])
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    require(_cut(workers[rank]) or command.ended, f"rank {rank} has no connections")
    ended = scene.wait(command)
    restarts = [event for event in invariants.lines(scene.run) if event["event"] == "restart"]
    if ended.code == FINISHED:
        if not restarts:
            raise Missed("the run needed its connections no more")
        require(scene.variant == "restarted", f"restarts are off, and there was one: {restarts}")
        scene.stays_undisturbed(ended)
        return
    scene.expect(ended, (FAILED, FAULT), r"rank \d")
    require(scene.variant == "resumed", f"restarts are on, and the run ended: {ended}")
    invariants.none_lost(scene.run)
    scene.resumes()


def _cut(pid: int) -> int:
    """Shut down every TCP connection of a process; return their number."""
    connections = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                connections.add(fields[9])
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if match and match[1] in connections:
                with socket.socket(fileno=_file_of(pid, int(link.name))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _file_of(pid: int, number: int) -> int:
    """Return a file of another process as a file of this one."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor: int = libc.syscall(_PIDFD_GETFD, process, number, 0)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return descriptor
    finally:
        os.close(process)
