"""What the processes of a run do: one prepares, then each worker trains, from the recipe in the run directory."""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.checkpoints.parent import ParentCheckpoint
from trainwright.engine.events import Event, EventLog, Notice, Observer, Start
from trainwright.engine.optimizer import Schedule, build_optimizer_factory
from trainwright.engine.policies.base import TrainingContext
from trainwright.engine.policies.profiling import Profiling
from trainwright.engine.task import ForwardOnly, Task, import_task_module
from trainwright.engine.trainer import Trainer
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, MachineError, RequestError
from trainwright.machine.cache import find_cache_root
from trainwright.machine.detect import detect
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.processor import bind
from trainwright.machine.usage import OwnProcess
from trainwright.models.adapters.files import check_libraries
from trainwright.models.attention.described import describe_attention
from trainwright.models.attention.packs import build_platform
from trainwright.models.causal_lm import CausalLM, compile_blocks
from trainwright.models.quantization import count_parameters
from trainwright.models.recompute import save_activation_memory
from trainwright.parallel.layout import ModelLayout
from trainwright.parallel.openmp import limit_spinning
from trainwright.parallel.strategy import Strategy, StrategyConfig, build_strategy, check_averages
from trainwright.parallel.world import RankInfo, World, join, leave, report_collectives
from trainwright.parallel.zero import deepspeed_config
from trainwright.recipe.checks import set_processes
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.optimizer_spec import check_optimizer
from trainwright.recipe.registries import STEP_POLICIES, STOP_WARNINGS, WATCHERS
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.fields import Auto, parse_seconds
from trainwright.recipe.sections.parallel import ProcessRange
from trainwright.recipe.strategy_spec import check_library
from trainwright.run import process, run_directory
from trainwright.run.group.contract import check_agreement, check_layout, choose_device
from trainwright.run.limits import open_files_in_words
from trainwright.run.observers.hooks import ObservedRank, ObservedRun, build_observers, observe_rank
from trainwright.run.relaunch import is_replan_requested
from trainwright.run.shutdown.exit_code import ATTEMPT, check_torchrun_time
from trainwright.run.shutdown.requests import STATE_BYTES, Deadline, StopRequests
from trainwright.run.shutdown.stop import (
    find_scheduler_job,
    is_resize_requested,
    request_stop,
    set_fresh,
    stop_requested,
    take_save_to_resize,
)
from trainwright.utils import heartbeat
from trainwright.utils.activity import Activity, begin_activity
from trainwright.utils.heartbeat import create_heartbeat_directory
from trainwright.utils.text import say

_NO_TF32 = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS


@dataclass(frozen=True)
class Worker:
    """What a process does in a run.

    Attributes:
        run: the run directory; its recipe is resolved.
        resume: from the newest checkpoint.
        rank_info: which part is this process's; None: read torchrun's variables.
        cache: of the machine.
        reported: why the run was relaunched, recorded as it is.
        may_change: whether the launcher can relaunch the run with another plan, if train.replan asks for it.
        deadline: when the run has to have stopped. Rank 0's counts.
        launcher: what started this process.
    """

    run: Path
    resume: bool = False
    rank_info: RankInfo | None = None
    cache: Path = field(default_factory=find_cache_root)
    reported: Event | None = None
    may_change: bool = False
    deadline: Deadline | None = None
    launcher: str = "trainwright"


@dataclass(frozen=True)
class TrialRun:
    """A run of a few steps, of which only the events are kept; ``largest``: of the largest micro-batch each."""

    steps: int
    largest: bool = False


def train(worker: Worker) -> int:
    """Train this process's share of the run, observed as its recipe asks for and with heartbeats for the launcher.

    Returns and raises as ``run_worker``.
    """
    run = worker.run
    rank_info = worker.rank_info or RankInfo.from_variables()
    heartbeat.begin(create_heartbeat_directory(run), rank_info.rank)
    report_collectives()
    for watcher in WATCHERS.present():
        watcher.install(run, rank_info.rank)
    with Activity(process.find_console(), "looking at the machine"):
        heart, gpu = heartbeat.find_own_heartbeat(), _find_gpu(detect(), rank_info)
    assert heart is not None, "it has begun"
    warn = functools.partial(_stop_warning, worker.launcher)

    def requests(state_bytes: int) -> StopRequests:
        return StopRequests(run, worker.deadline, state_bytes, request_stop, _say_to_user, warn=warn)

    with observe_rank(ObservedRank(run, rank_info, heart, gpu)):
        return run_worker(worker, observers=build_observers, requests=requests)


def _stop_warning(launcher: str, needed: float) -> str | None:
    warnings = (check_torchrun_time(needed, launcher), *(warning(needed) for warning in STOP_WARNINGS.present()))
    return next((warning for warning in warnings if warning is not None), None)


