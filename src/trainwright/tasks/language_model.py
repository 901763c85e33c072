"""The common parts of tasks with a causal language model: data, model, stream, samples and export.

A task defines the rows, the weight of an example, the loss and the metrics.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trainwright.data.check import refuse_unused_template
from trainwright.data.rows.formats import look_up_reader
from trainwright.data.rows.layouts import PLAIN
from trainwright.data.rows.tokenizer_calls import check_token
from trainwright.data.sources.reading import locate_row
from trainwright.data.stream.batch import Batch, collate
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.data.stream.stages import Stages
from trainwright.data.stream.stream import BatchSizes, Data, GlobalBatch, MicroBatch, Stream, StreamSettings
from trainwright.data.stream.streamed import prepare_streamed
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.data.tokens.lengths import describe_rows, save_lengths
from trainwright.engine.task import ForwardOnly, Measured
from trainwright.errors import RequestError
from trainwright.inference.evaluation.measure import ValidationQuestions
from trainwright.inference.generation import (
    Sampling,
    answer_batch,
    choose_padding_token,
    compute_new_token_limit,
    stop_of,
)
from trainwright.inference.loading import probe
from trainwright.inference.prompts import PromptEncoder
from trainwright.models.adapters.attaching import adds_nothing, attach_adapter
from trainwright.models.causal_lm import CausalLM, build_router_loss, check_model, freeze
from trainwright.models.files import check_saved, compute_logits, save_model
from trainwright.models.float8 import use_float8
from trainwright.models.load import (
    build_fresh_model,
    check_adapter,
    choose_dtype_to_save,
    load_config,
    load_model,
    load_tokenizer,
    read_max_positions,
)
from trainwright.models.low_rank import join_adapters
from trainwright.models.resolve_model import resolve
from trainwright.models.tokenization import end_texts_at_turns
from trainwright.models.truncate_config import count_varied_layers, cut_config
from trainwright.models.weights import Weights, build_empty_model, load_empty
from trainwright.parallel.layout import find_units
from trainwright.parallel.world import World
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.model import ModelSection
from trainwright.recipe.strategy_spec import look_up_strategy

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def prepare_once(recipe: RecipeSchema, cache: Path) -> int:
    """Prepare the data and convert the weights, so that both are in the cache; return the number of examples."""
    return len(prepare_data(recipe, prepare_model(recipe), cache).train)


def prepare_model(recipe: RecipeSchema) -> PreTrainedTokenizerBase:
    """Make the model available locally, check its configuration, and return its tokenizer."""
    resolve(recipe.model)
    check_adapter(recipe.model, recipe.train.seed)
    tokenizer = load_tokenizer(recipe.model)
    _check_without_weights(recipe, tokenizer)
    return tokenizer


def _check_without_weights(recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RequestError before the launch for errors that the model's configuration shows."""
    config = load_config(recipe.model, tokenizer)
    if recipe.model.trained_patterns is not None:
        freeze(build_empty_model(config), recipe.model)
    if getattr(getattr(recipe, recipe.spec.name, None), "router_loss", 0.0):
        build_router_loss(recipe, build_empty_model(config))
    if recipe.parallel.wrap != "auto" and recipe.model.adapter.type == "none":
        empty = CausalLM(build_empty_model(config), packed=False)
        find_units(empty, empty.blocks(), recipe.parallel.wrap)
    if can_read_own_shards(recipe):  # no process has all weights, so check a small model
        few = CausalLM(
            build_fresh_model(cut_config(config, count_varied_layers(config)), 0),
            packed=recipe.data.pack_length is not None,
            attention=recipe.model.attention,
        )
        check_model(few, probe(config.get_text_config().vocab_size))


