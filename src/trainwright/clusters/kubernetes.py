"""The manifest of a job for Kubernetes: a JobSet, a TrainJob or a PyTorchJob.

It has one pod on each node, which trains there as one node of the run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from trainwright.clusters.job import GRACE, Job
from trainwright.clusters.job_attempts import MODULE, RESTARTS
from trainwright.errors import EXIT_MACHINE, EXIT_REQUEST, EXIT_TRAINING, RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.parallel import ProcessRange, parse_job_seconds
from trainwright.run.run_directory import format_directory_override

_WOULD_FAIL_AGAIN = (EXIT_REQUEST, EXIT_MACHINE, EXIT_TRAINING)
_MOST_RESTARTS = 100
_PORT = 29400
# Each pod starts when there is room for it, perhaps days later. The job's time limit and a pod that fails end the wait.
_RENDEZVOUS_SECONDS = 7 * 24 * 3600
_GRACE_SECONDS = 120  # between a preemption's signal and the kill; a checkpoint is written in it
_NAME_LENGTH = 40  # names of pods add to it, and have at most 63 characters
_SHARED, _MEMORY = "shared", "memory"
_PODS = "node"
_COMPLETION_INDEX = "$(JOB_COMPLETION_INDEX)"  # replaced by Kubernetes
_RESTART_ATTEMPT = {
    "name": RESTARTS,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}},
}
_TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"
# Prescribed by the operators:
_TRAINJOB_CONTAINER = "node"
_TRAINJOB_LABELS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_PYTORCHJOB_CONTAINER = "pytorch"
_RETRIED = 128  # by PyTorchJobs, from this exit code on


def format_job(job: Job) -> str:
    """Return the manifest of a job. Raises RequestError for settings that the pods cannot have."""
    _check(job)
    objects = _OBJECTS[job.settings.manifest or "jobset"](job)
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=1000)


class _Plain(yaml.SafeDumper):
    """Write what occurs twice twice: kubectl knows anchors, people who read it might not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _build_jobset(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _build_metadata(job),
        "spec": _build_jobset_spec(job, container="train"),
    }


def _build_jobset_spec(
    job: Job, *, container: str, job_labels: dict[str, str] | None = None, limited: bool = True
) -> dict[str, Any]:
    """Return the specification of a JobSet.

    Args:
        container: name of the container that trains.
        job_labels: of the Job in it.
        limited: whether it has the job's time limit itself.
    """
    nodes = job.settings.nodes or 1
    first = f"{_format_name(job)}-{_PODS}-0-0.{_format_name(job)}"  # the host name that JobSet gives the first pod
    fails = {"containerName": container, "operator": "In", "values": list(_WOULD_FAIL_AGAIN)}
    spec: dict[str, Any] = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": fails}]},
        "template": {
            "metadata": {"labels": _build_labels(job)},
            "spec": _build_pod(job, container=container, first=first, rank=_COMPLETION_INDEX, env=(_RESTART_ATTEMPT,)),
        },
    }
    if limited and job.settings.time is not None:
        spec["activeDeadlineSeconds"] = parse_job_seconds(job.settings.time)
    template = {"metadata": {"labels": job_labels}, "spec": spec} if job_labels else {"spec": spec}
    return {
        # Whatever else ends a pod (75, 5, a lost node) starts all of them again, and they resume the run.
        "failurePolicy": {
            "maxRestarts": _MOST_RESTARTS,
            "rules": [
                {
                    "name": "wouldFailAgain",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                }
            ],
        },
        "replicatedJobs": [{"name": _PODS, "replicas": 1, "template": template}],
    }


def _build_trainjob(job: Job) -> list[dict[str, Any]]:
    nodes = job.settings.nodes or 1
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": _format_name(job)},
        "trainer": {"numNodes": nodes},
    }
    if job.settings.time is not None:
        spec["activeDeadlineSeconds"] = parse_job_seconds(job.settings.time)
    template = _build_jobset_spec(job, container=_TRAINJOB_CONTAINER, job_labels=_TRAINJOB_LABELS, limited=False)
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": template}}
    return [
        {"apiVersion": _TRAINER_VERSION, "kind": "TrainingRuntime", "metadata": _build_metadata(job), "spec": runtime},
        {"apiVersion": _TRAINER_VERSION, "kind": "TrainJob", "metadata": _build_metadata(job), "spec": spec},
    ]


