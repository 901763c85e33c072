"""Strategies in which every rank holds the full model: `single` on one process, `ddp` on several.

In bf16 the module's own parameters are bf16, with fp32 master weights for the optimizer. Compared with autocast this
saves a cast of every weight in every forward pass; updates are computed in fp32 in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainwright.parallel.layout import ModelLayout, dtype_name, placement
from trainwright.parallel.matrices.exchange import MatrixExchange, Ranks
from trainwright.parallel.norms import squared_norm
from trainwright.parallel.optimizer_state import create_optimizer_state
from trainwright.parallel.replicated.gradients import GradientAccumulator
from trainwright.parallel.replicated.spec import STEP_ELEMENTS
from trainwright.parallel.shards import Shard, persistent_buffers
from trainwright.parallel.strategy import NeedsFullMatrices, Setup
from trainwright.recipe.strategy_spec import spec_of
from trainwright.transfer import on_device


class Replicated:
    """The full model on every rank; ``gradients`` sums gradients over the ranks."""

    gradients = GradientAccumulator

    def __init__(self, setup: Setup) -> None:
        world, module, dtype = setup.world, setup.module, setup.dtype
        self.name = setup.parallel.strategy
        self.world = world
        for parameter in module.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)  # before it is moved to the device
        self.module = module.to(world.device)
        trainable = [(key, p) for key, p in module.named_parameters() if p.requires_grad]
        self._masters = {key: nn.Parameter(p.detach()) if dtype != p.dtype else p for key, p in trainable}
        for _, parameter in trainable:
            parameter.data = parameter.data.to(dtype)
        self._working = dict(trainable)
        bucket_bytes = spec_of(self.name).bucket_bytes
        self._gradients = self.gradients(self._working.values(), exchange=world.size > 1, bucket_bytes=bucket_bytes)
        self._optimizer = setup.make_optimizer(self._masters.items())
        if world.size > 1 and isinstance(self._optimizer, NeedsFullMatrices):
            everyone = Ranks(world.size, world.rank)
            self._optimizer.exchange = MatrixExchange(world.device, lambda p: p.shape, replicas=everyone)
        self._scales_itself = getattr(self._optimizer, "_step_supports_amp_scaling", False)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; after the ``last`` micro-batch of a step, exchange them."""
        self._gradients.backward(loss, last=last)

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm over all parameters of the exchanged gradients, the same on every rank."""
        grads = [g for p in self._working.values() if (g := self._gradients.of(p)) is not None]
        return on_device(squared_norm(grads).sqrt(), self.world.device)

    def step(self, learning_rate: float, scale: float) -> None:
        """Multiply the gradients by ``scale``, update the weights, and drop the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self._scales_itself:
            # The argument that GradScaler passes to a fused optimizer: saves a pass over the gradients.
            # Filled on the device: a number that is copied there makes the host wait.
            self._optimizer.grad_scale = torch.full((), 1.0 / scale, device=self.world.device)  # type: ignore[attr-defined]
        for names in self._parts():
            masters, working = [self._masters[name] for name in names], [self._working[name] for name in names]
            apart = [(m, w) for m, w in zip(masters, working, strict=True) if m is not w]
            for master, parameter in zip(masters, working, strict=True):
                grad = self._gradients.of(parameter)
                # Missing gradients count as zero, as after an exchange: the optimizer must behave the same on one
                # process as on several, and must have the same state to save.
                master.grad = torch.zeros_like(master) if grad is None else grad.float()
                if master is not parameter:
                    self._gradients.drop(parameter)
            if scale != 1.0 and not self._scales_itself:
                torch._foreach_mul_([master.grad for master in masters if master.grad is not None], scale)
            self._optimizer.step()
            for master in masters:
                master.grad = None
            if apart:  # in one call, as a model has many small parameters
                torch._foreach_copy_([parameter.data for _, parameter in apart], [master.data for master, _ in apart])
        self._gradients.clear()

    def _parts(self) -> Iterator[list[str]]:
        """Yield names of parameters that are updated together: all if their gradients are in fp32 already."""
        if self.world.size > 1:
            yield list(self._masters)
            return
        part: list[str] = []
        elements = 0
        for name, master in self._masters.items():
            separate = master is not self._working[name]
            if part and separate and elements + master.numel() > STEP_ELEMENTS:
                yield part
                part, elements = [], 0
            part.append(name)
            elements += master.numel()
        if part:
            yield part

    def discard_gradients(self) -> None:
        """Drop the gradients without changing the weights."""
        self._gradients.clear()

    def abandon_step(self) -> None:
        """Let the other ranks finish a step that failed on this one."""
        self._gradients.abandon()

    def state(self) -> dict[str, Shard]:
        """Return this rank's part of parameters, buffers and optimizer state."""
        rank, size = self.world.rank, self.world.size
        return {name: Shard.full(tensor, rank, size) for name, tensor in self._tensors()}

    def load_state(self, read: Callable[[str, Shard], torch.Tensor]) -> None:
        """Fill the state from ``read(name, shard)``."""
        create_optimizer_state(self._optimizer)
        for name, tensor in self._tensors():
            tensor.copy_(read(name, Shard.full(tensor)))
        for name, master in self._masters.items():
            if master is not self._working[name]:
                self._working[name].data.copy_(master)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield everything that training changes, by its name in a checkpoint."""
        for name, tensor in self.parameters(frozen=False):
            yield f"model.{name}", tensor
        for name, master in self._masters.items():
            for slot, value in self._optimizer.state[master].items():
                yield f"optimizer.{slot}.{name}", value

    def parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full parameters and buffers in master precision. Every rank must iterate."""
        for name, parameter in self.module.named_parameters():
            if frozen or name in self._masters:
                yield name, self._masters.get(name, parameter).detach()
        yield from persistent_buffers(self.module)

    def layout(self) -> ModelLayout:
        """Describe how this rank holds the model."""
        name = max(self._working, key=lambda key: self._working[key].numel())
        parameter, master = self._working[name], self._masters[name]
        elements = sum(p.numel() for p in self._working.values())
        updated = [p for group in self._optimizer.param_groups for p in group["params"]]
        return ModelLayout(
            parameter=name,
            shape=tuple(parameter.shape),
            local_shape=tuple(parameter.shape),
            placement=placement("whole", 1, self._gradients.ranks),
            forward_dtype=dtype_name(p.dtype for p in self.module.parameters() if p.is_floating_point()),
            master_dtype=dtype_name(p.dtype for p in updated),
            parameter_device=parameter.device.type,
            optimizer_device=master.device.type,
            elements=elements,
            held=elements,
            updated=sum(p.numel() for p in updated),
            gradient_parts=1,
            gradient_ranks=self._gradients.ranks,
        )

    @contextmanager
    def full_parameters(self, available_memory: int | None = None) -> Iterator[tuple[nn.Module, str | None]]:
        """Provide the module with full parameters on every rank, for generation."""
        yield self.module, None
