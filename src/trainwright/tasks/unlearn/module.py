"""The model to unlearn from, with its frozen reference.

The reference is a copy inside the module, so that strategies distribute both in the same way; or, if an adapter is
trained, the module itself with the adapter disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.models.adapters.attaching import disable_adapters
from trainwright.models.causal_lm import CausalLM, Objective
from trainwright.models.fused.choice import Kernels
from trainwright.models.linear_losses import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A computation on a micro-batch inside the module's forward pass, where its parameters are available.
Work = Callable[["UnlearnLM", Batch], torch.Tensor]


class UnlearnLM(CausalLM):
    """A causal language model with its reference.

    ``forward(batch, work=f)`` returns ``f(self, batch)``; otherwise as in ``CausalLM``.

    Args:
        reference: a separate frozen model, or None without reference or if it is the model without its adapter.
        layer: index of the block, from 0, whose output ``compute_activations`` returns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool,
        reference: UnlearnLM | None = None,
        layer: int | None = None,
        attention: str = "auto",
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__(model, packed=packed, attention=attention, kernels=kernels)
        self.reference = reference
        self._speaks_for_reference = False
        self._layer = layer
        self._tapped: torch.Tensor | None = None
        if layer is not None:
            # Before compilation: compiled code does not see hooks that are registered later.
            self.blocks()[layer].register_forward_hook(self._tap)

    def forward(
        self,
        batch: Batch,
        statistics: bool = False,
        objective: Objective | None = None,
        losses: bool = False,
        weights: Callable[[Head], torch.Tensor] | None = None,
        work: Work | None = None,
    ) -> torch.Tensor:
        """Return the result of ``work``, token losses of the reference (see ``use_reference``), or as ``CausalLM``."""
        if work is not None:
            return work(self, batch)
        if self._speaks_for_reference:
            assert losses and self.reference is not None
            return self.reference.compute_token_losses(batch)
        result = super().forward(batch, statistics, objective, losses, weights)
        self._tapped = None
        return result

    def train(self, mode: bool = True) -> UnlearnLM:
        """Set the mode; the reference stays in evaluation mode."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    @contextmanager
    def use_reference(self) -> Iterator[None]:
        """Return the losses of the reference instead of the model's own within the context."""
        self._speaks_for_reference = True
        try:
            yield
        finally:
            self._speaks_for_reference = False

    def compute_activations(self, batch: Batch) -> torch.Tensor:
        """Return the output of the layer at every target [N, H], fp32 or higher; later blocks do not run."""
        assert self._layer is not None
        with keep_first_blocks(self.model, self.blocks(), self._layer + 1):
            self._compute_hidden(batch)
        return self.taken(batch)

    def _tap(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._tapped = output[0] if isinstance(output, tuple) else output

    def taken(self, batch: Batch) -> torch.Tensor:
        """Return the same as ``compute_activations`` from the last pass over the batch."""
        hidden, self._tapped = self._tapped, None
        assert hidden is not None
        at = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.target_index + 1)
        return at.to(torch.promote_types(at.dtype, torch.float32))

    @contextmanager
    def open_reference(self) -> Iterator[UnlearnLM]:
        """Provide the reference, without gradients and dropout."""
        with torch.no_grad():
            if self.reference is not None:
                yield self.reference
                return
            training = self.model.training
            self.model.eval()
            try:
                with disable_adapters(self.model):
                    yield self
            finally:
                self.model.train(training)


@contextmanager
def keep_first_blocks(model: nn.Module, blocks: list[nn.Module], count: int) -> Iterator[None]:
    """Reduce the model to its first ``count`` blocks within the context."""
    holder, name = next(
        (module, name)
        for module in model.modules()
        for name, child in module._modules.items()
        if isinstance(child, nn.ModuleList) and list(child) == blocks
    )
    full_list = holder._modules[name]
    holder._modules[name] = nn.ModuleList(blocks[:count])
    try:
        yield
    finally:
        holder._modules[name] = full_list