def _build_pytorchjob(job: Job) -> dict[str, Any]:
    """Return the PyTorchJob of a job: its master is the first node, its workers are the others."""
    nodes = job.settings.nodes or 1
    policy: dict[str, Any] = {"backoffLimit": _MOST_RESTARTS, "cleanPodPolicy": "Running"}
    if job.settings.time is not None:
        policy["activeDeadlineSeconds"] = parse_job_seconds(job.settings.time)
    replicas = {"Master": _build_replicas(job, 1)} | ({"Worker": _build_replicas(job, nodes - 1)} if nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _build_metadata(job),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }


def _build_replicas(job: Job, count: int) -> dict[str, Any]:
    first = f"{_format_name(job)}-master-0"
    # The operator sets RANK to that of the pod. It reads restartPolicy here, and sets the pods' own.
    spec = _build_pod(job, container=_PYTORCHJOB_CONTAINER, first=first, rank="$(RANK)", add=_RETRIED)
    del spec["restartPolicy"]
    return {
        "replicas": count,
        "restartPolicy": "ExitCode",
        "template": {"metadata": {"labels": _build_labels(job)}, "spec": spec},
    }


def _check(job: Job) -> None:
    """Raise RequestError for settings that the pods cannot have."""
    settings = job.settings
    for key in ("image", "claim", "mount"):
        if getattr(settings, key) is None:
            raise RequestError(f"{key}: is missing; describe the cluster in clusters.yaml, with image, claim and mount")
    mount = Path(str(settings.mount))
    if not mount.is_absolute():
        raise RequestError(f"mount: {settings.mount!r} is not an absolute path")
    labeled_path = ("the working directory", Path.cwd())
    for label, path in (labeled_path, ("the recipe", job.recipe), ("logging.run_directory", job.run)):
        if not path.is_relative_to(mount):
            raise RequestError(f"{label}: {path} is not in {mount}, where the pods have the shared volume")


def _format_name(job: Job) -> str:
    """Return the name of the job's object: that of the run as Kubernetes accepts names."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.run.name.lower()).strip("-")
    return ("run-" + plain if not plain[:1].isalpha() else plain)[:_NAME_LENGTH].strip("-")


def _build_metadata(job: Job) -> dict[str, Any]:
    return {"name": _format_name(job), "labels": _build_labels(job), "annotations": {"trainwright/run": str(job.run)}}


def _build_labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "trainwright", "app.kubernetes.io/instance": _format_name(job)}


def _build_pod(
    job: Job, *, container: str, first: str, rank: str, add: int = 0, env: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    """Return the specification of a pod.

    Args:
        container: its name, which some operators prescribe.
        first: the host name of the first pod.
        rank: of this pod; may be a variable, ``$(NAME)``.
        add: to the exit codes that are worth another start.
        env: further variables.
    """
    settings = job.settings
    grace = _GRACE_SECONDS if settings.grace is None else parse_job_seconds(settings.grace)
    needs = {"cpu": settings.cpus_per_node, "nvidia.com/gpu": settings.gpus_per_node}
    mounts = {_SHARED: str(settings.mount), _MEMORY: "/dev/shm"}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": container,
                "image": settings.image,
                "command": ["python", "-P", "-m", MODULE],
                "args": _build_arguments(job, first, rank, add),
                "env": [{"name": GRACE, "value": str(grace)}, *env],
                "workingDir": os.getcwd(),
                "resources": {"limits": {key: str(count) for key, count in needs.items() if count is not None}},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
            }
        ],
        "volumes": [
            {"name": _SHARED, "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},  # the default of 64 MiB is too small for workers
        ],
    }
    if settings.node_labels:
        spec["nodeSelector"] = dict(settings.node_labels)
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in settings.node_labels]
    return spec


def _build_arguments(job: Job, first: str, rank: str, add: int) -> list[str]:
    nodes = job.settings.nodes or 1
    words = [str(job.recipe), *job.overrides, format_directory_override(job.run), "--resume", "auto"]
    rank_options = ["--node-rank", rank] if nodes > 1 else []
    words = [_escape_word(word) for word in words]
    if nodes > 1:
        words += ["--nodes", str(nodes), *rank_options, "--rendezvous", f"{first}:{_PORT}"]
        # With a range of processes the run begins without the pods that have not come by then.
        if not isinstance(load_recipe(job.recipe, job.overrides).parallel.num_processes, ProcessRange):
            words.append(f"--rendezvous-timeout={_RENDEZVOUS_SECONDS}")
    return [_escape_word(str(job.run)), *rank_options, *(["--add", str(add)] if add else []), "--", *words]


def _escape_word(word: str) -> str:
    return word.replace("$", "$$")  # Kubernetes replaces $(NAME), and $$ by $


_OBJECTS = {
    "jobset": lambda job: [_build_jobset(job)],
    "trainjob": _build_trainjob,
    "pytorchjob": lambda job: [_build_pytorchjob(job)],
}
