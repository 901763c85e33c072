"""Start a user's own Accelerate or torch script in several processes, as reliably as a run."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_STOPPED, MachineError, RequestError
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.launch.accelerate.reading import AccelerateConfig
    from trainwright.launch.accelerate.translation import Translation
    from trainwright.machine.machine import Machine


def launch_script(
    script: str,
    arguments: tuple[str, ...],
    *,
    module: bool,
    config_file: Path | None,
    num_processes: int | None,
    cpu: bool,
    logs: Path | None,
) -> int:
    """Run the script to its end; return its exit code. Changes this process.

    Args:
        module: ``script`` is a module, as with ``python -m``.
        config_file: an Accelerate file. Default: Accelerate's default file, if it exists.
        num_processes: default: from the file, otherwise one per GPU.
        cpu: use the CPU even if there are GPUs.
        logs: directory for one log per process. Default: a new one under ``runs/``.

    Raises:
        RequestError: the script does not exist, or the file is invalid.
        MachineError: the machine lacks what is asked for.
        TrainwrightError: the script failed; the exit code is its own if it sets one.
    """
    from trainwright.launch.group.environment import refuse_worker

    refuse_worker("launch")
    _check_script(script, module)
    code = _run(script, module, arguments, _plan(config_file, num_processes, cpu), logs)
    if code == EXIT_STOPPED:
        say(f"stopped: {script} was interrupted", file=sys.stderr)
    return code


@dataclass(frozen=True)
class ScriptPlan:
    """The number of workers, their device and variables, and the file that sets them."""

    processes: int
    on_cpu: bool
    variables: dict[str, str]
    file: str | None
    cores: int


def _check_script(script: str, module: bool) -> None:
    from importlib.util import find_spec

    from trainwright.recipe.files import missing_file

    if not module:
        if not Path(script).is_file():
            raise RequestError(missing_file(Path(script)))
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())
    if find_spec(script.partition(".")[0]) is None:
        raise RequestError(f"--module: no module {script} in this directory or installed")


def _plan(config_file: Path | None, num_processes: int | None, cpu: bool) -> ScriptPlan:
    from trainwright.launch.accelerate.reading import default_path, read

    if config_file is None and default_path().is_file():
        config_file = default_path()
    if config_file is not None:
        return _plan_of_file(read(config_file), num_processes, cpu)
    from trainwright.launch.accelerate.machine import default_processes
    from trainwright.machine.accelerators import refuse_unusable
    from trainwright.machine.detect import detect

    variables = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    os.environ.update(variables)
    machine = detect()
    refuse_unusable(machine)
    processes = num_processes or default_processes(machine)
    _check_gpus(processes, machine)
    if not machine.gpus:
        variables["ACCELERATE_USE_CPU"] = "true"
    return ScriptPlan(processes, not machine.gpus, variables, None, machine.cpu_cores)


def _plan_of_file(source: AccelerateConfig, num_processes: int | None, cpu: bool) -> ScriptPlan:
    from trainwright.launch.accelerate.environment import worker_environment
    from trainwright.launch.accelerate.machine import becomes_ddp, default_processes, require
    from trainwright.launch.accelerate.translation import interpret
    from trainwright.machine.accelerators import refuse_unusable
    from trainwright.machine.detect import detect

    translation = interpret(source)
    translation.refuse_problems(for_script=True)
    if translation.nodes > 1:
        raise RequestError(
            f"{source.place('num_machines')}: num_machines is {translation.nodes}; launch starts processes on one "
            "machine only; for several, start the script with torchrun on each"
        )
    if num_processes is not None:
        translation = replace(translation, processes=num_processes)
    if cpu:
        translation = replace(translation, device="cpu")
    machine = detect()
    require(translation, machine, for_script=True)
    os.environ.update(translation.device_environment())
    refuse_unusable(detect())
    on_cpu = translation.device == "cpu" or not machine.gpus
    if becomes_ddp(translation, machine):
        raise _sharded_on_cpu(translation)
    processes = translation.processes or default_processes(detect())
    variables = worker_environment(source, translation, on_cpu=on_cpu)
    return ScriptPlan(processes, on_cpu, variables, source.name, machine.cpu_cores)


def _sharded_on_cpu(translation: Translation) -> MachineError:
    return MachineError(
        f"{translation.source}: on a CPU Accelerate runs {translation.distributed_type} as plain DDP, without "
        "sharding; set distributed_type: MULTI_CPU to accept that. Recipes are also sharded on CPUs: trainwright "
        f"train RECIPE --accelerate-config {translation.source}"
    )


def _check_gpus(processes: int, machine: Machine) -> None:
    gpus = len(machine.gpus)
    if gpus and processes > gpus:
        raise MachineError(
            f"--num-processes: {processes} processes, but there {('are' if gpus > 1 else 'is')} {gpus} "
            f"GPU{'s' * (gpus > 1)}; use --num-processes {gpus}, or --cpu"
        )


def _run(script: str, module: bool, arguments: tuple[str, ...], plan: ScriptPlan, logs: Path | None) -> int:
    from trainwright.launch import run_directory
    from trainwright.launch.ending.stop import Stopping
    from trainwright.launch.limits import check_limits
    from trainwright.launch.process import prepare_environment

    os.environ.update(plan.variables)
    check_limits(plan.processes, plan.processes)
    prepare_environment(plan.cores, plan.processes)
    with Stopping("stopping: the script is interrupted; ctrl-C again kills it") as stopping:
        # Imports torch, so it comes after the thread limit and before the workers are forked.
        from trainwright.launch.accelerate.script import Script, run_script
        from trainwright.launch.local import launch as launch_workers

        stem = script.rpartition(".")[2] if module else Path(script).stem
        directory = logs or run_directory.create("auto", stem) / "logs"
        _announce(script, plan, directory)
        entry = functools.partial(run_script, Script(script, module, arguments))
        return launch_workers(entry, processes=plan.processes, logs=directory, stopping=stopping)


def _announce(script: str, plan: ScriptPlan, logs: Path) -> None:
    number = f"{plan.processes} process{'es' * (plan.processes > 1)}"
    by = f", by {plan.file}" if plan.file else ""
    device = "the CPU" if plan.on_cpu else f"GPU{'s' * (plan.processes > 1)}"
    say(f"{script}: {number} on {device}{by}; logs: {logs}", file=sys.stderr)
