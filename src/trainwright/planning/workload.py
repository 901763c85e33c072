"""What a plan is about: the work that a recipe asks for, and one way of spreading it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.planning.architectures.architecture import Architecture
from trainwright.recipe.strategy_spec import StrategySpec, spec_of

MixedPrecision = Literal["no", "bf16", "fp16"]
OptimizerName = Literal["adamw", "muon"]
Recompute = Literal["none", "full", "selective"] | int
# "nf4_single": with scales in fp32, which are quantised no second time.
Quantisation = Literal["none", "nf4", "nf4_single", "int8"]
# The linear modules of a block, by what they do; a family may have several of them in one matrix.
Target = Literal["query", "key", "value", "output", "gate", "up", "down"]
ALL_LINEAR: tuple[Target, ...] = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True)
class Adapter:
    """Small matrices of ``rank`` that are trained beside frozen ones. ``dropout``: on what enters them."""

    kind: Literal["lora", "dora"]
    rank: int
    targets: tuple[Target, ...] = ALL_LINEAR
    dropout: float = 0.0


@dataclass(frozen=True)
class Beside:
    """A frozen model that runs forwards beside the trained one, in every micro-batch.

    ``blocks``: how many of its first blocks run; all: its head too. ``share``: of the tokens. ``copied``: it has
    weights of its own; if not, it is the model with its adapter switched off.
    """

    blocks: int
    share: float
    copied: bool


@dataclass(frozen=True)
class Workload:
    """What is trained, and on how much at a time; the same for every machine and strategy.

    ``row_tokens``: longest row of a micro-batch, padding or the room at the end of a pack not counted in.
    ``document_tokens``: mean length of the documents in it, each of which attends to itself alone;
    ``longest_document``: the longest. Without packing a row is one document, padded to the longest in its
    micro-batch. ``global_batch_rows``: rows of one optimizer step, over all devices; a mean where packed.
    ``batch_tokens``: tokens of one optimizer step, padding not counted in; a mean, None where it is not known.
    ``batch_documents``: of padded rows, the lengths of the documents of a global batch at equal distances, the longest
    first, each the longest that stands in its place in any batch; empty where they are not known, or all alike.
    ``most_batch_tokens``: of packs, as ``batch_tokens`` but of the largest one; None where it is not known.
    ``target_fraction``: of the tokens, how many are predicted in the loss. ``windows``: all are, as in pretraining,
    where what is predicted first has a token before it. ``steps``: where known.

    ``fresh``: the weights are drawn here, not read from files. ``quantisation``: of the frozen base that ``adapter``
    stands on. ``trained``: where not all parameters are, those that are, by unit and name of an inventory.
    ``first_blocks``: where the loss is of a block's output, the number of blocks that run. ``texts``: rows are as long
    as the recipe's data section says, ``max_length`` for an example (None: a whole row). ``takes_adapters``: the model
    can be frozen and an adapter be trained beside it.
    """

    architecture: Architecture
    row_tokens: int
    global_batch_rows: float
    packed: bool = True
    document_tokens: float | None = None
    longest_document: int | None = None
    target_fraction: float = 1.0
    windows: bool = False
    adapter: Adapter | None = None
    quantisation: Quantisation = "none"
    optimizer: OptimizerName = "adamw"
    steps: int | None = None
    evaluates: bool = True
    generates: bool = False
    batch_tokens: float | None = None
    fresh: bool = False
    batch_documents: tuple[int, ...] = ()
    most_batch_tokens: float | None = None
    beside: Beside | None = None
    trained: frozenset[tuple[int, str]] | None = None
    first_blocks: int | None = None
    texts: bool = True
    max_length: int | None = None
    takes_adapters: bool = True

    @property
    def tokens(self) -> float:
        """Tokens of one optimizer step, padding not counted in."""
        if self.batch_tokens is not None:
            return self.batch_tokens
        return self.global_batch_rows * (self.row_tokens if self.packed else self.document)

    @property
    def document(self) -> float:
        """Mean length of a document in tokens; a whole row where nothing is known."""
        return self.row_tokens if self.document_tokens is None else self.document_tokens

    @property
    def longest(self) -> int:
        """Length of the longest document in tokens."""
        return self.row_tokens if self.longest_document is None else self.longest_document

    def length_at(self, place: int) -> int | None:
        """Length of the document at a place of a global batch of padded rows, the longest first; None if not known."""
        known = self.batch_documents
        if not known:
            return None
        return min(self.longest, known[min(len(known) - 1, int(place * len(known) / max(1.0, self.global_batch_rows)))])

    def targets(self, tokens: int, documents: int) -> int:
        """How many of ``tokens`` in so many documents are predicted: the first of each is not, but in windows."""
        if self.windows:
            return tokens
        return max(0, min(tokens - documents, round(tokens * self.target_fraction)))


@dataclass(frozen=True)
class Choice:
    """One way of running a workload. Names are those of the recipe's keys.

    ``threads``: of each process on a CPU; None on GPUs.
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
        """What is known of the strategy."""
        return spec_of(self.strategy)

    @property
    def shards(self) -> int:
        """Into how many parts the strategy cuts what it shards."""
        return self.num_processes // self.replicate_size if self.spec.shards else 1

    @property
    def offloaded(self) -> frozenset[str]:
        """What is in the host's memory, where a GPU computes."""
        return self.spec.offloaded(self)
