"""The `fsdp` strategy: parameters, gradients and optimizer state sharded over the ranks by torch's FSDP2.

Each unit (a transformer block; the rest of the model is the last one) is gathered when it runs and freed after it. The
shards are fp32 master weights; gathered parameters are cast to the dtype of the run, and gradients are summed in fp32.
Without master weights the shards are bf16 (`Bf16Weights`), and so are the reduced gradients of a single micro-batch.

The optimizer updates the local parts of the shards as plain tensors: updates are element-wise, so they need no DTensor,
and the multi-tensor AdamW over DTensors leaks memory from torch 2.12 on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from trainwright.errors import RequestError
from trainwright.parallel.bf16_weights import Bf16Part, Bf16Weights
from trainwright.parallel.layout import (
    ModelLayout,
    Shard,
    describe_tensor_placement,
    find_units,
    format_dtype_names,
    iterate_persistent_buffers,
)
from trainwright.parallel.matrix_exchange import MatrixExchange, Ranks
from trainwright.parallel.strategy import (
    DividedByRows,
    NeedsFullMatrices,
    RowShards,
    StrategyConfig,
    add_gradient,
    compute_squared_norm,
    exchange_averages,
    prepare_optimizer_state,
    set_learning_rate,
)
from trainwright.parallel.world import World, ensure_process_group, explain_memory_shortage

if TYPE_CHECKING:
    from trainwright.models.weights import Weights


class FullySharded:
    """The model sharded over ``world.size / parallel.replicate_size`` ranks.

    A model on the CPU is moved and sharded unit by unit, so memory never holds more than the full model and one
    gathered unit. A model on the meta device never needs more than this rank's shards, which are filled by ``weights``.
    Units are the model's blocks unless ``parallel.wrap`` names others.

    Raises:
        RequestError: sizes do not multiply to the world size, or the model lacks a class to wrap.
    """

    def __init__(self, setup: StrategyConfig) -> None:
        world, module, parallel = setup.world, setup.module, setup.parallel
        self.name = parallel.strategy
        self.world = world
        self.module = module
        self._replicas = parallel.replicate_size
        self._shard_ranks = world.size // parallel.replicate_size
        self._mesh = _build_mesh(world, parallel.replicate_size)
        self._reshard = parallel.reshard_after_forward
        self._buffers = {key for key, _ in iterate_persistent_buffers(module)}
        # FSDP2 shards along the first dimension; scalars are replicated on every rank.
        self._scalars = {key: p for key, p in module.named_parameters() if p.dim() == 0}
        if setup.rounding_seed is not None:
            _cast_trainable(module, setup.dtype)
        self._root = self._shard(
            find_units(module, setup.blocks, parallel.wrap), setup.dtype, parallel.offload_parameters
        )
        self._parameters = dict(module.named_parameters())
        self._masters = {key: _select_local(p) for key, p in self._parameters.items() if p.requires_grad}
        self._sums: dict[str, torch.Tensor] = {}  # gradients of shards in bf16 over earlier micro-batches, in fp32
        self._last = True
        self.bf16_weights = None if setup.rounding_seed is None else self._build_bf16_weights(setup.rounding_seed)
        self._optimizer = setup.make_optimizer(self._masters.items())
        if isinstance(self._optimizer, NeedsFullMatrices):
            self._optimizer.exchange = self._build_matrix_exchange()
        if isinstance(self._optimizer, DividedByRows):
            self._optimizer.divide(self._build_row_shards())
        if setup.weights is not None:
            self._fill(setup.weights)

    def _build_bf16_weights(self, seed: int) -> Bf16Weights:
        """Replace the shards by masters that exist during an update, and sum gradients of several micro-batches."""
        parts = {}
        for key, local in self._masters.items():
            shard = self._shard_of(key, local)
            begin = shard.offset[0] * math.prod(shard.shape[1:]) if shard.shape else 0
            parts[key] = Bf16Part(shard.local, begin, math.prod(shard.shape))
            self._parameters[key].register_post_accumulate_grad_hook(functools.partial(self._add, key))
        weights = Bf16Weights(seed, parts)
        self._masters = weights.masters
        return weights

    def _add(self, key: str, parameter: torch.Tensor) -> None:
        """Move the gradient of a shard into its fp32 sum, unless it is that of a step's only micro-batch."""
        grad = parameter.grad
        if grad is None or (self._last and key not in self._sums):
            return
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if key in self._sums:
            add_gradient(self._sums[key], local)
        else:
            self._sums[key] = local.float()
        parameter.grad = None

    def _fill(self, weights: Weights) -> None:
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                weights.fill(key, self._shard_of(key, _select_local(parameter)), self.world)
            for key, buffer in self._iterate_persistent():
                weights.fill(key, Shard.full(buffer), self.world)

    def _shard(self, units: list[nn.Module], dtype: torch.dtype, offload: bool) -> FSDPModule:
        """Shard the units, inner ones first, and then the module with its remaining parameters."""
        device = self.world.device
        for parameter in self._scalars.values():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        precision = MixedPrecisionPolicy()
        if dtype != torch.float32:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
        for unit in [*units, self.module]:
            for parameter in unit.parameters():
                if not isinstance(parameter, DTensor):
                    _prepare(parameter, dtype)
            sharded_unit = fully_shard(
                unit,
                mesh=self._mesh,
                # The module's own parameters are needed first in the backward pass, so they are not freed before it.
                reshard_after_forward=self._reshard and unit is not self.module,
                mp_policy=precision,
                offload_policy=policy,
                ignored_params=set(self._scalars.values()),
            )
            # Losses are already divided, so gradients are only summed; gloo supports no other reduction.
            sharded_unit.set_gradient_divide_factor(1.0)
            sharded_unit.set_force_sum_reduction_for_comms(True)
            # Experts that received no token of this rank.
            sharded_unit.set_reduce_scatter_unused_params(True)
        assert isinstance(self.module, FSDPModule)
        _materialize_tensors(self.module, device, torch.device("cpu") if offload else device)
        self._scalars = {key: p for key, p in self.module.named_parameters() if p.dim() == 0}
        _make_root(self.module)
        return self.module

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; after the ``last`` micro-batch of a step, exchange them."""
        self._last = last
        if self._reshard:
            # Saves memory: each micro-batch's gradients are reduced into the shards, full gradients are never kept.
            self._root.set_requires_all_reduce(last)
        else:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
        loss.backward()
        if last and self._scalars and self.world.size > 1:
            self._sum_scalars()

    def _sum_scalars(self) -> None:
        trainable = {key: p for key, p in self._scalars.items() if p.requires_grad}
        if not trainable:
            return
        gradients = dict(self._gradients())
        total = torch.stack([gradients.get(key, torch.zeros_like(p)).float() for key, p in trainable.items()])
        dist.all_reduce(total)
        for (key, parameter), grad in zip(trainable.items(), total, strict=True):
            if self.bf16_weights is None:
                parameter.grad = grad
            else:
                self._sums[key] = grad

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm over all parameters of the exchanged gradients, the same on every rank."""
        grads = dict(self._gradients())
        replicated_norm = compute_squared_norm(grad for key, grad in grads.items() if key in self._scalars)
        shards = compute_squared_norm(grad for key, grad in grads.items() if key not in self._scalars)
        # All ranks' shards are summed, so each is counted once per replica.
        return (self.world.sum_tensor(shards) / self._replicas + replicated_norm).sqrt()

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts of the gradients that exist."""
        for key in self._masters:
            grad = self._sums.get(key, self._parameters[key].grad)
            if grad is not None:
                yield key, grad.to_local() if isinstance(grad, DTensor) else grad

    def step(self, learning_rate: float, scale: float) -> None:
        """Multiply the gradients by ``scale``, update the weights, and drop the gradients."""
        set_learning_rate(self._optimizer, learning_rate)
        gradients = dict(self._gradients())
        parts = [list(self._masters)] if self.bf16_weights is None else self.bf16_weights.together(self._shard_ranks)
        for names in parts:
            if self.bf16_weights is not None:
                self.bf16_weights.expand(names)
            masters = [self._masters[key] for key in names]
            for key, master in zip(names, masters, strict=True):
                grad = gradients.pop(key, None)
                self._drop_gradients([key])  # first, as a scalar is its own master
                # In the precision of the master; a missing one is zero, as under every other strategy.
                master.grad = torch.zeros_like(master) if grad is None else grad.to(master.dtype)
                del grad
            if scale != 1.0:
                torch._foreach_mul_([master.grad for master in masters if master.grad is not None], scale)
            self._optimizer.step()
            for master in masters:
                master.grad = None
            if self.bf16_weights is not None:
                self.bf16_weights.round(names)

    def exchange_averages(self) -> None:
        """Exchange weights and averages."""
        exchange_averages(self._optimizer)
        self._root.reset_iter_state()  # gathered parameters have the other weights

    def _build_row_shards(self) -> RowShards:
        shapes = {master: tuple(self._parameters[key].shape) for key, master in self._masters.items()}
        group = self._mesh.get_group("shard")
        return RowShards(self._shard_ranks, shapes.__getitem__, lambda tensor: dist.all_reduce(tensor, group=group))

    def _build_matrix_exchange(self) -> MatrixExchange:
        shapes = {master: self._parameters[key].shape for key, master in self._masters.items()}
        shards = Ranks(self._shard_ranks, self._mesh.get_local_rank("shard"), self._mesh.get_group("shard"))
        replicas = Ranks()
        if self._replicas > 1:
            rank, group = self._mesh.get_local_rank("replicate"), self._mesh.get_group("replicate")
            replicas = Ranks(self._replicas, rank, group)
        return MatrixExchange(self.world.device, shapes.__getitem__, shards=shards, replicas=replicas)

    def _drop_gradients(self, names: Iterable[str]) -> None:
        for key in names:
            self._parameters[key].grad = None
            self._sums.pop(key, None)

    def discard_gradients(self) -> None:
        """Drop the gradients without changing the weights."""
        self._root.reset_iter_state()
        self._drop_gradients(self._masters)

    def state(self) -> dict[str, Shard]:
        """Return this rank's part of parameters, buffers and optimizer state."""
        return dict(self._shards())

    def load_state(self, read: Callable[[str, Shard], torch.Tensor], *, optimizer: bool = True) -> None:
        """Fill the state from ``read(name, shard)``."""
        prepare_optimizer_state(self._optimizer, self.step, filled=optimizer)
        self._root.reset_iter_state()  # gathered parameters have the old weights
        for name, shard in self._shards():
            shard.local.copy_(read(name, shard))

    def _shards(self) -> Iterator[tuple[str, Shard]]:
        """Yield everything that training changes, by its name in a checkpoint."""
        for key in self._masters:
            yield f"model.{key}", self._shard_of(key, _select_local(self._parameters[key]))
        for key, buffer in self._iterate_persistent():
            yield f"model.{key}", Shard.full(buffer, self.world.rank, self.world.size)
        for key, master in self._masters.items():
            for slot, value in self._optimizer.state[master].items():
                yield f"optimizer.{slot}.{key}", self._shard_of(key, value, slot)

    def _shard_of(self, key: str, local: torch.Tensor, slot: str | None = None) -> Shard:
        """Return ``local`` as a shard of parameter ``key``, or of its optimizer state ``slot``."""
        parameter = self._parameters[key]
        shape: tuple[int, ...] | None = tuple(parameter.shape)
        if slot is not None and local.dim() and isinstance(self._optimizer, DividedByRows):
            shape = self._optimizer.state_shape(slot, tuple(parameter.shape))
        if not isinstance(parameter, DTensor) or not local.dim() or shape is None:
            return Shard.full(local, self.world.rank, self.world.size)
        # Equal parts along the first dimension, the last ones smaller or empty, like torch.chunk's.
        rows = -(-parameter.shape[0] // self._shard_ranks)
        begin = min(rows * self._mesh.get_local_rank("shard"), parameter.shape[0])
        offset = (shape[0] * begin // parameter.shape[0],) + (0,) * (len(shape) - 1)
        replica = self._mesh.get_local_rank("replicate") if self._replicas > 1 else 0
        return Shard(local.detach(), shape, offset, replica, self._replicas)

    def parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full parameters and buffers in master precision. Every rank must iterate."""
        for key, parameter in self._parameters.items():
            if frozen or key in self._masters:
                tensor = parameter.detach().to(self.world.device)
                yield key, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield from self._iterate_persistent()

    def _iterate_persistent(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((key, buffer) for key, buffer in self.module.named_buffers() if key in self._buffers)

    def layout(self) -> ModelLayout:
        """Describe how this rank holds the model."""
        shards = {key: p for key, p in self._parameters.items() if key in self._masters and isinstance(p, DTensor)}
        name = max(shards, key=lambda key: shards[key].numel())
        parameter = shards[name]
        updated_parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        masters = shards.values() if self.bf16_weights is not None else updated_parameters
        return ModelLayout(
            parameter=name,
            shape=tuple(parameter.shape),
            local_shape=tuple(parameter.to_local().shape),
            placement=describe_tensor_placement(parameter),
            forward_dtype=format_dtype_names(
                dtype for unit in _list_units(self.module) for dtype, _ in _iterate_gathered_weights(unit)
            ),
            master_dtype=format_dtype_names(p.dtype for p in masters),
            parameter_device=parameter.to_local().device.type,
            optimizer_device=self._masters[name].device.type,
            elements=sum(self._parameters[key].numel() for key in self._masters),
            held=sum(_select_local(self._parameters[key]).numel() for key in self._masters),
            updated=sum(p.numel() for p in updated_parameters),
            gradient_parts=parameter.device_mesh.size() // self._replicas,
            gradient_ranks=parameter.device_mesh.size(),
        )

    @contextmanager
    def full_parameters(self, available_memory: int | None = None) -> Iterator[tuple[nn.Module, str | None]]:
        """Provide the module with full parameters on every rank, for generation."""
        total = sum(
            dtype.itemsize * size
            for unit in _list_units(self.module)
            for dtype, size in _iterate_gathered_weights(unit)
        )
        reason = explain_memory_shortage(self.world, total, available_memory)
        if reason is not None:
            # Parameters outside the blocks are used throughout, and their hooks are the module's own, which generation
            # does not call.
            self._root.unshard()
            self._reshard_blocks(True)
            try:
                yield self.module, reason
            finally:
                self._reshard_blocks(self._reshard)
                self._root.reset_iter_state()
            return
        self._reshard_blocks(False)
        for unit in _list_units(self.module):
            unit.unshard()
        try:
            yield self.module, None
        finally:
            self._reshard_blocks(self._reshard)
            self._root.reset_iter_state()

    def _reshard_blocks(self, after_forward: bool) -> None:
        self._root.set_reshard_after_forward(after_forward)
        self._root.set_reshard_after_forward(False, recurse=False)


def _build_mesh(world: World, replicas: int) -> DeviceMesh:
    """Return a mesh of the ranks, in rows of neighbors that share one copy of the model."""
    if world.size % replicas:
        raise RequestError(
            f"parallel.replicate_size: {replicas} replicas of the model do not divide parallel.num_processes "
            f"{world.size} evenly; choose from "
            f"{', '.join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)}"
        )
    ensure_process_group(world)
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    # A mesh would create its groups with the timeout of their backend.
    share = world.size // replicas
    rows = [list(range(begin, begin + share)) for begin in range(0, world.size, share)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    groups = [dist.new_subgroups_by_enumeration(ranks, timeout=world.timeout)[0] for ranks in (columns, rows)]
    return DeviceMesh.from_group(groups, world.device.type, rows, mesh_dim_names=("replicate", "shard"))


def _make_root(module: nn.Module) -> None:
    """Mark ``module`` as FSDP2's root: FSDP2 takes the first module that runs as the root, which may be a block."""
    assert isinstance(module, FSDPModule)
    name = "runs_first"
    setattr(module, name, lambda: None)
    register_fsdp_forward_method(module, name)
    with torch.no_grad():
        getattr(module, name)()
    delattr(module, name)
    module.reset_iter_state()


def _materialize_tensors(module: nn.Module, device: torch.device, rests_on: torch.device) -> None:
    """Allocate tensors that are on the meta device; sharded parameters on device ``rests_on``."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for user in module.modules():
        for name, parameter in user._parameters.items():
            if parameter is not None and parameter.is_meta:
                users.setdefault(parameter, []).append((user, name))

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        target = rests_on if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor

    if users:
        module._apply(with_memory)
    for (first, name), *aliases in users.values():  # shared parameters have become several
        for user, alias in aliases:
            user._parameters[alias] = first._parameters[name]


def _cast_trainable(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _prepare(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Convert a parameter to a form that FSDP2 accepts.

    Frozen parameters are cast to the dtype they are gathered in; packed bits are viewed as that dtype, as everything
    that is gathered is cast to it.
    """
    if not parameter.requires_grad and not parameter.is_floating_point():
        parameter.data = parameter.data.reshape(-1).view(dtype)
    elif not parameter.requires_grad:
        parameter.data = parameter.data.to(dtype)
    parameter.data = parameter.data.contiguous()


def _select_local(parameter: nn.Parameter) -> nn.Parameter:
    """Return the part of a parameter that this rank holds, in the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)


def _list_units(module: nn.Module) -> list[FSDPModule]:
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def _iterate_gathered_weights(unit: FSDPModule) -> Iterator[tuple[torch.dtype, int]]:
    """Yield the dtype that a unit casts each of its weights to when it gathers it, and the number of elements.

    FSDP2 shows it in its own state only.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            yield parameter.param_dtype or parameter.orig_dtype, math.prod(parameter._orig_size)
