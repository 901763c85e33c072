"""A TrainJob of Kubeflow Trainer 2, and the TrainingRuntime that it refers to, which has the pods."""

from __future__ import annotations

from typing import Any

from trainwright.launch.clusters.job import Job
from trainwright.launch.kubernetes.jobset import jobset_spec
from trainwright.launch.kubernetes.pods import metadata, name_of
from trainwright.recipe.sections.launch import job_seconds

_VERSION = "trainer.kubeflow.org/v1alpha1"
_CONTAINER = "node"  # prescribed, as the label is
_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def trainjob(job: Job) -> list[dict[str, Any]]:
    """Return the TrainingRuntime and the TrainJob of a job."""
    nodes = job.settings.nodes or 1
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name_of(job)},
        "trainer": {"numNodes": nodes},
    }
    if job.settings.time is not None:
        spec["activeDeadlineSeconds"] = job_seconds(job.settings.time)
    template = jobset_spec(job, container=_CONTAINER, job_labels=_TRAINER, limited=False)
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": template}}
    return [
        {"apiVersion": _VERSION, "kind": "TrainingRuntime", "metadata": metadata(job), "spec": runtime},
        {"apiVersion": _VERSION, "kind": "TrainJob", "metadata": metadata(job), "spec": spec},
    ]
