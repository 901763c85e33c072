"""What decides the operations of a step, and nothing else: the key of a trace. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainwright.machine.processor import has_amx
from trainwright.machine.vendors import VENDORS, Vendor
from trainwright.models.attention.kernels import ASSUMED, CPU, Dtype, Platform, list_missing_kernels
from trainwright.models.fused.choice import Kernels, is_fused
from trainwright.planning.trace.units import BatchShape
from trainwright.recipe.modalities import select_text_config

if TYPE_CHECKING:
    from trainwright.machine.describe import Cluster
    from trainwright.planning.workload import Choice
    from trainwright.recipe.schema import RecipeSchema
    from trainwright.recipe.sections.model import AdapterSection

Rows = Literal["packed", "equal", "masked", "plain"]  # "equal": a pack of sequences of one length


@dataclass(frozen=True)
class Device:
    """The device that runs the kernels.

    ``platform``: a GPU's kind and software. ``half``: the dtype of two bytes that it computes in. ``deterministic``: it
    uses deterministic kernels only. ``attention``: of the recipe's model, on a CPU; a GPU's platform has it.
    ``fused``: it runs the kernels of ``models.fused``, on a CPU operations in blocks. ``amx``: a CPU has AMX.
    """

    kind: Literal["cpu", "cuda"]
    platform: Platform = ASSUMED
    half: Literal["bf16", "fp16"] = "bf16"
    deterministic: bool = False
    attention: str = "auto"
    fused: bool = False
    amx: bool = True

    def dtype(self, width: int) -> Dtype:
        """Return the dtype of ``width`` bytes."""
        return "fp32" if width == 4 else self.half

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss with its gradient is one kernel."""
        return self.fused and self.is_gpu

    @property
    def limits(self) -> Platform:
        """What limits the choice of attention kernels."""
        return self.platform if self.is_gpu else replace(CPU, attention=self.attention)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == "cuda"


@dataclass(frozen=True)
class TracedModel:
    """The modules that a task trains and their loss, without a choice of how they run.

    Attributes:
        configuration: of transformers as JSON, with ``model_type``; of a module of the user's own also
            ``implementation`` and a hash of its source; ``of`` writes it.
        adapter: the recipe's section ``model.adapter`` as JSON, only the keys that decide operations; "": none.
        trainable: patterns of the names of trained parameters; None: all of them.
        last_block: the block whose output the loss is of, if it needs no logits.
        objective: of the loss: "cross_entropy", "objective" (a function of the targets' losses, which runs the head
            twice) or "hidden" (of a block's output).
        reference: "none", "switched_off" (the model without its adapter) or "copied" (a frozen model of its own) that
            runs without gradients before every forward pass; ``reference_block``: its last block, None: all and the
            head; ``reference_share``: the share of the tokens that it runs on.
        z_loss, router_loss: whether the loss has these terms.
        dropout: of the recipe's model; None: that of the configuration.
        implementation: of the recipe's model.
        float8: of the recipe's ``train``.
    """

    configuration: str
    adapter: str = ""
    trainable: tuple[str, ...] | None = None
    last_block: int | None = None
    objective: Literal["cross_entropy", "objective", "hidden"] = "cross_entropy"
    reference: Literal["none", "switched_off", "copied"] = "none"
    reference_block: int | None = None
    reference_share: float = 1.0
    z_loss: bool = False
    router_loss: bool = False
    dropout: float | None = None
    implementation: str = "transformers"
    float8: str = "no"

    @classmethod
    def of(cls, configuration: Mapping[str, Any], recipe: RecipeSchema | None = None) -> TracedModel:
        """Return the model of a recipe with a configuration; without a recipe, one that is trained in full."""
        # Of several modalities, the language model is trained.
        text = format_canonical(select_text_config(configuration))
        if recipe is None:
            return cls(text)
        needs, adapter = recipe.spec.needs(recipe), _format_adapter(recipe.model.adapter)
        reference: dict[str, Any] = {}
        if needs.reference is not None and (needs.reference.every_step or needs.reference.own_weights):
            kind = "copied" if needs.reference.own_weights or not adapter else "switched_off"
            # One that runs once, before the first step, stays in memory.
            share = needs.reference.share if needs.reference.every_step else 0.0
            reference = {"reference": kind, "reference_block": needs.reference.last_block, "reference_share": share}
        section, hidden = getattr(recipe, recipe.spec.name, None), needs.last_block is not None
        return cls(
            text,
            adapter,
            recipe.model.trained_patterns,
            needs.last_block,
            "hidden" if hidden else "objective" if needs.of_losses else "cross_entropy",
            **reference,
            z_loss=bool(getattr(section, "z_loss", 0.0)),
            router_loss=bool(getattr(section, "router_loss", 0.0)),
            dropout=recipe.model.dropout,
            implementation=recipe.model.implementation,
            float8=recipe.train.float8,
        )

    def add_adapter(self, section: AdapterSection) -> TracedModel:
        """Return the same model with an adapter."""
        return replace(self, adapter=_format_adapter(section))

    @property
    def adapter_section(self) -> Mapping[str, Any]:
        """The adapter's keys; empty without one."""
        return json.loads(self.adapter) if self.adapter else {}

    @property
    def quantization(self) -> str:
        """The quantization of the frozen weights, or "none"."""
        return str(self.adapter_section.get("quantization", "none"))

    @property
    def is_partly_trained(self) -> bool:
        """Whether some parameters are frozen, or only an adapter is trained."""
        return bool(self.adapter) or self.trainable is not None or self.last_block is not None


