"""The loss that balances the load of experts, so that a router does not prefer some of them.

Switch Transformer, arXiv 2101.03961, equations 4 to 6, as transformers computes it (``load_balancing_loss_func``): over
the tokens of all layers. Transformers takes all tokens of a micro-batch together, so that its value depends on how a
batch is divided; here it is computed for each sequence, and weighted by the number of its targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainwright.data.stream.batch import Batch, on_device
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainwright.recipe.schema import RecipeSchema


@dataclass(frozen=True)
class RouterLoss:
    """The loss's ``weight``, and the number of experts of a token."""

    weight: float
    experts_per_token: int

    def sum(self, logits: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the weighted loss of each sequence times the number of its targets, summed (fp32).

        Args:
            logits: of the routers of every layer [T, E], of all tokens of the batch with its padding.
        """
        sequences = _membership(batch)
        chosen = probabilities = sequences.new_zeros(len(sequences), logits[0].shape[-1])
        for layer in logits:
            routed = layer.float().softmax(-1)
            places = routed.detach().topk(self.experts_per_token, dim=-1).indices
            chosen = chosen + sequences @ torch.zeros_like(routed).scatter(-1, places, 1.0)
            probabilities = probabilities + sequences @ routed
        tokens = sequences.sum(1, keepdim=True) * len(logits)
        imbalance = (chosen / tokens * (probabilities / tokens)).sum(-1) * probabilities.shape[-1]
        targets = on_device(torch.tensor(batch.target_counts, dtype=torch.float32), imbalance.device)
        return self.weight * (imbalance * targets).sum()


def _membership(batch: Batch) -> torch.Tensor:
    """Return 1 for the tokens of each sequence, 0 for others and padding: fp32 [S, T]."""
    rows, length = batch.input_ids.shape
    count, device = len(batch.target_counts), batch.input_ids.device
    position = torch.arange(rows * length, device=device)
    if batch.boundaries is not None:
        edges = on_device(batch.boundaries[: count + 1], device)[:, None]
        return ((position >= edges[:-1]) & (position < edges[1:])).float()
    assert batch.attention_mask is not None
    of_row = position // length == torch.arange(count, device=device)[:, None]
    return (of_row & batch.attention_mask.reshape(-1).bool()).float()


def router_loss(recipe: RecipeSchema, model: PreTrainedModel) -> RouterLoss | None:
    """Return the router loss of a recipe's task for a model, which needs no weights; None without one.

    Raises:
        RequestError: the model has no routers, or none whose logits transformers returns.
    """
    name = recipe.spec.name
    wanted: Any = getattr(getattr(recipe, name, None), "router_loss", 0.0)
    if wanted == 0.0:
        return None
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None)
    if experts is None or "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        raise RequestError(f"{name}.router_loss: {type(model).__name__} returns no logits of routers; set it to 0")
    weight = getattr(config, "router_aux_loss_coef", None) if wanted == "model" else wanted
    if weight is None:
        raise RequestError(f"{name}.router_loss: {config.model_type} has no router_aux_loss_coef; set a number")
    return RouterLoss(float(weight), experts)
