"""Tokens that a recipe adds to a tokenizer, and the base model with a row of its embeddings for each of them.

The enlarged model is written once into the cache, so that every process, strategy and adapter reads the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.machine.cache import explain_cache_errors, find_cache_root
from trainwright.machine.sharing import build_once
from trainwright.models.configuration import disable_progress_bars, read_config, untie
from trainwright.models.text_part import is_whole, read_causal
from trainwright.utils.activity import begin_activity

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainwright.recipe.sections.model import AddedTokensSection

_VERSION = 1  # raised when the initial values of new rows change
_COMPLETE = "complete"  # a file that is written last


def add_tokens(tokenizer: PreTrainedTokenizerBase, added: AddedTokensSection) -> None:
    """Add the tokens that the tokenizer does not have; the ids of all others stay the same."""
    if added.names:
        tokenizer.add_tokens(added.ordinary)
        tokenizer.add_tokens(added.special, special_tokens=True)


def count_needed_rows(size: int, tokenizer: PreTrainedTokenizerBase, added: AddedTokensSection) -> int:
    """Return how many rows the embeddings of a model with ``size`` rows have with the added tokens.

    Rows that the model has beyond its vocabulary are used first. If the tokenizer has other tokens without a row, it is
    not for this model, and nothing is added.
    """
    if len(tokenizer) <= size:
        return size
    beyond = {token for token, index in tokenizer.get_vocab().items() if index >= size}
    return len(tokenizer) if beyond <= set(added.names) else size


def enlarge_model(
    directory: Path, files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, added: AddedTokensSection
) -> Path:
    """Return the directory of the model in ``directory`` with a row for every token: one in the cache, or itself.

    Args:
        files: its weights.
        tokenizer: has the added tokens.

    Raises:
        RequestError: the embeddings of the model cannot be resized.
        MachineError: the cache cannot be written.
    """
    size = read_config(directory).get_text_config().vocab_size
    rows = count_needed_rows(size, tokenizer, added)
    if rows == size:
        return directory
    if is_whole(directory):
        raise RequestError(
            f"model.added_tokens: {directory} is a model of several modalities, whose embeddings are not enlarged; use "
            "tokens that its vocabulary has, such as <unused0> of Gemma"
        )
    stats = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([_VERSION, stats, rows]).encode()).hexdigest()[:32]
    target = find_cache_root() / "enlarged" / key

    def make(path: Path) -> None:
        begin_activity(f"adding rows to the embeddings of {directory}")
        _write(directory, path, rows)
        (path / _COMPLETE).write_text("")

    with explain_cache_errors(target):
        return build_once(target, lambda: target if (target / _COMPLETE).is_file() else None, make)


def _write(directory: Path, path: Path, rows: int) -> None:
    """Write the model with ``rows`` rows, in the precision of its files."""
    import torch

    with disable_progress_bars(), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = read_causal(directory, dtype="auto")
        untie(model)
        before = [part.weight.detach().clone() for part in _list_ends(model)]
        try:
            model.resize_token_embeddings(rows, mean_resizing=False)
        except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
            problem = f"the embeddings of {directory} cannot be resized ({error})"
            raise RequestError(f"model.added_tokens: {problem}") from error
        torch.default_generator.manual_seed(0)
        for part, old in zip(_list_ends(model), before, strict=True):
            part.weight.data[len(old) :] = sample_new_rows(old, rows - len(old)).to(old.dtype)
            if getattr(part, "bias", None) is not None:
                part.bias.data[len(old) :] = part.bias.data[: len(old)].double().mean().to(part.bias.dtype)
        model.save_pretrained(path)


def _list_ends(model: PreTrainedModel) -> list[Any]:
    """Return the embeddings and the head, which is left out if it has the same weight."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return [embeddings] if head is None or head.weight is embeddings.weight else [embeddings, head]


def sample_new_rows(old: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows [count, D] for new tokens, float32, drawn as transformers' ``resize_token_embeddings`` does.

    They are normal with the mean of the rows of ``old`` [V, D] and 1e-9 of their covariance, so that predictions hardly
    change; equal to the mean if the covariance is singular (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    import torch

    values = old.double()
    mean = values.mean(0)
    deviations = values - mean
    factor, problem = torch.linalg.cholesky_ex(1e-9 * (deviations.T @ deviations) / len(old))
    rows = mean.repeat(count, 1)
    if len(old) > old.shape[1] and not problem:
        rows = rows + torch.randn(count, old.shape[1]).double() @ factor.T
    return rows.float()
