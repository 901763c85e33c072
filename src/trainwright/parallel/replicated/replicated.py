"""Strategies in which every rank holds the full model: `single` on one process, `ddp` on several.

In bf16 the module's own parameters are bf16, with fp32 master weights for the optimizer. Compared with autocast this
saves a cast of every weight in every forward pass; updates are computed in fp32 in both cases. Without master weights
those of a part of the model are there while it is updated (`Bf16Weights`).

torch's DistributedDataParallel is not used for three reasons: it rebuilds its buckets after the first backward pass, so
with three ranks a resumed run sums in another order than the run it continues; it averages, but losses here are already
divided by the global weight; and it keeps a gradient buffer that is only needed during the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from trainwright.data.stream.batch import copy_to_device
from trainwright.parallel.bf16_weights import Bf16Part, Bf16Weights, split_by_size
from trainwright.parallel.constants import step_elements
from trainwright.parallel.layout import (
    ModelLayout,
    Shard,
    describe_placement,
    format_dtype_names,
    iterate_persistent_buffers,
)
from trainwright.parallel.matrix_exchange import MatrixExchange, Ranks
from trainwright.parallel.strategy import (
    NeedsFullMatrices,
    StrategyConfig,
    add_gradient,
    compute_squared_norm,
    exchange_averages,
    prepare_optimizer_state,
    set_learning_rate,
)
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.utils import heartbeat


class GradientAccumulator:
    """Accumulate gradients over the micro-batches of a step, in fp32 from the second summand on.

    A low-precision gradient is added to its sum as soon as the backward pass has made it: it is still in the cache, and
    the gradients of one micro-batch are never held together.

    Args:
        parameters: the trainable parameters, in the same order on every rank.
        exchange: whether to sum over ranks.
        bucket_bytes: minimum bytes of fp32 gradients that are exchanged at a time; None: all of them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, exchange: bool, bucket_bytes: int | None = None) -> None:
        self._parameters = list(parameters)
        self._sums: dict[nn.Parameter, torch.Tensor] = {}  # over earlier micro-batches
        self._adding = False  # whether the gradients of this backward pass go into the sums
        self._exchanged = False  # whether the sums are over all ranks
        for parameter in self._parameters:
            if parameter.dtype.itemsize < torch.float32.itemsize:  # autograd accumulates others in place itself
                parameter.register_post_accumulate_grad_hook(self._add)
        self._exchange = _Exchange(self._parameters, self._sums, bucket_bytes) if exchange else None

    @property
    def ranks(self) -> int:
        """Number of ranks whose gradients are summed into one."""
        return 1 if self._exchange is None else dist.get_world_size()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; with ``last``, also exchange what was added since the last step."""
        exchange = self._exchange if last else None
        self._adding = exchange is None and (not last or bool(self._sums))
        if exchange is not None:
            exchange.begin()
        loss.backward()
        if exchange is not None:
            exchange.finish()
            self._exchanged = True

    def _add(self, parameter: nn.Parameter) -> None:
        """Move the gradient of a parameter into its fp32 sum."""
        grad = parameter.grad
        if grad is None or not self._adding:
            return
        before = self._sums.get(parameter)
        if before is None:
            self._sums[parameter] = grad.float()
        else:
            add_gradient(before, grad)
        parameter.grad = None

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter, or None if it has none."""
        total = self._sums.get(parameter)
        return parameter.grad if total is None else total

    def drop(self, parameter: nn.Parameter) -> None:
        """Free the gradient of one parameter."""
        parameter.grad = None
        self._sums.pop(parameter, None)

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            self.drop(parameter)
        self._exchanged = False

    def abandon(self) -> None:
        """Drop the gradients of a failed step, and complete the exchange that other ranks wait for."""
        exchange = None if self._exchanged else self._exchange
        self.clear()  # first, because memory is short
        if exchange is not None:
            exchange.abandon()


