"""The parts before and after the blocks: embeddings, masks and rotary tables; final norm, head and loss."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.operations.elementary import add, dropout, from_result, gather, scale, to
from trainwright.planning.operations.layers import embedding, linear, norm
from trainwright.planning.operations.shapes import BatchShape, Device
from trainwright.planning.operations.tape import Parameter, Tape, Tensor
from trainwright.planning.operations.weights import ModelWeights
from trainwright.planning.stack import OWN, Stack

_FP32 = 4
# models/linear_losses.py: least bytes of a chunk of logits, and of the fp32 logits that a CPU processes
# at once.
_CHUNK_BYTES = 128 * 2**20
_BLOCK_BYTES = 2 * 2**20


@dataclass
class Beginning:
    """The inputs of the blocks. ``held``: other tensors that the model's forward pass holds until its end."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    held: list[Tensor]


def begin(
    tape: Tape, a: Architecture, weights: ModelWeights, batch: BatchShape, device: Device, of_head: bool = False
) -> Beginning:
    """Compute the embeddings, and the tables and masks that all blocks share.

    ``of_head``: the embedding's gradient is added to that of the head (models/linear_losses.py).
    """
    tape.operation = "embedding"
    tokens = batch.tokens
    hidden = embedding(tape, weights["embedding"], tokens, of_head)
    held = []
    if a.scaled_embedding or a.family == "granite":
        hidden = scale(tape, hidden)
    if a.learned_positions:
        positions = embedding(tape, weights["positions"], tokens)
        held = [hidden, positions]
        hidden = add(tape, hidden, positions)
    held.append(hidden)
    hidden = dropout(tape, hidden, a.embedding_dropout, device.is_gpu)
    if a.family == "phi":
        held = [hidden]
    tape.operation = "mask"
    held += [tape.new(size, 1) for size in _masks(a, batch)]
    tape.operation = "rotary"
    numel = int(a.head_dim * a.rotary) * tokens if a.rotary_layers else 0
    width = _FP32 if a.post_norm else hidden.width
    cos, sin = tape.new(numel, width), tape.new(numel, width)
    if a.family == "gemma3_text" and 0 < a.windowed_layers < a.layers:
        held += [tape.new(numel, width), tape.new(numel, width)]  # each kind of layers has its own base
    return Beginning(hidden, cos, sin, held)


def _masks(a: Architecture, batch: BatchShape) -> list[int]:
    """Return the sizes of the masks that transformers makes once for all layers."""
    if batch.packed:
        return []
    size = batch.rows * batch.length**2
    if a.attention_softcap is not None:  # eager attention adds numbers, and always needs a mask
        size *= _FP32
        return [size, size]
    windowed = a.window is not None and a.windowed_layers > 0 and a.window < batch.length
    plain = batch.masked and a.windowed_layers < a.layers
    return [size] * (plain + (windowed or (batch.masked and a.windowed_layers > 0)))


def head_weight(weights: ModelWeights) -> Parameter:
    """Return the weight of the head, which may be the embedding."""
    return weights.parameters.get("head", weights["embedding"])


def finish(
    tape: Tape, a: Architecture, hidden: Tensor, weights: ModelWeights, batch: BatchShape, stack: Stack = OWN
) -> Tensor:
    """Apply the final norm and the summed loss (models/causal_lm.py), or the loss of ``stack``."""
    tape.operation = "final_norm"
    hidden = norm(tape, a, hidden, weights, "final_norm", batch.tokens)
    if stack.loss != "chunked":
        return _full_loss(tape, a, hidden, head_weight(weights), weights.bias("head"), stack)
    tape.operation = "targets"
    if batch.targets < batch.tokens and not a.whole_logits:
        hidden = gather(tape, hidden, batch.targets * a.hidden, tape.new(0, 8))
    tape.operation = "head"
    if a.whole_logits:
        return _loss_of_logits(tape, hidden, weights, batch)
    grows = stack.grows_chunks and tape.device.is_gpu
    return _loss(tape, a, hidden, head_weight(weights), weights.bias("head"), batch.targets, grows)


def _loss_of_logits(tape: Tape, hidden: Tensor, weights: ModelWeights, batch: BatchShape) -> Tensor:
    """Compute the loss of a module that returns the logits of all positions; their gradient is made with the loss."""
    weight = head_weight(weights)
    logits = linear(tape, hidden, weight, weights.bias("head"))
    if batch.targets < batch.tokens:
        logits = gather(tape, logits, batch.targets * weight.n, tape.new(0, 8))
    tape.operation = "loss"
    gradient = tape.new(logits.numel, logits.width)
    tape.launch("elementwise", 2 * logits.bytes, gradient.bytes)
    if not tape.wants(logits):
        return tape.new(batch.targets, _FP32)
    kept = tape.save(gradient)
    return tape.derive(tape.new(1, _FP32), [logits], lambda grad: [kept.get().alias()])


