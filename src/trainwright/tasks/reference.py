"""Log-probabilities of the data under the reference model: computed once, before the first step, and cached.

    <cache>/references/<fingerprint>.npy    float64 [sequences], NaN for sequences that no run has needed yet

They are computed through the strategy's own module, so the model need not fit on one device, and every rank computes a
part. The fingerprint covers the weights, the data, the precision and the kind of device: a resumed run finds the file
again, and so does the next run from the same model on the same data.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainwright.data.stream.batch import Batch, copy_to_device
from trainwright.data.stream.dataset_cache import PreparedData
from trainwright.data.stream.stream import MicroBatch, Stream
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.task import ForwardOnly
from trainwright.errors import TrainingError
from trainwright.parallel.world import World
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.language_model import LanguageModelTask
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """The summed log-probability, in nats, of the targets of every sequence of a run [sequences]."""

    sums: Sums

    def of(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of a batch's sequences [S], float64, on the batch's device."""
        return copy_to_device(torch.from_numpy(self.sums[list(batch.sequences)]), batch.targets.device)


class ReferenceTask(LanguageModelTask):
    """Base class of tasks whose loss compares the model with a reference.

    Args:
        reference: the recipe's key: start, base, or another model.
    """

    def __init__(
        self,
        recipe: RecipeSchema,
        tokenizer: PreTrainedTokenizerBase,
        prepared: PreparedData,
        cache: Path,
        reference: str,
    ) -> None:
        self._cache = cache
        super().__init__(recipe, tokenizer, prepared)
        # A new adapter is initially zero, so the model without it is the one that training starts from.
        new = recipe.model.adapter.start_from is None
        self._without_adapter = self._adapter is not None and (new or reference == "base")

    def _reference(
        self,
        passes: ForwardOnly,
        stream: Stream,
        examples: Sequence[int],
        notify: Callable[[str], None],
        weights: str,
        without: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Reference:
        """Compute log-probabilities of examples of a stream's dataset with the current module. All ranks must call it.

        Args:
            stream: divides examples into micro-batches.
            weights: identifies the weights of the reference.
            without: context for the computation, such as one that disables an adapter.

        Raises:
            TrainingError: out of memory with one row per micro-batch, or a probability is not finite.
        """
        world, dataset = passes.world, stream.dataset
        precision, float8 = str(self._recipe.train.mixed_precision), self._recipe.train.float8
        sequences = sorted({sequence for example in examples for sequence in dataset.sequences(example)})
        # Of what is computed in other batches the last bits may differ: a run that is resumed needs the same ones.
        identity = {
            "weights": weights,
            "precision": precision if float8 == "no" else f"{precision}, float8 {float8}",
            "device": world.device.type,
            "data": dataset.fingerprint,
            "batches": stream.division,
            "examples": str(list(examples)),
        }
        file = self._cache / "references" / f"{_digest(identity)}.npy"
        cached_sums = _open(file, dataset)
        if all(world.gather(not np.isnan(cached_sums[sequences]).any())):
            notify(f"the reference's log-probabilities of {format_plural(len(sequences), 'answer')} are in {file}")
            return Reference(cached_sums)
        notify(f"computing the reference's log-probabilities of {format_plural(len(examples), 'example')}")
        started_at = time.monotonic()
        with without():
            log_probabilities = _compute(
                passes, stream, lambda micro: self._batch(dataset, micro, world.device), examples
            )
        if not np.isfinite(log_probabilities[sequences]).all():
            raise TrainingError("the model's probability of some data is NaN before training")
        saved = _save(file, log_probabilities, world)
        notify(f"the reference took {time.monotonic() - started_at:.1f} s{f' and is kept in {file}' if saved else ''}")
        return Reference(log_probabilities)


def _compute(
    passes: ForwardOnly, stream: Stream, batch_of: Callable[[MicroBatch], Batch], examples: Sequence[int]
) -> Sums:
    """Return the sums of the sequences of ``examples``, NaN elsewhere; in smaller micro-batches if memory runs out."""
    size, rows = stream.global_batch_size, None
    parts = [examples[i : i + size] for i in range(0, len(examples), size)]
    while True:
        local_sums = np.full(stream.dataset.sequence_count, np.nan)

        def visit(module: nn.Module, micro: MicroBatch, own: Sums = local_sums) -> None:
            batch = batch_of(micro)
            sums = -batch.sum_by_sequence(module(batch, losses=True))
            if micro.weight:
                own[list(batch.sequences)] = sums.cpu().numpy()

        try:
            passes((stream.divide(part, rows) for part in parts), visit)
        except torch.OutOfMemoryError as error:
            largest = max(stream.divide(part, rows).rows for part in parts)
            if largest == 1 or not passes.repeatable:
                raise TrainingError(
                    f"memory ran out while the reference was computed, in micro-batches of {largest} rows: {error}; "
                    "set train.micro_batch_size lower, or data.max_length"
                ) from error
            rows = -(-largest // 2)
            continue
        return combine_sums(passes.world, local_sums)


def combine_sums(world: World, own: Sums) -> Sums:
    """Combine the results of all ranks; sequences that several ranks computed count once."""
    mine = np.flatnonzero(~np.isnan(own))
    together = np.full_like(own, np.nan)
    for sequences, values in world.gather((mine, own[mine])):
        together[sequences] = values
    return together


def _open(file: Path, dataset: TokenDataset) -> Sums:
    try:
        cached_sums: Sums = np.load(file, mmap_mode="r")
    except (OSError, ValueError):  # missing or incomplete
        cached_sums = np.full(0, np.nan)
    return cached_sums if len(cached_sums) == dataset.sequence_count else np.full(dataset.sequence_count, np.nan)


def _save(file: Path, sums: Sums, world: World) -> bool:
    """Save the sums on every machine; return whether this rank did. A failure is ignored, as they can be recomputed."""
    if world.local_rank:
        return False
    scratch = file.with_name(f".{file.stem}-{secrets.token_hex(4)}.npy")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(scratch, sums)
        scratch.replace(file)
    except OSError:
        scratch.unlink(missing_ok=True)
        return False
    return True


def _digest(identity: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
