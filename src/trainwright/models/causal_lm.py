"""A ``transformers`` causal language model for training: maps a micro-batch to a summed loss.

Strategies wrap ``forward`` of modules, so the loss is computed inside it, including the head, which only runs on target
positions.

The loss that balances the load of experts, so that a router does not prefer some of them, is that of Switch
Transformer, arXiv 2101.03961, equations 4 to 6, as transformers computes it (``load_balancing_loss_func``): over the
tokens of all layers. Transformers takes all tokens of a micro-batch together, so that its value depends on how a batch
is divided; here it is computed for each sequence, and weighted by the number of its targets.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.data.stream.batch import Batch, copy_to_device
from trainwright.errors import RequestError
from trainwright.models.attention import packs, plain
from trainwright.models.attention.kernels import CPU, AttentionNeeds, choose
from trainwright.models.attention.packs import UnpackableError, register
from trainwright.models.attention.sequences import Sequences
from trainwright.models.fused.choice import Kernels, is_fused
from trainwright.models.fused.modules import compute_in_blocks, fuse_modules
from trainwright.models.linear_losses import (
    Head,
    Terms,
    compute_standardized_log_likelihood,
    compute_token_statistics,
    linear_cross_entropy,
    needs_padding,
    pad_batch,
    share_gradient,
)
from trainwright.models.own_module import OwnModel
from trainwright.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainwright.recipe.schema import RecipeSchema

# Maps the negative log-likelihood of every target [N] (fp32, nats) and the batch to a scalar to minimize.
Objective = Callable[[torch.Tensor, Batch], torch.Tensor]


class CausalLM(nn.Module):
    """Wraps a model with a decoder and a linear head.

    ``forward(batch)`` returns the summed cross-entropy (fp32 scalar, nats) of the batch's targets;
    ``forward(batch, objective=f)`` returns ``f`` of the targets' losses, for any function ``f``;
    ``forward(batch, statistics=True)`` returns ``[summed loss, correct predictions]`` without gradients;
    ``forward(batch, losses=True)`` returns the loss of every target [N] (fp32, nats) without gradients.

    Args:
        model: on its device, with loaded weights.
        packed: whether batches are packs; sets the attention implementation of the model.
        attention, kernels: of the recipe, ``model.attention`` and ``model.kernels``.
        z_loss, label_smoothing: of losses to minimize, see ``linear_losses.Terms``.
        router_loss: added to losses to minimize.

    Attributes:
        embedding_noise: the alpha of NEFTune; 0: no noise. It is of passes in training mode with gradients.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        router_loss: RouterLoss | None = None,
        attention: str = "auto",
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__()
        self.model = model
        self.packed = packed
        if packed:
            model.set_attn_implementation(register(attention))
        elif attention != "auto":
            _set_padded_attention(model, attention)
        self._head = {**_find_head_settings(model), "fused": is_fused(kernels)}
        if is_fused(kernels):
            fuse_modules(model)
        elif kernels == "auto" and next(model.parameters()).device.type in ("cpu", "meta"):
            compute_in_blocks(model)
        self._terms = Terms(z_loss, label_smoothing)
        self._router_loss = router_loss
        self.embedding_noise = 0.0

    @property
    def config(self) -> Any:
        """Return the configuration of the wrapped model."""
        return self.model.config

    def forward(
        self,
        batch: Batch,
        statistics: bool = False,
        objective: Objective | None = None,
        losses: bool = False,
        weights: Callable[[Head], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the loss of a batch, its statistics, its token losses, or the value of ``objective``.

        ``weights`` computes the constant weight of each target's loss [N].
        """
        if losses:
            return self.compute_token_losses(batch)
        head, balance = self._computed(batch)
        if statistics:
            target_losses, correct = compute_token_statistics(head, batch.targets)
            return torch.stack([target_losses.sum(dtype=torch.float64), correct.sum().double()])
        if weights is not None:
            loss = linear_cross_entropy(head, batch.targets, target_weights=weights(head))
        elif objective is None:
            loss = linear_cross_entropy(head, batch.targets, terms=self._terms)
        else:
            loss = evaluate_objective(head, batch.targets, objective, batch)
        return loss if balance is None else loss + balance

    def compute_token_losses(self, batch: Batch) -> torch.Tensor:
        """Return the negative log-likelihood of every target in nats [N], fp32, without gradients."""
        return self.compute_token_statistics(batch)[0]

    def compute_token_statistics(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the negative log-likelihood in nats [N] and whether the prediction is correct [N]; no gradients."""
        return compute_token_statistics(self.head(batch), batch.targets)

    def compute_standardized_log_likelihood(self, batch: Batch) -> torch.Tensor:
        """Return the standardized log-likelihood of every target over the vocabulary [N], fp32, without gradients."""
        return compute_standardized_log_likelihood(self.head(batch), batch.targets)

    def head(self, batch: Batch) -> Head:
        """Return the hidden states [N, H] that predict the batch's targets, with the head that computes the logits."""
        return self._computed(batch)[0]

    def _computed(self, batch: Batch) -> tuple[Head, torch.Tensor | None]:
        """Return what ``head`` does, and the router loss in passes with gradients."""
        head = self.model.get_output_embeddings()
        like = next(self.model.parameters())
        # Without a head, a module of one's own computes the logits itself.
        shared = nullcontext(lambda: None) if head is None else share_gradient(self.model.get_input_embeddings(), head)
        with shared as head_weight:
            input_batch = pad_batch(batch) if needs_padding(like) else batch
            with self._add_noise(input_batch):
                hidden, balance = self._compute_hidden(input_batch)
                hidden = hidden[:, : batch.input_ids.shape[1]]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if len(batch.target_index) < len(hidden):  # otherwise all positions are used, in order
            hidden = hidden.index_select(0, batch.target_index)
        return Head(hidden, _add_lora_to_head(head, head_weight()), getattr(head, "bias", None), **self._head), balance

    @contextmanager
    def _add_noise(self, batch: Batch) -> Iterator[None]:
        """Add noise to the embeddings of a sequence of L tokens: uniform in +-alpha / sqrt(L * H) (NEFTune, arXiv
        2310.05914).

        From the default generator, which is seeded for every micro-batch: on any number of processes the same.
        """
        if not (self.embedding_noise and self.training and torch.is_grad_enabled()):
            yield
            return
        lengths = batch.spread_lengths().to(batch.input_ids.device)

        def add(_module: nn.Module, _inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
            size = self.embedding_noise / (lengths * hidden.shape[-1]).sqrt()
            noise = torch.empty_like(hidden, dtype=torch.float32).uniform_(-1.0, 1.0)
            return hidden + (noise * size[..., None]).to(hidden.dtype)

        handle = self.model.get_input_embeddings().register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def _compute_hidden(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last hidden states [B, L, H] after the final norm; the router loss in passes with gradients."""
        extra: dict[str, Any] = {"attention_mask": batch.attention_mask}
        if batch.boundaries is not None:
            sequences = Sequences(batch.boundaries, batch.longest, batch.input_ids.device)
            # All are passed to every attention layer, most under the names of transformers.
            extra = {
                "sequences": sequences,
                "cu_seq_lens_q": sequences.boundaries,
                "cu_seq_lens_k": sequences.boundaries,
                "max_length_q": batch.longest,
                "max_length_k": batch.longest,
            }
        if isinstance(self.model, OwnModel):
            return self.model.outputs(batch.input_ids, position_ids=batch.position_ids, **extra), None
        balances = self._router_loss is not None and torch.is_grad_enabled()
        if balances:
            extra["output_router_logits"] = True
        output = _find_decoder(self.model)(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra
        )
        if not balances:
            return output.last_hidden_state, None
        assert self._router_loss is not None
        return output.last_hidden_state, self._router_loss.sum(output.router_logits, batch)

    @contextmanager
    def open_for_generation(self) -> Iterator[PreTrainedModel]:
        """Provide the model for ``generate``: in evaluation mode, without gradients, with the library's attention."""
        attention = self.model.config._attn_implementation
        training = self.training
        self.eval()
        if self.packed:
            self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield self.model
        finally:
            if self.packed:
                self.model.set_attn_implementation(attention)
            self.train(training)

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks in order: the units of compilation, recomputation and sharding."""
        return find_blocks(self.model)


def _add_lora_to_head(head: Any, weight: torch.Tensor | None) -> torch.Tensor | None:
    """Return the weight of a head with what PEFT's LoRA layers add to it; any other head's is unchanged."""
    scales: dict[str, float] | None = getattr(head, "scaling", None)
    if weight is None or not isinstance(scales, dict) or head.disable_adapters:
        return weight
    for name in head.active_adapters:
        delta = scales[name] * (head.lora_B[name].weight @ head.lora_A[name].weight)
        weight = weight + delta.to(weight.dtype)
    return weight


def _set_padded_attention(model: PreTrainedModel, attention: str) -> None:
    choose(AttentionNeeds(0, 0, "fp32", packed=False), replace(CPU, attention=attention))
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise RequestError(f"model.attention: {attention} is not possible for {type(model).__name__}: {why}") from None


def evaluate_objective(head: Head, targets: torch.Tensor, objective: Objective, batch: Batch) -> torch.Tensor:
    """Return the value of ``objective`` for the losses of the targets [N], with its gradient.

    The weight of each target is only known after all losses are computed, so the head runs a second time, which avoids
    holding the logits of more than a chunk. The second run gives the gradient; the value is that of the objective.
    """
    value, weights = _compute_slopes(objective, compute_token_statistics(head, targets)[0], batch)
    weighted_loss = linear_cross_entropy(head, targets, target_weights=weights)
    return value + (weighted_loss - weighted_loss.detach())


@torch.enable_grad()
def _compute_slopes(objective: Objective, losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the value of the objective and its derivative with respect to every loss [N]."""
    losses = losses.detach().requires_grad_()
    value = objective(losses, batch)
    (slopes,) = torch.autograd.grad(value, losses)
    return value.detach(), slopes


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's transformer blocks: the longest list of modules of a class in ``_no_split_modules``.

    Raises:
        ValueError: the model has no such list.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists: list[nn.ModuleList] = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    of_blocks = [m for m in lists if type(m[0]).__name__ in names]
    candidates = of_blocks or lists
    if not candidates:
        raise ValueError(f"no transformer blocks were found in {type(model).__name__}")
    return list(max(candidates, key=lambda blocks: len(list(blocks))))


def check_model(model: CausalLM, batch: Batch, tolerance: float = 1e-3) -> None:
    """Verify with this model that packed sequences do not attend to each other and that its loss is correct.

    Args:
        model: on any device.
        batch: a flat batch of at least two sequences with targets; a few tokens each are enough.
        tolerance: for the loss of a token, in nats; the default is for fp32 models.

    Raises:
        RequestError: the architecture mixes sequences, or computes its logits in an unsupported way.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            sequences = list(_iterate_sequences(batch))
            alone = torch.cat([_compute_plain_losses(model.model, sequence) for sequence in sequences])
            together = [batch] if model.packed else sequences
            losses = torch.cat([model.compute_token_losses(part) for part in together])
        difference = (losses - alone).abs().max().item()
        problem = None if difference < tolerance else f"the loss of a token differs by {difference:.2g}"
    except UnpackableError as error:
        problem = str(error)
    except ValueError as error:  # raised by transformers if linear attention lacks a kernel for packs
        if not model.packed:
            raise
        problem = " ".join(str(error).split())
    finally:
        model.train(training)
    name = type(model.model).__name__
    if problem is not None and model.packed:
        raise RequestError(f"data.pack_length: {name} does not keep packed sequences apart ({problem}); set it to null")
    if problem is not None:
        raise RequestError(f"model: {name} computes its logits in an unsupported way ({problem})")


def _iterate_sequences(batch: Batch) -> Iterator[Batch]:
    assert batch.boundaries is not None
    edges = batch.boundaries.tolist()
    for begin, end in itertools.pairwise(edges):
        inside = (batch.target_index >= begin) & (batch.target_index < end)
        yield replace(
            batch,
            input_ids=batch.input_ids[:, begin:end],
            position_ids=batch.position_ids[:, begin:end],
            boundaries=None,
            target_index=batch.target_index[inside] - begin,
            targets=batch.targets[inside],
        )


def _compute_plain_losses(model: PreTrainedModel, sequence: Batch) -> torch.Tensor:
    """Return the losses [N] of one sequence as transformers computes them: its attention, its head, its logits."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=sequence.input_ids, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(attention)
    target_logits = logits.index_select(0, sequence.target_index).float()
    return nn.functional.cross_entropy(target_logits, sequence.targets, reduction="none")


def _find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head.

    If the class has a wrong ``base_model_prefix`` (Llama 4), ``base_model`` is the whole model.
    """
    if model.base_model is not model:
        return model.base_model
    embedding = model.get_input_embeddings()
    return next(part for part in model.children() if any(inner is embedding for inner in part.modules()))


def _find_head_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the logit scale and softcap of this architecture, from the names that configurations use."""
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:  # Granite
        scale = 1.0 / float(config.logits_scaling)
    return {"softcap": getattr(config, "final_logit_softcapping", None), "logit_scale": scale}


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block in place. The first passes are slow; packs of any length then use the same code."""
    # What depends on the lengths of sequences differs for every batch, so it runs uncompiled between compiled parts.
    plain.attend_each_sequence = torch.compiler.disable(plain.attend_each_sequence)
    Sequences.in_chunks = torch.compiler.disable(Sequences.in_chunks)  # type: ignore[method-assign]
    Sequences.block_mask = torch.compiler.disable(Sequences.block_mask)  # type: ignore[method-assign]
    packs.choose_kernel_name = torch.compiler.assume_constant_result(packs.choose_kernel_name)
    packs.switch_to = torch.compiler.assume_constant_result(packs.switch_to)
    for block in blocks:
        block.compile(dynamic=True)


def freeze(model: nn.Module, section: ModelSection, last_block: int | None = None) -> None:
    """Freeze parameters whose names match ``model.frozen``, or do not match ``model.trainable``; in full.

    Args:
        last_block: the loss depends on the output of this block, so later parameters are frozen too.

    Raises:
        RequestError: a pattern matches nothing, or no trainable parameters remain.
    """
    names = [name for name, _ in model.named_parameters()]
    for key in ("trainable", "frozen"):
        for pattern in getattr(section, key) or ():
            if not any(re.fullmatch(pattern, name) for name in names):
                raise RequestError(
                    f"model.{key}: {pattern} matches none of the {len(names)} names of the model's parameters, such "
                    f"as {names[len(names) // 2]}"
                )
    beyond = set() if last_block is None else _list_parameters_after(model, last_block)
    patterns = section.trained_patterns
    for name, parameter in model.named_parameters():
        trains = patterns is None or any(re.fullmatch(pattern, name) for pattern in patterns)
        parameter.requires_grad_(trains and parameter not in beyond)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if last_block is None:
            raise RequestError("model.frozen: nothing is left to train; match fewer names")
        raise RequestError(
            f"model.trainable: it only matches parameters after unlearn.layer {last_block}, which do not affect its "
            "output; match earlier blocks, or choose a later layer"
        )


def _list_parameters_after(model: nn.Module, last_block: int) -> set[nn.Parameter]:
    """Return parameters of later blocks and the head, on which the output of a block does not depend."""
    blocks = find_blocks(model)
    embeddings = set(model.get_input_embeddings().parameters())  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    later = [*blocks[last_block + 1 :], *([head] if head is not None else [])]
    return {parameter for module in later for parameter in module.parameters()} - embeddings


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
        sequences = _build_membership(batch)
        expert_counts = probabilities = sequences.new_zeros(len(sequences), logits[0].shape[-1])
        for layer in logits:
            layer_probabilities = layer.float().softmax(-1)
            indices = layer_probabilities.detach().topk(self.experts_per_token, dim=-1).indices
            expert_counts = expert_counts + sequences @ torch.zeros_like(layer_probabilities).scatter(-1, indices, 1.0)
            probabilities = probabilities + sequences @ layer_probabilities
        tokens = sequences.sum(1, keepdim=True) * len(logits)
        imbalance = (expert_counts / tokens * (probabilities / tokens)).sum(-1) * probabilities.shape[-1]
        targets = copy_to_device(torch.tensor(batch.target_counts, dtype=torch.float32), imbalance.device)
        return self.weight * (imbalance * targets).sum()


def _build_membership(batch: Batch) -> torch.Tensor:
    """Return 1 for the tokens of each sequence, 0 for others and padding: fp32 [S, T]."""
    rows, length = batch.input_ids.shape
    count, device = len(batch.target_counts), batch.input_ids.device
    position = torch.arange(rows * length, device=device)
    if batch.boundaries is not None:
        edges = copy_to_device(batch.boundaries[: count + 1], device)[:, None]
        return ((position >= edges[:-1]) & (position < edges[1:])).float()
    of_row = position // length == torch.arange(count, device=device)[:, None]
    lengths = copy_to_device(batch.spread_lengths(), device)
    return (of_row & (position % length < lengths)).float()


def build_router_loss(recipe: RecipeSchema, model: PreTrainedModel) -> RouterLoss | None:
    """Return the router loss of a recipe's task for a model, which needs no weights; None without one.

    Raises:
        RequestError: the model has no routers, or none whose logits transformers returns.
    """
    name = recipe.spec.name
    setting: Any = getattr(getattr(recipe, name, None), "router_loss", 0.0)
    if setting == 0.0:
        return None
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None)
    if experts is None or "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        raise RequestError(f"{name}.router_loss: {type(model).__name__} returns no logits of routers; set it to 0")
    weight = getattr(config, "router_aux_loss_coef", None) if setting == "model" else setting
    if weight is None:
        raise RequestError(f"{name}.router_loss: {config.model_type} has no router_aux_loss_coef; set a number")
    return RouterLoss(float(weight), experts)
