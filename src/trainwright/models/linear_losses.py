"""The loss of a language model's linear head, without the logits of all tokens: cross-entropy, and any other loss.

The head is a language model's largest matrix product, and its logits are the largest tensor of a step: 49,152 numbers
per token for SmolLM2. Here the targets are processed in chunks.

- ``linear_cross_entropy``: the gradient of a summed loss is known together with its value, so both are computed in one
  pass, with three matrix products per target and no recomputation. (The idea is from Liger Kernel, arXiv 2410.10989,
  section 3.2; the softmax is in fp32, or in float64 for float64 models.)
- ``linear_logit_loss``: for any loss, autograd computes its gradient with respect to the logits, a few rows at a time.
- ``share_gradient``: for an embedding tied to the head, autograd creates a gradient for each use, both as large
  as the vocabulary, and adds them: for SmolLM2, 113 MB of zeros except for the rows of tokens in the batch. Here those
  rows are added to the gradient of the head in place.

Few sizes of matrix products on CPUs.

oneDNN, which computes products in bf16 and fp16 on a CPU, generates code for every new shape, and torch and oneDNN
cache it: 2 to 3 ms and more than half a MiB each (measured with AMX). Rows of varied lengths would give each step new
shapes. Their numbers are therefore rounded up, by 3 % in the mean and at most a sixteenth. Padding comes after
everything else, nothing attends to it, and it is removed before losses are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import pad

from trainwright.data.stream.batch import Batch
from trainwright.models.fused import operators
from trainwright.parallel.constants import BLOCK_BYTES, CHUNK_BYTES, FUSED_CHUNK_BYTES, compute_padded_size


@contextmanager
def share_gradient(embedding: nn.Module, head: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """Patch ``embedding`` while a model runs it; provide a function that returns the weight for its head afterwards.

    Only applies on a CPU, where rows are added in the order of the tokens, in fp32 or higher, where this is as exact as
    a separate sum, and if no quantization or sharding has changed the modules.
    """
    if not _can_share_gradient(embedding, head):
        # Read when it is used: a sharding strategy may gather it until then.
        yield lambda: cast(torch.Tensor, head.weight)
        return
    assert isinstance(embedding, nn.Embedding)
    of_head: list[torch.Tensor] = [embedding.weight]

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor
        hidden, of_head[0] = _Lookup.apply(embedding.weight, tokens, embedding.padding_idx)
        return hidden

    embedding.forward = forward  # type: ignore[assignment, method-assign]
    try:
        yield lambda: of_head[0]
    finally:
        del embedding.forward


def _can_share_gradient(embedding: nn.Module, head: nn.Module) -> bool:
    if type(embedding) is not nn.Embedding or "forward" in vars(embedding) or not torch.is_grad_enabled():
        return False
    if embedding._forward_pre_hooks or embedding._forward_hooks:
        return False
    if embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse:
        return False
    weight = embedding.weight
    exact = weight.dtype in (torch.float32, torch.float64)
    return head.weight is weight and weight.requires_grad and weight.device.type == "cpu" and exact


class _Lookup(torch.autograd.Function):
    """Look up rows of a weight [V, H] for tokens [...]; also return the weight for a later use."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, tokens: torch.Tensor, padding: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(tokens)
        ctx.padding = padding
        return nn.functional.embedding(tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, of_rows: torch.Tensor, of_weight: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        tokens, of_rows = tokens.reshape(-1), of_rows.reshape(-1, of_rows.shape[-1])
        if ctx.padding is not None:  # padding has no gradient, as in nn.Embedding
            mask = tokens != ctx.padding
            tokens, of_rows = tokens[mask], of_rows[mask]
        return of_weight.index_add_(0, tokens, of_rows), None, None


# Lower bound for the variance of log-likelihoods over the vocabulary, for nearly certain predictions.
_LEAST_VARIANCE = 1e-6


class Head(NamedTuple):
    """Hidden states [N, H], weight [V, H] and bias [V] of a head, and the transformations of its logits.

    Without a weight, the hidden states are the logits [N, V].
    ``logit_scale`` multiplies the logits, then ``softcap`` bounds them as ``softcap * tanh(logits / softcap)``.
    ``fused``: one kernel computes the loss of logits and their gradient, if its dtype allows it.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    softcap: float | None = None
    logit_scale: float = 1.0
    fused: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether one kernel computes the loss."""
        return self.fused and self.hidden.dtype != torch.float64


class Terms(NamedTuple):
    """Terms of the loss of every target beside its cross-entropy.

    ``z_loss`` times the squared log-sum-exp of the logits is added. ``label_smoothing`` is the part of the target's
    probability that is spread evenly over the vocabulary (arXiv 1512.00567, section 7), as in torch's cross_entropy.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0


NO_TERMS = Terms()


def linear_cross_entropy(
    head: Head, targets: torch.Tensor, *, target_weights: torch.Tensor | None = None, terms: Terms = NO_TERMS
) -> torch.Tensor:
    """Compute the summed cross-entropy of N targets from ``hidden`` [N, H] @ ``weight`` [V, H]^T (+ ``bias`` [V]).

    ``target_weights`` [N], fp32, multiply the losses of the targets and get no gradient.

    Returns:
        The sum in nats, fp32 scalar, which the caller divides by a weight.
    """
    return _LinearCrossEntropy.apply(head.hidden, head.weight, head.bias, targets, head, target_weights, terms)


@torch.no_grad()
def compute_token_statistics(head: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-likelihood in nats [N] and whether the prediction is correct [N], without gradients."""
    hidden, weight, bias, softcap, logit_scale, _ = head
    losses, correct = [], []
    compute = operators.loss_and_correct if head.is_fused else _compute_loss_and_correct
    for part in split_into_chunks(len(targets), hidden, weight, fused=head.is_fused):
        chunk = compute_padded_logits(hidden[part], weight, bias)[: part.stop - part.start]
        for rows in split_into_row_blocks(chunk):
            loss, right = compute(chunk[rows], targets[part][rows], softcap, logit_scale)
            losses.append(loss)
            correct.append(right)
    if not losses:
        return hidden.new_zeros(0, dtype=choose_sum_dtype(hidden)), targets.new_zeros(0, dtype=torch.bool)
    return torch.cat(losses), torch.cat(correct)


def _compute_loss_and_correct(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, logit_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and correctness of some rows of logits. Their fp32 copy is freed before that of the next rows."""
    work = _finish_in_place(logits, softcap, logit_scale)
    target_logits = work.gather(1, targets[:, None])[:, 0]
    correct = work.argmax(1) == targets
    return _convert_to_probabilities(work)[:, 0] - target_logits, correct


@torch.no_grad()
def compute_standardized_log_likelihood(head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Return how many standard deviations each target's log-likelihood is above the mean [N], without gradients.

    Mean and deviation are over the vocabulary, weighted by the model's probabilities (arXiv 2404.02936, equation 2).
    """
    hidden, weight, bias, softcap, logit_scale, _ = head
    blocks = [hidden.new_zeros(0, dtype=torch.float32)]
    for part in split_into_chunks(len(targets), hidden, weight):
        chunk = compute_padded_logits(hidden[part], weight, bias)[: part.stop - part.start]
        for rows in split_into_row_blocks(chunk):
            logs = finish_logits(chunk[rows], softcap, logit_scale).log_softmax(1)
            chances = logs.exp()
            mean = (chances * logs).sum(1)
            variance = (chances * (logs - mean[:, None]).square()).sum(1)
            target_logs = logs.gather(1, targets[part][rows][:, None])[:, 0]
            blocks.append((target_logs - mean) / variance.clamp_min(_LEAST_VARIANCE).sqrt())
    return torch.cat(blocks)


@torch.no_grad()
def compute_top_entropy(head: Head, k: int) -> torch.Tensor:
    """Return the entropy in nats of the ``k`` most probable tokens at every position [N], fp32, without gradients.

    Their probabilities are those among themselves (as in arXiv 2601.02151).
    """
    hidden, weight, bias, softcap, logit_scale, _ = head
    blocks = [hidden.new_zeros(0, dtype=torch.float32)]
    for part in split_into_chunks(len(hidden), hidden, weight):
        chunk = compute_padded_logits(hidden[part], weight, bias)[: part.stop - part.start]
        for rows in split_into_row_blocks(chunk):
            logits = finish_logits(chunk[rows], softcap, logit_scale)
            logs = logits.topk(min(k, logits.shape[1]), dim=1).values.log_softmax(1)
            blocks.append(-(logs.exp() * logs).sum(1))
    return torch.cat(blocks)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        target_weights: torch.Tensor | None,
        terms: Terms,
    ) -> torch.Tensor:
        wants = ctx.needs_input_grad
        total = hidden.new_zeros((), dtype=choose_sum_dtype(hidden))
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grads = HeadGradients(weight if wants[1] else None, bias if wants[2] else None, fused=head.is_fused)
        for part in split_into_chunks(len(targets), hidden, weight, fused=head.is_fused):
            logits, count = compute_padded_logits(hidden[part], weight, bias), part.stop - part.start
            weights = None if target_weights is None else target_weights[part]
            chunk = logits[:count]  # without the rows of zeros after them
            for rows in split_into_row_blocks(chunk):
                row_weights = None if weights is None else weights[rows]
                total += _convert_to_gradient(chunk[rows], targets[part][rows], head, row_weights, terms)
            if grad_hidden is not None:
                set_hidden_gradient(grad_hidden[part], logits, weight)
            grads.add(logits, hidden[part])
        ctx.save_for_backward(grad_hidden, *grads.result())
        ctx.spent = False
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("the gradient of linear_cross_entropy was already taken")
        ctx.spent = True  # scale the saved gradients in place: they are as large as the head
        gradients = [None if gradient is None else gradient.mul_(grad) for gradient in ctx.saved_tensors]
        return (*gradients, None, None, None, None)


class HeadGradients:
    """Gradients of the head, summed over chunks; in fp32 if there is more than one chunk.

    ``fused``: products are added to the sum in fp32 by their kernel, also the first one.
    """

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, *, fused: bool = False) -> None:
        self._like = (weight, bias)
        self._fused = fused
        self._sums: list[torch.Tensor | None] = [None, None]

    def add(self, delta: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the gradients of a chunk: of its logits [n, V], which may be padded with zeros, and hidden states."""
        weight, bias = self._like
        hidden = pad_rows(hidden)
        if weight is not None:
            before, wide = self._sums[0], choose_sum_dtype(delta)
            if self._fused and delta.dtype != wide and has_wide_products(delta):
                if before is None:
                    self._sums[0] = torch.mm(delta.t(), hidden, out_dtype=wide)
                else:
                    torch.addmm(before, delta.t(), hidden, out_dtype=wide, out=before)
            elif before is None:
                self._sums[0] = delta.t() @ hidden
            elif delta.dtype == wide:
                before.addmm_(delta.t(), hidden)
            else:
                self._sums[0] = before.float().add_(delta.t() @ hidden)
        if bias is not None:
            before = self._sums[1]
            part = delta.sum(0, dtype=choose_sum_dtype(delta))
            self._sums[1] = part if before is None else before.add_(part)

    def result(self) -> list[torch.Tensor | None]:
        """Return the summed gradients in the dtypes of the weights."""
        return [
            None if like is None else torch.zeros_like(like) if total is None else total.to(like.dtype)
            for like, total in zip(self._like, self._sums, strict=True)
        ]


def has_wide_products(tensor: torch.Tensor) -> bool:
    """Return whether products of the tensor's dtype can have fp32 results, as torch has them under CUDA."""
    return tensor.is_cuda and torch.version.hip is None


def compute_padded_logits(hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the raw logits of ``hidden`` [n, H], with rows of zeros after them where products need that.

    They are overwritten by callers, so without a weight they are a copy of ``hidden``.
    """
    if weight is None:
        return hidden.clone()
    logits = torch.nn.functional.linear(pad_rows(hidden), weight, bias)
    if bias is not None:
        logits[len(hidden) :] = 0
    return logits


def set_hidden_gradient(gradient: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Write the gradient of hidden states [n, H], from that of their logits, which may be padded."""
    if weight is None:
        gradient.copy_(delta)
    elif len(delta) == len(gradient):
        torch.mm(delta, weight, out=gradient)
    else:
        gradient.copy_(torch.mm(delta, weight)[: len(gradient)])


def _convert_to_gradient(
    logits: torch.Tensor, targets: torch.Tensor, head: Head, weights: torch.Tensor | None, terms: Terms
) -> torch.Tensor:
    """Return the summed loss of some rows of a head's logits, and overwrite the logits with its gradient."""
    softcap, logit_scale = head.softcap, head.logit_scale
    z_loss, smoothing = terms
    if head.is_fused:
        return operators.cross_entropy(logits, targets, weights, softcap, logit_scale, z_loss, smoothing).sum()
    columns = targets[:, None]
    work = _finish_in_place(logits, softcap, logit_scale)
    slope = None if softcap is None else 1 - (work / softcap).square()
    target_logits = work.gather(1, columns)[:, 0]
    if smoothing:
        target_logits = (1 - smoothing) * target_logits + smoothing * work.mean(1)
    # In place from here: probabilities, then the gradient.
    scale = _convert_to_probabilities(work)
    losses = scale[:, 0] - target_logits
    if z_loss:
        losses += z_loss * scale[:, 0].square()
        work *= 1 + 2 * z_loss * scale
    work.scatter_add_(1, columns, work.new_full((), smoothing - 1.0).expand_as(columns))
    if smoothing:
        work -= smoothing / work.shape[1]
    if slope is not None:
        work *= slope
    if logit_scale != 1.0:
        work *= logit_scale
    if weights is not None:
        work *= weights[:, None]
        losses *= weights
    if work is not logits:
        logits.copy_(work)
    return losses.sum()


def _convert_to_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Replace ``logits`` [n, V], fp32 or higher, by the softmax of each row; return the log-sum-exp [n, 1]."""
    # One exponential and no copy: on a CPU this takes an eighth of the time of logsumexp followed by softmax. The
    # softmax kernel is as fast, but it sums each row sequentially, which gives errors of 1e-5 for 49,152 numbers.
    largest = logits.amax(1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    logits.mul_(total.reciprocal())
    return largest + total.log()


def _finish_in_place(logits: torch.Tensor, softcap: float | None, logit_scale: float) -> torch.Tensor:
    """Compute ``finish_logits`` in the memory of ``logits`` if its precision suffices."""
    if logits.dtype != choose_sum_dtype(logits):
        return finish_logits(logits, softcap, logit_scale)
    if logit_scale != 1.0:
        logits *= logit_scale
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def finish_logits(logits: torch.Tensor, softcap: float | None, logit_scale: float) -> torch.Tensor:
    """Return scaled and softcapped logits in fp32 or higher, as a differentiable copy."""
    logits = logits.to(choose_sum_dtype(logits), copy=True)
    if logit_scale != 1.0:
        logits *= logit_scale
    if softcap is None:
        return logits
    capped_logits = logits.div_(softcap).tanh_()
    return capped_logits * softcap if capped_logits.requires_grad else capped_logits.mul_(softcap)


def choose_sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype for sums and softmaxes of ``tensor``: its own, but at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def split_into_chunks(
    count: int, hidden: torch.Tensor, weight: torch.Tensor | None, *, fused: bool = False
) -> list[slice]:
    """Divide ``count`` targets into the fewest equal slices whose logits fit a chunk."""
    vocabulary, width = (hidden.shape[1], 0) if weight is None else weight.shape
    rows = (FUSED_CHUNK_BYTES if fused else CHUNK_BYTES) // (hidden.element_size() * vocabulary)
    return _split_evenly(count, max(rows, count * width // vocabulary) if hidden.is_cuda or hidden.is_xpu else rows)


def split_into_row_blocks(logits: torch.Tensor) -> list[slice]:
    """Divide rows into slices whose fp32 logits fit a CPU's cache; a single slice on a GPU."""
    if logits.is_cuda or logits.is_xpu:
        return [slice(None)]
    return _split_evenly(len(logits), BLOCK_BYTES // (4 * logits.shape[1]))


def _split_evenly(count: int, size: int) -> list[slice]:
    if not count:
        return []
    pieces = -(-count // max(1, size))
    size = -(-count // pieces)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


# Maps logits [n, V], targets [n] and a teacher's logits [n, V] or None to the loss of each position [n].
LogitLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def linear_logit_loss(
    head: Head, targets: torch.Tensor, loss: LogitLoss, teacher: Head | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a loss at N positions; return its sum, the loss of each, and the negative log-likelihood of each target.

    Args:
        targets: [N].
        teacher: gets no gradient.

    Returns:
        Scalar, [N], [N] in nats; only the sum is differentiable, with respect to the hidden states and the head.
    """
    return _LinearLogitLoss.apply(head.hidden, head.weight, head.bias, targets, loss, head, teacher)


class _LinearLogitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        loss: LogitLoss,
        head: Head,
        teacher: Head | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wants = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grads = HeadGradients(weight if wants[1] else None, bias if wants[2] else None)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss_values, losses = hidden.new_empty(len(targets), dtype=dtype), hidden.new_empty(len(targets), dtype=dtype)
        for part in split_into_chunks(len(targets), hidden, weight):
            logits, count = compute_padded_logits(hidden[part], weight, bias), part.stop - part.start
            chunk = logits[:count]
            for rows in split_into_row_blocks(chunk):
                span = slice(part.start + (rows.start or 0), part.start + (rows.stop or count))
                taught = None if teacher is None else _compute_teacher_logits(teacher, span)
                _compute_row_losses(chunk[rows], targets[span], loss, head, taught, loss_values[span], losses[span])
            if grad_hidden is not None:
                set_hidden_gradient(grad_hidden[part], logits, weight)
            grads.add(logits, hidden[part])
        ctx.save_for_backward(grad_hidden, *grads.result())
        ctx.mark_non_differentiable(loss_values, losses)
        return loss_values.sum(), loss_values, losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [None if gradient is None else gradient.mul_(grad) for gradient in ctx.saved_tensors]
        return (*gradients, None, None, None, None)


def _compute_row_losses(
    raw: torch.Tensor,
    targets: torch.Tensor,
    loss: LogitLoss,
    head: Head,
    taught: torch.Tensor | None,
    each: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """Compute the losses and negative log-likelihoods of some rows; overwrite ``raw`` with the gradient."""
    with torch.enable_grad():
        work = raw.detach().requires_grad_()
        logits = finish_logits(work, head.softcap, head.logit_scale)
        value = loss(logits, targets, taught)
        (slope,) = torch.autograd.grad(value.sum(), work)
    each.copy_(value.detach())
    values = logits.detach()
    losses.copy_(values.logsumexp(1) - values.gather(1, targets[:, None])[:, 0])
    raw.copy_(slope)


def _compute_teacher_logits(teacher: Head, rows: slice) -> torch.Tensor:
    hidden = teacher.hidden[rows]
    raw = compute_padded_logits(hidden, teacher.weight, teacher.bias)[: len(hidden)]
    return finish_logits(raw, teacher.softcap, teacher.logit_scale)


def needs_padding(like: torch.Tensor) -> bool:
    """Return whether products with tensors of the device and dtype of ``like`` are compiled for their shapes."""
    return like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.float16)


def pad_rows(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [N, ...] with rows of zeros after them if products with them need that."""
    extra = compute_padded_size(len(values)) - len(values) if needs_padding(values) else 0
    return pad(values, (0, 0, 0, extra)) if extra else values


def pad_batch(batch: Batch) -> Batch:
    """Return the inputs of a batch with more columns; in a flat batch they are a sequence of their own.

    If no row has padding, the mask also includes the new columns: transformers drops a mask of ones, and causal
    attention hides the columns from the tokens before them.
    """
    width = batch.input_ids.shape[1]
    extra = compute_padded_size(width) - width
    if not extra:
        return batch
    edges, mask = batch.boundaries, batch.attention_mask
    are_full = all(length == width for length in batch.lengths)
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (0, extra)),
        position_ids=pad(batch.position_ids, (0, extra)),  # 0 is a valid position for every model
        boundaries=None if edges is None else torch.cat([edges, edges.new_tensor([width + extra])]),
        attention_mask=None if mask is None else pad(mask, (0, extra), value=are_full),
        longest=max(batch.longest, extra),
    )