def _say_to_user(line: str) -> None:
    say(f"\n{line}", file=process.find_console() or sys.stderr)


def run_worker(
    worker: Worker,
    *,
    observers: Callable[[ObservedRun], Sequence[Observer]] = lambda run: (),
    requests: Callable[[int], StopRequests] | None = None,
    stop_requested: Callable[[], bool] = stop_requested,
    trial: TrialRun | None = None,
    watch: Callable[[Task, Strategy], None] = lambda task, strategy: None,
) -> int:
    """Train this process's share of a run until it ends or a stop is requested.

    Args:
        observers: called on rank 0 only; returns the observers of the events.
        requests: called on rank 0 with the bytes of a checkpoint; looks for stop requests other than signals.
        trial: take a few steps instead.
        watch: called with the task and its strategy before they are used.

    Returns:
        The exit code: finished, or stopped on a signal after a checkpoint.

    Raises:
        RequestError: the run that is resumed is at the step of the deadline already.
    """
    run = worker.run
    set_fresh(True)
    recipe_text = (run / run_directory.RECIPE).read_text(encoding="utf-8")
    rank_info, machine = worker.rank_info or RankInfo.from_variables(), detect()
    recipe = load_recipe(run / run_directory.RECIPE)
    elastic = recipe.parallel.num_processes
    if isinstance(elastic, ProcessRange):
        recipe = set_processes(recipe, rank_info.size)
    _configure(recipe, machine, rank_info)
    task, sizes, world = _join(worker, recipe, rank_info, choose_device(machine, rank_info, recipe.parallel.device))
    world = replace(world, stop_requested=stop_requested)
    with Activity(process.find_console(), f"setting up {recipe.parallel.strategy}"):
        heartbeat.begin_phase("setup")
        _follow_device(world)
        check_agreement(recipe, task, world)
        strategy, layout = _build_strategy(recipe, task, world)
        watch(task, strategy)
    events = EventLog(run / "events.jsonl" if world.is_main else None)
    may_change = worker.may_change and recipe.train.replan == "auto"
    if world.is_main:
        gpu = None if world.device.type == "cpu" else world.device.index
        own_process = OwnProcess(torch.get_num_threads(), world.local_size, gpu)
        with Activity(process.find_console(), "starting the trackers"):
            for observer in observers(ObservedRun(run, recipe, events.emit, world.size, own_process, may_change)):
                events.follow(observer)
    resize_check = is_resize_requested if isinstance(elastic, ProcessRange) and worker.may_change else None
    stop_requests = requests(sizes[1] * STATE_BYTES) if requests is not None and world.is_main else None
    if stop_requests is not None:
        events.follow(stop_requests)
        stop_requests.watch()
    keeps, keep_recipe = recipe.checkpoint, functools.partial(_keep_recipe, run, world, elastic)
    profiled = recipe.train.profile is not None and trial is None
    profiling = [functools.partial(Profiling, run)] if profiled else []
    trainer = Trainer(
        TrainingContext(recipe, recipe_text, task, strategy, events, keep_recipe=keep_recipe),
        schedule=Schedule(recipe.optimizer, len(task.stream)),
        checkpoints=Checkpoints(run / "checkpoints", keep_last=keeps.keep_last, keep_best=keeps.keep_best is True),
        stop_requested=stop_requested,
        updating=lambda: set_fresh(False),
        change_requested=functools.partial(is_replan_requested, run) if may_change else resize_check,
        policies=[*profiling, *(STEP_POLICIES.get(name) for name in recipe.train.step_policies)],
        save_requested=(lambda: False) if stop_requests is None else functools.partial(_take_save, stop_requests),
        stop_after=world.broadcast(None if worker.deadline is None else worker.deadline.step),
    )
    _begin(trainer, worker, None if trial is not None else recipe.train.fork)
    events.announce("comparing the processes")
    events.emit(start_event(trainer, run, sizes, layout, worker.launcher))
    if worker.reported is not None:
        events.emit(worker.reported)
    with open_files_in_words():
        finished = (
            trainer.run(run / "final") if trial is None else trainer.run_steps(trial.steps, largest=trial.largest)
        )
    if trainer.is_over:
        request_stop()  # so that the launcher does not go on with other processes
    with Activity(process.find_console(), "ending the processes"):
        events.close()
        heartbeat.finish()
        leave()  # not after a failure: it would wait for the other ranks before the error is reported
    return EXIT_FINISHED if finished else EXIT_STOPPED


