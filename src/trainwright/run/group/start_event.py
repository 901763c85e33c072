"""What a run records of itself when it starts: its settings, its processes, and the software."""

from __future__ import annotations

import platform
import socket
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from trainwright.engine.events import Start
from trainwright.engine.task import Task
from trainwright.engine.trainer import Trainer
from trainwright.machine.detect import detect
from trainwright.models.attention.described import describe_attention
from trainwright.models.attention.packs import platform_of
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.layout import ModelLayout
from trainwright.parallel.world import World
from trainwright.recipe.schema import Recipe
from trainwright.run import run_directory
from trainwright.run.shutdown.stop import scheduler_job

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
        device=_device_name(world),
        micro_batch_size=first.rows if recipe.train.micro_batch_size == "auto" else recipe.train.micro_batch_size,
        gradient_accumulation_steps=len(first.for_rank(0, world.size)),
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
        reasons=run_directory.reasons(run),
        predicted=run_directory.predicted(run),
        layout=layout.line(),
        launcher=launcher,
        job=scheduler_job(),
        nodes=list(dict.fromkeys(hosts)),
        gpus=world.size if world.device.type == "cuda" else 0,
        attention=_attention(recipe, task, world),
        fingerprints={
            split: stream.dataset.fingerprint
            for split, stream in (("train", task.stream), ("validation", task.validation))
            if stream is not None
        },
        versions=_versions(),
        details=task.describe(),
        parent=trainer.parent,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("trainwright", "torch", "transformers", "peft", "deepspeed", "bitsandbytes"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _attention(recipe: Recipe, task: Task, world: World) -> list[str]:
    """Return a line for each attention kernel of the model, with the reasons for its choice."""
    model = next((module for module in task.module.modules() if isinstance(module, CausalLM)), None)
    if model is None:
        return []
    kernels = platform_of(world.device.type, world.device.index or 0, recipe.model.attention)
    return describe_attention(model, DTYPES[recipe.train.mixed_precision], recipe.data.max_length, kernels)


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return detect().cpu_name
