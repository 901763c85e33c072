"""Write a model as a ``transformers`` directory, atomically, and check it.

The check: what ``from_pretrained`` loads has the trained weights and computes the trained model's logits. It needs
memory for the whole model once more, and is left out where that is not free.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import TrainingError
from trainwright.machine.detect import detect
from trainwright.models.configuration import convert_creation_errors, restore_source
from trainwright.models.resolve_model import INDEX, weight_files
from trainwright.models.safetensors_files import write_weights
from trainwright.models.text_part import find_whole, iterate_whole_tensors, read_causal, write_whole_settings
from trainwright.parallel.constants import SHARD_BYTES, SUMMED_ELEMENTS
from trainwright.recipe.sections.model import OWN
from trainwright.utils.paths import sync, sync_tree
from trainwright.utils.text import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def save_model(
    directory: Path,
    config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None = None,
    dtype: torch.dtype | None = None,
    check: Callable[[Path, Mapping[str, int]], None] | None = None,
) -> dict[str, int]:
    """Save a model to ``directory`` so that ``AutoModelForCausalLM.from_pretrained`` loads the same weights.

    The built-in GPT is saved as the equivalent architecture of transformers, and the language model of several
    modalities as a part of the whole model. Files are written to a temporary
    directory, flushed and renamed; an existing directory is replaced afterwards, and kept if anything fails. Training
    settings (``model.dropout``) are removed from the config.

    Args:
        config: of the model; not modified.
        tensors: the state dict, or its items one by one (then at most one shard is in memory). Names are those of the
            bare model; copies of tied weights are optional.
        dtype: dtype of floating-point tensors; fp32 if None.
        check: is called with the written directory and the checksums before the directory appears.

    Returns:
        The checksum of every tensor as it is stored, by its name in the model, for ``check_saved``.

    Raises:
        TrainingError: a tensor is missing, unknown, has a wrong shape or a value that ``dtype`` cannot represent, or
            weights that the configuration ties differ.
        OSError: the disk is full.
    """
    import torch

    from trainwright.models.gpt.conversion import convert_to_published

    with replace_directory(Path(directory)) as temporary:
        dtype = dtype or torch.float32
        whole_directory = find_whole(config)
        config, tensors = convert_to_published(restore_source(copy.deepcopy(config)), tensors)
        model = build_skeleton(config)
        checksums: dict[str, int] = {}
        items = tensors.items() if isinstance(tensors, Mapping) else tensors
        checked_tensors = _convert_names(_convert_for_storage(items, dtype, checksums), model)
        if whole_directory is not None:
            checked_tensors = iterate_whole_tensors(checked_tensors, weight_files(whole_directory), model)
        _write_weights(temporary, checked_tensors)
        _check_ties(model.all_tied_weights_keys or {}, checksums)
        _write_settings(temporary, config, model, tokenizer, generation_config, dtype)
        if whole_directory is not None:
            write_whole_settings(config, temporary, whole_directory)
        if check is not None:
            check(temporary, checksums)
    return checksums


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Provide an empty directory that replaces ``directory`` after a flush, or is removed on failure."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for stale in directory.parent.glob(f".{directory.name}.tmp-*"):
        shutil.rmtree(stale)
    temporary = directory.parent / f".{directory.name}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        yield temporary
        _flush(temporary)
        _replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, with the names, the shapes and the ties of its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # the attention implementation of the training may not be registered
    with convert_creation_errors(config), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def compute_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements as integers, modulo 2^64: any flipped bit changes it."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    elements = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
    return torch.stack([part.sum(dtype=torch.int64) for part in elements.split(SUMMED_ELEMENTS)]).sum()


def _convert_for_storage(
    items: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, checksums: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors on the CPU in ``dtype``; add the checksum of each to ``checksums``."""
    import torch

    for name, value in items:
        stored_tensor = value.detach().to(device="cpu", dtype=dtype if value.is_floating_point() else None).contiguous()
        if dtype is torch.float16 and value.is_floating_point() and not stored_tensor.isfinite().all():
            raise TrainingError(
                f"the model cannot be saved in fp16: {name} has values of up to {float(value.abs().max()):.3g}, and "
                "fp16 ends at 65,504; save it in bf16 or fp32 (model.save_dtype, --dtype)"
            )
        checksums[name] = int(compute_checksum(stored_tensor))
        yield name, stored_tensor


def _check_ties(tied: Mapping[str, str], checksums: Mapping[str, int]) -> None:
    """Raise TrainingError if a weight that is stored as part of another one has other values."""
    for name, source in tied.items():
        if name in checksums and source in checksums and checksums[name] != checksums[source]:
            raise TrainingError(
                f"the model cannot be saved: {name} differs from {source}, but the configuration ties the two"
            )


