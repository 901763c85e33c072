"""The Python script that submits a job to a Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.launch.clusters.job import Job
from trainwright.launch.run_directory import override_of

ENTRY = "trainwright.launch.ray.entry"
_TEXT = '''\
"""Train {recipe} on a Ray cluster, at RAY_ADDRESS. Written by trainwright submit."""

import shlex

from ray.job_submission import JobSubmissionClient

WORDS = [
{words}]

# Ray gives the entry point to a shell.
job = JobSubmissionClient().submit_job(entrypoint="python -m {entry} " + shlex.join(WORDS))
print(f"job {{job}}", {run!r}, sep="\\n")
'''


def text(job: Job) -> str:
    """Return the script."""
    asked = job.settings
    words = [f"--nodes={asked.nodes or 1}"]
    words += [f"--gpus-per-node={asked.gpus_per_node}"] if asked.gpus_per_node else []
    words += [f"--cpus-per-node={asked.cpus_per_node}"] if asked.cpus_per_node else []
    words += [f"--directory={os.getcwd()}", str(job.run), "--"]
    words += [str(job.recipe), *job.overrides, override_of(job.run), "--resume", "auto"]
    lines = "".join(f"    {word!r},\n" for word in words)
    recipe = ascii(Path(job.recipe).name)[1:-1].replace('"', "'")
    return _TEXT.format(recipe=recipe, words=lines, entry=ENTRY, run=f"run {job.run}")
