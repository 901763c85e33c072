"""The task file of a managed job of SkyPilot: each node trains as one node of the run.

SkyPilot gives a task SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS, SKYPILOT_NUM_NODES and SKYPILOT_NUM_GPUS_PER_NODE
(docs.skypilot.co, "Environment variables").
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trainwright.clusters.job import Job
from trainwright.clusters.job_attempts import MODULE
from trainwright.errors import EXIT_FAULT, EXIT_STOPPED, RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.run.run_directory import format_directory_override

_PORT = 29400
_DEVICES = re.compile(r"(\d+)[x×*](.+)")


def format_job(job: Job) -> str:
    """Return the task file. Raises RequestError for settings that it cannot have."""
    settings = job.settings
    copies = _select_copies(job)
    directory = Path.cwd()
    if not job.recipe.is_relative_to(directory):
        raise RequestError(f"the recipe: {job.recipe} is not in {directory}, which SkyPilot copies to the nodes")
    task: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-") or "run",
        "num_nodes": settings.nodes or 1,
        "workdir": ".",
        "resources": _build_resources(job),
    }
    if settings.setup:
        task["setup"] = "\n".join(settings.setup) + "\n"
    task["run"] = _run(job, copies)
    return yaml.dump(task, Dumper=_Readable, sort_keys=False, width=1000)


def _select_copies(job: Job) -> list[str]:
    """Return the value of ``checkpoint.copies``, from which the run goes on elsewhere; empty if nodes share its disk.

    A bucket that SkyPilot mounts is no run directory: files get there when they are closed, which the events are at the
    end, and each node has a cache of its own before it.
    """
    settings = job.settings
    copies = load_recipe(job.recipe, job.overrides).checkpoint.copies
    if settings.mount is not None:
        if settings.bucket is not None:
            raise RequestError(
                "bucket and mount: set one; with a file system that all nodes share, no bucket is needed"
            )
        if not PurePosixPath(settings.mount).is_absolute():
            raise RequestError(f"mount: {settings.mount!r} is not an absolute path")
        return []
    if (settings.nodes or 1) > 1:
        raise RequestError(
            f"--nodes: the directory of a run on {settings.nodes} nodes has to be on a file system that all of them "
            "share, which a bucket is not; describe in clusters.yaml where `setup` mounts one (mount), or use one node"
        )
    if settings.bucket is None and not copies:
        raise RequestError(
            "bucket: is missing; the disk of a preempted node is gone, so describe in clusters.yaml a bucket for "
            "copies, such as s3://name, or set checkpoint.copies in the recipe"
        )
    return list(dict.fromkeys([*copies, *([settings.bucket] if settings.bucket is not None else [])]))


def _build_resources(job: Job) -> dict[str, Any]:
    settings = job.settings
    resources: dict[str, Any] = {}
    devices = _DEVICES.fullmatch(settings.machine or "")
    if devices is not None and "x" not in devices[2]:
        resources["accelerators"] = f"{devices[2]}:{settings.gpus_per_node}"
    elif settings.gpus_per_node is not None:
        raise RequestError("machine: is missing, so SkyPilot cannot know the kind of GPU; set it, such as 8xH100")
    if settings.cpus_per_node is not None:
        resources["cpus"] = f"{settings.cpus_per_node}+"
    if settings.spot is not None:
        resources["use_spot"] = settings.spot
    if settings.image is not None:
        resources["image_id"] = f"docker:{settings.image}"
    # A preempted node has no exit code; SkyPilot starts its job again anyway.
    resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [EXIT_FAULT, EXIT_STOPPED]}
    return resources


def _run(job: Job, copies: list[str]) -> str:
    settings = job.settings
    recipe = str(job.recipe.relative_to(os.getcwd()))
    words = [recipe, *job.overrides, *([f"checkpoint.copies={json.dumps(copies)}"] if copies else [])]
    base = '"$HOME"/runs' if settings.mount is None else shlex.quote(settings.mount.rstrip("/"))
    lines = [f"run={base}/{shlex.quote(job.run.name)}"]
    node, node_options = "", ""
    if (settings.nodes or 1) > 1:
        lines.append('first=$(head -n1 <<<"$SKYPILOT_NODE_IPS")')
        node = ' --node-rank "$SKYPILOT_NODE_RANK"'
        node_options = f' --nodes "$SKYPILOT_NUM_NODES"{node} --rendezvous "$first:{_PORT}"'
    if settings.gpus_per_node is not None or _DEVICES.fullmatch(settings.machine or ""):
        lines.append("count=$((SKYPILOT_NUM_GPUS_PER_NODE * SKYPILOT_NUM_NODES))")
        node_options += ' --num-processes "$count"'
    count_in = f" --count-in {shlex.quote(copies[-1])}" if copies else ""
    arguments = f"{_format_directory(job)} --resume auto"
    lines.append(f'exec python -P -m {MODULE} "$run"{node}{count_in} -- {shlex.join(words)} {arguments}{node_options}')
    return "\n".join(lines) + "\n"


def _format_directory(job: Job) -> str:
    """Return the override that names the run's directory, as the shell takes it."""
    if job.settings.mount is not None:
        return shlex.quote(format_directory_override(Path(job.settings.mount, job.run.name)))
    key, home, rest = format_directory_override(Path("/HOME/runs", job.run.name)).partition("/HOME")
    assert home, "it is in the override as it was given"
    return f'{shlex.quote(key)}"$HOME"{shlex.quote(rest)}'


class _Readable(yaml.SafeDumper):
    """Write texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if value.endswith("\n") else None)


_Readable.add_representer(str, _represent_text)
