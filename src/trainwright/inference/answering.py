"""Answers to many prompts: in batches of similar length that fit the memory, shared among the ranks.

The batches do not depend on the number of ranks, so neither do the sums from which results are computed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.data.sources.row_files import Row
from trainwright.engine.out_of_memory import MemoryShortage, catch_shortage
from trainwright.errors import MachineError, RequestError
from trainwright.inference.generation import Answer, Sampling, Stop, answer_batch, compute_new_token_limit
from trainwright.machine.vendors import look_up_processor
from trainwright.models.configuration import list_layer_configs
from trainwright.parallel.world import World, free_bytes
from trainwright.utils import heartbeat
from trainwright.utils.paths import write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Maximum prompts per batch. A constant, so that batches are the same on any machine.
_ROWS = {"cpu": 16, "gpu": 128}
# Fraction of the free memory for keys, values and logits.
_USABLE = 0.6


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered.

    Attributes:
        rows: prompts per batch.
        together: see ``map_over_ranks``.
    """

    sampling: Sampling
    stop: Stop
    rows: int | None = None
    together: bool = False


def answer_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    settings: AnswerSettings,
    world: World,
    done: Done = lambda examples: None,
) -> list[Answer]:
    """Return an answer to every prompt (its token ids), in their order, on every rank. Every rank must call.

    The sampling for a prompt depends on the seed and on its index.

    Args:
        model: the full model, in evaluation mode, on the world's device.

    Raises:
        RequestError: a prompt is empty or leaves no position for an answer.
        MachineError: memory runs out with a single prompt.
    """
    sampling, stop = settings.sampling, settings.stop
    lengths = [len(prompt) + compute_new_token_limit(model, prompt, sampling) for prompt in prompts]
    batches = split_into_batches(model, lengths, world, settings.rows)
    costs = [float(len(batch) * lengths[batch[0]]) for batch in batches]

    def work(batch: Sequence[int]) -> list[Answer]:
        batch_prompts = [prompts[index] for index in batch]
        return answer_batch(model, tokenizer, batch_prompts, sampling, stop, examples=batch)

    return map_over_ranks(world, batches, costs, work, done, together=settings.together, result=Answer)


def split_into_batches(
    model: PreTrainedModel, lengths: Sequence[int], world: World, rows: int | None = None
) -> list[list[int]]:
    """Return the indices of the prompts in batches, the same on every rank. Every rank must call.

    Args:
        lengths: of the prompts with their longest answers.
    """
    config = model.config.get_text_config()
    element = next(model.parameters()).element_size()
    fixed_bytes = 12 * int(config.vocab_size)  # logits as computed, in fp32, and sorted
    # Keys and values are copied to grow; express the cost of a row in tokens of them.
    token = 2 * compute_cache_bytes(config, element)
    free = min(free for (free,) in world.gather_floats([float(free_bytes(world))])) * _USABLE
    tokens = max(1, int(free / (token + fixed_bytes / max(lengths, default=1))))
    return batch_by_length(lengths, tokens=tokens, rows=rows or _ROWS[look_up_processor(world.device.type)])


def compute_cache_bytes(config: Any, element_bytes: int) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    layers = list_layer_configs(config)
    repeats = int(config.num_hidden_layers) // len(layers)
    return 2 * repeats * sum(map(_count_key_channels, layers)) * element_bytes


def _count_key_channels(config: Any) -> int:
    """Return the channels of the keys of a token in a layer."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    return groups * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


T = TypeVar("T")

# From indices of examples to a result for each, in the same order.
Work = Callable[[Sequence[int]], Sequence[T]]
# Called with the number of examples that this rank has finished since the last call.
Done = Callable[[int], None]
# Called with a description of the work and its number of rows; returns a function to report finished rows.
Stage = Callable[[str, int], Done]


def batch_by_length(lengths: Sequence[int], *, tokens: int, rows: int) -> list[list[int]]:
    """Return indices in batches of at most ``rows`` rows and ``tokens`` tokens with padding, longest batch first."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or len(batches[-1]) == rows or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def map_over_ranks(
    world: World,
    batches: Sequence[Sequence[int]],
    costs: Sequence[float],
    work: Work[T],
    done: Done = lambda examples: None,
    *,
    together: bool = False,
    result: type | None = None,
) -> list[T]:
    """Return the results of all examples in the order of their indices, on every rank. Every rank must call.

    Batches are assigned to the least loaded rank, the costliest first. A batch that runs out of memory is repeated in
    halves.

    Args:
        batches: indices from 0, each in one batch.
        costs: of every batch, in any unit.
        together: every rank does everything, in the same order, because each pass of the model involves all ranks.
        result: the class of a result that is a dataclass or a named tuple.

    Raises:
        MachineError: on every rank, if memory runs out with a single example.
        StopRequested: on every rank, when any of them was asked to stop.
    """
    by_index: dict[int, T] = {}
    shortage: str | None = None
    largest = max(map(len, batches), default=0)
    shares = _assign_batches(costs, 1) if together else _assign_batches(costs, world.size)
    mine = shares[0 if together else world.rank]
    for turn in range(max(map(len, shares))):
        waiting = _split_batch(batches[mine[turn]], largest) if turn < len(mine) else []
        while waiting and shortage is None:
            part = waiting.pop(0)
            results = catch_shortage(lambda part=part: work(part))  # type: ignore[misc]
            if not isinstance(results, MemoryShortage):
                by_index.update(zip(part, results, strict=True))
                done(len(part))
                heartbeat.note_progress()
            elif len(part) > 1:
                largest = -(-len(part) // 2)
                waiting = [half for batch in (part, *waiting) for half in _split_batch(batch, largest)]
            else:
                shortage = f"rank {world.rank}: {results.detail}"
        world.check_stop()
    everyone = world.gather((shortage, by_index), *([] if result is None else [result]))
    if shortages := [why for why, _ in everyone if why is not None]:
        raise MachineError(
            f"memory ran out with a single example ({shortages[0]}); use fewer processes on this machine, shorter "
            "examples or answers, or a device with more memory"
        )
    results_of_all = {index: result for _, part in everyone for index, result in part.items()}
    return [results_of_all[index] for index in range(len(results_of_all))]


def _assign_batches(costs: Sequence[float], ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    return shares


def _split_batch(batch: Sequence[int], largest: int) -> list[list[int]]:
    return [list(batch[begin : begin + largest]) for begin in range(0, len(batch), largest)]


def check_answer_file(out: Path) -> None:
    """Raise RequestError if ``out`` exists, or its format is not supported."""
    if out.suffix.lower() not in _FORMATS:
        raise RequestError(f"--out: {out} should end in {', '.join(_FORMATS)}")
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose another file")


def write_answers(out: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` to ``out`` in order, completely or not at all. Raises RequestError if it is not writable."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, _FORMATS[out.suffix.lower()](rows))
    except OSError as error:
        raise RequestError(f"--out: {out} cannot be written: {error.strerror or error}") from error


def _format_jsonl(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _format_json(rows: Sequence[Row]) -> str:
    return json.dumps(rows, ensure_ascii=False, indent=2) + "\n"


def _format_csv(rows: Sequence[Row]) -> str:
    """Return one column per field of any row; lists and objects as JSON, because the format has only text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _format_cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _format_cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    ".jsonl": _format_jsonl,
    ".ndjson": _format_jsonl,
    ".json": _format_json,
    ".csv": _format_csv,
}
