"""Pretraining: predict every token of a corpus from the previous ones in its window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.data.stream.dataset_cache import PreparedData
from trainwright.data.stream.stream import MicroBatch
from trainwright.data.stream.streamed import StreamedDataset, prepare_streamed
from trainwright.data.stream.windows import WindowDataset, collate_windows, prepare_windows
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.data.tokens.lengths import check_length, save_lengths
from trainwright.engine.task import LossSum
from trainwright.inference.generation import Sampling
from trainwright.models.load import load_tokenizer, read_max_positions
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.data import DataSection
from trainwright.tasks.language_model import LanguageModelTask, add_stages, count_embeddings, prepare_model
from trainwright.tasks.pretrain.spec import PretrainSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Pretraining", "build", "prepare_once"]

# Greedy decoding soon repeats itself.
_TEMPERATURE, _TOP_P = 0.8, 0.95
_WORD_BEGINS = "\u2581"  # represents a space in SentencePiece vocabularies


def prepare_once(recipe: RecipeSchema, cache: Path) -> int:
    """Prepare the shards and convert the weights, so that both are in the cache; return the number of examples."""
    return len(_prepare_data(recipe, prepare_model(recipe), cache).train)


def build(recipe: RecipeSchema, cache: Path) -> Pretraining:
    """Return the task of a resolved recipe."""
    tokenizer = load_tokenizer(recipe.model)
    return Pretraining(recipe, tokenizer, _prepare_data(recipe, tokenizer, cache))


def _prepare_data(recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, cache: Path) -> PreparedData:
    positions = read_max_positions(recipe.model, tokenizer)
    check_length(recipe.data, positions)
    contiguous = recipe.own(PretrainSection).windows == "contiguous"
    embeddings = count_embeddings(recipe.model, tokenizer)

    def windows(data: DataSection) -> PreparedData:
        with_data = recipe.model_copy(update={"data": data})
        train, validation, lines, sets = prepare_windows(with_data, tokenizer, cache, embeddings, contiguous=contiguous)
        return PreparedData(train, validation, lines, sets=sets)

    if recipe.data.streaming is None:
        prepared_data = windows(recipe.data)
    else:
        prepared_data = prepare_streamed(recipe, tokenizer, cache, embeddings, positions, windows)
    save_lengths(recipe.model, recipe.data, recipe.train.seed, prepared_data.train, cache)
    return add_stages(recipe, prepared_data)


class Pretraining(LanguageModelTask):
    """Pretraining of a causal language model on token shards."""

    def __init__(self, recipe: RecipeSchema, tokenizer: PreTrainedTokenizerBase, prepared: PreparedData) -> None:
        self._pretrain = recipe.own(PretrainSection)
        super().__init__(recipe, tokenizer, prepared)
        size = self._lm.config.get_text_config().vocab_size
        self._token_bytes = torch.from_numpy(count_token_bytes(tokenizer, size)).double()

    def _choose_z_loss(self) -> float:
        return self._pretrain.z_loss

    def _choose_sampling(self) -> Sampling:
        length = self._recipe.evaluate.max_new_tokens
        return Sampling(length, _TEMPERATURE, _TOP_P, seed=self._recipe.train.seed)

    def _collate_micro_batch(self, dataset: TokenDataset, micro: MicroBatch) -> Batch:
        assert isinstance(dataset, WindowDataset | StreamedDataset)
        return collate_windows(dataset, micro, packed=self._packed, pad_token_id=self._pad)

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the summed loss of one micro-batch and the weight of its targets."""
        batch = self._batch(self._prepared.train, micro, device)
        total = module(batch)
        if self._pretrain.z_loss or self._pretrain.router_loss:  # then the total is not only the loss of the text
            return LossSum(total, float(len(batch.targets)))
        return LossSum(total, float(len(batch.targets)), torch.stack([total.detach().double(), self._bytes(batch)]))

    def _bytes(self, batch: Batch) -> torch.Tensor:
        """Return the number of bytes of the batch's targets, float64 scalar."""
        self._token_bytes = self._token_bytes.to(batch.targets.device)
        return self._token_bytes.index_select(0, batch.targets).sum()

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return ``[summed loss in nats, bytes, correct predictions, targets]``."""
        assert self._prepared.validation is not None
        batch = self._batch(self._prepared.validation, micro, device)
        loss, correct = module(batch, statistics=True)
        sums = [loss, self._bytes(batch), correct, loss.new_tensor(len(batch.targets))]
        return torch.stack(sums) * float(micro.weight > 0)

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics from statistics summed over the split or step."""
        nats, size, *rest = statistics
        # Bits per byte of text are comparable between tokenizers (arXiv 2101.00027, section 3.1).
        per_byte = {"bits_per_byte": nats / math.log(2) / size} if size else {}
        if not rest:
            return per_byte
        correct, targets = rest
        perplexity = float(torch.tensor(nats / targets, dtype=torch.float64).exp())
        return {"loss": nats / targets, **per_byte, "perplexity": perplexity, "token_accuracy": correct / targets}


def count_token_bytes(tokenizer: PreTrainedTokenizerBase, size: int) -> npt.NDArray[np.int64]:
    """Return the number of UTF-8 bytes of every token [size]; 0 for special and unused tokens."""
    backend: Any = tokenizer.backend_tokenizer
    bytewise = "ByteLevel" in str(backend.decoder)  # then each character of a token is a byte
    special = set(tokenizer.all_special_ids)
    lengths = np.zeros(size, dtype=np.int64)
    for text, token in tokenizer.get_vocab().items():
        if token not in special and token < size:
            lengths[token] = len(text) if bytewise else _count_bytes(text)
    return lengths


def _count_bytes(text: str) -> int:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):  # a byte-fallback token
        return 1
    return len(text.replace(_WORD_BEGINS, " ").encode())