def _join(
    worker: Worker, recipe: RecipeSchema, rank_info: RankInfo, device: str
) -> tuple[Task, tuple[int, int], World]:
    """Build the task, then join the process group; return the parameters of the model and those that are trained, too.

    In this order: reading and preparing may take long, and no rank should wait in a collective.
    """
    with Activity(process.find_console(), "mapping the data and building the model"):
        heartbeat.begin_phase("loading")
        task = import_task_module(recipe).build(recipe, worker.cache)
        if task.weights is not None:
            begin_activity("loading the weights")
            task.weights.load(rank_info.rank)
        sizes = count_parameters(task.module)  # before they are sharded
        begin_activity("waiting for the other processes")
        heartbeat.begin_phase("joining")
        return task, sizes, join(device, rank_info, timedelta(seconds=parse_seconds(recipe.parallel.timeout)))


def _begin(trainer: Trainer, worker: Worker, fork: str | None) -> None:
    """Prepare the task, and load the checkpoint to go on with: the run's newest, or that of the run it forks."""
    strategy, events = trainer.strategy, trainer.training.events
    events.announce("preparing the training")
    trainer.task.begin(ForwardOnly(strategy), strategy.parameters(), lambda text: events.emit(Notice(message=text)))
    checkpoint = trainer.find_newest_checkpoint() if worker.resume else None
    if checkpoint is not None:
        events.announce(f"loading {checkpoint.path}")
        trainer.resume(checkpoint)
    elif fork is not None:
        events.announce(f"loading {fork}")
        trainer.fork(ParentCheckpoint.of(fork))
    _refuse_past_end(trainer, worker)


def _refuse_past_end(trainer: Trainer, worker: Worker) -> None:
    """Raise RequestError if the run is at the step of its deadline already, unless this launch repeats another."""
    if not trainer.is_over or trainer.progress.pending:
        return
    if trainer.world.broadcast(worker.reported is None and os.environ.get(ATTEMPT, "0") == "0"):
        raise RequestError(
            f"--until step {trainer.stop_after}: {worker.run} is at step {trainer.progress.step} already; give a later "
            "step, or leave out --until to train it to its end"
        )


def _take_save(stop_requests: StopRequests) -> bool:
    return stop_requests.take_save() | take_save_to_resize()  # each of them forgets what was asked


def _configure(recipe: RecipeSchema, machine: Machine, rank_info: RankInfo) -> None:
    """Set what holds for the whole process: visible GPUs, kernels, threads and cores; check the libraries."""
    if recipe.parallel.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for libraries that use any visible GPU
    if recipe.train.deterministic:  # operations without a deterministic kernel raise an error
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when the first product is computed
        torch.use_deterministic_algorithms(True)
        # Filling new memory shows errors in programs, and takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _set_precision_of_fp32_products(recipe.train.tf32)
    torch.set_num_threads(process.count_allowed_threads())
    process.keep_freed_memory()
    process.limit_product_caches()
    if not machine.gpus or recipe.parallel.device == "cpu":
        limit_spinning()
    check_library(recipe.parallel.strategy)
    check_optimizer(recipe.optimizer.name)
    deepspeed_config.check_file(recipe)
    check_libraries(recipe.model.adapter)
    _bind(machine, rank_info)


def _find_gpu(machine: Machine, rank_info: RankInfo) -> Gpu | None:
    return machine.gpus[rank_info.gpu] if machine.is_here and rank_info.gpu < len(machine.gpus) else None


def _follow_device(world: World) -> None:
    """Count the seconds of phases on the clock of the GPU, if there is one."""
    heart, device = heartbeat.find_own_heartbeat(), world.device
    if heart is not None and device.type != "cpu":
        heart.follow_device(
            lambda: torch.accelerator.current_stream(device).record_event(torch.Event(device, enable_timing=True))
        )


def _report_compilation() -> None:
    """Report compilation as a phase of its own; it runs inside the first passes and whenever shapes change."""
    from torch._dynamo.callback import on_compile_end, on_compile_start  # takes seconds

    if (heart := heartbeat.find_own_heartbeat()) is not None:
        on_compile_start(lambda _: heart.begin_within("compilation"))
        on_compile_end(lambda _: heart.end_within())


def _bind(machine: Machine, rank_info: RankInfo) -> None:
    """Bind this process to the NUMA node of its GPU, if it has one; its log says so."""
    gpu = _find_gpu(machine, rank_info)
    if gpu is not None and (binding := bind(gpu.address)) is not None:
        say(f"rank {rank_info.rank}: {binding}", file=sys.stderr)


