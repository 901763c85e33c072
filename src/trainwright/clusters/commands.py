"""``trainwright submit``, ``jobs``, ``stop`` and ``checkpoint``: jobs of a cluster, and requests to runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import RequestError
from trainwright.utils.installation import FIRST
from trainwright.utils.text import choose_table_width, say


def submit(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [SECTION.KEY=VALUE]...", help="The recipe, and overrides.", show_default=False),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="slurm, kubernetes, skypilot, ray, or a cluster of ~/.config/trainwright/clusters.yaml.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in runs/, and of the job.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs of each node. Default: those of the cluster's machine.")
    ] = None,
    cpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Number of CPUs of each node. Default: the share of its GPUs, or all of them."),
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit, such as 4h or 4:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm only: partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm only: account that is charged.")] = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="INDICES",
            help="Slurm only: an array of jobs, such as 0-9: a run for each index, which replaces {element} in "
            "overrides.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Slurm only: number of jobs that train the run, one after another, where none can be requeued; what "
            "is not needed is canceled.",
        ),
    ] = None,
    until_done: Annotated[
        bool | None,
        typer.Option(
            "--until-done/--once",
            help="Slurm only: requeue the job after its time limit too, until the run has finished. Default, --once: "
            "only after a preemption or a machine fault.",
            show_default=False,
        ),
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="With Kubernetes: jobset, trainjob (Kubeflow Trainer 2) or pytorchjob (Kubeflow 1)."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Submit even if the plan does not fit.")] = False,
    print_only: Annotated[bool, typer.Option("--print", help="Print the job's file, and submit nothing.")] = False,
) -> None:
    """Train a recipe in a job of Slurm, or print the file of a job for Kubernetes, SkyPilot or Ray.

    The run is planned for the described nodes first. The job resumes the run if it has begun, so the same command
    continues it. Defaults are in the recipe's section launch and in clusters.yaml.
    """
    options = {name: value for name, value in locals().items() if name not in ("arguments", "print_only")}
    import trainwright as tw
    from trainwright.recipe.loading import split_words

    recipe, overrides = split_words(arguments)
    if recipe is None:
        raise RequestError("no recipe; pass one, for instance: " + FIRST.format("submit --to slurm"))
    submission = tw.submit(recipe, *overrides, **options, dry_run=print_only)
    if print_only:
        say(submission.script, end="", wrap=False)
        return
    for line in submission.lines():
        say(line, wrap=False)


def jobs(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run directories.", show_default=False)
    ] = None,
) -> None:
    """Show runs and the jobs that train them: those in runs/, and those of your jobs in Slurm's queue."""
    import trainwright as tw
    from trainwright.clusters.operations import format_jobs

    for line in format_jobs(tw.jobs(*(runs or [])), choose_table_width(sys.stdout)):
        say(line, wrap=False)
