"""ZeRO on DeepSpeed: `zero1` shards the optimizer state, `zero2` also gradients, `zero3` also parameters.

DeepSpeed only shards, gathers and reduces, and updates its flat fp32 partitions with the recipe's own optimizer. Its
other features are disabled: by default it clips at 1.0, averages over the ranks and divides by an accumulation count,
which differs from step to step here. The engine clips, sums gradients, and controls where a step's gradients end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.parallel.layout import (
    ModelLayout,
    Shard,
    describe_placement,
    format_dtype_names,
    iterate_persistent_buffers,
)
from trainwright.parallel.strategy import StrategyConfig, compute_squared_norm, exchange_averages, set_learning_rate
from trainwright.parallel.world import explain_memory_shortage
from trainwright.parallel.zero.deepspeed_config import build_settings
from trainwright.parallel.zero.deepspeed_engine import (
    import_deepspeed,
    list_hooks,
    reset_module_order,
    set_hooks,
    start_engine,
)
from trainwright.parallel.zero.partitions import (
    ParameterPiece,
    build_covering_rows,
    build_partitions,
    build_row_blocks,
    split_into_chunks,
)
from trainwright.recipe.strategy_spec import look_up_strategy


class Zero:
    """A model sharded by DeepSpeed; its DeepSpeed file has been checked against the recipe.

    With zero3 the module may be on the meta device, to be filled by ``weights`` one parameter at a time.

    Raises:
        RequestError: DeepSpeed cannot shard a parameter.
        MachineError: DeepSpeed is not installed.
    """

    def __init__(self, setup: StrategyConfig) -> None:
        world, module, dtype, weights = setup.world, setup.module, setup.dtype, setup.weights
        self.name = setup.parallel.strategy
        self.world = world
        self._sharded = look_up_strategy(self.name).shards_parameters
        # ZeRO-3 only averages gradients. Their sum is computed from the reduced fp32 gradients: a factor of the loss
        # would pass through a backward pass in bf16, which rounds it unless it is a power of two.
        self._averaged = world.size if self._sharded else 1
        self._gather = import_deepspeed(world).zero.GatheredParameters
        self._model = module
        self._weights = weights
        _replace_meta_parameters(module)
        self._names = {parameter: key for key, parameter in module.named_parameters()}
        self._originals: dict[str, torch.Tensor] = {}  # fp32 values of trainable parameters that this rank needs
        optimizer = setup.make_optimizer((key, p) for key, p in module.named_parameters() if p.requires_grad)
        self._optimizer = optimizer
        self._hooks = list_hooks(module)
        prepare = functools.partial(self._set_precision, dtype=dtype)
        config = build_settings(setup.parallel, dtype, module)
        self._engine = start_engine(world, module, optimizer, config, dtype, prepare, cut=self._sharded)
        self.module: nn.Module = self._engine
        self._partitions = build_partitions(self._engine.optimizer)
        self._pieces = self._partitions.pieces(self._names, world.rank, world.size)
        self._restore_masters()
        if weights is not None:
            for name, buffer in iterate_persistent_buffers(self._model):
                weights.fill(name, Shard.full(buffer), world)

    def _set_precision(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Fill in a parameter's weights and cast it to ``dtype``; keep the fp32 values that this rank may need."""
        name, full = self._names[parameter], parameter.detach()
        if self._weights is not None:
            full = torch.empty(full.shape, dtype=full.dtype, device=self.world.device)
            self._weights.fill(name, Shard.full(full), self.world)
        if parameter.requires_grad and dtype != torch.float32:
            original = full
            if self._sharded:
                begin, end = split_into_chunks(full.numel(), self.world.size)[self.world.rank]
                original = full.flatten()[begin:end].clone()
            self._originals[name] = original
        packed = not parameter.is_floating_point()  # a quantized matrix; all that DeepSpeed shards has one dtype
        parameter.data = full.reshape(-1).view(dtype) if packed else full.to(dtype)

    def _restore_masters(self) -> None:
        """Restore fp32 master weights: DeepSpeed creates them from the low-precision weights."""
        masters = self._partitions.masters()
        with torch.no_grad():
            for name, original in self._originals.items():
                piece = self._pieces[name]
                local_part = original if self._sharded else original.flatten()[piece.begin : piece.begin + piece.size]
                piece.of(masters[piece.group]).copy_(local_part)
        self._originals.clear()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; after the ``last`` micro-batch of a step, exchange them."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm over all parameters of the exchanged gradients, the same on every rank."""
        return self.world.sum_tensor(compute_squared_norm(self._partitions.gradients())).sqrt() * self._averaged

    def step(self, learning_rate: float, scale: float) -> None:
        """Multiply the gradients by ``scale``, update the weights, and drop the gradients."""
        set_learning_rate(self._optimizer, learning_rate)
        scale *= self._averaged
        if scale != 1.0:
            for part in self._partitions.gradients():
                part.mul_(scale)
        self._engine.step()
        self._partitions.clear_gradients()

    def discard_gradients(self) -> None:
        """Drop the gradients without changing the weights."""
        self._partitions.clear_gradients()

    def state(self) -> dict[str, Shard]:
        """Return this rank's part of parameters, buffers and optimizer state."""
        rank, size = self.world.rank, self.world.size
        shards = {}
        masters = self._partitions.masters()
        tensors: dict[str, tuple[ParameterPiece, torch.Tensor]] = {}
        for name, piece in self._pieces.items():
            tensors[f"model.{name}"] = piece, piece.of(masters[piece.group].detach())
            for slot, value in self._optimizer.state.get(masters[piece.group], {}).items():
                if value.numel() == masters[piece.group].numel() and value.dim():
                    tensors[f"optimizer.{slot}.{name}"] = piece, piece.of(value)
                else:
                    shards[f"optimizer.{slot}.{name}"] = Shard.full(value, rank, size)
        for name, buffer in iterate_persistent_buffers(self._model):
            shards[f"model.{name}"] = Shard.full(buffer, rank, size)
        for dtype in sorted({local.dtype for _, local in tensors.values()}, key=str):  # in the same order on all ranks
            alike = {name: item for name, item in tensors.items() if item[1].dtype == dtype}
            shards.update(build_row_blocks(alike, rank, size))
        return shards

    def load_state(self, read: Callable[[str, Shard], torch.Tensor], *, optimizer: bool = True) -> None:
        """Fill the state from ``read(name, shard)``."""
        if optimizer:
            self._create_optimizer_state()
        else:
            self._optimizer.state.clear()
        masters = self._partitions.masters()
        with torch.no_grad():
            for name, piece in self._pieces.items():
                flat = masters[piece.group]
                _fill(piece, piece.of(flat), f"model.{name}", read)
                for slot, value in self._optimizer.state.get(flat, {}).items():
                    if value.numel() == flat.numel() and value.dim():
                        _fill(piece, piece.of(value), f"optimizer.{slot}.{name}", read)
                    else:
                        value.copy_(read(f"optimizer.{slot}.{name}", Shard.full(value)))
            for name, buffer in iterate_persistent_buffers(self._model):
                buffer.copy_(read(f"model.{name}", Shard.full(buffer)))
            self._partitions.refresh()

    def exchange_averages(self) -> None:
        """Exchange weights and averages."""
        if any("average" in state for state in self._optimizer.state.values()):
            exchange_averages(self._optimizer)
            self._partitions.refresh()

    def _create_optimizer_state(self) -> None:
        """Create the optimizer state to be filled, by a step with zero gradients at a learning rate of 0."""
        if any(self._optimizer.state.values()):
            return
        set_learning_rate(self._optimizer, 0.0)
        masters = self._partitions.masters()
        gradients = [master.grad for master in masters]
        for master in masters:
            master.grad = torch.zeros_like(master)
        self._partitions.take_optimizer_step()
        for master, grad in zip(masters, gradients, strict=True):
            master.grad = grad

    def parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full parameters and buffers in master precision. Every rank must iterate."""
        masters = self._partitions.masters()
        named_parameters: Iterator[tuple[str, Any]] = self._model.named_parameters()
        for name, parameter in named_parameters:
            piece = self._pieces.get(name)
            if piece is not None:
                yield name, self._assemble_tensor(piece, piece.of(masters[piece.group].detach()))
            elif not frozen:
                continue
            elif self._sharded:
                piece = _build_frozen_piece(parameter, self.world.rank, self.world.size)
                yield name, self._assemble_tensor(piece, parameter.ds_tensor.detach()[: piece.size])
            else:
                yield name, parameter.detach()
        yield from iterate_persistent_buffers(self._model)

    def _assemble_tensor(self, piece: ParameterPiece, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. All ranks but one contribute zero bytes, so the sum is exact in any dtype."""
        total = piece.ranges[-1][1]
        full = torch.zeros(total, dtype=local.dtype, device=self.world.device)
        full[piece.begin : piece.begin + piece.size] = local
        if self.world.size > 1:
            dist.all_reduce(full.view(torch.uint8))
        return full.view(piece.shape)

    def layout(self) -> ModelLayout:
        """Describe how this rank holds the model."""
        parameters: dict[str, Any] = {
            name: parameter for parameter, name in self._names.items() if name in self._pieces
        }
        name = max(self._pieces, key=lambda key: math.prod(self._pieces[key].shape))
        piece, masters = self._pieces[name], self._partitions.masters()
        parameter = parameters[name]
        ranks = dist.get_world_size(self._engine.optimizer.dp_process_group)
        if self._sharded:
            rests = parameter.ds_tensor
            elements = sum(max(p.ds_tensor.numel(), p.numel()) for p in parameters.values())
        else:
            rests = parameter
            elements = sum(p.numel() for p in parameters.values())
        return ModelLayout(
            parameter=name,
            shape=piece.shape,
            local_shape=(piece.size,) if self._sharded else piece.shape,
            placement=describe_placement("flat", ranks, 1) if self._sharded else describe_placement("whole", 1, ranks),
            forward_dtype=format_dtype_names(p.dtype for p in self._names if p.is_floating_point()),
            master_dtype=format_dtype_names(master.dtype for master in masters),
            parameter_device=rests.device.type,
            optimizer_device=masters[piece.group].device.type,
            elements=sum(math.prod(p.shape) for p in self._pieces.values()),
            held=elements,
            updated=sum(master.numel() for master in masters),
            gradient_parts=self._partitions.gradient_parts(),
            gradient_ranks=ranks,
        )

    @contextmanager
    def full_parameters(self, available_memory: int | None = None) -> Iterator[tuple[nn.Module, str | None]]:
        """Provide the module with full parameters on every rank, for generation."""
        if not self._sharded:
            yield self._model, None
            return
        parameters: Any = list(self._model.parameters())
        total = sum(p.ds_numel * p.element_size() for p in parameters)
        reason = explain_memory_shortage(self.world, total, available_memory)
        if reason is not None:
            try:
                yield self._model, reason
            finally:
                reset_module_order(self._engine)
            return
        # DeepSpeed's hooks would free each layer after it runs, and gather it again for the next token with all ranks
        # taking part, but ranks generate answers of different lengths.
        installed_hooks = list_hooks(self._model)
        with self._gather(parameters):
            set_hooks(self._model, self._hooks)
            try:
                yield self._model, None
            finally:
                set_hooks(self._model, installed_hooks)


def _replace_meta_parameters(module: nn.Module) -> None:
    """Replace parameters on the meta device by ones without memory that can be allocated later."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for user in module.modules():
        for name, parameter in user._parameters.items():
            if parameter is not None and parameter.is_meta:
                placeholder = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
                user._parameters[name] = replacements.setdefault(
                    parameter, nn.Parameter(placeholder, parameter.requires_grad)
                )


def _build_frozen_piece(parameter: Any, rank: int, size: int) -> ParameterPiece:
    """Return the piece of a frozen parameter under ZeRO-3: chunked like the others, but in no partition."""
    ranges = split_into_chunks(parameter.ds_numel, size)
    begin, end = ranges[rank]
    return ParameterPiece(tuple(parameter.ds_shape), ranges, begin, end - begin, group=-1, position=0)


def _fill(piece: ParameterPiece, local: torch.Tensor, name: str, read: Callable[[str, Shard], torch.Tensor]) -> None:
    if piece.size:
        rows, inside = build_covering_rows(piece, local.dtype)
        local.copy_(read(name, rows).flatten()[inside])
