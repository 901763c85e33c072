"""Submit a recipe to a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import RequestError

if TYPE_CHECKING:
    from trainwright.api.planning import Plan
    from trainwright.launch.clusters.job import Job

_WRITERS = {
    "slurm": "trainwright.launch.slurm.job",
    "kubernetes": "trainwright.launch.clusters.kubernetes",
    "skypilot": "trainwright.launch.clusters.skypilot",
    "ray": "trainwright.launch.clusters.ray",
}
# What takes a file that is printed.
_USE = {
    "kubernetes": "kubectl create -f - reads it",
    "skypilot": "sky jobs launch FILE takes it",
    "ray": "python FILE submits it",
}


@dataclass(frozen=True)
class Submission:
    """A job, and the run that it trains.

    Attributes:
        job: the scheduler's number; None if nothing was submitted.
        later: the numbers of the jobs that go on with the run after that one, in order.
        run: the directory of the run; with an array, of the runs of its elements.
        script: the text of the job's file.
        plan: for the described machine; None if the cluster's nodes are not described.
        seconds: the time limit, if it is known.
        warning: what the job is not given by the scheduler, as far as it is known.
    """

    job: str | None
    run: Path
    script: str
    plan: Plan | None
    seconds: int | None
    warning: str | None = None
    later: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield what ``trainwright submit`` prints."""
        if self.plan is None:
            yield "not planned: the cluster's nodes are not described (machine in clusters.yaml, such as 8xH100)"
        else:
            from trainwright.planning.output import summary

            yield summary(self.plan.details)
            step = self.plan.predicted.get("step_time")
            if self.seconds is not None and step:
                yield f"about {int(self.seconds / step):,} steps fit into the {self.seconds / 3600:.3g} h of a job"
        if self.warning is not None:
            yield f"warning: {self.warning}"
        if self.later:
            yield f"then {', '.join(self.later)}, each after the one before"
        yield f"job {self.job}"
        yield f"run {self.run}"


def submit(
    recipe: str | PathLike[str],
    *overrides: str,
    to: str | None = None,
    name: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    cpus_per_node: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    array: str | None = None,
    jobs: int | None = None,
    until_done: bool | None = None,
    manifest: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Submission:
    """Submit a recipe as a job of Slurm, or return the file of one for Kubernetes,
    SkyPilot or Ray; what ``trainwright submit`` does.

    The job starts the run, or resumes it if it has begun: submit the same again to continue a run whose job has ended.
    What is not given is taken from the recipe's section ``launch``, then from the cluster in
    ``~/.config/trainwright/clusters.yaml``, then left to the scheduler.

    Args:
        recipe: the path of a recipe file, which the nodes see too.
        overrides: ``section.key=value``; with an array, ``{element}`` is replaced by the element's index.
        to: ``slurm``; ``kubernetes``, ``skypilot`` or ``ray``, only with ``dry_run``; or a cluster of clusters.yaml.
        name: of the run, in ``runs/``, and of its job. Default: that of the recipe or of ``logging.run_directory``,
            with which there can be no other name.
        nodes: number of nodes.
        gpus_per_node: GPUs of each node. Default: those of the cluster's ``machine``, or none.
        cpus_per_node: CPUs of each node. Default: the share that belongs to its GPUs, or all.
        time: the time limit, such as ``4h`` or ``"4:00:00"``.
        partition: where the job runs.
        account: who is charged.
        array: the indices of an array of jobs, such as ``0-9``.
        jobs: how many jobs train the run, one after another; those that are not needed are canceled.
        until_done: requeue the job until the run has finished.
        manifest: of Kubernetes: ``jobset``, ``trainjob`` or ``pytorchjob``.
        force: submit even if the plan says that the run does not fit.
        dry_run: submit and write nothing; the submission's ``script`` is the file.

    Raises:
        RequestError: the recipe or the arguments are invalid, the scheduler refuses them, or there is none.
        MachineError: the run does not fit into the described machine.

    Examples:
        >>> import trainwright as tw
        >>> made = tw.submit("tiny.yaml", to="slurm", name="first", nodes=2, time="4h", dry_run=True)
        >>> "#SBATCH --time=4:00:00" in made.script.splitlines()
        True
    """
    from trainwright.launch.clusters.job import first_overrides, job_of
    from trainwright.launch.clusters.settings import SLURM
    from trainwright.launch.slurm import submission
    from trainwright.recipe.sections.launch import job_seconds

    options = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "cpus_per_node": cpus_per_node,
        "time": time,
        "partition": partition,
        "account": account,
        "array": array,
        "jobs": jobs,
        "until_done": until_done,
        "manifest": manifest,
    }
    job = job_of(Path(recipe), overrides, options, to, name)
    if job.settings.scheduler != SLURM and not dry_run:
        scheduler = job.settings.scheduler
        raise RequestError(f"--to: jobs of {scheduler} are only printed; pass --print, and {_USE[scheduler]}")
    on_slurm = job.settings.scheduler == SLURM
    cpus = job.settings.cpus_per_node
    if on_slurm:
        job = submission.completed(job)
    script = _text(job)
    plan = None
    if (machine := job.settings.described()) is not None:
        from trainwright.api.planning import plan as plan_for

        plan = plan_for(recipe, *first_overrides(job), on=machine)
        if not force:
            plan.details.refuse_shortage()
    warning = submission.stop_warning(job, plan.details) if on_slurm and plan is not None else None
    numbers: list[str] = []
    if not dry_run:
        numbers = submission.submit(job, chosen=cpus != job.settings.cpus_per_node)
        script = _text(job)  # now that there is a directory for its log
    limit = job.settings.time
    seconds = None if limit is None else job_seconds(limit)
    return Submission(next(iter(numbers), None), job.run, script, plan, seconds, warning, tuple(numbers[1:]))


def _text(job: Job) -> str:
    """Return the job's file."""
    from importlib import import_module

    text: str = import_module(_WRITERS[job.settings.scheduler]).text(job)
    return text
