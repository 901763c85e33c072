"""Set up DeepSpeed for Zero: on this device and process group, without its messages."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from trainwright.errors import RequestError
from trainwright.parallel.world import World, ensure_process_group
from trainwright.parallel.zero.spec import DEEPSPEED

# Attribute names of a module's hooks in torch.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Hooks = list[dict[str, Any]]


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed for this device and the existing process group, without its messages.

    Raises:
        MachineError: it is not installed, or its version is not supported.
    """
    DEEPSPEED.check()
    # Otherwise DeepSpeed detects the device on import and takes a GPU that is not used.
    with _set_environment({"DS_ACCELERATOR": world.device.type}):
        deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls collectives by names that torch 2.13 has deprecated, with a warning at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # It would compile an operation that only inference uses, for which some machines have no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if world.device.type == "cpu":
        # It requires fp16 instructions; torch computes in fp16 without them.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    ensure_process_group(world)
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is None:  # it would create one with its own timeout
        groups._WORLD_GROUP = dist.new_group(timeout=world.timeout)
    return deepspeed


def start_engine(
    world: World,
    module: nn.Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    dtype: torch.dtype,
    prepare: Callable[[nn.Parameter], None],
    cut: bool,
) -> Any:
    """Return DeepSpeed's engine for ``module``.

    Args:
        dtype: the parameters' dtype after ``prepare``.
        prepare: called with every parameter before DeepSpeed accesses it; it may have no memory until then.
        cut: shard the parameters one by one, so that the device never holds all of them.

    Raises:
        RequestError: DeepSpeed cannot shard a parameter.
    """
    _refuse_scalars(module)
    deepspeed = importlib.import_module("deepspeed")
    turns = _InTurns(module, prepare)
    # It only takes its device from this variable, also during training, which is not the local rank if every process
    # only sees its own GPU. Open MPI's variable is only read here.
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    with _set_environment({"OMPI_COMM_WORLD_LOCAL_RANK": None}):
        if cut:
            deepspeed.zero.Init(module=turns, config_dict_or_path=config, dtype=dtype)
            for buffer in module.buffers():
                buffer.data = buffer.data.to(world.device)
        else:
            list(turns.parameters())
        # Separate hook tables for DeepSpeed; the existing ones are not changed.
        set_hooks(module, [{name: table.copy() for name, table in part.items()} for part in list_hooks(module)])
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    if cut:
        _gather_unseen(engine.optimizer.parameter_offload)
    return engine


class _InTurns(nn.Module):
    """A module that prepares each parameter when an iteration reaches it."""

    def __init__(self, module: nn.Module, prepare: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.module = module
        self._prepare = prepare

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            self._prepare(parameter)
            yield parameter


def list_hooks(module: nn.Module) -> Hooks:
    """Return the hook tables of every submodule."""
    return [{name: getattr(part, name) for name in _HOOKS} for part in module.modules()]


def set_hooks(module: nn.Module, tables: Hooks) -> None:
    """Restore the hook tables that ``list_hooks`` returned."""
    for part, hooks_of_part in zip(module.modules(), tables, strict=True):
        for name, table in hooks_of_part.items():
            setattr(part, name, table)


def reset_module_order(engine: Any) -> None:
    """Reset the order of submodules after passes of parts of the module, which ZeRO-3 would take for a new pass."""
    engine.optimizer.parameter_offload.get_param_coordinator().reset_step()


def _refuse_scalars(module: nn.Module) -> None:
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise RequestError(
            f"parallel.strategy: DeepSpeed cannot take parameters without dimensions ({', '.join(scalars[:5])}); "
            "use fsdp or ddp for this model"
        )


def _gather_unseen(offload: Any) -> None:
    """Hide gathers and releases from dispatch modes.

    Selective recomputation expects exactly the operations of the forward pass, and gathers differ in the backward pass.
    """

    def unseen(function: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def call(part: nn.Module) -> None:
            with _disable_current_modes():
                function(part)

        return call

    for when, which in itertools.product(("pre", "post"), ("forward", "backward")):
        name = f"{when}_sub_module_{which}_function"
        setattr(offload, name, unseen(getattr(offload, name)))


@contextmanager
def _set_environment(values: dict[str, str | None]) -> Iterator[None]:
    """Set or unset environment variables temporarily."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
