"""Load a model that was found, ready for evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainwright.data.stream.batch import Batch, collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.checkpoints.checkpoint import Checkpoint
from trainwright.errors import MachineError, RequestError
from trainwright.inference.finding import UnloadedModel
from trainwright.machine.machine import Machine
from trainwright.models.adapters.attaching import attach_adapter
from trainwright.models.causal_lm import CausalLM, check_model, freeze
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.resolve_model import count_stored_weights, resolve
from trainwright.models.truncate_config import count_parameters
from trainwright.parallel.layout import Shard
from trainwright.utils.activity import begin_activity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The largest difference in the loss of a token between two ways to compute it, in nats.
_SAME = {torch.float32: 1e-3}
_SAME_ROUNDED = 0.25
# Fraction of a device's memory for the weights; the rest is for computing with them.
_USABLE = 0.9


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, and its tokenizer; ``chat``: whether it was trained for
    conversations.
    """

    lm: CausalLM
    tokenizer: PreTrainedTokenizerBase
    chat: bool


def load(unloaded: UnloadedModel, dtype: torch.dtype, device: torch.device) -> Loaded:
    """Load a model, including the checkpoint's tensors.

    Raises:
        RequestError: the weights are missing, damaged or inconsistent.
    """
    with name_arguments_in_errors():
        tokenizer = load_tokenizer(unloaded.section)
        model = load_model(unloaded.section, dtype, unloaded.seed, tokenizer)
        attach_adapter(model, unloaded.section, unloaded.seed)
        if unloaded.section.trained_patterns is not None:
            freeze(model, unloaded.section)  # a checkpoint has what is trained
        lm = CausalLM(model, packed=False)
        if unloaded.checkpoint is not None:
            _fill(lm, Checkpoint.open(unloaded.checkpoint, verify=False))
        for parameter in lm.parameters():
            parameter.requires_grad_(False)
            if parameter.is_floating_point():  # adapters are stored in fp32
                parameter.data = parameter.data.to(dtype)
        begin_activity("checking the model")
        check_model(lm, probe(model.config.get_text_config().vocab_size), _SAME.get(dtype, _SAME_ROUNDED))
        return Loaded(lm.to(device).eval(), tokenizer, tokenizer.chat_template is not None)


def check_fits(unloaded: UnloadedModel, dtype: torch.dtype, machine: Machine, processes: int) -> None:
    """Check whether each of ``processes`` of this machine can hold a full copy of the model.

    Raises:
        MachineError: it cannot.
        RequestError: the configuration is that of a far larger model than the weights, for which memory would be taken.
    """
    with name_arguments_in_errors():
        count = count_parameters(load_config(unloaded.section))
        directory = resolve(unloaded.section, weights=False).directory
        if directory is not None and unloaded.section.gguf_file is None:
            elements = sum(count_stored_weights(directory).values())
            if count > 2 * elements:
                raise RequestError(
                    f"model.name: {directory} has weights of {elements:,} numbers, and its config.json is that of a "
                    f"model of {count:,}; download the model again"
                )
    size = count * dtype.itemsize
    if machine.gpus:
        memory, owner = min(gpu.memory_bytes for gpu in machine.gpus), "one GPU"
    else:
        memory, owner = machine.memory_bytes // processes, f"a process's share of this machine, one of {processes},"
    if size > memory * _USABLE:
        fix = "use --dtype bf16, or a device with more memory"
        if not machine.gpus and processes > 1:
            fix = "use fewer processes (--num-processes)"
        raise MachineError(
            f"{unloaded.origin} has {size / 2**30:,.1f} GiB of weights, and {owner} has {memory / 2**30:,.1f} GiB: "
            f"every process holds a full copy; {fix}"
        )


def probe(vocabulary: int) -> Batch:
    """Return two short sequences of arbitrary tokens in one pack, to check a model with."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (5, 7)]
    dataset = TokenDataset.from_examples([(ids, [True] * len(ids)) for ids in sequences], "probe")
    return collate_examples(dataset, (0, 1), packed=True)


def _fill(lm: CausalLM, checkpoint: Checkpoint) -> None:
    persistent = lm.state_dict(keep_vars=True)
    with checkpoint.open_reader() as read, torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(read.weights(name, Shard.full(parameter)))
        for name, buffer in lm.named_buffers():
            if name in persistent:
                buffer.copy_(read(f"model.{name}", Shard.full(buffer)))


@contextmanager
def name_arguments_in_errors() -> Iterator[None]:
    """Make messages name the command's argument instead of a recipe's key, for commands without a recipe."""
    try:
        yield
    except RequestError as error:
        message = str(error).replace("model.adapter.start_from", "--adapter").replace("model.name", "MODEL")
        raise RequestError(message) from error
