"""The model that is unlearning, and the frozen one that it is compared with.

The reference is a copy inside the module, so that whatever spreads the module over devices spreads it alike; or, where
an adapter is trained, the module itself with the adapter switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.models.adapters.attaching import switched_off
from trainwright.models.causal_lm import CausalLM, Objective
from trainwright.models.losses.linear_logit_loss import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What is computed of a micro-batch inside of the module, where its parameters are at hand.
Work = Callable[["UnlearnLM", Batch], torch.Tensor]


class UnlearnLM(CausalLM):
    """A causal model beside its reference.

    ``forward(batch, work=f)`` gives ``f(self, batch)``; all else is as in ``CausalLM``.

    Args:
        reference: a frozen model of its own; None: there is none, or it is the model without its adapter.
        layer: the block, from 0, whose output ``activations`` gives.
    """

    def __init__(
        self, model: PreTrainedModel, *, packed: bool, reference: UnlearnLM | None = None, layer: int | None = None
    ) -> None:
        super().__init__(model, packed=packed)
        self.reference = reference
        self._speaks_for_reference = False
        self._layer = layer
        self._tapped: torch.Tensor | None = None
        if layer is not None:
            # Before anything is compiled: a hook that comes later is not seen by what is.
            self.blocks()[layer].register_forward_hook(self._tap)

    def forward(
        self,
        batch: Batch,
        statistics: bool = False,
        objective: Objective | None = None,
        losses: bool = False,
        work: Work | None = None,
    ) -> torch.Tensor:
        """Return the loss of a batch, or what the reference says of it."""
        if work is not None:
            return work(self, batch)
        if self._speaks_for_reference:
            assert losses and self.reference is not None
            return self.reference.token_losses(batch)
        found = super().forward(batch, statistics, objective, losses)
        self._tapped = None
        return found

    def train(self, mode: bool = True) -> UnlearnLM:
        """Set the mode; the reference stays in evaluation mode."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """While entered, the losses that are asked for are those of the frozen model."""
        self._speaks_for_reference = True
        try:
            yield
        finally:
            self._speaks_for_reference = False

    def head(self, batch: Batch) -> Head:
        """Return what the head makes the logits of the batch's targets [N, V] from."""
        hidden, weight, bias, _ = self._at_targets(batch)
        return Head(hidden, weight, bias, self._head["softcap"], self._head["logit_scale"])

    def reference_head(self, batch: Batch) -> Head:
        """As ``head``, of the reference."""
        with self._frozen() as lm:
            return lm.head(batch)

    def activations(self, batch: Batch) -> torch.Tensor:
        """Output of the layer at every target [N, H], fp32 or more; no later block is run."""
        assert self._layer is not None
        with first_blocks(self.model, self.blocks(), self._layer + 1):
            self._hidden(batch)
        return self.taken(batch)

    def reference_activations(self, batch: Batch) -> torch.Tensor:
        """As ``activations``, of the reference."""
        with self._frozen() as lm:
            return lm.activations(batch)

    def _tap(self, block: nn.Module, given: Any, output: Any) -> None:
        self._tapped = output[0] if isinstance(output, tuple) else output

    def taken(self, batch: Batch) -> torch.Tensor:
        """As ``activations``, of the last pass over the batch."""
        taken, self._tapped = self._tapped, None
        assert taken is not None
        at = taken.reshape(-1, taken.shape[-1]).index_select(0, batch.target_index + 1)
        return at.to(torch.promote_types(at.dtype, torch.float32))

    @contextmanager
    def _frozen(self) -> Iterator[UnlearnLM]:
        """Freeze the reference: no gradients and no dropout."""
        with torch.no_grad():
            if self.reference is not None:
                yield self.reference
                return
            training = self.model.training
            self.model.eval()
            try:
                with switched_off(self.model):
                    yield self
            finally:
                self.model.train(training)


@contextmanager
def first_blocks(model: nn.Module, blocks: list[nn.Module], count: int) -> Iterator[None]:
    """Reduce the model to its first ``count`` blocks."""
    holder, name = next(
        (module, name)
        for module in model.modules()
        for name, child in module._modules.items()
        if isinstance(child, nn.ModuleList) and list(child) == blocks
    )
    whole = holder._modules[name]
    holder._modules[name] = nn.ModuleList(blocks[:count])
    try:
        yield
    finally:
        holder._modules[name] = whole
