"""The manifest of a JobSet: one pod on each node, which trains there as one node of the run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from trainwright.errors import EXIT_MACHINE, EXIT_REQUEST, EXIT_TRAINING, RequestError
from trainwright.launch.clusters.job import Job
from trainwright.recipe.sections.launch import job_seconds

_PORT = 29400
_GRACE_SECONDS = 120  # between a preemption's signal and the kill; a checkpoint is written in it
_MOST_RESTARTS = 100
_NAME_LENGTH = 40  # names of pods add to it, and have at most 63 characters
_NODES = "node"
_RANK = "$(JOB_COMPLETION_INDEX)"  # replaced by Kubernetes
_MEMORY = "memory"


def text(job: Job) -> str:
    """Return the manifest of a job. Raises RequestError for settings that the pods cannot have."""
    _check(job)
    return yaml.safe_dump(_jobset(job), sort_keys=False, width=1000)


def name_of(job: Job) -> str:
    """Return the name of the JobSet: that of the run as Kubernetes accepts names."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.run.name.lower()).strip("-")
    return ("run-" + plain if not plain[:1].isalpha() else plain)[:_NAME_LENGTH].strip("-")


def _check(job: Job) -> None:
    asked = job.settings
    for key in ("partition", "account", "array", "until_done", "options", "setup"):
        if getattr(asked, key):
            raise RequestError(f"launch.{key}: is for Slurm, and Kubernetes has no such setting; remove it")
    for key in ("image", "claim", "mount"):
        if getattr(asked, key) is None:
            raise RequestError(f"{key}: is missing; describe the cluster in clusters.yaml, with image, claim and mount")
    mount = Path(str(asked.mount))
    if not mount.is_absolute():
        raise RequestError(f"mount: {asked.mount!r} is not an absolute path")
    here = ("the working directory", Path.cwd())
    for what, path in (here, ("the recipe", job.recipe), ("logging.run_directory", job.run)):
        if not path.is_relative_to(mount):
            raise RequestError(f"{what}: {path} is not in {mount}, where the pods have the shared volume")


def _jobset(job: Job) -> dict[str, Any]:
    name, nodes = name_of(job), job.settings.nodes or 1
    labels = {"app.kubernetes.io/name": "trainwright", "app.kubernetes.io/instance": name}
    template: dict[str, Any] = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_would_fail_again()]},
        "template": {"metadata": {"labels": labels}, "spec": _pod(job, name, nodes)},
    }
    if job.settings.time is not None:
        template["activeDeadlineSeconds"] = job_seconds(job.settings.time)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": dict(labels), "annotations": {"trainwright/run": str(job.run)}},
        "spec": {
            # Whatever else ends a pod (75, 5, a lost node) starts all of them again, and they resume the run.
            "failurePolicy": {
                "maxRestarts": _MOST_RESTARTS,
                "rules": [
                    {
                        "name": "would-fail-again",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                    }
                ],
            },
            "replicatedJobs": [{"name": _NODES, "replicas": 1, "template": {"spec": template}}],
        },
    }


def _would_fail_again() -> dict[str, Any]:
    codes = [EXIT_REQUEST, EXIT_MACHINE, EXIT_TRAINING]
    return {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": codes}}


def _pod(job: Job, name: str, nodes: int) -> dict[str, Any]:
    asked = job.settings
    needs = {"cpu": asked.cpus_per_node, "nvidia.com/gpu": asked.gpus_per_node}
    mounts = {"shared": str(asked.mount), _MEMORY: "/dev/shm"}
    container = {
        "name": "train",
        "image": asked.image,
        "command": ["python", "-m", "trainwright"],
        "args": _arguments(job, name, nodes),
        "workingDir": os.getcwd(),
        "resources": {"limits": {key: str(count) for key, count in needs.items() if count is not None}},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": asked.claim}},
            {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},  # the default of 64 MiB is too small for workers
        ],
    }


def _arguments(job: Job, name: str, nodes: int) -> list[str]:
    words = ["train", str(job.recipe), *job.overrides, f"logging.run_directory={job.run}", "--resume", "auto"]
    words = [word.replace("$", "$$") for word in words]  # Kubernetes replaces $(NAME), and $$ by $
    if nodes == 1:
        return words
    first = f"{name}-{_NODES}-0-0.{name}"  # the host name that JobSet gives the first pod
    return [*words, "--nodes", str(nodes), "--node-rank", _RANK, "--rendezvous", f"{first}:{_PORT}"]