class _Exchange:
    """All-reduce gradients in fixed buckets, each as soon as the backward pass has finished its gradients.

    Buckets follow the reverse order of the parameters, about the order of the backward pass; all ranks start them in
    that order, regardless of the order in which gradients arrive.
    """

    def __init__(
        self, parameters: list[nn.Parameter], sums: dict[nn.Parameter, torch.Tensor], bucket_bytes: int | None
    ) -> None:
        self._sums = sums
        self._buckets = _group_into_buckets(parameters, bucket_bytes)
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._active = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._mark_ready)

    def begin(self) -> None:
        self._active = True
        self._missing = [len(bucket) for bucket in self._buckets]
        self._started: list[tuple[torch.Tensor, dist.Work]] = []

    def _mark_ready(self, parameter: nn.Parameter) -> None:
        if not self._active:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[len(self._started)]
        flat = torch.empty(_count_elements(bucket), dtype=torch.float32, device=bucket[0].device)
        for parameter, view in zip(bucket, _split_into_views(flat, bucket), strict=True):
            grad, before = parameter.grad, self._sums.get(parameter)
            view.zero_() if grad is None else view.copy_(grad)
            if before is not None:
                view.add_(before)
            parameter.grad = None
            self._sums[parameter] = view
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._started.append((flat, work))

    def finish(self) -> None:
        while len(self._started) < len(self._buckets):  # parameters that backward did not reach
            self._start()
        with heartbeat.report_waiting():
            for _, work in self._started:
                work.wait()
        self._started = []
        self._active = False

    def abandon(self) -> None:
        """Complete the exchange with zeros, one bucket at a time."""
        if not self._active:
            self.begin()
        for _, work in self._started:
            work.wait()
        for bucket in self._buckets[len(self._started) :]:
            dist.all_reduce(torch.zeros(_count_elements(bucket), dtype=torch.float32, device=bucket[0].device))
        self._started = []
        self._active = False


def _group_into_buckets(parameters: list[nn.Parameter], bucket_bytes: int | None) -> list[list[nn.Parameter]]:
    if bucket_bytes is None:
        return [parameters[::-1]]
    buckets: list[list[nn.Parameter]] = []
    bucket_left = 0
    for parameter in reversed(parameters):
        size = 4 * parameter.numel()
        if size > bucket_left:
            buckets.append([])
            bucket_left = bucket_bytes
        buckets[-1].append(parameter)
        bucket_left -= size
    return buckets


def _count_elements(bucket: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in bucket)


def _split_into_views(flat: torch.Tensor, bucket: list[nn.Parameter]) -> list[torch.Tensor]:
    pieces = flat.split([parameter.numel() for parameter in bucket])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, bucket, strict=True)]


