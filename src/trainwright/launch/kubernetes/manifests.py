"""The manifest of a job: what `kubectl create` reads."""

from __future__ import annotations

import yaml

from trainwright.launch.clusters.job import Job
from trainwright.launch.kubernetes.jobset import jobset
from trainwright.launch.kubernetes.pods import check
from trainwright.launch.kubernetes.pytorchjob import pytorchjob
from trainwright.launch.kubernetes.trainjob import trainjob

_WRITERS = {"jobset": lambda job: [jobset(job)], "trainjob": trainjob, "pytorchjob": lambda job: [pytorchjob(job)]}


def text(job: Job) -> str:
    """Return the manifest of a job. Raises RequestError for settings that the pods cannot have."""
    check(job)
    objects = _WRITERS[job.settings.manifest or "jobset"](job)
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=1000)


class _Plain(yaml.SafeDumper):
    """Write what occurs twice twice: kubectl knows anchors, people who read it might not."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True."""
        return True
