"""Simulate eager tensors without data: the memory that PyTorch would allocate and the kernels it would launch.

A block is written in this package as its modeling code is, on tensors that have a size and no content. As in torch, a
tensor's bytes are freed when the last handle on its storage is deleted. Every operation records the node that autograd
would record, with the tensors it would save, and ``Tape.backward`` runs the nodes in autograd's order, accumulating
gradients in place where autograd does (torch/csrc/autograd: engine.cpp, input_buffer.cpp, functions/accumulate_grad.h).
Imports no torch.
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainwright.planning.operations.launches import Kernel, KernelKind, product_workspace
from trainwright.planning.operations.shapes import Device

Edge = tuple["Node", int]
Apply = Callable[[list["Tensor | None"]], list["Tensor | None"]]
Derivative = Callable[["Tensor"], list["Tensor | None"]]

ALTERNATE = "every second product"


class Storage:
    """Memory that several handles share."""

    __slots__ = ("bytes", "handles")

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.handles = 0


class Tensor:
    """A handle on a storage, or on a part of it.

    ``width``: bytes per element. ``heads_first``: whether the memory of a tensor [B, H, L, D] is in that order;
    otherwise it is in the order [B, L, H, D] of projections. ``base``: the tensor that this is a view of, kept as in
    torch.
    """

    __slots__ = ("base", "heads_first", "node", "numel", "slot", "storage", "tape", "width")

    def __init__(self, tape: Tape, storage: Storage, numel: int, width: int, heads_first: bool = False) -> None:
        self.tape = tape
        self.storage = storage
        self.numel = numel
        self.width = width
        self.heads_first = heads_first
        self.node: Node | None = None
        self.slot = 0
        self.base: Tensor | None = None
        storage.handles += 1

    def __del__(self) -> None:
        self.storage.handles -= 1
        if not self.storage.handles:
            self.tape.live -= self.storage.bytes
            self.tape.storages.discard(self.storage)

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return self.numel * self.width

    def alias(self) -> Tensor:
        """Return another handle, without a history."""
        return Tensor(self.tape, self.storage, self.numel, self.width, self.heads_first)

    def view(self, numel: int | None = None) -> Tensor:
        """Return a view, without a history; ``numel``: its size, if it is a part or broadcast."""
        seen = Tensor(self.tape, self.storage, self.numel if numel is None else numel, self.width, self.heads_first)
        seen.base = self
        return seen


class Parameter:
    """A weight [n, k] (k = 1: a vector), whose memory is counted elsewhere. ``quantized``: its format."""

    __slots__ = ("k", "n", "name", "node", "quantized", "trainable", "width")

    def __init__(self, name: str, n: int, k: int, width: int, trainable: bool) -> None:
        self.name = name
        self.n = n
        self.k = k
        self.width = width
        self.trainable = trainable
        self.quantized = "none"
        self.node: Node | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.n * self.k

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return self.numel * self.width


class Node:
    """The autograd node of an operation: where its gradients go, and how they are computed."""

    __slots__ = ("__weakref__", "apply", "edges", "operation", "outputs", "sequence")

    def __init__(self, sequence: float, operation: str, edges: list[Edge | None], outputs: int, apply: Apply) -> None:
        self.sequence = sequence
        self.operation = operation
        self.edges = edges
        self.outputs = outputs
        self.apply: Apply | None = apply


class Saved:
    """A tensor saved for the backward pass, or a placeholder that is recomputed."""

    __slots__ = ("__weakref__", "_frame", "tensor")

    def __init__(self, tensor: Tensor | None, frame: Frame | None = None) -> None:
        self.tensor = tensor
        self._frame = frame

    def get(self) -> Tensor:
        """Return the tensor, recomputed if it was not kept."""
        if self.tensor is None:
            assert self._frame is not None
            self._frame.fill()
        assert self.tensor is not None
        return self.tensor


class _Stop(Exception):
    """Raised when all saved tensors have been recomputed."""


class Frame:
    """A call whose saved tensors are recomputed when the first of them is needed (torch.utils.checkpoint).

    ``keep``: kinds of kernels whose results are kept, in ``kept``; with ``ALTERNATE`` every second product, from the
    first.
    """

    def __init__(self, tape: Tape, call: Callable[[], object], keep: frozenset[str]) -> None:
        self.tape = tape
        self.keep = keep
        self.kept: deque[list[Tensor]] = deque()
        self.filling = False
        self._products = 0
        self._call = call
        self._promises: list[weakref.ref[Saved]] = []
        self._position = 0

    def save(self, tensor: Tensor | None) -> Saved:
        """Keep a tensor, or a placeholder to recompute it."""
        if not self.filling:
            promise = Saved(None, self)
            self._promises.append(weakref.ref(promise))
            return promise
        promise_or_none = self._promises[self._position]()
        self._position += 1
        if promise_or_none is not None and tensor is not None:
            promise_or_none.tensor = tensor.alias()
        if self._position == len(self._promises):
            raise _Stop
        return Saved(tensor)

    def filled(self) -> list[Tensor]:
        """Return the saved tensors that have been recomputed."""
        promises = (promise() for promise in self._promises[: self._position])
        return [one.tensor.alias() for one in promises if one is not None and one.tensor is not None]

    def keeps(self, kind: str) -> bool:
        """Return whether the result of the next kernel of this kind is kept."""
        if kind == "product" and ALTERNATE in self.keep:
            self._products += 1
            return self._products % 2 == 1
        return kind in self.keep

    def fill(self) -> None:
        """Recompute the tensors that were not kept."""
        self.filling, self._position, self._products = True, 0, 0
        outer, self.tape.frame = self.tape.frame, self
        try:
            self._call()
        except _Stop:
            pass
        finally:
            self.tape.frame = outer


class Tape:
    """Track live tensors and launched kernels while a program runs on it.

    ``live``, ``peak``: bytes; ``storages``: those of ``live``. ``operation``: the name that kernels are recorded under.
    ``receive``: called with each parameter's gradient, which is freed unless it keeps a handle. ``held``: tensors that
    the program holds until the end of the step. ``left``: tensors that recomputation leaves behind.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.live = 0
        self.storages: set[Storage] = set()
        self.peak = 0
        self.kernels: list[Kernel] = []
        self.operation = ""
        self.grad = True
        self.held: list[Tensor] = []
        self.left: list[Tensor] = []
        self.frame: Frame | None = None
        self.receive: Callable[[Parameter, Tensor], None] = lambda parameter, grad: None
        self._sequence = 0

    def new(self, numel: int, width: int, heads_first: bool = False) -> Tensor:
        """Allocate a tensor."""
        size = numel * width
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
        storage = Storage(size)
        self.storages.add(storage)
        return Tensor(self, storage, numel, width, heads_first)

    def launch(self, kind: KernelKind, read: int, written: int) -> None:
        """Record a kernel."""
        self.kernels.append(Kernel(self.operation, kind, read, written))

    def elementwise(self, inputs: Sequence[Tensor | Parameter], like: Tensor, width: int | None = None) -> Tensor:
        """Return the result of an elementwise kernel with the size of ``like``; ``width``: if it is not its own."""
        out = self.new(like.numel, like.width if width is None else width, like.heads_first)
        self.launch("elementwise", sum(value.bytes for value in inputs), out.bytes)
        return out

    def product(self, m: int, n: int, k: int, width: int, times: int = 1, transposed: bool = False) -> None:
        """Record a matrix product; ``transposed``: the first factor is stored as [k, m]."""
        if width < 4 and not self.device.is_gpu:
            self.new(self.device.threads * product_workspace(m, n, k, transposed), 1)
        read, written = times * k * (m + n) * width, times * m * n * width
        self.kernels.append(Kernel(self.operation, "product", read, written, 2 * times * m * n * k, m, n, k, times))

    def result(self, kind: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the result of ``make``, or the kept one during selective recomputation."""
        frame = self.frame
        if frame is None or not frame.keeps(kind):
            return make()
        if frame.filling:
            return [kept.alias() for kept in frame.kept.popleft()]
        made = make()
        frame.kept.append([tensor.alias() for tensor in made])
        return made

    def save(self, tensor: Tensor | None) -> Saved:
        """Save ``tensor`` (None: a parameter) for the backward pass."""
        return Saved(tensor) if self.frame is None else self.frame.save(tensor)

    def save_for(self, tensor: Tensor, *inputs: Tensor) -> Saved:
        """Save ``tensor`` if an operation on ``inputs`` (by default itself) is recorded; otherwise nothing is kept."""
        return self.save(tensor) if self.wants(*(inputs or (tensor,))) else Saved(None)

    def wants(self, *inputs: Tensor | Parameter) -> bool:
        """Return whether an operation on ``inputs`` is recorded."""
        return self.grad and any(
            (value.trainable if isinstance(value, Parameter) else value.node is not None) for value in inputs
        )

    def record(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor | Parameter | None], apply: Apply) -> None:
        """Record a node with these ``outputs`` that passes gradients to ``inputs``."""
        self._sequence += 1
        edges = [None if value is None else self._edge(value) for value in inputs]
        node = Node(self._sequence, self.operation, edges, len(outputs), apply)
        for slot, output in enumerate(outputs):
            output.node, output.slot = node, slot

    def derive(self, output: Tensor, inputs: Sequence[Tensor | Parameter], derivative: Derivative) -> Tensor:
        """Return ``output``, recorded if a gradient passes through it.

        ``derivative``: maps its gradient to those of ``inputs``.
        """
        if self.wants(*inputs):
            self.record([output], inputs, lambda grads: derivative(_only(grads)))
        return output

    def leaf(self, tensor: Tensor) -> None:
        """Record a node without inputs that takes the gradient of ``tensor``."""
        self.record([tensor], [], lambda grads: [])

    def _edge(self, value: Tensor | Parameter) -> Edge | None:
        if isinstance(value, Tensor):
            return None if value.node is None else (value.node, value.slot)
        if not value.trainable:
            return None
        if value.node is None:

            def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
                assert grads[0] is not None
                self.receive(value, grads[0])
                return []

            value.node = Node(float("inf"), value.name, [], 1, apply)
        return value.node, 0

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Disable the recording of gradients."""
        outer, self.grad = self.grad, False
        yield
        self.grad = outer

    def checkpoint(self, call: Callable[[], Tensor], keep: frozenset[str] = frozenset()) -> Tensor:
        """Run ``call`` and recompute its saved tensors in the backward pass, except results of kinds in ``keep``."""
        assert self.frame is None, "recomputation inside recomputation"
        frame = self.frame = Frame(self, call, keep)
        try:
            return call()
        finally:
            self.frame = None
            del frame

    def leave(self) -> None:
        """Leave behind what is saved so far of a call that is being recomputed."""
        if self.frame is not None and self.frame.filling:
            self.left += self.frame.filled()

    def backward(self, output: Tensor, grad: Tensor) -> None:
        """Run the nodes behind ``output``; the caller should hold the only handles on it and on ``grad``."""
        root = output.node
        assert root is not None
        waiting = _dependencies(root)
        buffers: dict[Node, list[Tensor | None]] = {root: [None] * root.outputs}
        buffers[root][output.slot] = grad
        del grad, output
        count = 0
        ready = [(-root.sequence, count, root)]
        while ready:
            node = heapq.heappop(ready)[2]
            self.operation = node.operation
            grads = buffers.pop(node)
            assert node.apply is not None
            results = node.apply(grads)
            # Saved tensors and incoming gradients are freed before outgoing ones are accumulated.
            if node.sequence != float("inf"):
                node.apply = None
            del grads
            results.reverse()
            for edge in node.edges:
                result = results.pop()
                if edge is None:
                    continue
                target, slot = edge
                waiting[target] -= 1
                if result is not None:
                    buffer = buffers.setdefault(target, [None] * target.outputs)
                    buffer[slot] = self._sum(buffer[slot], result)
                    del buffer
                del result
                if not waiting[target]:
                    if target in buffers:
                        count += 1
                        heapq.heappush(ready, (-target.sequence, count, target))
                    else:
                        self._skip(target)
            del node

    def _skip(self, node: Node) -> None:
        raise AssertionError(f"no gradient reaches {node.operation}")

    def _sum(self, before: Tensor | None, grad: Tensor) -> Tensor:
        if before is None:
            return grad.alias()
        self.launch("elementwise", 2 * before.bytes, before.bytes)
        if before.storage.handles == 1:
            return before.alias()
        return self.new(before.numel, before.width, before.heads_first)


def _only(grads: list[Tensor | None]) -> Tensor:
    assert grads[0] is not None, "a node runs when its gradient is complete"
    return grads[0]


def _dependencies(root: Node) -> dict[Node, int]:
    """Return the number of gradients that each node behind ``root`` waits for."""
    counts: dict[Node, int] = {root: 0}
    todo = [root]
    while todo:
        for edge in todo.pop().edges:
            if edge is not None:
                if edge[0] not in counts:
                    counts[edge[0]] = 0
                    todo.append(edge[0])
                counts[edge[0]] += 1
    return counts
