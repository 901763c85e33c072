"""``trainwright train``: train a recipe on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.command import NamesInHelp, command
from trainwright.errors import RequestError
from trainwright.recipe.registries import HOST_LAUNCHERS, SIMULATIONS
from trainwright.utils.installation import FIRST
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.run.resolve import Resolved


# Which machines train together.
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        "--num-machines",
        min=1,
        max=100_000,
        help="Number of machines that work together; run the command on each.",
    ),
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", "--machine-rank", min=0, help="Rank of this node, from 0.")
]
Rendezvous = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of node 0 for the rendezvous.")]
RendezvousTimeout = Annotated[
    float | None, typer.Option(min=1, metavar="SECONDS", help="Seconds to wait for the other nodes. Default: 600.")
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS", help="Start it on these machines together, over ssh, from here: node1,node2 or node[1-4]."
    ),
]
HostFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The same with hosts from a file: a host a line, or `node1 slots=8`."),
]
AccelerateFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Take the number of processes, strategy and related settings from this Accelerate file."
    ),
]


class TrainCommand(NamesInHelp):
    """Allow --resume without a value, which typer's options do not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, where ``--resume`` may have no value."""
        return super().parse_args(ctx, [_complete_bare_resume(args, i) for i in range(len(args))])


@command(cls=TrainCommand)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE [SECTION.KEY=VALUE]...",
            help="The recipe's YAML file, and overrides. With --resume RUN, the recipe of that run.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[RUN]",
            help="Resume this run: its directory, or the URL of its copies, such as s3://bucket/runs/NAME; without a "
            "value, the recipe's newest run in runs/. auto: the run in runs/RECIPE, or in logging.run_directory, if it "
            "has begun or has copies; otherwise start it there.",
        ),
    ] = None,
    fork: Annotated[
        str | None,
        typer.Option(
            metavar="RUN[@STEP]",
            help="Start a new run from a checkpoint of this run, the newest or that of STEP; short for train.fork. "
            "Without a recipe, with the recipe of that run.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan without training or writing anything.")
    ] = False,
    num_processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of worker processes on all nodes; short for parallel.num_processes."),
    ] = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    hosts: Hosts = None,
    hostfile: HostFile = None,
    accelerate_config: AccelerateFile = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Stop after a checkpoint before this time: 06:00, or 2026-03-01T06:00; or after a step: 'step 400'.",
        ),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after a checkpoint within this time, such as 4h.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start even if the plan does not fit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show on a terminal too, as in logs, why each setting was chosen.")
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Run the code on simulated GPUs instead, such as 8xH100 or 128x8xH100: shows peak memory beside the "
            "plan, collectives and host waits, and operations that mix devices or dtypes. Computes and writes nothing.",
        ),
    ] = None,
    max_host_syncs: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="With --simulate: fail if the host waits for the GPU more than N times per step."
        ),
    ] = None,
    most_waits: Annotated[int | None, typer.Option(min=0, metavar="N", hidden=True)] = None,
) -> None:
    """Train a recipe.

    Ends with 0: finished, 2: wrong request, 3: this machine cannot do it, 4: failed, 5: a machine failed, 75: stopped;
    run it again with --resume.
    """
    from trainwright.api.training import prepare_shown
    from trainwright.recipe.loading import split_words
    from trainwright.run.request import TrainingRequest

    if verbose:
        from trainwright.run.observers.console import VERBOSE

        os.environ[VERBOSE] = "1"
    recipe, overrides = split_words(arguments or [])
    if fork is not None:
        recipe, overrides = _build_fork(fork, recipe, overrides)
    if most_waits is not None:
        say("note: --most-waits is called --max-host-syncs now; the next version refuses it", file=sys.stderr)
        max_host_syncs = most_waits if max_host_syncs is None else max_host_syncs
    if simulate is not None or max_host_syncs is not None:
        elsewhere: dict[str, object] = {
            "--resume": resume,
            "--nodes": nodes,
            "--node-rank": node_rank,
            "--rendezvous": rendezvous,
            "--hosts": hosts,
            "--hostfile": hostfile,
            "--until": until,
            "--time-limit": time_limit,
            "--rendezvous-timeout": rendezvous_timeout,
        }
        excess = [name for name, value in elsewhere.items() if value is not None] + ["--dry-run"] * dry_run
        overrides = [*overrides, *([f"parallel.num_processes={num_processes}"] if num_processes else [])]
        _simulate(recipe, overrides, simulate, max_host_syncs, excess, force, accelerate_config)
        return
    request = TrainingRequest(
        recipe,
        overrides,
        resume,
        num_processes,
        nodes,
        node_rank,
        rendezvous,
        rendezvous_timeout,
        accelerate_config,
        force,
        until=until,
        time_limit=time_limit,
    )
    if hosts is not None or hostfile is not None:
        if dry_run:
            raise RequestError("--hosts and --hostfile start a run; remove --dry-run")
        if code := HOST_LAUNCHERS.get("ssh")(request, hosts, hostfile):
            raise typer.Exit(code)
        return
    prepared_training = prepare_shown(request)
    if not dry_run:
        prepared_training.start()
        return
    prepared_training.request.discard_fetched()
    _show(prepared_training.resolved)
    if not force:
        prepared_training.resolved.plan.refuse_shortage()


