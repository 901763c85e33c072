"""Unlearning: make a model forget the rows to forget, while keeping its other abilities.

Task-vector negation (arXiv 2212.04089, section 3) is theta_0 - scale (theta_forget - theta_0): the run trains on the
forget rows, and only the exported model is negated; checkpoints and metrics are those of the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.data.rows.formats import EXAMPLES, look_up_reader
from trainwright.data.stream.batch import Batch, copy_to_device
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.data.stream.stream import GlobalBatch, MicroBatch
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.task import ForwardOnly, LossSum, Measured
from trainwright.errors import RequestError
from trainwright.models.adapters.attaching import disable_adapters, iterate_adapted_layers
from trainwright.models.causal_lm import CausalLM, freeze
from trainwright.models.load import load_config, load_model, load_tokenizer, read_max_positions
from trainwright.models.resolve_model import resolve
from trainwright.models.truncate_config import count_layers
from trainwright.models.weights import Weights, build_empty_model
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World
from trainwright.recipe.adapter_spec import LORA
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.model import AdapterSection, ModelSection
from trainwright.tasks.language_model import check_prepared, check_tokens, load, prepare_model
from trainwright.tasks.reference import Reference, ReferenceTask
from trainwright.tasks.unlearn.benchmarks import find_benchmark
from trainwright.tasks.unlearn.evaluation.items import ItemSequences
from trainwright.tasks.unlearn.evaluation.measure import measure_truth_ratios, select_few_sequences
from trainwright.tasks.unlearn.losses import ROLES, Counts, LossSums, UnlearnLosses, sample_direction, update_multiplier
from trainwright.tasks.unlearn.module import UnlearnLM
from trainwright.tasks.unlearn.section import UnlearnSection, select_data
from trainwright.tasks.unlearn.stream import (
    FORGET,
    REFUSAL,
    RETAIN,
    join_datasets,
    refuse_overlap,
    sample_examples,
    select_role_examples,
)
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = ["Unlearning", "build", "prepare_once"]
_NAMES = {FORGET: "forget", RETAIN: "retain", REFUSAL: "refusal"}


def prepare_once(recipe: RecipeSchema, cache: Path) -> int:
    """Prepare the rows and convert the weights, so that both are in the cache.

    Raises:
        RequestError: rows are both in the forget and the retain data, the reference does not fit, or the model lacks a
            layer or pattern.
    """
    section = recipe.own(UnlearnSection)
    refuse_overlap(select_data(recipe))
    tokenizer = prepare_model(recipe)
    check_reference(recipe, tokenizer)
    config = load_config(recipe.model, tokenizer)
    if section.facts.of == "activations" and (layer := section.value("layer")) >= (blocks := count_layers(config)):
        raise RequestError(
            f"unlearn.layer: {layer} does not exist: the model has {blocks} blocks, 0 to {blocks - 1}; choose one of "
            "the first half"
        )
    if section.last_block is not None:
        freeze(build_empty_model(config), recipe.model, section.last_block)
    return len(prepare_rows(recipe, tokenizer, cache).prepared.train)


def build(recipe: RecipeSchema, cache: Path) -> Unlearning:
    """Return the task of a resolved recipe."""
    tokenizer = load_tokenizer(recipe.model)
    return Unlearning(recipe, tokenizer, prepare_rows(recipe, tokenizer, cache), cache)


class Unlearning(ReferenceTask):
    """An unlearning objective for a causal language model; an example is a forget row and a retain row."""

    _lm: UnlearnLM

    def __init__(
        self, recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, rows: UnlearnRows, cache: Path
    ) -> None:
        self._unlearn = recipe.own(UnlearnSection)
        self._rows = rows
        super().__init__(recipe, tokenizer, rows.prepared, cache, self._unlearn.reference)
        self._of_reference: Reference | None = None
        self._counts = Counts(0.0, 0.0)
        self._pairs = 0
        if self._unlearn.facts.ascends:
            self.state = {"alpha": self._unlearn.value("alpha"), "steps": 0.0}
        steering_vector = None
        if self._unlearn.facts.of == "activations":
            width = self._lm.config.get_text_config().hidden_size
            steering_vector = sample_direction(width, self._unlearn.value("steering_coefficient"), recipe.train.seed)
        self._losses = UnlearnLosses(self._unlearn, self._log_probabilities, steering_vector)
        self._watch = self._watched(recipe)
        self.answers = self._watch is not None

    def _watched(self, recipe: RecipeSchema) -> ItemSequences | None:
        """Return the part of the recipe's benchmark to measure, on as many rows as the validation losses."""
        name = select_data(recipe).benchmark
        if name is None or self._prepared.validation is None:
            return None
        positions = read_max_positions(recipe.model, self._tokenizer)
        benchmark = find_benchmark(name, "data.benchmark")
        rows = len(self._prepared.validation)
        return select_few_sequences(benchmark, self._tokenizer, rows=rows, positions=positions, key="data.benchmark")

    def answer_metrics(self, module: nn.Module, world: World, *, together: bool) -> Measured:
        """Return the metrics of the model's answers to benchmark rows; all ranks must call it."""
        assert self._watch is not None and isinstance(module, CausalLM)
        return Measured(measure_truth_ratios(self._watch, module, world, together=together))

    def _wrap_model(self, model: PreTrainedModel) -> CausalLM:
        layer = self._unlearn.value("layer") if self._unlearn.facts.of == "activations" else None
        last_block = self._unlearn.last_block
        how: dict[str, Any] = {"attention": self._recipe.model.attention, "kernels": self._recipe.model.kernels}
        if self._adapter is None and last_block is not None:
            freeze(model, self._recipe.model, last_block)
        model_and_weights = load_frozen_copy(
            self._recipe, self._tokenizer, packed=self._packed, layer=layer if last_block is not None else None
        )
        if model_and_weights is None:
            return UnlearnLM(model, packed=self._packed, layer=layer, **how)
        frozen, weights = model_and_weights
        if self.weights is not None:
            assert weights is not None, "the reference is read in parts where the model is"
            self.weights = CombinedWeights(self.weights, weights)
        return UnlearnLM(model, packed=self._packed, reference=frozen, layer=layer, **how)

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of the model and of its reference."""
        frozen = self._lm.reference
        return [*self._lm.blocks(), *(frozen.blocks() if frozen is not None else [])]

    def _choose_example_weight(self, dataset: TokenDataset) -> float:
        return 1.0

    def begin(
        self, passes: ForwardOnly, weights: Iterable[tuple[str, torch.Tensor]], notify: Callable[[str], None]
    ) -> None:
        """Compute the reference's log-probabilities of the forget rows in this run, if the objective needs them."""
        section = self._unlearn
        if not (section.compares or self._is_partly_frozen or section.facts.subtracts):
            return
        self._keep_start(weights, passes.world)
        if section.facts.reference != "log-probabilities":
            return
        stream = self._stream(self._rows.forget, len(self._rows.forget), shuffle=False)
        identity = f"{self.start} {section.reference}"
        self._of_reference = self._reference(
            passes, stream, self._list_forget_rows(), notify, identity, self._use_reference
        )

    def _use_reference(self) -> AbstractContextManager[None]:
        if find_other_model(self._recipe) is not None:
            return self._lm.use_reference()
        return disable_adapters(self._lm.model) if self._without_adapter else nullcontext()

    def _list_forget_rows(self) -> list[int]:
        """Return the forget rows that the run uses for training or validation."""
        streams = [stream for stream in (self.stream, self.validation) if stream is not None]
        if (self.stream.total_examples or 0) >= len(self._rows.forget):
            return list(range(len(self._rows.forget)))
        sequences_per_row = len(self._rows.forget.sequences(0))
        sequences = {stream.dataset.sequences(example)[0] for stream in streams for example in stream.seen()}
        return sorted({sequence // sequences_per_row for sequence in sequences})

    def _log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Return the reference's log-probability of each sequence [S], float64; 0 for retain rows, which have none."""
        assert self._of_reference is not None
        sums, last = self._of_reference.sums, len(self._of_reference.sums)
        values = [float(sums[sequence]) if sequence < last else 0.0 for sequence in batch.sequences]
        return copy_to_device(torch.tensor(values, dtype=torch.float64), batch.targets.device)

    def before_passes(self, passes: ForwardOnly, batch: GlobalBatch, *, validation: bool) -> None:
        """Count the tokens or answers of the whole global batch, which the two losses are averaged over."""
        dataset = self._prepared.validation if validation else self._prepared.train
        assert dataset is not None
        sequences = [
            (dataset.role(sequence), dataset.sequence_targets(sequence))
            for micro in batch.micro_batches
            for example in micro.examples
            for sequence in dataset.sequences(example)
        ]
        self._counts = Counts.of(self._unlearn, sequences)
        self._pairs = sum(len(micro.examples) for micro in batch.micro_batches)

    @property
    def _alpha(self) -> float:
        return float(self.state.get("alpha", self._unlearn.value("alpha")))

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the weighted losses of the pairs of one micro-batch."""
        batch, sums = self._batch(self._prepared.train, micro, device), LossSums()
        # The engine divides by the number of pairs, but each of the two losses is averaged over its own count.
        forget = self._unlearn.value("gamma") * self._pairs / max(1.0, self._counts.forget)
        retain = self._alpha * self._pairs / max(1.0, self._counts.retain)
        total = module(batch, work=lambda lm, batch: self._losses(lm, batch, forget, retain, sums))
        total = total - self._allowed() * len(batch.examples)
        return LossSum(total, micro.weight, sums.vector(self._build_counts(batch), device))

    def _allowed(self) -> float:
        """Return the constant that pdu subtracts from the loss: the limit of the retain loss, times its multiplier."""
        return self._alpha * (self._unlearn.retain_limit or 0.0)

    def _build_counts(self, batch: Batch) -> Counts:
        return Counts.of(self._unlearn, list(zip(batch.roles, batch.target_counts, strict=True)))

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return the sums of ``LossSums.vector``."""
        assert self._prepared.validation is not None
        batch, sums = self._batch(self._prepared.validation, micro, device), LossSums()
        module(batch, work=lambda lm, batch: self._losses(lm, batch, 1.0, 1.0, sums))
        unseen = [role for role in ROLES if role in batch.roles and role not in sums.likelihoods]
        if unseen:
            losses = module(batch, losses=True)
            for role in unseen:
                role_parts = zip(losses.split(batch.target_counts), batch.roles, strict=True)
                sums.see(batch, torch.cat([part for part, its in role_parts if its == role]), role)
        return sums.vector(self._build_counts(batch), device) * float(micro.weight > 0)

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics from statistics summed over the split or step."""
        forget, of_forget, retain, of_retain, *likelihoods = statistics
        parts = {}
        if of_forget:
            parts["forget_loss"] = forget / of_forget
        if of_retain and self._unlearn.retains:
            parts["retain_loss"] = retain / of_retain
        loss = self._unlearn.value("gamma") * parts.get("forget_loss", 0.0)
        loss += self._alpha * parts.get("retain_loss", 0.0) - self._allowed()
        metrics = {"loss": loss, **parts}
        for index, role in enumerate(ROLES):
            nll, targets, chances, answers = likelihoods[4 * index : 4 * index + 4]
            if answers:
                name = "alternate" if role == REFUSAL and self._unlearn.facts.alternates else _NAMES[role]
                metrics[f"{name}_nll"] = nll / targets
                metrics[f"{name}_probability"] = chances / answers
        if "alpha" in self.state:
            metrics["alpha"] = self.state["alpha"]
        return metrics

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Update the multiplier by dual ascent (pdu only)."""
        if not self._unlearn.facts.ascends:
            return
        self.state["steps"] += 1
        warmup = self._unlearn.value("dual_warmup_steps")
        first = round(warmup * len(self.stream)) if isinstance(warmup, float) else warmup
        if self.state["steps"] > first:
            limit = self._unlearn.retain_limit
            assert limit is not None
            step_size = self._unlearn.value("dual_step_size")
            self.state["alpha"] = update_multiplier(self.state["alpha"], metrics["retain_loss"], limit, step_size)

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write the model without its reference, negated if the objective subtracts."""
        model_tensors: Iterable[tuple[str, torch.Tensor]]
        model_tensors = ((name, tensor) for name, tensor in tensors if not name.startswith(PREFIX))
        scale = self._unlearn.value("scale") if self._unlearn.facts.subtracts else None
        if self._adapter is not None:
            super().export(model_tensors if scale is None else negate_adapter(model_tensors, scale), directory)
            return
        if scale is not None:
            start = load_model(self._recipe.model, torch.float32, self._recipe.train.seed, self._tokenizer)
            before = {f"model.{name}": tensor.detach() for name, tensor in start.named_parameters()}
            model_tensors = negate_change(model_tensors, before, scale)
        super().export(model_tensors, directory)

    def read_back(
        self, module: nn.Module, directory: Path | None, *, all_parameters: bool, same_logits: bool = True
    ) -> str | None:
        """Check that the exported model, or the adapter on its base, is the trained model, negated if it is."""
        assert isinstance(module, CausalLM)
        scale = self._unlearn.value("scale") if self._unlearn.facts.subtracts else None
        negates = (
            scale_adapter(module.model, -scale) if scale is not None and self._adapter is not None else nullcontext()
        )
        with negates:
            same = same_logits and (scale is None or self._adapter is not None)
            return super().read_back(module, directory, all_parameters=all_parameters, same_logits=same)


@dataclass(frozen=True)
class UnlearnRows:
    """The rows of an unlearning run.

    Attributes:
        prepared: pairs of forget and retain rows, for training and validation.
        forget: only the forget rows, with their refusals or alternates; sequences have the same indices as in the
            pairs.
    """

    prepared: PreparedData
    forget: TokenDataset


def prepare_rows(recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, cache: Path) -> UnlearnRows:
    """Return the rows of a resolved recipe, prepared or from the cache.

    Raises:
        RequestError: a source or a row is wrong.
    """
    section = recipe.own(UnlearnSection)
    data, seed = select_data(recipe), recipe.train.seed
    positions = read_max_positions(recipe.model, tokenizer)
    parts = {"forget": look_up_reader(recipe, "data.forget")}
    if section.retains:
        parts["retain"] = EXAMPLES
    prepared_parts = {
        part: prepare(data.part(part), tokenizer, kind, seed=seed, cache=cache, model_max_length=positions)
        for part, kind in parts.items()
    }
    forget = prepared_parts["forget"].train
    all_rows = join_datasets(forget, prepared_parts["retain"].train if "retain" in prepared_parts else None, cache)
    validation = None
    if data.held_out is not None:
        validation = sample_examples(all_rows, data.held_out, seed)
    taught = (REFUSAL,) if section.facts.learns == "refusals" else (FORGET, REFUSAL)
    lines = [line for part in prepared_parts.values() for line in part.summary if not line.startswith("split: ")]
    lines.append(_describe_pairs(all_rows, validation))
    prepared_data = PreparedData(
        select_role_examples(all_rows, taught), validation, lines, prepared_parts["forget"].directory
    )
    check_tokens(recipe, [part.train for part in prepared_parts.values()], tokenizer)
    check_prepared(recipe, prepared_data, cache)
    return UnlearnRows(prepared_data, forget)


def _describe_pairs(pairs: TokenDataset, validation: TokenDataset | None) -> str:
    line = f"unlearning: {format_plural(len(pairs), 'row')} to forget"
    if pairs.paired is not None:
        line += (
            f", each paired with one of {format_plural(pairs.paired.count, 'row')} to retain, a different one every "
            "epoch"
        )
    return line if validation is None else f"{line}; {len(validation):,} of them are measured"


Named = Iterable[tuple[str, torch.Tensor]]


def negate_change(
    tensors: Named, before: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters by name: those in ``before`` with their change negated and scaled, others unchanged."""
    for name, tensor in tensors:
        start = before.get(name)
        if start is not None:
            start = start.to(tensor.device, tensor.dtype)
            tensor = start - scale * (tensor - start)
        yield name, tensor


def negate_adapter(tensors: Named, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Negate and scale the matrices of a LoRA, which was initially zero."""
    return (
        (name, tensor * -scale if any(part in name for part in LORA.unchanged) else tensor) for name, tensor in tensors
    )


@contextmanager
def scale_adapter(model: nn.Module, factor: float) -> Iterator[None]:
    """Scale the contribution of the model's adapter by ``factor``."""
    scales = [layer.scaling for _, layer in iterate_adapted_layers(model)]
    before = [dict(scaling) for scaling in scales]
    for scaling in scales:
        for name in scaling:
            scaling[name] *= factor
    try:
        yield
    finally:
        for scaling, old in zip(scales, before, strict=True):
            scaling.update(old)


PREFIX = "reference."
_KEY = "unlearn.reference"
_OWN_MODELS = ("start", "base")


def find_other_model(recipe: RecipeSchema) -> ModelSection | None:
    """Return the model that the recipe names as its reference, or None if it is the run's own or not needed."""
    section = recipe.own(UnlearnSection)
    if not section.compares or section.reference in _OWN_MODELS:
        return None
    return ModelSection(name=section.reference)


def check_reference(recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the reference available locally and check that it fits.

    Raises:
        RequestError: it cannot be found, has another tokenizer, or a different activation size.
    """
    if (other := find_other_model(recipe)) is None:
        return
    try:
        resolve(other)
        its = load_tokenizer(other)
    except RequestError as error:
        raise RequestError(f"{_KEY}: {str(error).removeprefix('model.name: ')}") from None
    if its.get_vocab() != tokenizer.get_vocab():
        different = len(set(its.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
        raise RequestError(
            f"{_KEY}: {other.name} has a different tokenizer ({different:,} differences in the vocabulary), so "
            "probabilities cannot be compared; use a model with the same tokenizer"
        )
    ours, theirs = (load_config(section).get_text_config() for section in (recipe.model, other))
    keys = ["vocab_size"] if ours.vocab_size != theirs.vocab_size else []
    if recipe.own(UnlearnSection).facts.of == "activations" and ours.hidden_size != theirs.hidden_size:
        keys.append("hidden_size")
    for key in keys:
        raise RequestError(
            f"{_KEY}: {other.name} has a {key} of {getattr(theirs, key):,} and the model {getattr(ours, key):,}; they "
            "cannot be compared"
        )


def load_frozen_copy(
    recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, *, packed: bool, layer: int | None
) -> tuple[UnlearnLM, Weights | None] | None:
    """Return the reference as a separate model, and its weights, or None if no separate model is needed.

    Args:
        layer: the last block to keep if only its output is needed.
    """
    section = recipe.own(UnlearnSection)
    reference = find_other_model(recipe)
    adapted = recipe.model.adapter.type != "none"
    if reference is None and (adapted or not section.needs_reference_model):
        return None
    reference_section = reference or recipe.model.model_copy(update={"adapter": AdapterSection()})
    model, weights = load(recipe, reference_section, tokenizer, f"{PREFIX}model.")
    model.requires_grad_(False)
    lm = UnlearnLM(model, packed=packed, layer=layer, attention=recipe.model.attention, kernels=recipe.model.kernels)
    if layer is not None:
        _cut(lm, layer + 1)
    return lm.eval(), weights


def _cut(lm: UnlearnLM, count: int) -> None:
    """Permanently remove the blocks after the first ``count``."""
    blocks = lm.blocks()
    for module in lm.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[count:]
            return


class CombinedWeights:
    """The weights of the trained model and of its reference, combined."""

    def __init__(self, own: Weights, reference: Weights) -> None:
        self._own, self._reference = own, reference

    def load(self, rank: int) -> None:
        """Load the weights of both models."""
        self._own.load(rank)
        self._reference.load(rank)

    def fill(self, name: str, block: Shard, world: World) -> None:
        """Fill a block of the model that the name belongs to."""
        (self._reference if name.startswith(PREFIX) else self._own).fill(name, block, world)

    def fingerprint(self) -> str | None:
        """Return the combined fingerprints, or None if one is None."""
        both = self._own.fingerprint(), self._reference.fingerprint()
        return None if None in both else "+".join(map(str, both))
