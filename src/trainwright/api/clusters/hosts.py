"""Train, or run a script, on several hosts without a scheduler: each is started over ssh."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_FAULT, EXIT_REQUEST, Interrupted, RequestError, Stopped
from trainwright.launch.ending.requests import was_asked_to_stop
from trainwright.machine.usage.sample import process_age
from trainwright.text import quoted

if TYPE_CHECKING:
    from trainwright.api.training import TrainingRequest
    from trainwright.launch.hosts.names import Host
    from trainwright.launch.scripts.starting import NodeOptions

# For the hosts that answer, when a run is started again without some of them.
_RENDEZVOUS_SECONDS = 60


def train_on_hosts(asked: TrainingRequest, hosts: str | None, hostfile: Path | None) -> int:
    """Train on the hosts together; return the exit code. Everything is shown as each host writes it.

    Args:
        hosts: as ``node[1-3],node7``.
        hostfile: a file with hosts, instead of ``hosts``.

    Raises:
        RequestError: the request is wrong or a host unknown; nothing is started.
        MachineError: a host cannot take part; nothing is started.
        FaultError: a host was lost, and the run cannot go on with those that are left.
        Stopped: a stop was requested after a host was lost, before the run was started again.
    """
    from trainwright.launch import run_directory
    from trainwright.launch.hosts.names import ask, processes_of
    from trainwright.launch.hosts.starting import exports, run_on
    from trainwright.launch.process import ignore_closed_output
    from trainwright.launch.request import request_of
    from trainwright.recipe.sections.parallel import ProcessRange
    from trainwright.text import say

    found = _hosts_of(hosts, hostfile, asked.nodes, asked.node_rank, asked.rendezvous)
    request = request_of(asked.recipe, list(asked.overrides), asked.resume)  # a wrong recipe is told once, and here
    written, slots = request.recipe.parallel.num_processes, processes_of(found)
    may_lose = isinstance(written, ProcessRange) and asked.num_processes is None
    if isinstance(written, ProcessRange) and may_lose and slots not in (None, written.max):
        raise RequestError(
            f"parallel.num_processes: {written} processes, but the hosts have {slots} slots; set max to {slots}, or "
            "remove the slots"
        )
    count = None if may_lose else asked.num_processes or slots
    answers = ask(found, exports())
    run = request.run
    if run is None:
        run = run_directory.create(request.recipe.logging.run_directory, request.stem, in_place=request.in_place)
    logs = run / "logs"
    logs.mkdir(exist_ok=True)
    say(f"{run}: on {', '.join(host.name for host in found)}; logs: {logs}/host-*.log", file=sys.stderr)
    common = [*_words(asked, run, begun=request.run is not None), *([f"--num-processes={count}"] if count else [])]
    ignore_closed_output()
    restarts, port, begun = None, answers[0].port, time.time()
    while True:
        ended = run_on(found, [[*common, *_place(found, i, port)] for i in range(len(found))], logs, may_lose=may_lose)
        stopped = ended.stopped or was_asked_to_stop(run, within=process_age())
        if ended.code != EXIT_FAULT or stopped or not ended.lost or (may_lose and found[0] not in ended.lost):
            break
        from trainwright.launch.hosts.starting import Again  # imports torch

        restarts = restarts or Again(run, request.recipe.faults.restarts, may_lose, begun)
        try:
            found, port = restarts.decide(found, ended.lost)
        except Interrupted:
            raise Stopped(f"stopped while no host trained; continue with --resume {quoted(run)}") from None
        if was_asked_to_stop(run, within=process_age()):  # meanwhile
            break
        if may_lose and asked.rendezvous_timeout is None:
            common = [*common, f"--rendezvous-timeout={_RENDEZVOUS_SECONDS}"]
    if ended.code == EXIT_REQUEST and request.run is None:
        run_directory.discard_unbegun(run, keep=request.in_place)
    return ended.code


def launch_on_hosts(
    own: tuple[str, bool, tuple[str, ...]],
    options: list[str],
    num_processes: int | None,
    logs: Path | None,
    place: NodeOptions,
    hosts: str | None,
    hostfile: Path | None,
) -> int:
    """Run a user's own script on the hosts together; return the exit code.

    Args:
        own: the script, whether it is a module, and its arguments.
        options: further options of ``trainwright launch``, the same on each host.
        num_processes: on all hosts. Default: the slots of the host file, otherwise one per GPU.
        logs: directory for one log per process. Default: a new one under ``runs/``.
        place: what the hosts set by themselves, and the time that they wait for each other.

    Raises:
        RequestError: the request is wrong or a host unknown; nothing is started.
        MachineError: a host cannot take part; nothing is started.
    """
    from trainwright.launch.hosts.names import ask, processes_of
    from trainwright.launch.hosts.starting import exports, run_on
    from trainwright.launch.process import ignore_closed_output
    from trainwright.launch.scripts.starting import check_script, make_logs

    script, module, arguments = own
    found = _hosts_of(hosts, hostfile, place.nodes, place.node_rank, place.rendezvous)
    check_script(script, module)
    port = ask(found, exports())[0].port
    directory = make_logs(script, module, logs)
    words = [sys.executable, "-m", "trainwright", "launch", *options, f"--logs={directory}"]
    count = num_processes or processes_of(found)
    words += [f"--num-processes={count}"] if count else []
    words += [f"--rendezvous-timeout={place.seconds}"] if place.seconds and len(found) > 1 else []
    ignore_closed_output()
    rest = [*(["--module"] if module else []), "--", script, *arguments]
    return run_on(found, [[*words, *_place(found, i, port), *rest] for i in range(len(found))], directory).code


def _hosts_of(
    hosts: str | None, hostfile: Path | None, nodes: int | None, node_rank: int | None, rendezvous: str | None
) -> list[Host]:
    """Return the hosts of ``--hosts`` or ``--hostfile``. Raises RequestError, also for options that these set."""
    from trainwright.launch.group.addresses import is_loopback
    from trainwright.launch.hosts.names import parse_hosts, read_hostfile

    options = {"--nodes": nodes, "--node-rank": node_rank, "--rendezvous": rendezvous}
    if given := [name for name, value in options.items() if value is not None]:
        raise RequestError(f"--hosts and --hostfile set {', '.join(options)} on each host; remove {', '.join(given)}")
    if hosts is not None and hostfile is not None:
        raise RequestError("--hosts and --hostfile: pass only one of them")
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(Path(hostfile or ""))
    first, others = found[0], [each for each in found if not is_loopback(each.address)]
    if is_loopback(first.address) and others:
        raise RequestError(
            f"hosts: {others[0].name} cannot reach the first host as {first.address}, which is each machine itself; "
            "write its name or address in the network"
        )
    return found


def _words(asked: TrainingRequest, run: Path, *, begun: bool) -> list[str]:
    """Return the command of every host, without what differs: it begins or resumes the run in its directory."""
    from trainwright.launch.ending.stop import STARTS_AGAIN
    from trainwright.launch.run_directory import override_of

    key = "logging.run_directory="
    words = ["env", f"{STARTS_AGAIN}=1", sys.executable, "-m", "trainwright", "train"]
    words += [str(asked.recipe)] if asked.recipe is not None else []
    words += [each for each in asked.overrides if not each.startswith(key)]
    words += [f"--resume={run}"] if begun else ["--resume=auto", override_of(run)]
    options = {
        "--rendezvous-timeout": asked.rendezvous_timeout,
        "--accelerate-config": asked.accelerate_config,
        "--until": asked.until,
        "--time-limit": asked.time_limit,
    }
    words += [f"{name}={value}" for name, value in options.items() if value is not None]
    return [*words, *(["--force"] if asked.force else [])]


def _place(hosts: list[Host], index: int, port: int) -> list[str]:
    if len(hosts) == 1:
        return []
    from trainwright.launch.group.addresses import in_words

    return [f"--nodes={len(hosts)}", f"--node-rank={index}", f"--rendezvous={in_words(hosts[0].address, port)}"]
