"""Models without memory for their weights, and the weights that fill the shards of each process.

If every weight is stored in the model's files in its final form, each rank reads its own shard from there. Otherwise
(fresh weights, tensors that transformers renames or merges) rank 0 loads the model and broadcasts each tensor in turn,
so only one rank holds a full copy.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from trainwright.errors import RequestError
from trainwright.machine.allocator import return_freed_memory
from trainwright.models.configuration import NOT_MADE, convert_creation_errors, read_config
from trainwright.models.files import build_skeleton, has_conversions
from trainwright.models.load import UNUSED_TENSORS, finish_loading, load_config, load_model
from trainwright.models.resolve_model import resolve, weight_files
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from trainwright.recipe.sections.model import ModelSection

logger = logging.getLogger(__name__)

_SENT_BYTES = 64 * 2**20  # per broadcast
_SAMPLED = 64  # elements per tensor in a fingerprint


class Weights(Protocol):
    """The initial values of the parameters and buffers of an empty model, by name."""

    def load(self, rank: int) -> None:
        """Load what ``fill`` needs; may take long, so call it before other ranks wait in a process group.

        Raises:
            RequestError: the weights do not fit the model's configuration.
        """

    def fill(self, name: str, block: Shard, world: World) -> None:
        """Copy this rank's block (whole rows) of a tensor to ``block.local``, in its dtype.

        All ranks must call it, with the same names in the same order, and once per name.
        """

    def fingerprint(self) -> str | None:
        """Return a hash of the names and a sample of the values, or None if only one rank has them."""


def load_empty(
    model: ModelSection, seed: int, tokenizer: PreTrainedTokenizerBase | None = None, prefix: str = ""
) -> tuple[PreTrainedModel, Weights] | None:
    """Return the model in fp32 with parameters on the meta device and buffers on the CPU, and its weights.

    Filled with the weights, it equals ``load_model``, which rank 0 may call for them. Returns None if the structure of
    the model is only known after reading the weights.

    Args:
        prefix: prefix of the parameter names in the module that contains the model.

    Raises:
        RequestError: ``transformers`` does not have the architecture or a key, or files are incomplete.
    """
    from transformers import GenerationConfig

    config = load_config(model, tokenizer)
    empty = build_empty_model(config)
    weights = TensorWeights(lambda: load_model(model, torch.float32, seed, tokenizer), empty, prefix)
    directory = resolve(model).directory
    if directory is None:
        return finish_loading(empty, model, config), weights
    files = _list_tensors(directory)
    stored_model = build_skeleton(read_config(directory, model)) if model.implementation == "gpt" else empty
    if (stored_model.all_tied_weights_keys or {}).keys() & files.keys():
        return None  # tied weights are stored twice, and may differ
    if model.implementation == "gpt":
        return finish_loading(empty, model, config), weights
    if (directory / "generation_config.json").is_file():  # the file is optional
        try:
            empty.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, *NOT_MADE) as error:
            raise RequestError(f"model.name: {directory}/generation_config.json cannot be used: {error}") from error
    finish_loading(empty, model, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in _iterate_stored(empty)}
    as_they_are = all(name in files and files[name][1] == shape for name, shape in shapes.items())
    if has_conversions(empty) or not as_they_are:
        return empty, weights
    if unused := sorted(name for name in files.keys() - shapes.keys() if not name.endswith(UNUSED_TENSORS)):
        logger.warning("%s has %d more than the model uses: %s", directory, len(unused), ", ".join(unused[:3]))
    return empty, FileWeights({name: files[name][0] for name in shapes}, prefix)


def build_empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a causal model in fp32 with its parameters on the meta device and its buffers on the CPU."""
    from transformers import AutoModelForCausalLM

    with convert_creation_errors(config), _create_parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@contextmanager