RANK = 16  # of an adapter, if the recipe sets none
_OF_ADAPTER = {"type", "rank", "dropout", "targets", "modules_to_save", "quantization", "double_quantization"}
_OF_ADAPTER |= {"start_from", "stack"}


def _format_adapter(section: AdapterSection) -> str:
    if section.type == "none":
        return ""
    values = section.model_dump(include=_OF_ADAPTER)
    if section.start_from is None:
        values |= {"rank": section.rank or RANK, "targets": section.targets or "all-linear"}
    if section.decomposes:
        values["initialization"] = section.initialization
    if section.layers is not None:
        values["layers"] = section.layers
    if section.block_size is not None:
        values["block_size"] = section.block_size
    if section.quantize_experts:
        values["quantize_experts"] = True
    if section.target_parameters:
        values["target_parameters"] = section.target_parameters
    return format_canonical(values)


@dataclass(frozen=True)
class TraceRequest:
    """A model, and how its passes run.

    ``rows``: of its batches. ``recompute``: as ``train.activation_checkpointing``. ``hooked``: the strategy has hooks
    on every module.
    """

    model: TracedModel
    device: Device
    dtype: Dtype
    rows: Rows = "packed"
    recompute: str | int = "none"
    hooked: bool = False

    @classmethod
    def of(cls, model: TracedModel, device: Device, choice: Choice, batch: BatchShape) -> TraceRequest:
        """Return the request for passes of ``choice`` over ``batch``."""
        dtype, recompute = device.dtype(choice.width), choice.activation_checkpointing
        how = "compiled" if choice.compile and recompute == "none" else recompute
        return cls(model, device, dtype, choose_row_kind(batch), how, choice.spec.hooks_modules)

    @property
    def width(self) -> int:
        """Bytes of an element of weights and activations."""
        return 4 if self.dtype == "fp32" else 2


class Regime(NamedTuple):
    """On which side of thresholds a batch is, where operations change.

    ``windows``: sequences are longer than the model's windows. ``long``: than those whose attention a CPU computes in
    fp32 in the backward pass. ``chunked``: the loss takes more than one chunk. ``every``: every token is a target.
    """

    windows: bool = False
    long: bool = True
    chunked: bool = False
    every: bool = False


def choose_row_kind(batch: BatchShape) -> Rows:
    """Return the kind of rows of a batch."""
    if not batch.packed:
        return "masked" if batch.masked else "plain"
    lengths = {length for length, _ in batch.sequences}
    return "equal" if len(lengths) == 1 and sum(count for _, count in batch.sequences) > 1 else "packed"


def build_device(
    cluster: Cluster, choice: Choice, attention: str, *, deterministic: bool, kernels: Kernels = "auto"
) -> Device:
    """Return the device that a process of ``choice`` computes on. ``attention``, ``kernels``: of the recipe's model."""
    if cluster.device == "cpu":
        fused = kernels == "auto" and not choice.compile
        return Device("cpu", attention=attention, fused=fused, amx=has_amx(cluster.card))
    vendor: Vendor = VENDORS[cluster.card.vendor].name
    missing = list_missing_kernels() if cluster.is_here else ASSUMED.missing
    platform = Platform(vendor, cluster.card.capability, missing, attention)
    half: Literal["bf16", "fp16"] = "fp16" if choice.mixed_precision == "fp16" else "bf16"
    return Device("cuda", platform, half, deterministic, fused=is_fused(kernels))


def format_canonical(values: Mapping[str, Any]) -> str:
    """Return values as JSON that is equal for equal values."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