def _set_precision_of_fp32_products(tf32: bool) -> None:
    """Compute fp32 products in TF32, or not, whatever the environment presets (NVIDIA's containers allow it).

    Through the setting that torch's older and newer functions both read; its newer one breaks the older ones.
    """
    if tf32 and os.environ.get(_NO_TF32) == "0":
        raise MachineError(f"train.tf32: {_NO_TF32} is 0, which turns TF32 off; unset it, or set train.tf32 to false")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _build_strategy(recipe: RecipeSchema, task: Task, world: World) -> tuple[Strategy, ModelLayout]:
    """Return the task's model distributed by the recipe's strategy, and its layout on this process."""
    save_activation_memory(
        task.blocks(), recipe.train.activation_checkpointing, offload=recipe.train.activation_offload
    )
    if recipe.train.compile is True:
        _report_compilation()
        compile_blocks(task.blocks())
    dtype = DTYPES[recipe.train.mixed_precision]
    optimizer = build_optimizer_factory(recipe.optimizer)
    seed = None if recipe.optimizer.master_weights else recipe.train.seed
    setup = StrategyConfig(recipe.parallel, world, task.module, optimizer, dtype, task.blocks(), task.weights, seed)
    strategy = build_strategy(setup)
    check_averages(strategy, recipe.optimizer)
    return strategy, check_layout(recipe, dtype, strategy)


def _keep_recipe(
    run: Path, world: World, processes: int | ProcessRange | Auto, recipe: RecipeSchema, reason: str
) -> str:
    """Write the recipe that the run continues with, with the processes it asks for; return its text."""
    text = run_directory.format_recipe(
        set_processes(recipe, processes) if isinstance(processes, ProcessRange) else recipe
    )
    if world.is_main:
        with suppress(OSError):  # resuming with the old recipe would only run out of memory once more
            run_directory.change_recipe(run, text, reason)
    return text


# Of the matrix products, by `train.mixed_precision`.
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def start_event(trainer: Trainer, run: Path, sizes: tuple[int, int], layout: ModelLayout, launcher: str) -> Start:
    """Return the event of the start of a run or of its resumption. A collective of all ranks.

    Args:
        run: its directory.
        sizes: the parameters of the model, and those that are trained.
        launcher: what started this process.
    """
    recipe, task = trainer.training.recipe, trainer.task
    world = trainer.world
    hosts: list[str] = world.gather(socket.gethostname())
    first, steps = task.stream.global_batch(0), recipe.train.gradient_accumulation_steps
    return Start(
        task=recipe.task,
        world_size=world.size,
        strategy=trainer.strategy.name,
        mixed_precision=recipe.train.mixed_precision,
        tf32=recipe.train.tf32,
        float8=recipe.train.float8,
        device=_read_device_name(world),
        micro_batch_size=first.rows if recipe.train.micro_batch_size == "auto" else recipe.train.micro_batch_size,
        gradient_accumulation_steps=len(first.select_for_rank(0, world.size)),
        global_batch_size=recipe.train.global_batch_size,
        batch_unit=recipe.train.batch_unit,
        parameters=sizes[0],
        trainable_parameters=sizes[1],
        resumed_from=trainer.progress.step or None,
        pending=trainer.progress.pending,
        max_steps=trainer.max_steps,
        batch_varies=recipe.data.pack_length is not None
        or recipe.train.initial_batch_size is not None
        or recipe.train.batch_unit == "tokens",
        packed=recipe.data.pack_length is not None,
        accumulation_asked=None if steps == "auto" else steps,
        evaluate_every=recipe.evaluate.every,
        checkpoint_every=recipe.checkpoint.every if isinstance(recipe.checkpoint.every, int) else None,
        threads=torch.get_num_threads(),
        run_directory=str(run),
        reasons=run_directory.read_reasons(run),
        predicted=run_directory.read_predictions(run),
        layout=layout.line(),
        launcher=launcher,
        job=find_scheduler_job(),
        nodes=list(dict.fromkeys(hosts)),
        gpus=0 if world.device.type == "cpu" else world.size,
        attention=_describe_attention(recipe, task, world),
        fingerprints={
            split: stream.dataset.fingerprint
            for split, stream in (("train", task.stream), ("validation", task.validation))
            if stream is not None
        },
        versions=_read_versions(),
        details=task.describe(),
        parent=trainer.parent,
    )


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("trainwright", "torch", "transformers", "peft", "deepspeed", "bitsandbytes"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _describe_attention(recipe: RecipeSchema, task: Task, world: World) -> list[str]:
    """Return a line for each attention kernel of the model, with the reasons for its choice."""
    model = next((module for module in task.module.modules() if isinstance(module, CausalLM)), None)
    if model is None:
        return []
    kernels = build_platform(world.device.type, world.device.index or 0, recipe.model.attention)
    return describe_attention(model, DTYPES[recipe.train.mixed_precision], recipe.data.max_length, kernels)


def _read_device_name(world: World) -> str:
    if world.device.type == "cpu":
        return detect().cpu_name
    return str(torch.get_device_module(world.device).get_device_name(world.device))
