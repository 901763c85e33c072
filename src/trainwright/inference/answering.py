"""Answers to many prompts: in batches of similar length that fit the memory, shared among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright.inference.batching import Done, by_length, over_ranks
from trainwright.inference.generation import Answer, answer_batch, new_token_limit
from trainwright.inference.sampling import Sampling
from trainwright.inference.stopping import Stop
from trainwright.parallel.available_memory import free_bytes
from trainwright.parallel.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Maximum prompts per batch. A constant, so that batches are the same on any machine.
_ROWS = {"cpu": 16, "cuda": 128}
# Fraction of the free memory for keys, values and logits.
_USABLE = 0.6


def answer_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop: Stop,
    world: World,
    *,
    rows: int | None = None,
    done: Done = lambda examples: None,
    together: bool = False,
) -> list[Answer]:
    """Return an answer to every prompt (its token ids), in their order, on every rank. Every rank must call.

    The sampling for a prompt depends on the seed and on its index.

    Args:
        model: the full model, in evaluation mode, on the world's device.
        rows: prompts per batch.
        together: see ``over_ranks``.

    Raises:
        RequestError: a prompt is empty or leaves no position for an answer.
        MachineError: memory runs out with a single prompt.
    """
    lengths = [len(prompt) + new_token_limit(model, prompt, sampling) for prompt in prompts]
    batches = batches_of(model, lengths, world, rows)
    costs = [float(len(batch) * lengths[batch[0]]) for batch in batches]

    def work(batch: Sequence[int]) -> list[Answer]:
        chosen = [prompts[index] for index in batch]
        return answer_batch(model, tokenizer, chosen, sampling, stop, examples=batch)

    return over_ranks(world, batches, costs, work, done, together=together, result=Answer)


def batches_of(
    model: PreTrainedModel, lengths: Sequence[int], world: World, rows: int | None = None
) -> list[list[int]]:
    """Return the indices of the prompts in batches, the same on every rank. Every rank must call.

    Args:
        lengths: of the prompts with their longest answers.
    """
    config = model.config.get_text_config()
    element = next(model.parameters()).element_size()
    fixed = 12 * int(config.vocab_size)  # logits as computed, in fp32, and sorted
    # Keys and values are copied to grow; express the cost of a row in tokens of them.
    token = 2 * cache_bytes(config, element)
    free = min(free for (free,) in world.gather_floats([float(free_bytes(world))])) * _USABLE
    tokens = max(1, int(free / (token + fixed / max(lengths, default=1))))
    return by_length(lengths, tokens=tokens, rows=rows or _ROWS[world.device.type])


def cache_bytes(config: Any, element_bytes: int) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(config.num_hidden_layers) * groups * width * element_bytes
