"""A JobSet: a Job with a pod for each node, started again as a whole."""

from __future__ import annotations

from typing import Any

from trainwright.launch.clusters.attempt import RESTARTS
from trainwright.launch.clusters.job import Job
from trainwright.launch.kubernetes.pods import MOST_RESTARTS, WOULD_FAIL_AGAIN, labels, metadata, name_of, pod
from trainwright.recipe.sections.launch import job_seconds

_NODES = "node"
_RANK = "$(JOB_COMPLETION_INDEX)"  # replaced by Kubernetes
_ATTEMPT = {
    "name": RESTARTS,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}},
}


def jobset(job: Job) -> dict[str, Any]:
    """Return the JobSet of a job."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job),
        "spec": jobset_spec(job, container="train"),
    }


def jobset_spec(
    job: Job, *, container: str, job_labels: dict[str, str] | None = None, limited: bool = True
) -> dict[str, Any]:
    """Return the specification of a JobSet.

    Args:
        container: name of the container that trains.
        job_labels: of the Job in it.
        limited: whether it has the job's time limit itself.
    """
    nodes = job.settings.nodes or 1
    first = f"{name_of(job)}-{_NODES}-0-0.{name_of(job)}"  # the host name that JobSet gives the first pod
    fails = {"containerName": container, "operator": "In", "values": list(WOULD_FAIL_AGAIN)}
    spec: dict[str, Any] = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": fails}]},
        "template": {
            "metadata": {"labels": labels(job)},
            "spec": pod(job, container=container, first=first, rank=_RANK, env=(_ATTEMPT,)),
        },
    }
    if limited and job.settings.time is not None:
        spec["activeDeadlineSeconds"] = job_seconds(job.settings.time)
    template = {"metadata": {"labels": job_labels}, "spec": spec} if job_labels else {"spec": spec}
    return {
        # Whatever else ends a pod (75, 5, a lost node) starts all of them again, and they resume the run.
        "failurePolicy": {
            "maxRestarts": MOST_RESTARTS,
            "rules": [
                {
                    "name": "wouldFailAgain",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                }
            ],
        },
        "replicatedJobs": [{"name": _NODES, "replicas": 1, "template": template}],
    }