def _convert_names(
    tensors: Iterable[tuple[str, torch.Tensor]], model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to store, under the names of the architecture's published checkpoints."""
    from transformers.core_model_loading import revert_weight_conversion

    items = _check_expected(tensors, model)
    if not has_conversions(model):
        yield from items
    else:  # several tensors become one, so all of them are needed at once
        yield from revert_weight_conversion(model, dict(items)).items()


def _check_expected(
    items: Iterable[tuple[str, torch.Tensor]], model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    left_out = {*(model.all_tied_weights_keys or {}), *(model._keys_to_ignore_on_save or ())}
    missing = shapes.keys() - left_out
    for name, value in items:
        if name not in shapes:
            raise TrainingError(f"the model cannot be saved: {name} is not a tensor of {type(model).__name__}")
        if tuple(value.shape) != shapes[name]:
            raise TrainingError(f"the model cannot be saved: {name} is {tuple(value.shape)}, not {shapes[name]}")
        if name in missing:
            missing.remove(name)
            yield name, value
    if missing:
        raise TrainingError(f"the model cannot be saved: without {', '.join(sorted(missing)[:5])}")


def has_conversions(model: PreTrainedModel) -> bool:
    """Return whether transformers converts tensors of the files to obtain those of the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _write_weights(directory: Path, items: Iterable[tuple[str, torch.Tensor]]) -> None:
    weight_map: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    count = size = total = 0

    def write() -> None:
        nonlocal count, size
        count += 1
        write_weights(shard, directory / f"shard-{count}")
        weight_map.update(dict.fromkeys(shard, count))
        shard.clear()
        size = 0

    for name, value in items:
        tensor = value.contiguous()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            write()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    _name_shards(directory, weight_map, count, total)


def _name_shards(directory: Path, weight_map: Mapping[str, int], count: int, total: int) -> None:
    """Rename the shards as transformers does, now that their number is known; write the index if there are several."""
    if count == 1:
        (directory / "shard-1").rename(directory / "model.safetensors")
        return
    names = {i: f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    for i, name in names.items():
        (directory / f"shard-{i}").rename(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {k: names[i] for k, i in sorted(weight_map.items())}}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_settings(
    directory: Path,
    config: PretrainedConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    dtype: torch.dtype,
) -> None:
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    if config.model_type == OWN:
        from trainwright.models.own_module import OwnConfig, keep_source

        assert isinstance(config, OwnConfig)
        keep_source(config, directory)
    config.save_pretrained(directory)
    if generation_config is not None:
        generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _flush(directory: Path) -> None:
    """Flush every file and the directory to the disk before the rename."""
    mode = next(directory.glob("*.json")).stat().st_mode
    for path in directory.glob("*.safetensors"):
        path.chmod(mode)  # safetensors creates files that only their owner can read
    sync_tree(directory)


def _replace(temporary: Path, directory: Path) -> None:
    old = directory.parent / f".{directory.name}.old-{os.getpid()}"
    if directory.exists():
        directory.rename(old)  # rename cannot replace a non-empty directory
    temporary.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
    sync(directory.parent)


# Largest difference of logits relative to the largest logit. Weights are compared exactly before, so this only has to
# tell another computation from rounding.
_SAME, _SAME_ON_DEVICES, _SAME_ROUNDED = 1e-3, 2e-2, 0.2


def compute_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, L, V] of a model in evaluation mode, in the dtype that it computes in."""
    import torch

    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits


def has_experts(model: nn.Module) -> bool:
    """Return whether a model is a mixture of experts, by its modules."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def compute_logit_difference(logits: torch.Tensor, expected: torch.Tensor, *, mixture: bool) -> float:
    """Return the largest difference of logits [B, L, V], relative to the largest logit.

    In a ``mixture`` of experts, rounding sends some tokens to other experts, and their logits differ by any amount. So
    it is that of the median position.
    """
    import torch

    positions = (logits.float() - expected.float()).abs().amax(-1).flatten()
    difference = positions.median() if mixture else positions.max()
    return float(difference / expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def check_saved(
    directory: Path, checksums: Mapping[str, int], input_ids: torch.Tensor, expected: torch.Tensor | None
) -> str | None:
    """Load the model in ``directory`` and compare it with the one that was saved.

    Args:
        checksums: what ``save_model`` returned.
        input_ids: [B, L], on any device.
        expected: the logits of the model that was saved; None: only weights are compared.

    Returns:
        Why it was not compared: it is larger than the free memory. None if it was.

    Raises:
        TrainingError: a weight or the logits differ.
    """
    import torch

    total, free = sum(file.stat().st_size for file in directory.glob("*.safetensors")), detect().usable_bytes
    if total > free:
        return (
            f"{directory} was not compared with the trained model: it has {format_bytes(total)}, and "
            f"{format_bytes(free)} of memory are free"
        )
    loaded_model = read_causal(directory, dtype="auto")
    stored_dtype = loaded_model.config.dtype
    for name, tensor in loaded_model.state_dict().items():
        exact = tensor.to(stored_dtype) if tensor.is_floating_point() else tensor
        if name in checksums and int(compute_checksum(exact)) != checksums[name]:
            raise TrainingError(f"the model in {directory} is not the trained one: {name} loads with other values")
    if expected is None:
        return None
    difference = compute_logit_difference(
        compute_logits(loaded_model.eval(), input_ids.cpu()), expected.cpu(), mixture=has_experts(loaded_model)
    )
    exactly = expected.dtype is stored_dtype is torch.float32
    tolerance = _SAME_ROUNDED if not exactly else _SAME if expected.device.type == "cpu" else _SAME_ON_DEVICES
    if not difference <= tolerance:
        raise TrainingError(
            f"the model in {directory} does not compute what was trained: logits differ by {difference:.2g} of the "
            "largest"
        )
    return None