class Replicated:
    """The full model on every rank; ``gradients`` sums gradients over the ranks."""

    gradients = GradientAccumulator

    def __init__(self, setup: StrategyConfig) -> None:
        world, module, dtype = setup.world, setup.module, setup.dtype
        self.name = setup.parallel.strategy
        self.world = world
        masters = setup.rounding_seed is None
        for parameter in module.parameters():
            if not (masters and parameter.requires_grad) and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)  # before it is moved to the device
        self.module = module.to(world.device)
        trainable = [(key, p) for key, p in module.named_parameters() if p.requires_grad]
        self.bf16_weights: Bf16Weights | None = None
        if setup.rounding_seed is None:
            self._masters = {key: nn.Parameter(p.detach()) if dtype != p.dtype else p for key, p in trainable}
        else:
            parts = {key: Bf16Part(p.data, 0, p.numel()) for key, p in trainable}
            self.bf16_weights = Bf16Weights(setup.rounding_seed, parts)
            self._masters = self.bf16_weights.masters
        for _, parameter in trainable:
            parameter.data = parameter.data.to(dtype)
        self._working = dict(trainable)
        bucket_bytes = look_up_strategy(self.name).bucket_bytes
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
        return copy_to_device(compute_squared_norm(grads).sqrt(), self.world.device)

    def step(self, learning_rate: float, scale: float) -> None:
        """Multiply the gradients by ``scale``, update the weights, and drop the gradients."""
        set_learning_rate(self._optimizer, learning_rate)
        if self._scales_itself:
            # The argument that GradScaler passes to a fused optimizer: saves a pass over the gradients.
            # Filled on the device: a number that is copied there makes the host wait.
            self._optimizer.grad_scale = torch.full((), 1.0 / scale, device=self.world.device)  # type: ignore[attr-defined]
        for names in self._parts():
            masters, working = [self._masters[name] for name in names], [self._working[name] for name in names]
            apart = [(m, w) for m, w in zip(masters, working, strict=True) if m is not w]
            if self.bf16_weights is not None:
                self.bf16_weights.expand(names)
            self._give_gradients(masters, working)
            if scale != 1.0 and not self._scales_itself:
                torch._foreach_mul_([master.grad for master in masters if master.grad is not None], scale)
            self._optimizer.step()
            for master in masters:
                master.grad = None
            if self.bf16_weights is not None:
                self.bf16_weights.round(names)
            elif apart:  # in one call, as a model has many small parameters
                torch._foreach_copy_([parameter.data for _, parameter in apart], [master.data for master, _ in apart])
        self._gradients.clear()

    def _give_gradients(self, masters: list[nn.Parameter], working: list[nn.Parameter]) -> None:
        """Move the gradients of the weights that compute to their masters, in fp32.

        Missing ones count as zero, as after an exchange: the optimizer must behave the same on one process as on
        several, and must have the same state to save.
        """
        copies, grads = [], []
        for master, parameter in zip(masters, working, strict=True):
            grad = self._gradients.of(parameter)
            if grad is None:
                master.grad = torch.zeros_like(master)
            elif grad.dtype == master.dtype:
                master.grad = grad
            else:
                master.grad = torch.empty_like(master)
                copies.append(master.grad)
                grads.append(grad)
        if copies:
            torch._foreach_copy_(copies, grads)
        for master, parameter in zip(masters, working, strict=True):
            if master is not parameter:
                self._gradients.drop(parameter)

    def _parts(self) -> Iterator[list[str]]:
        """Yield names of parameters that are updated together: all if their gradients are in fp32 already."""
        if self.bf16_weights is not None:
            yield from self.bf16_weights.together()
        elif self.world.size > 1 or all(master is self._working[name] for name, master in self._masters.items()):
            yield list(self._masters)
        else:
            sizes = {name: master.numel() for name, master in self._masters.items()}
            yield from split_by_size(sizes, step_elements(self.world.device.type != "cpu"))

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

    def load_state(self, read: Callable[[str, Shard], torch.Tensor], *, optimizer: bool = True) -> None:
        """Fill the state from ``read(name, shard)``."""
        prepare_optimizer_state(self._optimizer, self.step, filled=optimizer)
        for name, tensor in self._tensors():
            tensor.copy_(read(name, Shard.full(tensor)))
        self._refresh()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield everything that training changes, by its name in a checkpoint."""
        for name, tensor in self.parameters(frozen=False):
            yield f"model.{name}", tensor
        for name, master in self._masters.items():
            for slot, value in self._optimizer.state[master].items():
                yield f"optimizer.{slot}.{name}", value

    def exchange_averages(self) -> None:
        """Exchange weights and averages."""
        exchange_averages(self._optimizer)
        self._refresh()

    def _refresh(self) -> None:
        """Copy the master weights to the weights that compute."""
        for name, master in self._masters.items():
            if master is not self._working[name] and self.bf16_weights is None:
                self._working[name].data.copy_(master)

    def parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full parameters and buffers in master precision. Every rank must iterate."""
        for name, parameter in self.module.named_parameters():
            if frozen or name in self._masters:
                master = parameter if self.bf16_weights is not None else self._masters.get(name, parameter)
                yield name, master.detach()
        yield from iterate_persistent_buffers(self.module)

    def layout(self) -> ModelLayout:
        """Describe how this rank holds the model."""
        name = max(self._working, key=lambda key: self._working[key].numel())
        parameter, master = self._working[name], self._masters[name]
        elements = sum(p.numel() for p in self._working.values())
        updated_parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        masters = self._working.values() if self.bf16_weights is not None else updated_parameters
        return ModelLayout(
            parameter=name,
            shape=tuple(parameter.shape),
            local_shape=tuple(parameter.shape),
            placement=describe_placement("whole", 1, self._gradients.ranks),
            forward_dtype=format_dtype_names(p.dtype for p in self.module.parameters() if p.is_floating_point()),
            master_dtype=format_dtype_names(p.dtype for p in masters),
            parameter_device=parameter.device.type,
            optimizer_device=master.device.type,
            elements=elements,
            held=elements,
            updated=sum(p.numel() for p in updated_parameters),
            gradient_parts=1,
            gradient_ranks=self._gradients.ranks,
        )

    @contextmanager
    def full_parameters(self, available_memory: int | None = None) -> Iterator[tuple[nn.Module, str | None]]:
        """Provide the module with full parameters on every rank, for generation."""
        yield self.module, None
