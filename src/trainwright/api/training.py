"""Training: a new run, a resumed one, or one whose processes another launcher has started."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.api.recipe import Recipe, extract_source
from trainwright.api.run import Run
from trainwright.api.separate_process import answer, run_in_process
from trainwright.errors import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    Interrupted,
    RequestError,
    Stopped,
    TrainwrightError,
    build_error,
)
from trainwright.machine.accelerators import restrict_to_device
from trainwright.machine.cache import keep_compiled_code
from trainwright.machine.detect import detect
from trainwright.recipe.registries import LAUNCHERS
from trainwright.run.group import environment
from trainwright.run.group.environment import NodeRendezvous, Variables
from trainwright.run.shutdown.requests import choose_deadline
from trainwright.run.shutdown.stop import describe_stop, interrupt_on_stop
from trainwright.utils.activity import Activity, begin_activity
from trainwright.utils.text import quote_word, say

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine
    from trainwright.run.request import RunRequest, TrainingRequest
    from trainwright.run.resolve import Resolved


def train(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    num_processes: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    rendezvous_timeout: float | None = None,
    accelerate_config: str | PathLike[str] | None = None,
    force: bool = False,
    progress: bool = False,
    until: str | None = None,
    time_limit: str | None = None,
) -> Run:
    """Train a recipe to the end; what ``trainwright train`` does.

    In a script that torchrun, ``accelerate launch``, srun or mpirun has started in several processes, each process
    calls this function and they train together; a failure is raised in all of them.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        num_processes: worker processes of all nodes together; short for ``parallel.num_processes``.
        nodes: the number of machines that train together; call it on each of them.
        node_rank: the index of this node, counted from 0.
        rendezvous: ``host:port`` where the nodes meet: an address of node 0.
        rendezvous_timeout: how many seconds the nodes wait for each other. Default: 600.
        accelerate_config: a file of ``accelerate config``, for the number of processes, the strategy and so on.
        force: start even if the plan says that the run does not fit.
        progress: show the plan, the steps and the results during training.
        until: stop after a checkpoint before this time, such as ``"06:00"`` or ``"2026-03-01T06:00"``, or after a step,
            ``"step 400"``. In a Slurm job, its time limit counts as well.
        time_limit: stop after a checkpoint within this time, such as ``"4h"``.

    Returns:
        The finished run.

    Raises:
        RequestError: the recipe, the arguments or the data are invalid; nothing is written.
        MachineError: the machine does not support what is asked.
        TrainingError: the run failed; the message names the rank and the first error.
        Stopped: it was stopped by a signal (such as ctrl-C) after a checkpoint; `resume` continues it.

    Examples:
        >>> import trainwright as tw
        >>> run = tw.train("tiny.yaml", "train.max_steps=2", "logging.run_directory=runs/two")
        >>> run.status, len(run.columns("step")["loss"])
        ('finished', 2)
    """
    from trainwright.run.request import TrainingRequest

    options = TrainingRequest(
        extract_source(recipe),
        overrides,
        None,
        num_processes,
        nodes,
        node_rank,
        rendezvous,
        rendezvous_timeout,
        None if accelerate_config is None else Path(accelerate_config),
        force,
        until,
        time_limit,
    )
    return _run(options, progress)


def resume(
    run: Run | str | PathLike[str],
    *overrides: str,
    recipe: Recipe | str | PathLike[str] | None = None,
    num_processes: int | None = None,
    force: bool = False,
    progress: bool = False,
    until: str | None = None,
    time_limit: str | None = None,
) -> Run:
    """Continue a run from its newest checkpoint to the end; what ``trainwright train --resume RUN`` does.

    What determines the losses is fixed; what distributes, measures or saves the run may change, and the run may become
    longer (``"train.max_steps=200"``).

    Args:
        run: a run, its directory, or its URL in ``checkpoint.copies``, such as ``"s3://bucket/runs/name"``.
        overrides: ``section.key=value``, the value in YAML.
        recipe: a recipe with further changes.
        num_processes: worker processes; short for ``parallel.num_processes``.
        force: start even if the plan says that the run does not fit.
        progress: show the plan, the steps and the results during training.
        until: stop after a checkpoint before this time, such as ``"06:00"`` or ``"2026-03-01T06:00"``, or after a step,
            ``"step 400"``. In a Slurm job, its time limit counts as well.
        time_limit: stop after a checkpoint within this time, such as ``"4h"``.

    Raises:
        RequestError: the run does not exist, or a change would make it another run.
        MachineError, TrainingError, Stopped: as for `train`.

    Examples:
        >>> import trainwright as tw
        >>> tw.resume("nowhere")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: --resume: nowhere is not a run: it has no recipe.yaml
    """
    from trainwright.run.request import TrainingRequest

    source = None if recipe is None else extract_source(recipe)
    options = TrainingRequest(
        source, overrides, fspath(run), num_processes, force=force, until=until, time_limit=time_limit
    )
    return _run(options, progress)


def _run(options: TrainingRequest, progress: bool) -> Run:
    launcher = environment.find_launcher(Variables(), options.nodes or 1)
    if launcher is None:
        return Run(run_in_process(_train, options, progress=progress))
    if excess := [key for key in _OF_OUR_LAUNCHER if getattr(options, key) is not None]:
        raise RequestError(f"{excess[0]}: {launcher} started the processes and sets their rendezvous; remove it")
    request = replace(options, overrides=tuple(options.list_overrides()), num_processes=None)
    return Run(run_in_process(_join, request, next(_numbers), os.getppid(), progress=progress))


@dataclass(frozen=True)
class PreparedTraining:
    """A run that can be started. ``notes``: settings around it that are not followed, one line each."""

    request: RunRequest
    resolved: Resolved
    machine: Machine
    notes: tuple[str, ...]
    rendezvous: NodeRendezvous | None

    def start(self) -> Path:
        """Train; return the run directory. Changes this process.

        Raises:
            As `train`.
        """
        from trainwright.run.start import start

        run = start(self.request, self.resolved, self.machine, self.rendezvous)
        if self.request.recipe.push is not None and (self.rendezvous is None or self.rendezvous.node_rank == 0):
            from trainwright.run.hub import push_finished

            push_finished(run, sys.stderr)
        return run


def prepare_shown(options: TrainingRequest) -> PreparedTraining:
    """Return ``prepare(options)``, with what it does and its notes on standard error."""
    with Activity(sys.stderr):
        prepared_training = prepare(options)
    for line in prepared_training.notes:
        say(f"note: {line}", file=sys.stderr)
    return prepared_training


def prepare(options: TrainingRequest) -> PreparedTraining:
    """Read, plan and check the request, without torch and before anything is written to the run's directory.

    Raises:
        RequestError: the recipe, the arguments or the data are invalid.
        MachineError: the machine lacks what is asked for. Too little memory is not reported here.
    """
    from trainwright.run.request import build_request, check_nodes, check_request, resolve_request

    keep_compiled_code()  # here, as measurements of the machine and traces import torch
    overrides, settings = options.list_overrides(), None
    words = [*options.words(), *overrides[len(options.overrides) :]]
    nodes, node_rank, rendezvous = options.nodes, options.node_rank, options.rendezvous
    if options.accelerate_config is not None:
        read_file = LAUNCHERS.get("accelerate").of_file
        settings = read_file(options.accelerate_config, words, nodes=nodes, node_rank=node_rank, rendezvous=rendezvous)
        if settings.nodes > 1:
            nodes, node_rank, rendezvous = settings.nodes, settings.node_rank, settings.rendezvous
    count = nodes or 1
    environment.refuse_worker("train", count)
    environment.refuse_more_nodes(words, nodes)
    met = NodeRendezvous.of(count, node_rank, rendezvous, options.rendezvous_timeout)
    begin_activity("reading the recipe")
    request = build_request(options.recipe, overrides, options.resume, settings)
    try:
        check_nodes(request.recipe, count)
        request = replace(request, deadline=choose_deadline(options.until, options.time_limit), force=options.force)
        check_request(request, creates=not node_rank)
        machine = restrict_to_device(detect(), request.recipe.parallel.device)
        begin_activity("planning")
        resolution = resolve_request(request, machine, count)
    except TrainwrightError:
        request.discard_fetched()
        raise
    notes = () if node_rank else _list_notes(options, nodes, resolution)
    return PreparedTraining(request, resolution, machine, notes, met)


def _train(options: TrainingRequest) -> Path:
    """Prepare and train, in a process that does nothing else."""
    try:
        with interrupt_on_stop():
            return prepare_shown(options).start()
    except Interrupted:
        consequence = "nothing was kept" if options.resume is None else "the existing run was not changed"
        raise Stopped(f"stopped before the first step; {consequence}") from None


def _list_notes(options: TrainingRequest, nodes: int | None, resolved: Resolved) -> tuple[str, ...]:
    files = [launcher.default_file() for launcher in LAUNCHERS.present() if options.accelerate_config is None]
    return tuple(environment.list_ignored_settings(nodes, resolved.processes, next(filter(None, files), None)))


_OF_OUR_LAUNCHER = ("nodes", "node_rank", "rendezvous", "accelerate_config")
_numbers = itertools.count()  # of the runs that this process has trained so


def _join(request: TrainingRequest, number: int, launcher: int) -> Path:
    """Join in a separate process on every rank; it ends with the run, independently of the script's process."""
    from trainwright.run.joined import run_joined

    failures: list[tuple[int, str]] = []

    def report(code: int, message: str) -> None:
        failures.append((code, message))
        answer(None, build_error(code, message))  # at once: a failed rank does not return from training

    try:
        with interrupt_on_stop():
            code, run = run_joined(request, report, number=number, launcher=launcher)
    except Interrupted:
        raise Stopped("stopped before the first step; nothing was changed") from None
    if failures:
        raise build_error(*failures[0])
    assert run is not None, "a run that cannot start has failed"
    if code == EXIT_STOPPED:
        stop_error = Stopped(f"{describe_stop(run)}; continue with --resume {quote_word(run)}")
        stop_error.run = run
        raise stop_error
    if code != EXIT_FINISHED:
        raise build_error(code, f"the run ended with exit code {code}; its logs are in {run / 'logs'}")
    return run.absolute()