def prepare_data(recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, cache: Path) -> PreparedData:
    """Return the data of a resolved recipe, prepared or from the cache."""
    positions = read_max_positions(recipe.model, tokenizer)
    kind, seed = look_up_reader(recipe), recipe.train.seed
    prepare_rows = functools.partial(
        prepare, tokenizer=tokenizer, kind=kind, seed=seed, cache=cache, model_max_length=positions
    )
    if recipe.data.streaming is None:
        prepared_data = prepare_rows(recipe.data)
    else:
        embeddings = count_embeddings(recipe.model, tokenizer)
        prepared_data = prepare_streamed(recipe, tokenizer, cache, embeddings, positions, prepare_rows)
    check_tokens(recipe, prepared_data.datasets, tokenizer)
    check_prepared(recipe, prepared_data, cache)
    return add_stages(recipe, prepared_data)


def add_stages(recipe: RecipeSchema, prepared: PreparedData) -> PreparedData:
    """Return the data with a line about each stage of the run. Raises RequestError if one ends before it begins."""
    stream = stream_of(recipe, prepared.train, 0, training=True, shuffle=True)
    if stream.staged is None:
        return prepared
    lines = stream.staged.lines(recipe.data.source_names, len(stream), stream.total_examples or 0)
    return replace(prepared, summary=[*prepared.summary, *lines])


def check_prepared(recipe: RecipeSchema, prepared: PreparedData, cache: Path) -> None:
    """Raise RequestError if the data does not fit the recipe; cache the lengths of its examples for plans."""
    refuse_unused_template(recipe.model.chat_template, [dataset.report["format"] for dataset in prepared.datasets])
    _check_packs(recipe, prepared.datasets)
    save_lengths(recipe.model, recipe.data, recipe.train.seed, prepared.train, cache, describe_rows(recipe))


