"""A PyTorchJob of the Kubeflow training operator 1, which starts a pod again that failed with a code from 128."""

from __future__ import annotations

from typing import Any

from trainwright.launch.clusters.job import Job
from trainwright.launch.kubernetes.pods import MOST_RESTARTS, labels, metadata, name_of, pod
from trainwright.recipe.sections.launch import job_seconds

_CONTAINER = "pytorch"  # prescribed
_RETRIED = 128  # from this code on


def pytorchjob(job: Job) -> dict[str, Any]:
    """Return the PyTorchJob of a job: its master is the first node, its workers are the others."""
    nodes = job.settings.nodes or 1
    policy: dict[str, Any] = {"backoffLimit": MOST_RESTARTS, "cleanPodPolicy": "Running"}
    if job.settings.time is not None:
        policy["activeDeadlineSeconds"] = job_seconds(job.settings.time)
    replicas = {"Master": _replicas(job, 1)} | ({"Worker": _replicas(job, nodes - 1)} if nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }


def _replicas(job: Job, count: int) -> dict[str, Any]:
    first = f"{name_of(job)}-master-0"
    # The operator sets RANK to that of the pod. It reads restartPolicy here, and sets the pods' own.
    spec = pod(job, container=_CONTAINER, first=first, rank="$(RANK)", add=_RETRIED)
    del spec["restartPolicy"]
    return {
        "replicas": count,
        "restartPolicy": "ExitCode",
        "template": {"metadata": {"labels": labels(job)}, "spec": spec},
    }