def _create_parameters_on_meta() -> Iterator[None]:
    """Create modules without memory for their parameters within the context; buffers are created as usual."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore


class FileWeights:
    """Weights in safetensors files (by name), with the names and shapes of the model.

    Each file is only open while a tensor is read, because mapped pages count as memory of the process.
    """

    def __init__(self, files: Mapping[str, Path], prefix: str) -> None:
        self._files = files
        self._prefix = prefix

    def load(self, rank: int) -> None:
        """Do nothing: each rank reads its slices as it fills them."""

    def fill(self, name: str, block: Shard, world: World) -> None:
        """Copy this rank's rows of the parameter ``name`` to ``block``."""
        from safetensors import safe_open

        name = name.removeprefix(self._prefix)
        rows = slice(block.offset[0], block.offset[0] + block.local.shape[0]) if block.shape else ...
        with safe_open(self._files[name], framework="pt") as file:
            block.local.copy_(file.get_slice(name)[rows])

    def fingerprint(self) -> str | None:
        """Return a hash of the names and a sample of the values."""
        from safetensors import safe_open

        digest = hashlib.sha256()
        for path in dict.fromkeys(self._files.values()):
            with safe_open(path, framework="pt") as file:
                for name in (name for name, source in self._files.items() if source == path):
                    digest.update(name.encode())
                    _add_sample(digest, file.get_slice(name))
        return digest.hexdigest()[:16]


def _add_sample(digest: Any, stored: Any) -> None:
    """Add the shape, the dtype and the first elements of a stored tensor."""
    shape = stored.get_shape()
    digest.update(f"{shape} {stored.get_dtype()}".encode())
    first = stored[: max(1, _SAMPLED // max(1, shape[-1]))] if shape else stored[...]
    digest.update(first.reshape(-1)[:_SAMPLED].contiguous().view(torch.uint8).numpy().tobytes())


class TensorWeights:
    """Weights of a model that rank 0 loads and broadcasts."""

    def __init__(self, load: Callable[[], nn.Module], empty: nn.Module, prefix: str) -> None:
        self._load = load
        self._prefix = prefix
        self._expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _iterate_stored(empty)}
        self._tensors: dict[str, torch.Tensor] = {}
        self._sent = 0

    def load(self, rank: int) -> None:
        """Load the model on rank 0."""
        if rank != 0:
            return
        model = self._load()
        self._tensors = dict(_iterate_stored(model))
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}
        assert shapes == self._expected, "the weights make the model of their configuration"
        for parameter in model.parameters():  # the model may live on until garbage collection
            parameter.data = parameter.data.new_empty(0)

    def fill(self, name: str, block: Shard, world: World) -> None:
        """Copy this rank's part of the parameter ``name``, broadcast from rank 0, to ``block``."""
        name = name.removeprefix(self._prefix)
        tensor = self._tensors.pop(name, None)  # freed after the broadcast
        self._release(0 if tensor is None else tensor.nbytes)
        if world.size == 1:
            assert tensor is not None
            block.local.copy_(tensor)
            return
        local, begin = block.local.view(-1), block.offset[0] * _count_row_elements(block.shape) if block.shape else 0
        flat = None if tensor is None else tensor.reshape(-1)
        for sent, first in _iterate_sent_parts(flat, block.shape, self._expected[name][1], world):
            low, high = max(first, begin), min(first + len(sent), begin + len(local))
            if low < high:
                local[low - begin : high - begin].copy_(sent[low - first : high - first])

    def _release(self, count: int) -> None:
        """Return memory of broadcast tensors to the system, because this rank's shards grow meanwhile."""
        self._sent += count
        if self._sent > _SENT_BYTES:
            return_freed_memory()
            self._sent = count

    def fingerprint(self) -> str | None:
        """Return None: fresh weights have no file to identify."""
        return None


def _iterate_sent_parts(
    flat: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, world: World
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the elements of rank 0's tensor in bounded parts, each with its first element's index, on every rank."""
    total, max_elements = torch.Size(shape).numel(), _SENT_BYTES // dtype.itemsize
    for first in range(0, total, max_elements):
        size = min(max_elements, total - first)
        part = torch.empty(size, dtype=dtype, device=world.device)
        if flat is not None:
            part.copy_(flat[first : first + size])
        dist.broadcast(part, src=0)
        yield part, first


def _count_row_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel()


def _iterate_stored(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of the parameters, shared ones once, and of the buffers that are saved with them."""
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    saved_names = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved_names)


def _list_tensors(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and shape of every tensor in a model directory."""
    from safetensors import safe_open

    tensors_by_name: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            tensors_by_name |= {name: (file, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()}  # noqa: SIM118
    return tensors_by_name
