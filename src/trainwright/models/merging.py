"""Merge an adapter into its base: the result is a plain model, verified before it appears."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import RequestError, TrainingError
from trainwright.machine.detect import detect
from trainwright.models.adapters.attaching import (
    attach_adapter,
    iterate_adapted_layers,
    look_up_parameter_name,
    select_plain_names,
)
from trainwright.models.configuration import untie
from trainwright.models.files import compute_logit_difference, has_experts, replace_directory, save_model
from trainwright.models.load import finish_loading, load_config, load_model, load_tokenizer
from trainwright.models.resolve_model import resolve
from trainwright.models.text_part import read_causal
from trainwright.utils.activity import begin_activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainwright.recipe.sections.model import ModelSection

# Largest difference of logits relative to the largest logit: the order of additions differs, and in low precision every
# product is rounded too.
_SAME = {torch.float32: 1e-4}
_SAME_ROUNDED = 0.2
_CHECK_MEMORY = 1.5  # memory for the comparison in fp32, relative to the fp32 weights
_PROBE_TOKENS, _NEW_TOKENS = 24, 8
_PROMPT = "The"
_KEPT, _REPLACED, _ORIGINAL = ".base_layer", ".modules_to_save.default", ".original_module"


def merge(section: ModelSection, seed: int, out: Path, dtype: torch.dtype | None = None) -> tuple[int, float, str]:
    """Write the base of ``section`` merged with its adapter to ``out``, atomically and verified.

    The base is not quantized, even if the adapter was trained on a quantized one. It is memory-mapped and written
    matrix by matrix, so at most one shard of the result is in memory; the verification needs memory for one model.

    Args:
        dtype: dtype of the result; None: the dtype of the base.

    Returns:
        ``changed``, ``difference`` and ``sample`` of ``api.publishing.Merged``.

    Raises:
        RequestError: there is no adapter, ``out`` exists, or in ``dtype`` the result equals the base.
        TrainingError: the result does not compute the same as base and adapter.
    """
    section = _disable_quantization(section)
    _check_out(section, out)
    tokenizer = load_tokenizer(section)
    model = _load_with_adapter(section, seed, None, tokenizer)
    dtype = dtype or model.get_parameter(next(select_plain_names(model, dict(model.named_parameters())))).dtype
    changes: list[bool] = []
    begin_activity("merging the adapter into its base")
    with replace_directory(out) as temporary:
        config = _untie_replaced(model)
        save_model(
            temporary / "merged",
            config,
            _iterate_merged_tensors(model, dtype, changes),
            tokenizer,
            model.generation_config,
            dtype,
        )
        del model
        if not any(changes):
            raise RequestError(
                f"--dtype: in {dtype} the merged weights are those of the base: what the adapter adds is rounded away; "
                "store them in fp32"
            )
        begin_activity("checking the merged model by its logits")
        difference, sample = _verify(section, seed, temporary / "merged", dtype, tokenizer)
        for file in (temporary / "merged").iterdir():
            file.rename(temporary / file.name)
        (temporary / "merged").rmdir()
    return sum(changes), difference, sample


def _disable_quantization(section: ModelSection) -> ModelSection:
    if section.adapter.type == "none" or section.adapter.start_from is None:
        resolve(section)  # which names what is wrong with a model that does not exist
        raise RequestError(
            f"no adapter to merge: {section.name} is a full model; to merge an adapter into it, use --adapter"
        )
    adapter = section.adapter.model_copy(update={"quantization": "none", "stack": False})
    return section.model_copy(update={"adapter": adapter})


def _check_out(section: ModelSection, out: Path) -> None:
    base = resolve(section).directory
    if base is not None and out.resolve() == base.resolve():
        raise RequestError(f"--out: {out} is the base model, which is never overwritten; choose a new directory")
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new directory")


def _load_with_adapter(
    section: ModelSection, seed: int, dtype: torch.dtype | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load the base with its adapter; with dtype None in the stored dtype, memory-mapped from the files."""
    source = resolve(section).directory
    model: Any
    if dtype is None and source is not None:
        config = load_config(section, tokenizer)
        model = read_causal(source, config, dtype="auto")
        untie(model)
        finish_loading(model, section, config)
    else:
        model = load_model(section, dtype, seed, tokenizer)
    attach_adapter(model, section, seed)
    return model.eval()


