"""Log-probabilities of the data under the reference model: computed once, before the first step, and cached.

    <cache>/references/<fingerprint>.npy    float64 [documents], NaN for documents that no run has needed yet

They are computed through the strategy's own module, so the model need not fit on one device, and every rank computes a
part. The fingerprint covers the weights, the data, the precision and the kind of device: a resumed run finds the file
again, and so does the next run from the same model on the same data.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.data.stream.stream import MicroBatch, Stream
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.forward_only import run_forward_only
from trainwright.errors import TrainingError
from trainwright.parallel.strategy import Independent, Strategy
from trainwright.parallel.world import World
from trainwright.text import plural

Sums = npt.NDArray[np.float64]

_PART = 2**22  # bytes of a tensor to sum at a time for its fingerprint


@dataclass(frozen=True)
class Reference:
    """The summed log-probability, in nats, of the targets of every document of a run [documents]."""

    sums: Sums

    def of(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of a batch's documents [D], float64, on the batch's device."""
        return torch.from_numpy(self.sums[list(batch.documents)]).to(batch.targets.device)


def reference(
    strategy: Strategy,
    stream: Stream,
    examples: Sequence[int],
    batch_of: Callable[[MicroBatch], Batch],
    identity: Mapping[str, str],
    cache: Path,
    notify: Callable[[str], None],
    without: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Reference:
    """Compute log-probabilities of examples of a stream's dataset with the current module. All ranks must call it.

    Args:
        stream: divides examples into micro-batches.
        batch_of: collates a micro-batch of the stream's dataset.
        identity: everything except the data that the numbers depend on.
        without: context for the computation, such as one that disables an adapter.

    Raises:
        TrainingError: out of memory with one row per micro-batch, or a probability is not finite.
    """
    world, dataset = strategy.world, stream.dataset
    documents = sorted({document for example in examples for document in dataset.documents(example)})
    # Of what is computed in other batches the last bits may differ: a run that is resumed needs the same ones.
    identity = {**identity, "data": dataset.fingerprint, "batches": stream.division, "examples": str(list(examples))}
    file = cache / "references" / f"{_digest(identity)}.npy"
    known = _open(file, dataset)
    if all(world.gather(not np.isnan(known[documents]).any())):
        notify(f"the reference's log-probabilities of {plural(len(documents), 'answer')} are in {file}")
        return Reference(known)
    notify(f"computing the reference's log-probabilities of {plural(len(examples), 'example')}")
    begun = time.monotonic()
    with without():
        found = _compute(strategy, stream, batch_of, examples)
    if not np.isfinite(found[documents]).all():
        raise TrainingError("the model's probability of some data is NaN before training")
    kept = _save(file, found, world)
    notify(f"the reference took {time.monotonic() - begun:.1f} s{f' and is kept in {file}' if kept else ''}")
    return Reference(found)


def start_fingerprint(strategy: Strategy, leave_out: Collection[str] = ()) -> str:
    """Return a hash of all weights, except those named in ``leave_out``. All ranks must call it."""
    digest = hashlib.sha256()
    for name, tensor in strategy.parameters():
        if strategy.world.is_main and name not in leave_out:
            digest.update(f"{name} {_sums(tensor)}".encode())
    found: str = strategy.world.broadcast(digest.hexdigest()[:32])
    return found


def _sums(tensor: torch.Tensor) -> list[int]:
    """Return integer sums of a tensor's bits, which are the same in any order and on any device."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    parts = flat.split(_PART)
    return [int((part.view(torch.int32) if part.numel() % 4 == 0 else part).sum(dtype=torch.int64)) for part in parts]


def _compute(
    strategy: Strategy, stream: Stream, batch_of: Callable[[MicroBatch], Batch], examples: Sequence[int]
) -> Sums:
    """Return the sums of the documents of ``examples``, NaN elsewhere; in smaller micro-batches if memory runs out."""
    size, rows = stream.global_batch_size, None
    parts = [examples[i : i + size] for i in range(0, len(examples), size)]
    while True:
        own = np.full(stream.dataset.document_count, np.nan)

        def visit(module: nn.Module, micro: MicroBatch, own: Sums = own) -> None:
            batch = batch_of(micro)
            sums = -batch.by_document(module(batch, losses=True))
            if micro.weight:
                own[list(batch.documents)] = sums.cpu().numpy()

        try:
            run_forward_only(strategy, (stream.divide(part, rows) for part in parts), visit)
        except torch.OutOfMemoryError as error:
            largest = max(stream.divide(part, rows).rows for part in parts)
            if largest == 1 or not isinstance(strategy, Independent):
                raise TrainingError(
                    f"memory ran out while the reference was computed, in micro-batches of {largest} rows: {error}; "
                    "set train.micro_batch_size lower, or data.max_length"
                ) from error
            rows = -(-largest // 2)
            continue
        return _together(strategy.world, own)


def _together(world: World, own: Sums) -> Sums:
    """Combine the results of all ranks; documents that several ranks computed count once."""
    mine = np.flatnonzero(~np.isnan(own))
    together = np.full_like(own, np.nan)
    for documents, values in world.gather((mine, own[mine])):
        together[documents] = values
    return together


def _open(file: Path, dataset: TokenDataset) -> Sums:
    try:
        known: Sums = np.load(file, mmap_mode="r")
    except (OSError, ValueError):  # missing or incomplete
        known = np.full(0, np.nan)
    return known if len(known) == dataset.document_count else np.full(dataset.document_count, np.nan)


def _save(file: Path, sums: Sums, world: World) -> bool:
    """Save the sums on every machine; return whether this rank did. A failure is ignored, as they can be recomputed."""
    if world.local_rank:
        return False
    scratch = file.with_name(f".{file.stem}-{os.getpid()}.npy")
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
