"""Gradients of a replicated model: accumulated over micro-batches, exchanged in buckets during the backward pass.

torch's DistributedDataParallel is not used for three reasons: it rebuilds its buckets after the first backward pass, so
with three ranks a resumed run sums in another order than the run it continues; it averages, but losses here are already
divided by the global weight; and it keeps a gradient buffer that is only needed during the exchange.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from trainwright import heartbeat
from trainwright.parallel.constants import CACHED_ELEMENTS


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
        elif grad.is_cuda:
            before.add_(grad)
        else:  # in pieces, as a CPU converts the second summand to a copy in fp32 first
            for total, part in zip(_pieces(before), _pieces(grad), strict=True):
                total.add_(part)
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
        self._buckets = _buckets(parameters, bucket_bytes)
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._active = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self) -> None:
        self._active = True
        self._missing = [len(bucket) for bucket in self._buckets]
        self._started: list[tuple[torch.Tensor, dist.Work]] = []

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._active:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[len(self._started)]
        flat = torch.empty(_elements(bucket), dtype=torch.float32, device=bucket[0].device)
        for parameter, view in zip(bucket, _views(flat, bucket), strict=True):
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
        with heartbeat.inside():
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
            dist.all_reduce(torch.zeros(_elements(bucket), dtype=torch.float32, device=bucket[0].device))
        self._started = []
        self._active = False


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int | None) -> list[list[nn.Parameter]]:
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


def _elements(bucket: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in bucket)


def _views(flat: torch.Tensor, bucket: list[nn.Parameter]) -> list[torch.Tensor]:
    pieces = flat.split([parameter.numel() for parameter in bucket])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, bucket, strict=True)]


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of a tensor that fit a CPU's cache, or the tensor if it is not contiguous."""
    return tensor.view(-1).split(CACHED_ELEMENTS) if tensor.is_contiguous() else (tensor,)
