"""ZeRO on DeepSpeed: `zero1` shards the optimizer's state, `zero2` gradients too, `zero3` parameters too.

DeepSpeed is given as little as it can do with: it shards, gathers and reduces, and updates its flat fp32 partitions
with the recipe's own optimizer. What it would do beside is off. It clips at 1.0 unless told otherwise, averages over
the ranks and divides by an accumulation count that here differs from step to step; the engine clips, gradients are
summed, and where a step's gradients end is said by the engine.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from trainwright.errors import RequestError
from trainwright.parallel.deepspeed_config import check_installed, settings
from trainwright.parallel.layout import Layout, dtype_name, placement
from trainwright.parallel.norms import squared_norm
from trainwright.parallel.shards import Shard
from trainwright.parallel.strategy import OptimizerFactory
from trainwright.parallel.world import World
from trainwright.parallel.zero_partitions import Piece, chunks, partitions
from trainwright.parallel.zero_rows import covering_rows, row_blocks
from trainwright.recipe.schema import ParallelSection

# Submodules' hooks, by the names under which torch keeps them.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# torch's own default for gloo; NCCL's is 10 minutes, which a checkpoint on slow storage may take.
_TIMEOUT = timedelta(minutes=30)


class Zero:
    """A model sharded by DeepSpeed.

    Raises:
        RequestError: a parameter that DeepSpeed cannot shard.
        MachineError: DeepSpeed is not installed.

    Args:
        module: fp32, on the CPU, its trainable parameters marked.
        dtype: what the forward and backward passes compute in. Masters, reduction and accumulation are fp32.
        parallel: the recipe's section; its DeepSpeed file has been checked against the recipe.
    """

    def __init__(
        self,
        name: str,
        world: World,
        module: nn.Module,
        make_optimizer: OptimizerFactory,
        dtype: torch.dtype,
        parallel: ParallelSection,
    ) -> None:
        self.name = name
        self.world = world
        self._sharded = name == "zero3"
        _refuse_scalars(module)
        deepspeed = _import_deepspeed(world)
        self._gather = deepspeed.zero.GatheredParameters
        self._model = module
        self._names = {parameter: key for key, parameter in module.named_parameters()}
        optimizer = make_optimizer((key, p) for key, p in module.named_parameters() if p.requires_grad)
        self._optimizer = optimizer
        originals = self._set_precision(dtype)
        self._hooks = [{hook: getattr(part, hook) for hook in _HOOKS} for part in module.modules()]
        config = settings(parallel, dtype, module)
        with _local_rank(world):
            if self._sharded:
                self._shard(deepspeed, config)
            _keep_hooks_apart(module)
            self._engine = _engine(deepspeed, module, optimizer, config)
        self.module: nn.Module = self._engine
        if self._sharded:
            _gather_unseen(self._engine.optimizer.parameter_offload)
        self._partitions = partitions(self._engine.optimizer)
        self._pieces = self._partitions.pieces(self._names, world.rank, world.size)
        self._restore_masters(originals)

    def _set_precision(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Have parameters in ``dtype``; the fp32 values of trainable ones, as much of them as this rank may need."""
        originals: dict[str, torch.Tensor] = {}
        if dtype == torch.float32:
            return originals
        for parameter, name in self._names.items():
            if parameter.requires_grad:
                full = parameter.detach()
                if self._sharded:
                    begin, end = chunks(full.numel(), self.world.size)[self.world.rank]
                    full = full.flatten()[begin:end].clone()
                originals[name] = full
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        return originals

    def _shard(self, deepspeed: Any, config: dict[str, Any]) -> None:
        """Cut one parameter after the other, so that the device never holds them all."""
        deepspeed.zero.Init(module=self._model, config_dict_or_path=config, dtype=next(iter(self._names)).dtype)
        for buffer in self._model.buffers():
            buffer.data = buffer.data.to(self.world.device)

    def _restore_masters(self, originals: dict[str, torch.Tensor]) -> None:
        """DeepSpeed makes its masters from the low-precision weights; a run starts from the full ones."""
        masters = self._partitions.masters()
        with torch.no_grad():
            for name, original in originals.items():
                piece = self._pieces[name]
                own = original if self._sharded else original.flatten()[piece.begin : piece.begin + piece.size]
                piece.of(masters[piece.group]).copy_(own)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        if self._sharded:
            loss = loss * self.world.size  # ZeRO-3 knows averages only
        self._engine.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        square = sum(float(squared_norm(part)) for part in self._partitions.gradients())
        return math.sqrt(self.world.sum([square])[0])

    def step(self, learning_rate: float, scale: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if scale != 1.0:
            for part in self._partitions.gradients():
                part.mul_(scale)
        self._engine.step()
        self._partitions.forget()

    def discard_gradients(self) -> None:
        self._partitions.forget()

    def state(self) -> dict[str, Shard]:
        rank, size = self.world.rank, self.world.size
        shards = {}
        masters = self._partitions.masters()
        tensors: dict[str, tuple[Piece, torch.Tensor]] = {}
        for name, piece in self._pieces.items():
            tensors[f"model.{name}"] = piece, piece.of(masters[piece.group].detach())
            for slot, value in self._optimizer.state.get(masters[piece.group], {}).items():
                if value.numel() == masters[piece.group].numel() and value.dim():
                    tensors[f"optimizer.{slot}.{name}"] = piece, piece.of(value)
                else:
                    shards[f"optimizer.{slot}.{name}"] = Shard.whole(value, rank, size)
        for name, parameter in self._frozen():
            if self._sharded:
                piece = _frozen_piece(parameter, rank, size)
                tensors[f"model.{name}"] = piece, parameter.ds_tensor.detach()[: piece.size]
            else:
                shards[f"model.{name}"] = Shard.whole(parameter, rank, size)
        for name, buffer in self._buffers():
            shards[f"model.{name}"] = Shard.whole(buffer, rank, size)
        for dtype in {local.dtype for _, local in tensors.values()}:
            alike = {name: item for name, item in tensors.items() if item[1].dtype == dtype}
            shards.update(row_blocks(alike, rank, size))
        return shards

    def load_state(self, read: Callable[[str, Shard], torch.Tensor]) -> None:
        self._create_optimizer_state()
        masters = self._partitions.masters()
        with torch.no_grad():
            for name, piece in self._pieces.items():
                flat = masters[piece.group]
                _fill(piece, piece.of(flat), f"model.{name}", read)
                for slot, value in self._optimizer.state[flat].items():
                    if value.numel() == flat.numel() and value.dim():
                        _fill(piece, piece.of(value), f"optimizer.{slot}.{name}", read)
                    else:
                        value.copy_(read(f"optimizer.{slot}.{name}", Shard.whole(value)))
            for name, parameter in self._frozen():
                if self._sharded:
                    piece = _frozen_piece(parameter, self.world.rank, self.world.size)
                    _fill(piece, parameter.ds_tensor[: piece.size], f"model.{name}", read)
                else:
                    parameter.copy_(read(f"model.{name}", Shard.whole(parameter)))
            for name, buffer in self._buffers():
                buffer.copy_(read(f"model.{name}", Shard.whole(buffer)))
            self._partitions.refresh()

    def _create_optimizer_state(self) -> None:
        """Have the optimizer make its state, to be filled: a step with zero gradients at a learning rate of 0."""
        if any(self._optimizer.state.values()):
            return
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        masters = self._partitions.masters()
        kept = [master.grad for master in masters]
        for master in masters:
            master.grad = torch.zeros_like(master)
        self._partitions.optimizer_step()
        for master, grad in zip(masters, kept, strict=True):
            master.grad = grad

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        masters = self._partitions.masters()
        for name, parameter in self._model.named_parameters():
            piece = self._pieces.get(name)
            if piece is not None:
                yield name, self._assemble(piece, piece.of(masters[piece.group].detach()))
            elif self._sharded:
                piece = _frozen_piece(parameter, self.world.rank, self.world.size)
                yield name, self._assemble(piece, parameter.ds_tensor.detach()[: piece.size])
            else:
                yield name, parameter.detach()
        yield from self._buffers()

    def _assemble(self, piece: Piece, local: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor. Of every byte all ranks but one have 0, so that the sum is exact in any dtype."""
        total = piece.ranges[-1][1]
        whole = torch.zeros(total, dtype=local.dtype, device=self.world.device)
        whole[piece.begin : piece.begin + piece.size] = local
        if self.world.size > 1:
            dist.all_reduce(whole.view(torch.uint8))
        return whole.view(piece.shape)

    def _frozen(self) -> Iterator[tuple[str, Any]]:
        for parameter, name in self._names.items():
            if name not in self._pieces:
                yield name, parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        persistent = {key for key, value in _state_names(self._model)}
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                yield name, buffer

    def layout(self) -> Layout:
        parameters = {name: parameter for parameter, name in self._names.items() if name in self._pieces}
        name = max(self._pieces, key=lambda key: math.prod(self._pieces[key].shape))
        piece, masters = self._pieces[name], self._partitions.masters()
        parameter: Any = parameters[name]
        ranks = dist.get_world_size(self._engine.optimizer.dp_process_group)
        if self._sharded:
            rests, local = parameter.ds_tensor, (piece.size,)
            held = sum(max(p.ds_tensor.numel(), p.numel()) for p in parameters.values())
        else:
            rests, local = parameter, piece.shape
            held = sum(p.numel() for p in parameters.values())
        return Layout(
            parameter=name,
            shape=piece.shape,
            local_shape=local,
            placement=placement("flat", ranks, 1) if self._sharded else placement("whole", 1, ranks),
            forward_dtype=dtype_name(p.dtype for p in self._names if p.is_floating_point()),
            master_dtype=dtype_name(master.dtype for master in masters),
            parameter_device=rests.device.type,
            optimizer_device=masters[piece.group].device.type,
            elements=sum(math.prod(p.shape) for p in self._pieces.values()),
            held=held,
            updated=sum(master.numel() for master in masters),
            gradient_parts=self._partitions.gradient_parts(),
            gradient_ranks=ranks,
        )

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        if not self._sharded:
            yield self._model
            return
        # DeepSpeed's hooks would free each layer when it has run, and gather it again for the next token, with every
        # rank taking part; ranks write answers of different lengths.
        installed = [{hook: getattr(part, hook) for hook in _HOOKS} for part in self._model.modules()]
        with self._gather(list(self._model.parameters())):
            _set_hooks(self._model, self._hooks)
            try:
                yield self._model
            finally:
                _set_hooks(self._model, installed)


def _refuse_scalars(module: nn.Module) -> None:
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise RequestError(
            f"parallel.strategy: DeepSpeed cannot take parameters without dimensions ({', '.join(scalars[:5])}); "
            "use fsdp or ddp for this model"
        )


def _frozen_piece(parameter: Any, rank: int, size: int) -> Piece:
    """A frozen parameter under ZeRO-3: chunks as those of the others, in no partition."""
    ranges = chunks(parameter.ds_numel, size)
    begin, end = ranges[rank]
    return Piece(tuple(parameter.ds_shape), ranges, begin, end - begin, group=-1, position=0)


def _fill(piece: Piece, local: torch.Tensor, name: str, read: Callable[[str, Shard], torch.Tensor]) -> None:
    """Read this rank's piece of a tensor."""
    if piece.size:
        rows, inside = covering_rows(piece, local.dtype)
        local.copy_(read(name, rows).flatten()[inside])


def _state_names(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.state_dict(keep_vars=True).items()


def _set_hooks(module: nn.Module, hooks: list[dict[str, Any]]) -> None:
    for part, kept in zip(module.modules(), hooks, strict=True):
        for name, value in kept.items():
            setattr(part, name, value)


def _gather_unseen(offload: Any) -> None:
    """Keep gathers and releases from dispatch modes: selective recomputation wants the very operations of the forward
    pass again, and what is gathered in a backward pass is another matter."""

    def unseen(function: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def call(part: nn.Module) -> None:
            with _disable_current_modes():
                function(part)

        return call

    for when, which in itertools.product(("pre", "post"), ("forward", "backward")):
        name = f"{when}_sub_module_{which}_function"
        setattr(offload, name, unseen(getattr(offload, name)))


def _keep_hooks_apart(module: nn.Module) -> None:
    """Give every submodule hook tables of its own for DeepSpeed to fill; those it had are left as they are."""
    for part in module.modules():
        for name in _HOOKS:
            setattr(part, name, getattr(part, name).copy())


def _import_deepspeed(world: World) -> Any:
    """DeepSpeed for this device, quiet, on the process group that there is.

    Raises:
        MachineError: it is not installed, or its version is not known to work.
    """
    check_installed()
    os.environ["DS_ACCELERATOR"] = world.device.type  # or it asks the machine, and takes a GPU that is not used
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # which importing it sets anew
    # It calls collectives by names that torch 2.13 has renamed, and every call would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # It would compile an operation that inference alone uses, for which not every machine has a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if world.device.type == "cpu":
        # It asks for fp16 instructions; torch computes in fp16 without them.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if not dist.is_initialized():  # a world of one has none otherwise
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    groups = importlib.import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is None:  # it would make one with a time-out of its own
        groups._WORLD_GROUP = dist.new_group(timeout=_TIMEOUT)
    return deepspeed


def _engine(deepspeed: Any, module: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> Any:
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


@contextmanager
def _local_rank(world: World) -> Iterator[None]:
    """DeepSpeed takes its device from LOCAL_RANK alone, and compares it with Open MPI's."""
    changed = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    before = {name: os.environ.pop(name, None) for name in changed}
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