def _iterate_merged_tensors(
    model: PreTrainedModel, dtype: torch.dtype, changes: list[bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the merged model's tensors by their plain names; append to ``changes`` whether each adapted one differs."""
    names = {module: name for name, module in model.named_modules()}
    layers = {
        f"{names[layer.get_base_layer()]}.{look_up_parameter_name(layer)}": layer
        for _, layer in iterate_adapted_layers(model)
    }
    state = model.state_dict(keep_vars=True)
    for name in select_plain_names(model, state):
        tensor, plain = state[name], name.replace(_KEPT, "").replace(_REPLACED, "")
        if _ORIGINAL in name:
            continue
        if name in layers:
            before = tensor.detach()
            tensor = _compute_merged_weight(layers[name]).to(dtype)
            changes.append(not torch.equal(tensor, before.to(dtype)))
        elif _REPLACED in name:
            original = state[name.replace(_REPLACED, _ORIGINAL)]
            changes.append(not torch.equal(tensor.to(dtype), original.to(dtype)))
        yield plain, tensor.detach()


@torch.no_grad()
def _compute_merged_weight(layer: Any) -> torch.Tensor:
    """Return the weight of an adapted layer as PEFT merges it, in fp32; the layer does not change."""
    parameter = getattr(layer.get_base_layer(), look_up_parameter_name(layer))
    original = parameter.data
    parameter.data = original.to(torch.float32, copy=True)
    try:
        layer.merge()
        return parameter.data
    finally:
        layer.merged_adapters.clear()
        parameter.data = original


def _untie_replaced(model: PreTrainedModel) -> Any:
    """Return the configuration, without tied embeddings if the head or the embedding was trained separately."""
    from copy import deepcopy

    config = deepcopy(model.config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights = [getattr(getattr(part, "modules_to_save", {}), "default", part) for part in (embedding, head)]
    if config.tie_word_embeddings and getattr(weights[0], "weight", None) is not getattr(weights[1], "weight", None):
        config.tie_word_embeddings = False
    return config


@torch.no_grad()
def _verify(
    section: ModelSection, seed: int, directory: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, str]:
    """Load the written model and compare it with base and adapter, with one model in memory at a time.

    Two comparisons: merged weights against base and adapter, and the written model against the rounded merged weights.
    Neither needs a tolerance for the rounding, which may be as large as a weak adapter.

    Returns:
        The relative difference of the logits from base and adapter, and a sample of generated text.
    """
    compute = torch.float32 if _can_compare_in_memory(directory, dtype) else dtype
    size = load_config(section).get_text_config().vocab_size
    ids = torch.randint(size, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    apart: Any = _load_with_adapter(section, seed, compute, tokenizer)
    apart.to(compute)
    expected_logits = _compute_logits(apart, ids)
    for _, layer in iterate_adapted_layers(apart):
        getattr(layer.get_base_layer(), look_up_parameter_name(layer)).data = _compute_merged_weight(layer).to(compute)
        layer._disable_adapters = True
    _check_same(
        "merged",
        compute_logit_difference(_compute_logits(apart, ids), expected_logits, mixture=has_experts(apart)),
        compute,
    )
    for parameter in apart.parameters():
        parameter.data = parameter.data.to(dtype).to(compute)
    rounded_logits = _compute_logits(apart, ids)
    del apart
    model = read_causal(directory, dtype=compute).eval()
    logits = _compute_logits(model, ids)
    _check_same("written", compute_logit_difference(logits, rounded_logits, mixture=has_experts(model)), compute)
    start = tokenizer(_PROMPT, return_tensors="pt", add_special_tokens=False)
    output_ids = model.generate(**start, max_new_tokens=_NEW_TOKENS, do_sample=False)
    sample = str(tokenizer.decode(output_ids[0].tolist(), skip_special_tokens=True))
    return compute_logit_difference(logits, expected_logits, mixture=has_experts(model)), sample


def _compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _check_same(stage: str, difference: float, compute: torch.dtype) -> None:
    if not difference <= _SAME.get(compute, _SAME_ROUNDED):
        raise TrainingError(
            f"the model as {stage} does not compute the same as base model and adapter: logits differ by "
            f"{difference:.2g} of the largest; nothing was written"
        )


def _can_compare_in_memory(directory: Path, dtype: torch.dtype) -> bool:
    """Return whether the model in ``directory``, stored in ``dtype``, fits in memory for a comparison in fp32."""
    stored_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return 4 / dtype.itemsize * stored_bytes * _CHECK_MEMORY < detect().usable_bytes
