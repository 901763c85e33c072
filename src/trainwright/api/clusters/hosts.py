"""Train on several hosts without a scheduler: each is started over ssh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_REQUEST, RequestError

if TYPE_CHECKING:
    from trainwright.api.training import TrainingRequest
    from trainwright.launch.hosts.names import Host


def train_on_hosts(asked: TrainingRequest, hosts: str | None, hostfile: Path | None) -> int:
    """Train on the hosts together; return the exit code. Everything is shown as each host writes it.

    Args:
        hosts: as ``node[1-3],node7``.
        hostfile: a file with hosts, instead of ``hosts``.

    Raises:
        RequestError: the request is wrong or a host unknown; nothing is started.
        MachineError: a host cannot take part; nothing is started.
    """
    from trainwright.launch import run_directory
    from trainwright.launch.hosts.asking import ask
    from trainwright.launch.hosts.names import parse_hosts, processes_of, read_hostfile
    from trainwright.launch.hosts.starting import exports, run_on
    from trainwright.launch.request import request_of
    from trainwright.text import say

    options = {"--nodes": asked.nodes, "--node-rank": asked.node_rank, "--rendezvous": asked.rendezvous}
    if given := [name for name, value in options.items() if value is not None]:
        raise RequestError(f"--hosts and --hostfile set {', '.join(options)} on each host; remove {', '.join(given)}")
    if hosts is not None and hostfile is not None:
        raise RequestError("--hosts and --hostfile: pass only one of them")
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(Path(hostfile or ""))
    count = asked.num_processes or processes_of(found)
    request = request_of(asked.recipe, list(asked.overrides), asked.resume)  # a wrong recipe is told once, and here
    answers = ask(found, exports())
    run = request.run
    if run is None:
        run = run_directory.create(request.recipe.logging.run_directory, request.stem, in_place=request.in_place)
    logs = run / "logs"
    logs.mkdir(exist_ok=True)
    say(f"{run}: on {', '.join(host.name for host in found)}; logs: {logs}/host-*.log", file=sys.stderr)
    common = [*_words(asked, run, begun=request.run is not None), *([f"--num-processes={count}"] if count else [])]
    code = run_on(found, [[*common, *_place(found, i, answers[0].port)] for i in range(len(found))], logs)
    if code == EXIT_REQUEST and request.run is None:
        run_directory.discard_unbegun(run, keep=request.in_place)
    return code


def _words(asked: TrainingRequest, run: Path, *, begun: bool) -> list[str]:
    """Return the command of every host, without what differs: it begins or resumes the run in its directory."""
    key = "logging.run_directory="
    words = [sys.executable, "-m", "trainwright", "train"]
    words += [str(asked.recipe)] if asked.recipe is not None else []
    words += [each for each in asked.overrides if not each.startswith(key)]
    words += [f"--resume={run}"] if begun else ["--resume=auto", f"{key}{run}"]
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
    return [f"--nodes={len(hosts)}", f"--node-rank={index}", f"--rendezvous={hosts[0].address}:{port}"]