def chunk_rows(head: Parameter, width: int, targets: int, grows: bool) -> tuple[int, int]:
    """Return the rows of a chunk of logits, and the number of chunks."""
    size = max(1, _CHUNK_BYTES // (width * head.n))
    if grows:  # as many bytes as the hidden states
        size = max(size, targets * head.k // head.n)
    count = -(-targets // size)
    return -(-targets // count) if count else 0, count


def _loss(
    tape: Tape, a: Architecture, hidden: Tensor, weight: Parameter, bias: Parameter | None, targets: int, grows: bool
) -> Tensor:
    """Run models/linear_losses.py, which computes the gradients with the loss."""
    width, wants_hidden = hidden.width, tape.wants(hidden)
    of_weight: Tensor | None = None
    of_bias = tape.new(bias.n, _FP32) if tape.grad and bias is not None and bias.trainable else None
    of_hidden = tape.new(hidden.numel, width) if wants_hidden else None
    rows, chunks = chunk_rows(weight, width, targets, grows)
    logits: Tensor | None = None
    for _ in range(chunks):
        logits = _logits(tape, weight, rows, width)
        tape.operation = "loss"
        _work_on(tape, a, weight.n, rows, width)
        tape.operation = "head"
        if wants_hidden:
            tape.product(rows, weight.k, weight.n, width)
        if tape.grad and weight.trainable:
            of_weight = _added(tape, of_weight, weight, rows, width)
    del logits
    if of_weight is not None and of_weight.width != width:
        of_weight = to(tape, of_weight, width)
    total = tape.new(1 if tape.grad else targets, _FP32)
    inputs: list[tuple[Tensor | Parameter | None, Tensor | None]]
    inputs = [(hidden, of_hidden), (weight, of_weight), (bias, of_bias)]
    given = [(value, tape.save(grad)) for value, grad in inputs if grad is not None]
    if given:

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            made: list[Tensor | None] = []
            for _, kept in given:
                grad = kept.get().alias()
                tape.launch("elementwise", grad.bytes, grad.bytes)
                made.append(grad)
            return made

        tape.record([total], [value for value, _ in given], apply)
    return total


def _full_loss(
    tape: Tape, a: Architecture, hidden: Tensor, weight: Parameter, bias: Parameter | None, stack: Stack
) -> Tensor:
    """Compute the loss from the logits of all tokens.

    "full": in fp32, with log-probabilities from the softmax (torch's cross_entropy), which a compiler does not keep.
    "fused": the gradient overwrites the logits.
    """
    tape.operation = "head"
    logits = linear(tape, hidden, weight, bias)
    tape.operation = "loss"
    if stack.loss == "fused":
        return _in_place(tape, logits)
    if stack.loss == "widened":
        return _in_place(tape, scale(tape, to(tape, logits, _FP32)))
    if stack.loss == "narrow":
        tape.held.append(logits.alias())
        return _picked(tape, from_result(tape, logits))
    if a.logit_softcap is not None:
        logits = scale(tape, from_result(tape, scale(tape, logits)))
    if stack.loss == "freed" and stack.compiles_loss:
        return _picked(tape, logits)
    numbers = to(tape, logits, _FP32)
    if stack.loss == "full":
        tape.held.append(numbers.alias())
    return _picked(tape, numbers if stack.compiles_loss else from_result(tape, numbers))


def _in_place(tape: Tape, logits: Tensor) -> Tensor:
    total = tape.new(1, _FP32)
    tape.launch("elementwise", 2 * logits.bytes, logits.bytes)
    kept = tape.save_for(logits)
    return tape.derive(total, [logits], lambda grad: [kept.get().alias()])


def _picked(tape: Tape, x: Tensor) -> Tensor:
    """Return the sum of one element of each row; its gradient has the size of ``x``."""
    total = tape.new(1, _FP32)
    numel, width = x.numel, x.width

    def apply(grad: Tensor) -> list[Tensor | None]:
        made = tape.new(numel, width)
        tape.launch("copy", 0, made.bytes)
        return [made]

    return tape.derive(total, [x], apply)


def _logits(tape: Tape, weight: Parameter, rows: int, width: int) -> Tensor:
    """Return the logits of a chunk, computed while those of the previous chunk still exist."""
    made = tape.new(rows * weight.n, width)
    tape.product(rows, weight.n, weight.k, width)
    return made


def _work_on(tape: Tape, a: Architecture, columns: int, rows: int, width: int) -> None:
    """Run softmax and its gradient on a chunk of logits in fp32; on a CPU in parts that fit its cache."""
    at_once = rows
    if not tape.device.is_gpu and rows:
        pieces = -(-rows // max(1, _BLOCK_BYTES // (_FP32 * columns)))
        at_once = -(-rows // pieces)
    copied, capped = width < _FP32, a.logit_softcap is not None
    # A copy if the logits are narrower than fp32; for a soft cap its derivative, computed from a square.
    tape.new((copied + 2 * capped) * at_once * columns, _FP32)
    numbers = rows * columns
    wide = numbers * _FP32
    if copied:
        tape.launch("elementwise", numbers * width, wide)
    # Scaled; capped (divided, tanh, multiplied), the derivative (divided, squared, subtracted), multiplied by it.
    for _ in range(2 * a.scaled_logits + 7 * capped):
        tape.launch("elementwise", wide, wide)
    for _ in range(2):  # maximum and sum
        tape.launch("reduction", wide, 0)
    for _ in range(3):  # difference, exponential, probability
        tape.launch("elementwise", wide, wide)
    if copied:
        tape.launch("copy", wide, numbers * width)


def _added(tape: Tape, before: Tensor | None, weight: Parameter, rows: int, width: int) -> Tensor:
    """Add the gradient of the head from one more chunk; in fp32 from the second chunk on."""
    if before is not None and width == _FP32:
        tape.product(weight.n, weight.k, rows, width, transposed=True)
        return before
    total = None if before is None else to(tape, before, _FP32)
    part = tape.new(weight.numel, width)
    tape.product(weight.n, weight.k, rows, width, transposed=True)
    if total is None:
        return part
    tape.launch("elementwise", total.bytes + part.bytes, total.bytes)
    return total