def _build_fork(fork: str, recipe: Path | None, overrides: list[str]) -> tuple[Path, list[str]]:
    """Return the recipe and the overrides of a run that starts from a checkpoint of another one."""
    from trainwright.engine.checkpoints.parent import ParentCheckpoint
    from trainwright.run.run_directory import RECIPE

    parent = ParentCheckpoint.of(fork)
    return recipe or parent.run / RECIPE, [*overrides, f"train.fork={json.dumps(str(parent))}"]


def _show(resolved: Resolved) -> None:
    from trainwright.recipe.loading import dump_recipe

    say(dump_recipe(resolved.recipe), end="")
    for reason in (*resolved.reasons, resolved.plan.summary):
        say(f"# {reason}", wrap=False)


def _simulate(
    recipe: Path | None,
    overrides: list[str],
    machine: str | None,
    max_host_syncs: int | None,
    excess: list[str],
    force: bool,
    accelerate_config: Path | None,
) -> None:
    """Simulate the recipe; ``excess`` are options that a simulation has no use for."""
    if machine is None:
        raise RequestError("--max-host-syncs: counts waits of a simulated run; pass --simulate MACHINE")
    if excess:
        raise RequestError(f"--simulate: {machine} describes all nodes of a new run; remove {', '.join(excess)}")
    if recipe is None:
        raise RequestError("no recipe; pass one, for instance: " + FIRST.format("train"))
    simulation = SIMULATIONS.get("simulate")(
        recipe, *overrides, on=machine, force=force, progress=True, accelerate_config=accelerate_config
    )
    for line in simulation.lines():
        say(line, wrap=False)
    simulation.refuse(max_host_syncs)


def _complete_bare_resume(args: list[str], i: int) -> str:
    """Return the value for `--resume` followed by nothing, an option, an override or a recipe file: the newest run."""
    if args[i] != "--resume":
        return args[i]
    from trainwright.run.request import is_bare_resume

    return "--resume=" if is_bare_resume(args[i + 1] if i + 1 < len(args) else None) else "--resume"


def stop(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's directory, or that of an array's runs.", show_default=False)
    ],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until the run has ended; 0: do not wait.")
    ] = 600.0,
) -> None:
    """Stop a run after its current step, with a checkpoint.

    A job of Slurm that trains it ends too, and is not requeued; one that waits is canceled. Otherwise the same as
    creating the file RUN/stop, which works from another machine too. An evaluation is interrupted,
    and repeated when the run is resumed.
    """
    import trainwright as tw

    say(f"{run}: {tw.stop(run, timeout=timeout)}")


def checkpoint(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the checkpoint; 0: do not wait.")
    ] = 600.0,
) -> None:
    """Have a run write a checkpoint after its current step, and go on.

    The same as creating the file RUN/checkpoint, which works from another machine too.
    """
    import trainwright as tw

    step = tw.checkpoint(run, timeout=timeout)
    say(f"{run}: {'asked for a checkpoint' if step is None else f'checkpoint of step {step}'}")


@command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def under(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="The launcher's command, such as torchrun ... -m trainwright.worker RECIPE."
        ),
    ],
) -> None:
    """Run torchrun, accelerate launch or another launcher, and end with the exit code of the run.

    These launchers end with 1 whatever their processes end with. Signals are passed on to the run.
    """
    from trainwright.run.program import run_launcher

    raise typer.Exit(run_launcher(command))
