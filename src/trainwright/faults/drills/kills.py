"""Killed processes; runs that are resumed with other processes or twice; and a worker whose memory is limited."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from trainwright.faults.drills import invariants, watched_commands
from trainwright.faults.drills.invariants import Missed, Skipped, require
from trainwright.faults.drills.kinds import ANY, SEVERAL, Spread, register_fault
from trainwright.faults.drills.trial_environment import FAILED, FAULT, FINISHED, MACHINE, REQUEST, STOPPED, Scene
from trainwright.faults.drills.watched_commands import TRAINWRIGHT, Command, CommandResult

# A lost process ends the run as failed; a machine's own failure may have a code of its own.
_LOST = (FAILED, FAULT)
# Whether the run is restarted automatically.
RESTARTS = {"restarted": "faults.restarts=3 per hour", "resumed": "faults.restarts=off"}


@register_fault(
    "SIGKILL of a worker",
    spreads=ANY,
    phases=(watched_commands.JOINING, *watched_commands.TRAINING, watched_commands.EXPORT),
    variants=RESTARTS,
    share=4,
)
def kill_worker(scene: Scene) -> None:
    """The rank is named, no process is left behind, and the run continues from its checkpoint, restarted or resumed."""
    command = start_in_phase(scene, RESTARTS[scene.variant])
    workers = command.list_workers() if scene.phase == watched_commands.JOINING else scene.list_workers(command)
    if not workers:
        raise Missed("no worker was seen")
    rank = scene.draw.choice(list(workers))
    command.send(signal.SIGKILL, workers[rank])
    result = scene.wait(command)
    restarts = invariants.read_events_of_kind(scene.run, "restart")
    if result.code == FINISHED and not restarts and scene.phase == watched_commands.EXPORT:
        raise Missed("the run had finished when the signal came")
    if scene.variant == "restarted":
        scene.check_finished_undisturbed(result)
        matching = [event for event in restarts if f"rank {rank} " in event["detail"]]
        require(len(restarts) == len(matching) == 1, f"rank {rank} was killed, restarts are {restarts}")
        return
    scene.expect(result, _LOST, rf"rank {rank}\b.*kill")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


@register_fault("SIGKILL of the launcher", spreads=ANY, phases=watched_commands.ALL, share=3)
def kill_launcher(scene: Scene) -> None:
    """Its workers end with it, and the run can be resumed at once."""
    command = start_in_phase(scene)
    command.send(signal.SIGKILL)
    _resume_killed(scene, command)


@register_fault("SIGKILL of everything", spreads=ANY, phases=watched_commands.ALL, share=4)
def kill_everything(scene: Scene) -> None:
    """As when a container or the machine is lost."""
    command = start_in_phase(scene)
    command.kill()
    _resume_killed(scene, command)


@register_fault(
    "SIGKILL again and again", spreads=ANY, phases=watched_commands.TRAINING, variants=("2", "3"), share=1.5
)
def kill_repeatedly(scene: Scene) -> None:
    """Also while a run is being resumed, or before it has progressed."""
    command = start_in_phase(scene)
    command.kill()
    for _ in range(int(scene.variant) - 1):
        command = scene.trainwright("train", "--resume", str(scene.run))
        starts = invariants.count_starts(scene.run)
        if scene.draw.random() < 0.5:
            time.sleep(scene.draw.uniform(0.5, 4.0))
        else:
            scene.wait_until(command, functools.partial(_has_restarted, scene, starts))
            time.sleep(scene.draw.uniform(0, 0.4))
        command.kill()
        invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


@register_fault(
    "the shell that runs the command is killed",
    spreads=ANY,
    phases=(watched_commands.IMPORTS, *watched_commands.TRAINING),
    variants=("SIGTERM", "SIGHUP", "SIGKILL"),
    share=1.5,
)
def kill_shell(scene: Scene) -> None:
    """A plain line of a batch script: the run ends with a clear message or finishes; nothing is lost."""
    script = scene.work / "job.sh"
    line = shlex.join([*TRAINWRIGHT, "train", *scene.asked()])
    script.write_text(f"#!/bin/bash\n{line}\necho the script goes on with code $?\n")
    shell = scene.command("bash", str(script))
    scene.reach(shell)
    os.kill(shell.pid, getattr(signal, scene.variant))
    deadline = time.monotonic() + scene.setting.patience
    while shell.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    result = scene.wait(shell)
    require("Traceback" not in result.text, f"a traceback: {result}")
    finishes = invariants.read_events_of_kind(scene.run, "finish")
    if any(event["status"] == "finished" for event in finishes):
        scene.check_undisturbed()
        return
    reached_step, saved_steps = invariants.find_last_step(scene.run), invariants.list_checkpoint_steps(scene.run)
    require(
        not reached_step or (saved_steps and saved_steps[-1] == reached_step),
        f"ended at step {reached_step}, checkpoints are of {saved_steps}",
    )
    scene.resume_and_compare()


@register_fault(
    "a run directory that is deleted",
    spreads=ANY,
    phases=watched_commands.TRAINING,
    variants=("deleted", "moved"),
    share=1,
)
def delete_run(scene: Scene) -> None:
    """The run does not end as if it had been saved."""
    command = start_in_phase(scene)
    if scene.variant == "moved":
        scene.run.rename(scene.run.with_name("elsewhere"))
    else:
        shutil.rmtree(scene.run, ignore_errors=True)
        if scene.run.exists():  # it wrote meanwhile
            shutil.rmtree(scene.run, ignore_errors=True)
    result = scene.wait(command)
    if scene.variant == "moved":
        shutil.rmtree(scene.run, ignore_errors=True)
        scene.run.with_name("elsewhere").rename(scene.run)
    scene.expect(result, (FAILED, MACHINE, REQUEST), re.escape(str(scene.run)))
    if scene.variant == "moved":
        scene.resume_and_compare()


def start_in_phase(scene: Scene, *overrides: str) -> Command:
    """Start the run; return in the phase of the case."""
    if scene.phase == watched_commands.PREPARATION:
        scene.use_own_cache()
    command = scene.train(*overrides)
    scene.reach(command)
    return command


def _resume_killed(scene: Scene, command: Command) -> None:
    result = scene.wait_for_interruption(command)
    require(result.code == -signal.SIGKILL, f"wanted a killed command, got {result}")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


def _has_restarted(scene: Scene, starts: int) -> bool:
    return invariants.count_starts(scene.run) > starts


@register_fault(
    "another strategy or number of processes", spreads=ANY, variants=("after SIGKILL", "after SIGTERM"), share=5
)
def change_world(scene: Scene) -> None:
    """The same losses to rounding, the same examples exactly."""
    others = [spread for spread in scene.setting.spreads if spread != scene.case.spread]
    other_spread = _choose_other_spread(scene, others)
    if scene.variant == "after SIGKILL":
        scene.provide_stopped_run()
    else:
        _stop(scene, scene.train(), watched_commands.STEPS // 2)
    _resume_with_spread(scene, other_spread)


@register_fault("processes that leave and come back", spreads=ANY, share=3)
def leave_and_come_back(scene: Scene) -> None:
    """Another number of processes for some steps, then the original: the same losses up to rounding."""
    original_spread = scene.case.spread
    others = [spread for spread in scene.setting.spreads if spread[1] != original_spread[1]]
    other_spread = _choose_other_spread(scene, others)
    _stop(scene, scene.train(), watched_commands.SAVES_EVERY + 1)
    command = scene.trainwright("train", "--resume", str(scene.run), *_format_overrides(other_spread))
    _stop(scene, command, 2 * watched_commands.SAVES_EVERY + 1)
    _resume_with_spread(scene, original_spread)


@register_fault("a run that is being trained is resumed too", spreads=ANY, phases=(watched_commands.STEP,), share=1)
def resume_twice(scene: Scene) -> None:
    """The second command is refused with a clear message, and the first, suspended meanwhile, is not disturbed."""
    first = scene.train()
    scene.wait_until(first, lambda: watched_commands.has_event(scene.run, "step", 1))
    suspended_processes = first.processes()
    for process in suspended_processes:
        first.send(signal.SIGSTOP, process)
    if first.ended or watched_commands.has_event(scene.run, "finish"):
        raise Missed("the first had finished")
    second = scene.wait(scene.trainwright("train", "--resume", str(scene.run)))
    for process in suspended_processes:
        first.send(signal.SIGCONT, process)
    scene.expect(second, (REQUEST,), "being trained")
    scene.check_finished_undisturbed(scene.wait(first))


def _choose_other_spread(scene: Scene, others: list[Spread]) -> Spread:
    """Return one of the spreads that the recipe can be trained with."""
    scene.draw.shuffle(others)
    spread = next(filter(scene.can_train, others), None)
    if spread is None:
        raise Skipped("there is no other number of processes or strategy among those that are tried")
    return spread


def _format_overrides(spread: Spread) -> tuple[str, str]:
    return f"parallel.strategy={spread[0]}", f"parallel.num_processes={spread[1]}"


def _stop(scene: Scene, command: Command, step: int) -> None:
    """Stop the run with a checkpoint once its newest launch has reached the step."""
    starts = invariants.count_starts(scene.run)
    scene.wait_for_step(command, step, starts)
    scene.injected = scene.injected or time.time()
    command.send(signal.SIGTERM)
    result = scene.wait_for_interruption(command)
    scene.expect(result, (STOPPED,), "resume")
    invariants.check_none_lost(scene.run)


def _resume_with_spread(scene: Scene, spread: Spread) -> None:
    result = scene.go_on(*_format_overrides(spread))
    scene.expect(result, (FINISHED,))
    scene.check_undisturbed(exact=False)
    start = invariants.read_events_of_kind(scene.run, "start")[-1]
    ran = start["strategy"], start["world_size"]
    require(ran == spread, f"asked for {spread}, ran {ran}")


@register_fault(
    "an address space that is limited later",
    spreads=ANY,
    phases=watched_commands.TRAINING,
    variants=("0", "1", "8"),
    share=1.5,
)
def limit_addresses(scene: Scene) -> None:
    """A worker's memory is limited to what it has plus some MiB: smaller micro-batches, or a clear error."""
    halvable = scene.setting.halvable
    command = start_in_phase(scene, *halvable)
    _, worker = scene.draw_worker(command)
    pages = int(Path(f"/proc/{worker}/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + int(scene.variant) * 2**20
    resource.prlimit(worker, resource.RLIMIT_AS, (size, size))
    result = scene.wait(command)
    scene.expect(result, (FINISHED, FAILED, MACHINE), "memory")
    invariants.check_checkpoints_complete(scene.run)
    if result.code == FINISHED:
        scene.check_undisturbed(halvable, exact=False)
    else:
        scene.resume_and_compare(overrides=halvable, exact=False)


_STOPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@register_fault("stop signal to the launcher", spreads=ANY, phases=watched_commands.ALL, variants=_STOPS, share=4)
def stop_launcher(scene: Scene) -> None:
    """The run stops after a checkpoint, or before the first step without one, and can be continued."""
    command = start_in_phase(scene)
    command.send(getattr(signal, scene.variant))
    _resume_stopped(scene, scene.wait(command))


@register_fault("stop signal to the whole group", spreads=ANY, phases=watched_commands.ALL, variants=_STOPS, share=3)
def stop_group(scene: Scene) -> None:
    """Like Ctrl-C in a terminal, or a scheduler that signals every process."""
    command = start_in_phase(scene)
    command.send_group(getattr(signal, scene.variant))
    _resume_stopped(scene, scene.wait(command))


@register_fault("stop signal to one worker", spreads=ANY, phases=watched_commands.TRAINING, variants=_STOPS, share=3)
def stop_worker(scene: Scene) -> None:
    """The run stops, fails and names that rank, or ignores it; continued, it equals the undisturbed run."""
    command = start_in_phase(scene)
    rank, worker = scene.draw_worker(command)
    command.send(getattr(signal, scene.variant), worker)
    result = scene.wait(command)
    scene.expect(result, (FINISHED, STOPPED, FAILED), f"rank {rank}" if result.code == FAILED else "resume")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare() if result.code else scene.check_undisturbed()


@register_fault("stop signal before the imports are done", variants=_STOPS, share=1)
def stop_during_imports(scene: Scene) -> None:
    """During start-up the interpreter itself may end it; nothing half-written is left."""
    command = scene.train()
    time.sleep(scene.draw.uniform(0.0, 1.2))
    number = getattr(signal, scene.variant)
    command.send(number)
    result = scene.wait(command)
    by_default = result.seconds < 1.2 and result.code in (-number, 128 + number)
    if not by_default:
        scene.expect(result, (STOPPED,), "stopp")
    scene.resume_and_compare()


@register_fault("a second ctrl-C", spreads=ANY, phases=watched_commands.TRAINING, share=1)
def interrupt_twice(scene: Scene) -> None:
    """The second signal kills; complete checkpoints stay."""
    command = start_in_phase(scene)
    for worker in command.list_workers().values():
        command.send(signal.SIGSTOP, worker)  # it would be done before the second
    command.send(signal.SIGINT)
    time.sleep(1.3)
    command.send(signal.SIGINT)
    result = scene.wait(command)
    scene.expect(result, (STOPPED, FAILED), "resume" if result.code == STOPPED else "killed|ctrl-C")
    invariants.check_checkpoints_complete(scene.run)
    scene.resume_and_compare()


@register_fault(
    "a stopped worker, then SIGTERM",
    spreads=ANY,
    phases=(watched_commands.STEP, watched_commands.FIRST_STEP, watched_commands.CHECKPOINT),
    share=1,
)
def freeze_worker(scene: Scene) -> None:
    """A worker that does not respond does not prevent the run from ending."""
    command = start_in_phase(scene)
    rank, worker = scene.draw_worker(command)
    command.send(signal.SIGSTOP, worker)
    time.sleep(0.3)
    command.send(signal.SIGTERM)
    result = scene.wait(command)
    scene.expect(result, (STOPPED, FAILED), "resume" if result.code == STOPPED else f"rank {rank}")
    invariants.check_checkpoints_complete(scene.run)
    scene.resume_and_compare()


@register_fault(
    "a worker stopped for ever", spreads=ANY, phases=watched_commands.TRAINING, variants=("restart", "stop"), share=1.5
)
def hang_worker(scene: Scene) -> None:
    """The rank is named within seconds, and the run continues by itself or, with on_hang: stop, when it is resumed."""
    command = start_in_phase(scene, f"faults.on_hang={scene.variant}", "faults.restarts=3 per hour")
    rank, worker = scene.draw_worker(command)
    command.send(signal.SIGSTOP, worker)
    result = scene.wait(command)
    ranks = [event["rank"] for event in invariants.read_faults(scene.run, "hang")]
    require(ranks == [rank], f"rank {rank} was stopped, the faults are of ranks {ranks}: {result}")
    if scene.variant == "restart":
        scene.check_finished_undisturbed(result)
        return
    scene.expect(result, (FAILED, FAULT), rf"rank {rank}\b")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


@register_fault("a worker stopped for a while", spreads=SEVERAL, phases=watched_commands.TRAINING, share=1)
def pause_worker(scene: Scene) -> None:
    """SIGSTOP and SIGCONT change nothing."""
    command = start_in_phase(scene)
    _, worker = scene.draw_worker(command)
    command.send(signal.SIGSTOP, worker)
    time.sleep(scene.draw.uniform(0.2, 2.0))
    command.send(signal.SIGCONT, worker)
    scene.check_finished_undisturbed(scene.wait(command))


def _resume_stopped(scene: Scene, ended: CommandResult) -> None:
    if ended.code == FINISHED:
        # Only a run whose last step was done when the signal came may finish.
        invariants.check_complete_and_same(scene.run, scene.reference(), exact=True)
        if scene.phase != watched_commands.EXPORT:
            raise Missed("the run had finished when the signal came")
        return
    scene.expect(ended, (STOPPED,), "stop")
    if any(event["event"] == "step" for event in invariants.read_lines(scene.run)):
        reached_step, saved_steps = invariants.find_last_step(scene.run), invariants.list_checkpoint_steps(scene.run)
        require(
            saved_steps and saved_steps[-1] == reached_step,
            f"stopped at step {reached_step}, checkpoints are of steps {saved_steps}",
        )
        invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


_PIDFD_GETFD = 438  # the number of the system call, the same on all architectures since Linux 5.6
_ESTABLISHED = "01"  # include/net/tcp_states.h


@functools.cache
def explain_refused_cut() -> str | None:
    """Return why this process cannot cut the connections of its children; None if it can."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as child:
        try:
            os.close(_open_foreign_file(child.pid, 0))
        except (OSError, AttributeError) as error:
            return f"no access to the connections of other processes: {error}"
        finally:
            child.kill()
    return None


@register_fault(
    "connections that are cut",
    spreads=SEVERAL,
    phases=watched_commands.TRAINING,
    variants=RESTARTS,
    share=2,
    needs=explain_refused_cut,
)
def cut_connections(scene: Scene) -> None:
    """Every rank ends in bounded time, and the run goes on, by itself or resumed."""
    command = start_in_phase(scene, RESTARTS[scene.variant])
    rank, worker = scene.draw_worker(command)
    require(_cut(worker) or command.ended, f"rank {rank} has no connections")
    result = scene.wait(command)
    restarts = invariants.read_events_of_kind(scene.run, "restart")
    if result.code == FINISHED:
        if not restarts:
            raise Missed("the run needed its connections no more")
        require(scene.variant == "restarted", f"restarts are off, and there was one: {restarts}")
        scene.check_finished_undisturbed(result)
        return
    scene.expect(result, (FAILED, FAULT), r"rank \d")
    require(scene.variant == "resumed", f"restarts are on, and the run ended: {result}")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


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
                with socket.socket(fileno=_open_foreign_file(pid, int(link.name))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open_foreign_file(pid: int, number: int) -> int:
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


@register_fault(
    "a stop under torchrun", spreads=SEVERAL, phases=watched_commands.TRAINING, variants=("SIGTERM", "SIGINT"), share=1
)
def stop_torchrun(scene: Scene) -> None:
    """Its workers write a checkpoint of the current step."""
    command = _start_under_torchrun(scene)
    command.send(getattr(signal, scene.variant))
    result = scene.wait_for_interruption(command)
    reached_step, saved_steps = invariants.find_last_step(scene.run), invariants.list_checkpoint_steps(scene.run)
    require(
        not reached_step or (saved_steps and saved_steps[-1] == reached_step),
        f"stopped at {reached_step}, checkpoints of {saved_steps}: {result}",
    )
    scene.resume_and_compare()


@register_fault("a worker killed under torchrun", spreads=SEVERAL, phases=watched_commands.TRAINING, share=0.7)
def kill_under_torchrun(scene: Scene) -> None:
    """The other rank ends by itself and names the killed one."""
    command = _start_under_torchrun(scene)
    rank, worker = scene.draw_worker(command)
    command.send(signal.SIGKILL, worker)
    result = scene.wait_for_interruption(command)
    require(f"error: rank {rank}" in result.text, f"rank {rank} is not named: {result}")
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


@register_fault("SIGKILL of the node agent", spreads=SEVERAL, phases=watched_commands.TRAINING, share=0.7)
def kill_agent(scene: Scene) -> None:
    """The workers of torchrun end with it, and the run goes on."""
    command = _start_under_torchrun(scene)
    command.send(signal.SIGKILL)
    scene.wait_for_interruption(command)
    invariants.check_none_lost(scene.run)
    scene.resume_and_compare()


def _start_under_torchrun(scene: Scene) -> Command:
    """The run under torchrun, in the phase of the case."""
    processes = str(scene.case.spread[1])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    command = scene.command(sys.executable, *launcher, "-m", "trainwright.worker", *scene.asked())
    scene.reach(command)
    return command
