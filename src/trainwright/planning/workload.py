"""The input of a plan: the work that a recipe requires, and one way to distribute it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainwright.machine.describe import Cluster
from trainwright.models.fused.choice import Kernels
from trainwright.planning.trace.request import TracedModel, TraceRequest, build_device
from trainwright.planning.trace.traced import read_model_facts, size_model
from trainwright.planning.trace.units import BatchShape, ModelFacts, SizedModel
from trainwright.recipe.strategy_spec import StrategySpec, look_up_strategy

MixedPrecision = Literal["no", "bf16", "fp16"]
Recompute = Literal["none", "full", "selective"] | int


class OptimizerState(NamedTuple):
    """What decides the bytes of an optimizer's state: its name, whether its momentum is more than 0, and whether there
    is an average of the weights beside it; whether there are fp32 master weights, and a weight decay.
    """

    name: str
    momentum: bool = True
    average: bool = False
    masters: bool = True
    decay: bool = False


@dataclass(frozen=True)
class Workload:
    """What is trained, and on how many tokens at a time; independent of machine and strategy.

    ``row_tokens``: longest row of a micro-batch, without padding or the unused end of a pack. ``document_tokens``: mean
    length of its sequences, which do not attend to each other; ``longest_document``: the longest. Without packing a row
    is one sequence, padded to the longest in its micro-batch. ``global_batch_rows``: rows per optimizer step over all
    devices; a mean if packed. ``batch_tokens``: tokens per optimizer step without padding; a mean, None if unknown.
    ``batch_documents``: for padded rows, sequence lengths at equal distances in a sorted global batch, the longest
    first, each the maximum over all batches; empty if unknown or all equal. ``lengths``: for packs, mean sequence
    lengths of equal parts of the sorted data; empty if unknown or all equal. ``most_batch_tokens``: for packs,
    ``batch_tokens`` of the largest batch; None if unknown. ``target_fraction``: share of the tokens that are targets;
    ``max_target_fraction``: that of the longest examples, if it is larger.
    ``windows``: all tokens are targets, as in pretraining, where a token precedes the first target. ``steps``: None if
    unknown. ``answers``: the model writes answers at evaluations. ``saved_width``: bytes of an element of the saved
    model. ``fresh``: weights are initialized, not read from files. ``texts``: the recipe's
    data section sets the length of rows, and ``max_length`` that of an example (None: a full row). ``takes_adapters``:
    the model can be trained with an adapter. ``deterministic``: only deterministic kernels are used.
    ``attention``: of the recipe's model. ``tf32``: fp32 products are computed in TF32. ``copies_state``:
    checkpoints are written from a copy of the state in the host's memory. ``momentum``: the optimizer's is more than
    0. ``averages``: an average of the weights is kept beside them.
    """

    model: TracedModel
    row_tokens: int
    global_batch_rows: float
    packed: bool = True
    document_tokens: float | None = None
    longest_document: int | None = None
    target_fraction: float = 1.0
    max_target_fraction: float = 0.0
    windows: bool = False
    optimizer: str = "adamw"
    steps: int | None = None
    evaluates: bool = True
    answers: bool = False
    saved_width: int = 4
    copies_state: bool = False
    batch_tokens: float | None = None
    fresh: bool = False
    batch_documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    most_batch_tokens: float | None = None
    texts: bool = True
    max_length: int | None = None
    takes_adapters: bool = True
    deterministic: bool = False
    tf32: bool = False
    attention: str = "auto"
    kernels: Kernels = "auto"
    momentum: bool = True
    averages: bool = False
    master_weights: bool = True
    weight_decay: bool = False

    @property
    def optimizer_state(self) -> OptimizerState:
        """What decides the bytes of the optimizer's state."""
        return OptimizerState(self.optimizer, self.momentum, self.averages, self.master_weights, self.weight_decay)

    @property
    def facts(self) -> ModelFacts:
        """The model's numbers."""
        return read_model_facts(self.model)

    def trace(self, choice: Choice, cluster: Cluster, batch: BatchShape) -> SizedModel:
        """Return what passes of ``choice`` over ``batch`` allocate and do on a device of ``cluster``."""
        return size_model(self.request(choice, cluster, batch), batch, choice.threads or 1)

    def request(self, choice: Choice, cluster: Cluster, batch: BatchShape) -> TraceRequest:
        """Return what decides the operations of these passes."""
        device = build_device(cluster, choice, self.attention, deterministic=self.deterministic, kernels=self.kernels)
        return TraceRequest.of(self.model, device, choice, batch)

    @property
    def tokens(self) -> float:
        """Tokens per optimizer step, without padding."""
        if self.batch_tokens is not None:
            return self.batch_tokens
        return self.global_batch_rows * (self.row_tokens if self.packed else self.mean_length)

    @property
    def mean_length(self) -> float:
        """Mean length of a sequence in tokens; a full row if unknown."""
        return self.row_tokens if self.document_tokens is None else self.document_tokens

    @property
    def longest(self) -> int:
        """Length of the longest sequence in tokens."""
        return self.row_tokens if self.longest_document is None else self.longest_document

    def find_length(self, position: int) -> int | None:
        """Return the length of the sequence at an index of a global batch, sorted longest first; None if unknown."""
        lengths = self.batch_documents
        if not lengths:
            return None
        index = int(position * len(lengths) / max(1.0, self.global_batch_rows))
        return min(self.longest, lengths[min(len(lengths) - 1, index)])

    def targets(self, tokens: int, sequences: int, *, most: bool = False) -> int:
        """Return how many of ``tokens`` tokens in ``sequences`` sequences are targets; ``most``: at most.

        The first token of each sequence is not a target, except in windows.
        """
        if self.windows:
            return tokens
        fraction = max(self.target_fraction, self.max_target_fraction if most else 0.0)
        return max(0, min(tokens - sequences, round(tokens * fraction)))


@dataclass(frozen=True)
class Choice:
    """One way to run a workload. Field names are those of the recipe's keys.

    ``threads``: threads per process on a CPU; None on GPUs.
    """

    strategy: str
    num_processes: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    mixed_precision: MixedPrecision
    activation_checkpointing: Recompute = "none"
    replicate_size: int = 1
    reshard_after_forward: bool = True
    offload_parameters: bool = False
    offload_optimizer: bool = False
    activation_offload: bool = False
    compile: bool = False
    threads: int | None = None

    @property
    def spec(self) -> StrategySpec:
        """The spec of the strategy."""
        return look_up_strategy(self.strategy)

    @property
    def shards(self) -> int:
        """The number of shards of the strategy."""
        return self.num_processes // self.replicate_size if self.spec.shards else 1

    @property
    def width(self) -> int:
        """Bytes per element of weights and activations in computation."""
        return 4 if self.mixed_precision == "no" else 2

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts that are in the host's memory when a GPU computes."""
        return self.spec.offloaded(self)