def count_embeddings(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that the model has embeddings for."""
    return load_config(section, tokenizer).get_text_config().vocab_size


def check_tokens(recipe: RecipeSchema, datasets: Sequence[TokenDataset], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RequestError, with the row, if the model has no embedding for a token of the data."""
    size = count_embeddings(recipe.model, tokenizer)
    for dataset in datasets:
        for part in dataset.report.get("parts", [dataset.report]):
            token, index = part["largest_token"]
            if wrong := check_token(token, tokenizer, size):
                location = locate_row(part["source"], index, recipe.data.format == "documents")
                raise RequestError(f"{location}: {wrong}")


def _check_packs(recipe: RecipeSchema, datasets: Sequence[TokenDataset]) -> None:
    """Raise RequestError if packs cannot hold every example, whose number of sequences is known from the rows."""
    pack, longest = recipe.data.pack_length, recipe.data.max_length
    for dataset in datasets:
        count = dataset.sequences_per_example
        if pack is not None and pack < count * longest:
            raise RequestError(
                f"data.pack_length: {pack} is too small for {count} answers of up to data.max_length {longest} tokens; "
                f"set it to {count * longest} or more, or lower data.max_length"
            )


def load(
    recipe: RecipeSchema, section: ModelSection, tokenizer: PreTrainedTokenizerBase, prefix: str = "model."
) -> tuple[PreTrainedModel, Weights | None]:
    """Return a model, or an empty one with its weights if each process only needs parts of them."""
    if can_read_own_shards(recipe):
        empty = load_empty(section, recipe.train.seed, tokenizer, prefix)
        if empty is not None:
            return empty
    return load_model(section, torch.float32, recipe.train.seed, tokenizer), None


def can_read_own_shards(recipe: RecipeSchema) -> bool:
    """Return whether every process only reads its own shards of the weights; adapters need the whole weights."""
    return look_up_strategy(recipe.parallel.strategy).shards_parameters and recipe.model.adapter.type == "none"


class LanguageModelTask:
    """Base class with the parts of a task that do not depend on the loss."""

    def __init__(self, recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, prepared: PreparedData) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._packed = recipe.data.pack_length is not None
        self._pad = choose_padding_token(tokenizer, count_embeddings(recipe.model, tokenizer))
        self.prompts: Sequence[str] = recipe.evaluate.prompts
        self.stream = self._stream(prepared.train, count_planned_examples(recipe, prepared.train), shuffle=True)
        self.validation = (
            self._stream(prepared.validation, len(prepared.validation), shuffle=False, sets=prepared.sets)
            if prepared.validation is not None
            else None
        )
        self._ahead: tuple[MicroBatch, Batch] | None = None  # collated before it is needed
        self.state: dict[str, float] = {}
        model, self.weights = load(recipe, recipe.model, tokenizer)
        self._adapter = attach_adapter(model, recipe.model, recipe.train.seed)
        if self._is_partly_frozen:
            freeze(model, recipe.model)
        self._without_adapter = False  # whether the start is the model without its adapter
        self.base = None if self._adapter is None else self._adapter.identity
        if self._adapter is not None and not look_up_strategy(recipe.parallel.strategy).hooks_modules:
            join_adapters(model)
        self._lm = self._wrap_model(model)
        self._lm.embedding_noise = recipe.train.neftune_noise_alpha or 0.0
        self.module: nn.Module = self._lm
        self.start: str | None = None
        if self.weights is None:  # for an empty model, a few layers were checked when the run was prepared
            check_model(self._lm, probe(model.config.get_text_config().vocab_size))
        if not use_float8(self.blocks(), recipe.train.float8) and recipe.train.float8 != "no":
            raise RequestError(
                "train.float8: the blocks of this model have no linear layers whose sizes are multiples of 16, for "
                "mxfp8 and nvfp4 of 32; set it to no"
            )
        self._plain = prepared.train.report["format"] in PLAIN
        self._encode_prompt = PromptEncoder(tokenizer, plain=self._plain)
        self._stop = stop_of(model, tokenizer, chat=not self._plain)
        self._save_dtype = choose_dtype_to_save(recipe.model)
        self._checksums: dict[str, int] = {}
        self._sampling = self._choose_sampling()
        for prompt in self.prompts:
            try:
                compute_new_token_limit(model, self._prompt_tokens(prompt), self._sampling)
            except RequestError as error:
                raise RequestError(f"evaluate.prompts: {error}") from None
        self._questions: ValidationQuestions | None = None  # the validation rows to answer
        self.answers = bool(recipe.evaluate.metrics)
        if self.answers:
            assert prepared.validation is not None, "evaluate.metrics needs data.validation"
            length = recipe.data.max_length
            self._questions = ValidationQuestions(recipe.evaluate, prepared.validation, length, tokenizer)

    def _stream(
        self, dataset: TokenDataset, total: int, *, shuffle: bool, sets: Mapping[str, int] | None = None
    ) -> Stream:
        weight = self._choose_example_weight(dataset)
        stream = stream_of(self._recipe, dataset, total, training=shuffle, shuffle=shuffle, example_weight=weight)
        return stream if not sets else Stream(dataset, replace(stream.settings, sets=sets))

    def _wrap_model(self, model: PreTrainedModel) -> CausalLM:
        """Return the module to train, around the model with its adapter."""
        return CausalLM(
            model,
            packed=self._packed,
            z_loss=self._choose_z_loss(),
            label_smoothing=self._choose_label_smoothing(),
            router_loss=build_router_loss(self._recipe, model),
            attention=self._recipe.model.attention,
            kernels=self._recipe.model.kernels,
        )

    def blocks(self) -> list[nn.Module]:
        """Return the repeated units of the module, in order."""
        return self._lm.blocks()

    def collate_ahead(self, micro: MicroBatch) -> None:
        """Collate a micro-batch of the stream on the host, for the call of ``loss`` that may follow."""
        self._ahead = micro, self._collate_micro_batch(self._prepared.train, micro)

    def _batch(self, dataset: TokenDataset, micro: MicroBatch, device: torch.device) -> Batch:
        if self._ahead is not None and dataset is self._prepared.train and self._ahead[0] == micro:
            return self._ahead[1].to(device)
        return self._collate_micro_batch(dataset, micro).to(device)

    def _collate_micro_batch(self, dataset: TokenDataset, micro: MicroBatch) -> Batch:
        return collate(dataset, micro, packed=self._packed, pad_token_id=self._pad)

    def begin(
        self, passes: ForwardOnly, weights: Iterable[tuple[str, torch.Tensor]], notify: Callable[[str], None]
    ) -> None:
        """Set ``start`` if weights are frozen, which a resumed run has to have again."""
        if self._is_partly_frozen:
            self._keep_start(weights, passes.world)

    @property
    def _is_partly_frozen(self) -> bool:
        return self._recipe.model.trained_patterns is not None

    def _keep_start(self, weights: Iterable[tuple[str, torch.Tensor]], world: World) -> None:
        """Set ``start``: a hash of all weights, of an adapted model without those that train. Every rank must call."""
        trained_names = {name for name, parameter in self._lm.named_parameters() if parameter.requires_grad}
        self.start = fingerprint(weights, trained_names if self._without_adapter else (), world)

    def before_passes(self, passes: ForwardOnly, batch: GlobalBatch, *, validation: bool) -> None:
        """Do nothing: the loss of a micro-batch is independent of other micro-batches."""

    def _choose_sampling(self) -> Sampling:
        """Return the sampling settings of prompts: greedy decoding."""
        return Sampling(max_new_tokens=self._recipe.evaluate.max_new_tokens)

    def _choose_z_loss(self) -> float:
        return 0.0

    def _choose_label_smoothing(self) -> float:
        return 0.0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Do nothing: a step only changes the weights."""

    def _choose_example_weight(self, dataset: TokenDataset) -> float | None:
        """Return the weight of an example in the loss; None: its number of targets."""
        return None

    def answer_metrics(self, module: nn.Module, world: World, *, together: bool) -> Measured:
        """Return the metrics of the model's answers to validation rows; all ranks must call it."""
        assert self._questions is not None and isinstance(module, CausalLM)
        with module.open_for_generation() as model:
            return self._questions.metrics(model, self._stop, world, together=together)

    def generate(self, module: nn.Module, prompt: str) -> str:
        """Return the model's greedy answer to a prompt."""
        assert isinstance(module, CausalLM)
        with module.open_for_generation() as model:
            (answer,) = answer_batch(model, self._tokenizer, [self._prompt_tokens(prompt)], self._sampling, self._stop)
        return answer.text.strip()

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt: text to continue, or a user turn."""
        return self._encode_prompt(prompt if self._plain else [{"role": "user", "content": prompt}])

    def describe(self) -> dict[str, Any]:
        """Return the fields of the `start` event: weights and data."""
        fields = {
            "weights": resolve(self._recipe.model).origin,
            "data": self._prepared.summary,
            "chats": not self._plain,
        }
        if self._recipe.data.streaming is None:
            train = self._prepared.train
            fields |= {"epoch_examples": len(train), "epoch_tokens": train.token_count}
        return fields

    def describe_example(self, index: int) -> str:
        """Describe an example of the stream briefly, for error messages."""
        tokens, _ = self._prepared.train.sequence(self._prepared.train.sequences(index)[0])
        text = self._tokenizer.decode(tokens[:48].tolist(), skip_special_tokens=True)
        return repr(" ".join(str(text).split())[:60])

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write a directory that ``transformers`` loads or, with an adapter, ``peft``."""
        prefix = "model."
        named_tensors = ((name.removeprefix(prefix), tensor) for name, tensor in tensors)
        model, tokenizer = self._lm.model, self._tokenizer
        config: PretrainedConfig = model.config
        generation: GenerationConfig | None = model.generation_config
        if not self._plain:
            tokenizer, config, generation = end_texts_at_turns(tokenizer, config, generation)
        if self._adapter is not None:
            self._adapter.save(directory, named_tensors, tokenizer, generation)
        else:
            tensors = self._restore_frozen(named_tensors)
            self._checksums = save_model(directory, config, tensors, tokenizer, generation, self._save_dtype)

    def _restore_frozen(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors, frozen ones as they were loaded: a run has them in the precision that it computes in."""
        frozen = {name for name, parameter in self._lm.model.named_parameters() if not parameter.requires_grad}
        if not frozen:
            return tensors
        start = load_model(self._recipe.model, torch.float32, self._recipe.train.seed, self._tokenizer)
        before = dict(start.named_parameters())
        return ((name, before[name].detach() if name in frozen else tensor) for name, tensor in tensors)

    def adds_nothing(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether an adapter with these parts would leave the model unchanged."""
        return adds_nothing(tensors, self._recipe.model.adapter.spec.unchanged)

    def read_back(
        self, module: nn.Module, directory: Path | None, *, all_parameters: bool, same_logits: bool = True
    ) -> str | None:
        """Check that the exported model, or the adapter on its base, gives the logits of the trained model.

        Without ``same_logits``, the export is made from the trained model, but is another one.
        """
        assert isinstance(module, CausalLM)
        with module.open_for_generation() as model:
            tokens = probe(model.config.get_text_config().vocab_size).input_ids.to(model.device)
            if self._adapter is not None:
                assert directory is not None
                self._adapter.read_back(model, directory, tokens, all_parameters=all_parameters)
                return None
            expected_logits = compute_logits(model, tokens) if directory is not None or not all_parameters else None
        if directory is None:
            return None
        return check_saved(directory, self._checksums, tokens, expected_logits if same_logits else None)


class Sized(Protocol):
    """The interface of training data with a known size."""

    def __len__(self) -> int: ...

    @property
    def token_count(self) -> int:
        """Return the number of tokens."""


def build_batch_sizes(recipe: RecipeSchema) -> BatchSizes:
    """Return the number of examples of each step."""
    train = recipe.train
    return BatchSizes(train.global_batch_size, train.initial_batch_size, train.batch_warmup_steps)


def count_planned_examples(recipe: RecipeSchema, dataset: Sized) -> int:
    """Return the number of examples of the run, with repetitions over epochs."""
    train = recipe.train
    if train.max_steps is not None:
        return build_batch_sizes(recipe).before(train.max_steps)
    if train.max_tokens is not None:
        return max(1, -(-train.max_tokens * len(dataset) // max(1, dataset.token_count)))
    assert train.epochs is not None
    return max(1, round(train.epochs * len(dataset)))


def stream_of(
    recipe: RecipeSchema,
    dataset: Data,
    total: int,
    *,
    training: bool,
    shuffle: bool,
    example_weight: float | None = None,
) -> Stream[Data]:
    """Return the stream of a resolved recipe, with ``total`` examples; see ``Stream``."""
    train, parallel = recipe.train, recipe.parallel
    rows, steps = train.micro_batch_size, train.gradient_accumulation_steps
    processes = 1 if parallel.processes == "auto" else parallel.processes  # not resolved where data is only shown
    unit = train.batch_unit if training else "examples"
    stream = Stream(
        dataset,
        StreamSettings(
            global_batch_size=train.global_batch_size if training else recipe.batch_rows,
            seed=train.seed,
            rows=None if rows == "auto" else rows,
            micro_batches=1 if steps == "auto" else steps * processes,
            pack_length=recipe.data.pack_length,
            total_examples=total,
            shuffle=shuffle,
            example_weight=example_weight,
            warm_up=build_batch_sizes(recipe) if training else None,
            unit=unit,
            stages=Stages.of(recipe, dataset) if training else None,
        ),
    )
    if unit != "examples" and train.max_steps is not None:
        stream.total_examples = stream.sizes.before(train.max_steps)
    return stream


_PART = 2**22  # bytes of a tensor to sum at a time


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]], leave_out: Collection[str], world: World) -> str:
    """Return a hash of all weights, except those named in ``leave_out``. All ranks must call it."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        if world.is_main and name not in leave_out:
            digest.update(f"{name} {_compute_bit_sums(tensor)}".encode())
    return world.broadcast(digest.hexdigest()[:32])


def _compute_bit_sums(tensor: torch.Tensor) -> list[int]:
    """Return integer sums of a tensor's bits, which are the same in any order and on any device."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    parts = flat.split(_PART)
    return [int((part.view(torch.int32) if part.numel() % 4 == 0 else part).sum(dtype=torch.int64)) for part in parts]
