"""What every task on a causal language model shares: its data, its model, samples and what is written in the end.

A task of its own says which rows it takes, what an example counts, and what is minimised and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.data.batch import Batch, collate
from trainwright.data.dataset import TokenDataset
from trainwright.data.kinds import kind_of_rows
from trainwright.data.lengths import remember
from trainwright.data.preflight import refuse_unused_template
from trainwright.data.prepare import Prepared, prepare
from trainwright.data.stream import GlobalBatch, MicroBatch, Stream
from trainwright.errors import RequestError
from trainwright.models.adapters import adds_nothing, attach_adapter, check_adapter
from trainwright.models.causal_lm import CausalLM, check_model
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.resolve import resolve
from trainwright.models.save import save_model
from trainwright.parallel.strategy import Strategy
from trainwright.recipe.schema import Recipe
from trainwright.tasks.sampling import Sampler
from trainwright.tasks.steps import planned_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare_once(recipe: Recipe, cache: Path) -> int:
    """Prepare the data and convert the weights; both are found in the cache afterwards."""
    resolve(recipe.model, notify=print)
    check_adapter(recipe.model, recipe.train.seed)
    return len(prepare_data(recipe, load_tokenizer(recipe.model), cache).train)


def prepare_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Prepared:
    """The data of a resolved recipe, prepared or found in the cache."""
    positions = getattr(load_config(recipe.model, tokenizer).get_text_config(), "max_position_embeddings", None)
    kind, seed = kind_of_rows(recipe), recipe.train.seed
    prepared = prepare(recipe.data, tokenizer, kind, seed=seed, cache=cache, model_max_length=positions)
    datasets = [dataset for dataset in (prepared.train, prepared.validation) if dataset is not None]
    refuse_unused_template(recipe.model.chat_template, [dataset.report["format"] for dataset in datasets])
    _check_packs(recipe, datasets)
    remember(recipe.model, recipe.data, recipe.train.seed, prepared.train, cache)
    return prepared


def _check_packs(recipe: Recipe, datasets: Sequence[TokenDataset]) -> None:
    """Refuse packs that do not hold every example; of how many documents these are is known from the rows."""
    pack, longest = recipe.data.pack_length, recipe.data.max_length
    for dataset in datasets:
        each = dataset.documents_per_example
        if pack is not None and pack < each * longest:
            raise RequestError(
                f"data.pack_length: {pack} does not hold {each} answers of up to data.max_length {longest} tokens; "
                f"set it to {each * longest} or more, or lower that"
            )


class LanguageModelTask:
    """The part of a task that does not depend on what is minimised."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, prepared: Prepared) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._packed = recipe.data.pack_length is not None
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.prompts: Sequence[str] = recipe.evaluate.prompts
        self.stream = self._stream(prepared.train, planned_examples(recipe, len(prepared.train)), shuffle=True)
        self.validation = (
            self._stream(prepared.validation, len(prepared.validation), shuffle=False)
            if prepared.validation is not None
            else None
        )
        model = load_model(recipe.model, torch.float32, recipe.train.seed, tokenizer)
        self._adapter = attach_adapter(model, recipe.model, recipe.train.seed)
        self.base = None if self._adapter is None else self._adapter.identity
        self._lm = CausalLM(model, packed=self._packed)
        self.module: nn.Module = self._lm
        self.start: str | None = None
        check_model(self._lm, _probe(model.config.get_text_config().vocab_size))
        self._sampler = Sampler(tokenizer, prepared.train.report["format"] == "text", recipe.evaluate.max_new_tokens)

    def _stream(self, dataset: TokenDataset, total: int, *, shuffle: bool) -> Stream:
        train, parallel = self._recipe.train, self._recipe.parallel
        rows, steps = train.micro_batch_size, train.gradient_accumulation_steps
        assert parallel.num_processes != "auto", "the recipe is resolved"
        return Stream(
            dataset,
            global_batch_size=train.global_batch_size,
            seed=train.seed,
            rows=None if rows == "auto" else rows,
            passes=1 if steps == "auto" else steps * parallel.num_processes,
            pack_length=self._recipe.data.pack_length,
            total_examples=total,
            shuffle=shuffle,
            example_weight=self._example_weight(dataset),
        )

    def blocks(self) -> list[nn.Module]:
        return self._lm.blocks()

    def _batch(self, dataset: TokenDataset, micro: MicroBatch, device: torch.device) -> Batch:
        return collate(dataset, micro, packed=self._packed, pad_token_id=self._pad).to(device)

    def begin(self, strategy: Strategy, notify: Callable[[str], None]) -> None:
        """Nothing is to be known of the weights of the start."""

    def before_passes(self, strategy: Strategy, batch: GlobalBatch, *, validation: bool) -> None:
        """The loss of a micro-batch depends on nothing outside it."""

    def _example_weight(self, dataset: TokenDataset) -> float | None:
        """What every example counts in the loss; None: as much as it has targets."""
        return None

    def generate(self, module: nn.Module, prompt: str) -> str:
        assert isinstance(module, CausalLM)
        with module.for_generation() as model:
            return self._sampler(model, prompt)

    def describe(self) -> dict[str, Any]:
        return {
            "weights": resolve(self._recipe.model).origin,
            "data": self._prepared.summary,
            "epoch_examples": len(self._prepared.train),
            "epoch_tokens": self._prepared.train.token_count,
        }

    def describe_example(self, index: int) -> str:
        tokens, _ = self._prepared.train.document(self._prepared.train.documents(index)[0])
        text = self._tokenizer.decode(tokens[:48].tolist(), skip_special_tokens=True)
        return repr(" ".join(str(text).split())[:60])

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write a directory that plain ``transformers`` loads, or with an adapter ``peft``."""
        prefix = "model."
        named = ((name.removeprefix(prefix), tensor) for name, tensor in tensors)
        model = self._lm.model
        if self._adapter is not None:
            self._adapter.save(directory, named, self._tokenizer)
        else:
            save_model(directory, model.config, named, self._tokenizer, model.generation_config)

    def adds_nothing(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return adds_nothing(tensors)

    def read_back(self, module: nn.Module, directory: Path, *, whole: bool) -> None:
        assert isinstance(module, CausalLM) and self._adapter is not None
        with module.for_generation() as model:
            probe = _probe(model.config.get_text_config().vocab_size).input_ids.to(model.device)
            self._adapter.read_back(model, directory, probe, whole=whole)


def _probe(vocabulary: int) -> Batch:
    """Two short documents of arbitrary tokens, to check the model with."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (5, 7)]
    dataset = TokenDataset.from_examples([(ids, [True] * len(ids)) for ids in documents], "probe")
    everything: GlobalBatch = Stream(dataset, global_batch_size=2, seed=0, rows=1, pack_length=16).global_batch(0)
    return collate(dataset, everything.micro_batches[0], packed=True, pad_token_id=0)
