"""``trainwright launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.command import command
from trainwright.cli.train import HostFile, Hosts, NodeRank, Nodes, Rendezvous, RendezvousTimeout
from trainwright.recipe.registries import HOST_LAUNCHERS


# Options after the script are the script's: the first word that is not an option of ours ends our own.
@command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module with --module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Passed to the script unchanged.")
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of processes on all nodes. Default: from the Accelerate file, otherwise one per GPU."
        ),
    ] = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    hosts: Hosts = None,
    hostfile: HostFile = None,
    config_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An Accelerate file. Default: Accelerate's default file, if it exists."),
    ] = None,
    mixed_precision: Annotated[
        str | None, typer.Option(metavar="TYPE", help="no, bf16, fp16 or fp8, for Accelerate, in place of the file's.")
    ] = None,
    dynamo_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Such as inductor, for Accelerate, in place of the file's.")
    ] = None,
    gpu_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="GPUs of this machine to use, such as 0,1, or all.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as in python -m.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there are GPUs.")] = False,
    logs: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Directory for one log per process. Default: a new one under runs/."),
    ] = None,
) -> None:
    """Start a script of your own, written for Accelerate or torch.distributed, in several processes.

    Options of launch come before SCRIPT. Ends with the script's own exit code if it sets one.
    """
    from trainwright.compatibility.scripts.starting import NodeOptions, ScriptOptions, launch_script

    node_options = NodeOptions(nodes, node_rank, rendezvous, rendezvous_timeout)
    options = {"mixed_precision": mixed_precision, "dynamo_backend": dynamo_backend, "gpu_ids": gpu_ids}
    settings = {key: value for key, value in options.items() if value is not None}
    if hosts is not None or hostfile is not None:
        words = [*(["--cpu"] if cpu else []), *([f"--config-file={config_file}"] if config_file else [])]
        words += [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        own = (script, module, tuple(arguments or ()))
        raise typer.Exit(
            HOST_LAUNCHERS.get("ssh script")(own, words, num_processes, logs, node_options, hosts, hostfile)
        )
    code = launch_script(
        script,
        tuple(arguments or ()),
        ScriptOptions(config_file, num_processes, cpu, node_options, settings),
        module=module,
        logs=logs,
    )
    raise typer.Exit(code)
