"""Jobs of Ray: the script that submits one, and what it runs, on each node a process that trains as one of the run.

    python -m trainwright.clusters.ray --nodes 2 --gpus-per-node 8 RUN -- WORDS OF trainwright train

Each attempt has a placement group with a bundle on each node, all on different nodes. A lost node, 5 and 75 are
followed by another attempt. Only the job needs Ray, which runs it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.clusters.job import Job
from trainwright.clusters.job_attempts import MODULE, RESTARTS
from trainwright.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_STOPPED
from trainwright.run.program import start_program
from trainwright.run.run_directory import format_directory_override
from trainwright.utils.text import say

_MOST_ATTEMPTS = 100
_PAUSE_SECONDS = 2.0  # in which Ray notices that a node is lost


def main() -> None:
    """Train until the run is done; exit with its code."""
    parser = argparse.ArgumentParser(prog="python -m trainwright.clusters.ray", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--cpus-per-node", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path(), help="where each node runs the command")
    parser.add_argument("run", type=Path)
    parser.add_argument("words", nargs="+")
    options = parser.parse_args()
    import ray

    ray.init()
    code = EXIT_FAULT
    for attempt in range(_MOST_ATTEMPTS):
        codes = _train_once(options, attempt)
        code = next(
            (exit_code for exit_code in codes if exit_code not in (EXIT_FINISHED, EXIT_FAULT, EXIT_STOPPED)), max(codes)
        )
        say(f"attempt {attempt + 1}: exit codes {', '.join(map(str, codes))}", file=sys.stderr)
        if code not in (EXIT_FAULT, EXIT_STOPPED):
            break
        time.sleep(_PAUSE_SECONDS)
    sys.exit(code)


def _train_once(options: argparse.Namespace, attempt: int) -> list[int]:
    """Train once on all nodes; return the exit code of each."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": options.cpus_per_node, **({"GPU": options.gpus_per_node} if options.gpus_per_node else {})}
    group = placement_group([needs] * options.nodes, strategy="STRICT_SPREAD")

    def on(rank: int, gpus: int, function: Any) -> Any:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        cpus = options.cpus_per_node if gpus or not options.gpus_per_node else 0
        return ray.remote(function).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy, max_retries=0)

    try:
        ray.get(group.ready())
        first = ray.get(on(0, 0, _choose_address).remote()) if options.nodes > 1 else None
        tasks = [
            on(rank, options.gpus_per_node, _train).remote(
                str(options.directory), build_command(options.run, options.words, options.nodes, rank, first), attempt
            )
            for rank in range(options.nodes)
        ]
        return [_await_exit_code(task) for task in tasks]
    except ray.exceptions.RayError as error:
        say(f"a node is lost: {error}", file=sys.stderr)
        return [EXIT_FAULT]
    finally:
        remove_placement_group(group)


def _await_exit_code(task: Any) -> int:
    import ray

    try:
        return int(ray.get(task))
    except ray.exceptions.RayTaskError:  # of our own code
        raise
    except ray.exceptions.RayError as error:
        say(f"a node is lost: {error}", file=sys.stderr)
        return EXIT_FAULT


def build_command(run: Path, words: Sequence[str], nodes: int, rank: int, first: str | None) -> list[str]:
    """Return the command of a node; ``first``: where the nodes meet, None for one node."""
    node = ["--node-rank", str(rank)] if nodes > 1 else []
    node_options = ["--nodes", str(nodes), *node, "--rendezvous", str(first)] if nodes > 1 else []
    return ["-P", "-m", MODULE, *node, str(run), "--", *words, *node_options]


def _choose_address() -> str:
    """Return an address of this node and a port that is free there."""
    import ray

    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _train(directory: str, command: Sequence[str], attempt: int) -> int:
    import os

    variables = {**os.environ, RESTARTS: str(attempt)}
    # Ray kills this process, which is Ray's own, and only what it started itself. A task runs on the main thread.
    code = start_program([sys.executable, *command], cwd=directory, env=variables).wait()
    return code if code >= 0 else EXIT_FAULT


if __name__ == "__main__":
    main()


ENTRY = "trainwright.clusters.ray"
_TEXT = '''\
"""Train {recipe} on a Ray cluster, at RAY_ADDRESS. Written by trainwright submit."""

import shlex

from ray.job_submission import JobSubmissionClient

WORDS = [
{words}]

# Ray gives the entry point to a shell.
job = JobSubmissionClient().submit_job(entrypoint="python -P -m {entry} " + shlex.join(WORDS))
print(f"job {{job}}", {run!r}, sep="\\n")
'''


def format_job(job: Job) -> str:
    """Return the script."""
    settings = job.settings
    words = [f"--nodes={settings.nodes or 1}"]
    words += [f"--gpus-per-node={settings.gpus_per_node}"] if settings.gpus_per_node else []
    words += [f"--cpus-per-node={settings.cpus_per_node}"] if settings.cpus_per_node else []
    words += [f"--directory={os.getcwd()}", str(job.run), "--"]
    words += [str(job.recipe), *job.overrides, format_directory_override(job.run), "--resume", "auto"]
    lines = "".join(f"    {word!r},\n" for word in words)
    recipe = ascii(Path(job.recipe).name)[1:-1].replace('"', "'")
    return _TEXT.format(recipe=recipe, words=lines, entry=ENTRY, run=f"run {job.run}")
