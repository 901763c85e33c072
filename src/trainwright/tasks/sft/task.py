"""Supervised fine-tuning: the loss is on what the assistant says, or on all of a plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.data.batch import Batch, collate
from trainwright.data.dataset import TokenDataset
from trainwright.data.lengths import remember
from trainwright.data.preflight import refuse_unused_template
from trainwright.data.prepare import Prepared, prepare
from trainwright.data.stream import GlobalBatch, MicroBatch, Stream
from trainwright.engine.task import LossSum
from trainwright.models.causal_lm import CausalLM, check_model
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.resolve import resolve
from trainwright.models.save import save_model
from trainwright.recipe.schema import Recipe
from trainwright.tasks.sft.sampling import Sampler
from trainwright.tasks.sft.steps import planned_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare_once(recipe: Recipe, cache: Path) -> int:
    """Prepare the data and convert the weights; both are found in the cache afterwards."""
    resolve(recipe.model, notify=print)
    return len(_prepared(recipe, load_tokenizer(recipe.model), cache).train)


def build(recipe: Recipe, cache: Path) -> SupervisedFineTuning:
    """The task of a resolved recipe."""
    tokenizer = load_tokenizer(recipe.model)
    return SupervisedFineTuning(recipe, tokenizer, _prepared(recipe, tokenizer, cache))


def _prepared(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Prepared:
    positions = getattr(load_config(recipe.model, tokenizer).get_text_config(), "max_position_embeddings", None)
    prepared = prepare(recipe.data, tokenizer, seed=recipe.train.seed, cache=cache, model_max_length=positions)
    datasets = [dataset for dataset in (prepared.train, prepared.validation) if dataset is not None]
    refuse_unused_template(recipe.model.chat_template, [dataset.report["format"] for dataset in datasets])
    remember(recipe.model, recipe.data, recipe.train.seed, prepared.train, cache)
    return prepared


class SupervisedFineTuning:
    """Fine-tuning of a causal language model on conversations or text."""

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
        self._lm = CausalLM(model, packed=self._packed)
        self.module: nn.Module = self._lm
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
        )

    def blocks(self) -> list[nn.Module]:
        return self._lm.blocks()

    def _batch(self, dataset: TokenDataset, micro: MicroBatch, device: torch.device) -> Batch:
        return collate(dataset, micro, packed=self._packed, pad_token_id=self._pad).to(device)

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        batch = self._batch(self._prepared.train, micro, device)
        return LossSum(module(batch), float(len(batch.targets)))

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """``[summed loss in nats, correct predictions, targets]``."""
        assert self._prepared.validation is not None
        batch = self._batch(self._prepared.validation, micro, device)
        sums = module(batch, statistics=True)
        return torch.cat([sums, sums.new_full((1,), len(batch.targets))]) * float(micro.weight > 0)

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        loss, correct, targets = statistics
        mean = torch.tensor(loss / targets, dtype=torch.float64)
        return {
            "loss": loss / targets,
            "perplexity": float(mean.exp()),
            "token_accuracy": correct / targets,
        }

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
        tokens, _ = self._prepared.train.example(index)
        text = self._tokenizer.decode(tokens[:48].tolist(), skip_special_tokens=True)
        return repr(" ".join(str(text).split())[:60])

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write a directory that plain ``transformers`` loads."""
        prefix = "model."
        named = ((name.removeprefix(prefix), tensor) for name, tensor in tensors)
        model = self._lm.model
        save_model(directory, model.config, named, self._tokenizer, model.generation_config)


def _probe(vocabulary: int) -> Batch:
    """Two short documents of arbitrary tokens, to check the model with."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (5, 7)]
    dataset = TokenDataset.from_examples([(ids, [True] * len(ids)) for ids in documents], "probe")
    everything: GlobalBatch = Stream(dataset, global_batch_size=2, seed=0, rows=1, pack_length=16).global_batch(0)
    return collate(dataset, everything.micro_batches[0], packed=True, pad_token_id=0)
