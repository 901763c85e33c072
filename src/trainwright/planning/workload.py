"""The input of a plan: the work that a recipe requires, and one way to distribute it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainwright.errors import RequestError
from trainwright.planning.architectures.architecture import Architecture
from trainwright.recipe.files import read_json
from trainwright.recipe.strategy_spec import StrategySpec, spec_of
from trainwright.utils.paths import user_path

if TYPE_CHECKING:
    from trainwright.recipe.sections.model import ModelSection

MixedPrecision = Literal["no", "bf16", "fp16"]
Recompute = Literal["none", "full", "selective"] | int
# "nf4_single": with scales in fp32, without double quantization.
Quantization = Literal["none", "nf4", "nf4_single", "int8"]
# The linear modules of a block, by purpose; a family may fuse several into one matrix.
Target = Literal["query", "key", "value", "output", "gate", "up", "down"]
ALL_LINEAR: tuple[Target, ...] = ("query", "key", "value", "output", "gate", "up", "down")
_RANK = 16  # rank of an adapter when the recipe does not set one
# Names of modules in the supported families, by purpose.
_TARGETS: dict[str, tuple[Target, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("output",),
    "out_proj": ("output",),
    "dense": ("output",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    "qkv_proj": ("query", "key", "value"),
    "query_key_value": ("query", "key", "value"),
    "gate_up_proj": ("gate", "up"),
    "c_attn": ("query", "key", "value"),
    "c_fc": ("up",),
    "fc1": ("up",),
    "fc2": ("down",),
    "dense_h_to_4h": ("up",),
    "dense_4h_to_h": ("down",),
}


@dataclass(frozen=True)
class AdapterShape:
    """Trainable matrices of rank ``rank`` next to frozen weights. ``dropout``: of their input."""

    kind: Literal["lora", "dora"]
    rank: int
    targets: tuple[Target, ...] = ALL_LINEAR
    dropout: float = 0.0


@dataclass(frozen=True)
class ReferenceWork:
    """A frozen model that runs forward in every micro-batch in addition to the trained one.

    ``blocks``: number of its first blocks that run; with all of them its head runs too. ``share``: share of the tokens.
    ``copied``: it has its own weights; otherwise it is the model with its adapter disabled.
    """

    blocks: int
    share: float
    copied: bool


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
    ``batch_tokens`` of the largest batch; None if unknown. ``target_fraction``: share of the tokens that are targets.
    ``windows``: all tokens are targets, as in pretraining, where a token precedes the first target. ``steps``: None if
    unknown. ``fresh``: weights are initialized, not read from files. ``quantization``: of the frozen base model of
    ``adapter``. ``trained``: the trained parameters, by unit and name of an inventory; None if all are.
    ``first_blocks``: number of blocks that run, if the loss is computed from a block's output. ``texts``: the recipe's
    data section sets the length of rows, and ``max_length`` that of an example (None: a full row). ``takes_adapters``:
    the model can be trained with an adapter. ``deterministic``: only deterministic kernels are used.
    ``attention``: of the recipe's model. ``tf32``: fp32 products are computed in TF32. ``copies_state``:
    checkpoints are written from a copy of the state in the host's memory.
    """

    architecture: Architecture
    row_tokens: int
    global_batch_rows: float
    packed: bool = True
    document_tokens: float | None = None
    longest_document: int | None = None
    target_fraction: float = 1.0
    windows: bool = False
    adapter: AdapterShape | None = None
    quantization: Quantization = "none"
    optimizer: str = "adamw"
    steps: int | None = None
    evaluates: bool = True
    copies_state: bool = False
    batch_tokens: float | None = None
    fresh: bool = False
    batch_documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    most_batch_tokens: float | None = None
    reference: ReferenceWork | None = None
    trained: frozenset[tuple[int, str]] | None = None
    first_blocks: int | None = None
    texts: bool = True
    max_length: int | None = None
    takes_adapters: bool = True
    deterministic: bool = False
    tf32: bool = False
    attention: str = "auto"

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

    def length_at(self, position: int) -> int | None:
        """Return the length of the sequence at an index of a global batch, sorted longest first; None if unknown."""
        known = self.batch_documents
        if not known:
            return None
        return min(
            self.longest, known[min(len(known) - 1, int(position * len(known) / max(1.0, self.global_batch_rows)))]
        )

    def targets(self, tokens: int, sequences: int) -> int:
        """Return how many of ``tokens`` tokens in ``sequences`` sequences are targets.

        The first token of each sequence is not a target, except in windows.
        """
        if self.windows:
            return tokens
        return max(0, min(tokens - sequences, round(tokens * self.target_fraction)))


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
        return spec_of(self.strategy)

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


def adapter_of(model: ModelSection) -> AdapterShape | None:
    """Return the adapter that a recipe trains, or None if it trains the model itself."""
    section = model.adapter
    if section.type == "none":
        return None
    started = _started(section.start_from)
    targets = section.targets or started.get("target_modules") or "all-linear"
    return AdapterShape(
        kind="dora" if section.type == "dora" else "lora",
        rank=section.rank or started.get("r") or _RANK,
        targets=ALL_LINEAR if isinstance(targets, str) else _by_purpose(targets),
        dropout=section.dropout,
    )


def quantization_of(model: ModelSection) -> Quantization:
    """Return the quantization of the base model that a recipe trains an adapter on."""
    section = model.adapter
    return "nf4_single" if section.quantization == "nf4" and not section.double_quantization else section.quantization


def _started(directory: str | None) -> dict[str, Any]:
    """Return the configuration of the adapter that training starts from."""
    if directory is None:
        return {}
    file = user_path(directory) / "adapter_config.json"
    try:
        content = read_json(file)
        return content if isinstance(content, dict) else {}
    except RequestError:
        return {}  # the error is reported when the adapter is loaded


def _by_purpose(names: Sequence[str]) -> tuple[Target, ...]:
    targets = dict.fromkeys(target for name in names for target in _TARGETS.get(name.rpartition(".")[2], ALL_LINEAR))
    return tuple(targets)
