"""Load the tokenizer, the configuration and the weights of a recipe's model section."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.chat_templates import list_arguments, set_defaults, set_template
from trainwright.errors import RequestError
from trainwright.machine.allocator import leave_to_system
from trainwright.models import configuration
from trainwright.models.added_tokens import count_needed_rows
from trainwright.models.resolve_model import (
    check_directory,
    choose_saved_precision,
    complete_tokenizer,
    is_here,
    resolve,
)
from trainwright.models.text_part import find_whole, read_causal
from trainwright.models.tokenization import list_token_ids
from trainwright.recipe.sections.model import OWN, AdapterSection, ModelSection
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
# Checkpoint tensors that causal language models do not use; no warning is given for them.
UNUSED_TENSORS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", "attention.masked_bias")


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``model`` or of ``model.tokenizer``, with ``model.added_tokens`` and
    ``model.chat_template``; needs no weights.

    Raises:
        RequestError: there is no tokenizer, or the template is neither a file nor Jinja text.
    """
    tokenizer = complete_tokenizer(model)
    if model.chat_template is not None:
        set_template(tokenizer, model.chat_template)
    if model.template_arguments:
        _set_arguments(tokenizer, model.template_arguments)
    return tokenizer


def load_config(model: ModelSection, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """Return the configuration of ``model``, including ``model.overrides`` and ``model.dropout``; needs no weights.

    A fresh model, or one with ``model.tokenizer``, gets the special token ids of the tokenizer
    (``load_tokenizer(model)`` if None); a fresh model also gets its vocabulary size.

    Raises:
        RequestError: ``transformers`` does not have the architecture or a key.
    """
    source = resolve(model, weights=False)
    own_tokenizer = source.directory is None or model.tokenizer is not None
    if own_tokenizer and tokenizer is None:
        tokenizer = load_tokenizer(model)
    if source.directory is None:
        assert source.config is not None and tokenizer is not None
        config = configuration.build_fresh_config(source.config, tokenizer)
    else:
        config = configuration.read_config(source.directory, model)
        if model.added_tokens.names:
            text = config.get_text_config()
            text.vocab_size = count_needed_rows(
                text.vocab_size, tokenizer or complete_tokenizer(model), model.added_tokens
            )
        if model.implementation == "gpt":
            config = _convert_to_gpt(config)
        if model.is_own or config.model_type == OWN:
            _name_class(config, model, source.directory)
        if own_tokenizer:
            assert tokenizer is not None
            _fit(config, tokenizer)
    if model.dropout is not None:
        configuration.set_dropout(config, model.dropout)
    return config


def read_max_positions(model: ModelSection, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
    """Return the maximum number of positions of ``model``, or None if unlimited."""
    return getattr(load_config(model, tokenizer).get_text_config(), "max_position_embeddings", None)


def check_adapter(section: ModelSection, seed: int) -> str | None:
    """Check ``model.adapter`` for this model before any weights are loaded; return what it leaves out, or None.

    Raises:
        RequestError: the adapter belongs to another base, sets keys that do not apply to it, or a target matches
            nothing.
    """
    from trainwright.models.adapters.attaching import check_fits
    from trainwright.models.adapters.config import build_peft_config, check_added_tokens, describe_experts_left_out
    from trainwright.models.adapters.files import identify_base_model
    from trainwright.models.files import build_skeleton

    if section.adapter.type == "none":
        return None
    model = build_skeleton(load_config(section))
    build_peft_config(section.adapter, model, identify_base_model(section, seed))
    left_out = describe_experts_left_out(section.adapter, model)
    check_added_tokens(section, model)
    check_fits(model, section, seed)
    return left_out


def check_files(section: ModelSection, seed: int) -> list[str]:
    """Check the tokenizer, the configuration and the adapter of a model in a directory or the Hugging Face cache.

    Returns:
        Lines about what a run would leave out or refuse.

    Raises:
        RequestError: as for a run.
    """
    lines = []
    complete = section.name is None or is_here(section.name, weights=True)
    if complete:
        resolve(section)
    tokenizer = load_tokenizer(section)
    size = load_config(section, tokenizer).get_text_config().vocab_size
    if len(tokenizer) > size:
        beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= size)
        examples = ", ".join(token for _, token in beyond[:4]) + (", …" if len(beyond) > 4 else "")
        lines.append(
            f"model.name: the tokenizer has {len(tokenizer):,} tokens and the model {size:,} embeddings: rows with the "
            f"others ({examples}) cannot be trained on"
        )
    left_out = check_adapter(section, seed) if complete else None
    return lines if left_out is None else [*lines, left_out]


def load_model(
    model: ModelSection,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Return the model on the CPU in ``dtype`` (fp32 if None), in evaluation mode.

    A fresh model is initialized from ``seed`` in fp32, so that its weights are the same for all dtypes, without
    changing the global random state. Weights are read only from safetensors and are never in memory twice. With
    ``model.adapter.quantization``, linear layers are quantized one by one as they are read; ``attach_adapter`` adds the
    adapter itself.

    Raises:
        RequestError: weights are missing, damaged or do not fit the configuration.
    """
    import torch

    dtype = dtype or torch.float32
    config = load_config(model, tokenizer)
    source = resolve(model)
    begin_activity(
        "initializing the model" if source.directory is None else f"loading the weights of {source.directory}"
    )
    if source.directory is None:
        loaded_model = build_fresh_model(config, seed, dtype)
        _quantize(loaded_model, model.adapter)
    else:
        theirs = configuration.read_config(source.directory, model) if model.implementation == "gpt" else config
        loaded_model = _load_weights(source.directory, theirs, dtype, model.adapter)
        if model.implementation == "gpt":
            from trainwright.models.gpt.config import GPTConfig
            from trainwright.models.gpt.conversion import from_transformers

            assert isinstance(config, GPTConfig)
            config.tie_word_embeddings = loaded_model.config.tie_word_embeddings
            loaded_model = from_transformers(loaded_model, config)
    return finish_loading(loaded_model, model, config)


def finish_loading(loaded: PreTrainedModel, model: ModelSection, config: PretrainedConfig) -> PreTrainedModel:
    """Set evaluation mode and the special ids of the generation config; return the model.

    An adapter may have been saved with a generation config and with a tokenizer that ends texts at another token.
    """
    from transformers import GenerationConfig

    adapter = None if model.adapter.start_from is None else expand_user_path(model.adapter.start_from)
    if adapter is not None and (adapter / "generation_config.json").is_file():
        loaded.generation_config = GenerationConfig.from_pretrained(adapter, local_files_only=True)
    generation = loaded.generation_config
    if model.tokenizer is not None and generation is not None:
        earlier = list_token_ids(generation.eos_token_id)
        for name in configuration.SPECIAL_IDS:
            setattr(generation, name, getattr(config, name, None))
        if adapter is not None and expand_user_path(model.tokenizer) == adapter:  # the vocabulary is still the model's
            stops = list(dict.fromkeys([*list_token_ids(generation.eos_token_id), *earlier]))
            generation.eos_token_id = stops if len(stops) > 1 else next(iter(stops), None)
    return loaded.eval()


def choose_dtype_to_save(model: ModelSection) -> torch.dtype:
    """Return the data type in which a full model is saved after training (``choose_saved_precision``)."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes[choose_saved_precision(model, model.fresh or {})]


def build_fresh_model(config: PretrainedConfig, seed: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model with this configuration on the CPU, initialized from ``seed``, in ``dtype`` (fp32 if None)."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = dtype or torch.float32
    with (
        configuration.convert_creation_errors(config),
        torch.random.fork_rng(devices=[]),
    ):  # the model is created on the CPU, so no other generator is used
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stored_names = model.state_dict().keys()  # other tensors, such as rotary frequencies, stay in fp32 as when loaded
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in stored_names and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    return model


def _load_weights(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, adapter: AdapterSection
) -> PreTrainedModel:
    check_directory(directory, "model.name")
    # Read in the dtype of the file, weights stay memory-mapped until each is quantized.
    as_read = dtype if adapter.quantization == "none" else "auto"
    try:
        result = read_causal(directory, config, dtype=as_read, output_loading_info=True)
    except (RuntimeError, OSError, *configuration.NOT_MADE) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise RequestError(f"model.name: {directory} cannot be loaded: {reason}") from error
    model, report = result
    if absent := sorted(report["missing_keys"]):
        raise RequestError(
            f"model.name: {directory} lacks {format_plural(len(absent), 'tensor')} of {type(model).__name__} "
            f"({', '.join(absent[:3])}); its weights do not match its config.json"
        )
    unused = sorted(k for k in report["unexpected_keys"] if not k.endswith(UNUSED_TENSORS))
    if unused and find_whole(config) is None:  # else they are of other modalities
        logger.warning("%s: %d tensors are not used: %s", directory, len(unused), ", ".join(unused[:3]))
    configuration.untie(model)
    _quantize(model, adapter)
    _own_memory(model, dtype)
    return model


def _convert_to_gpt(config: PretrainedConfig) -> PretrainedConfig:
    from trainwright.models.gpt.conversion import convert_config
    from trainwright.models.gpt.model import register

    register()
    try:
        return convert_config(config)
    except RequestError as error:
        raise RequestError(f"model.implementation: {error}; set it to transformers") from None


def _name_class(config: PretrainedConfig, model: ModelSection, directory: Path) -> None:
    """Set the class of a saved module to the one that the recipe names."""
    if config.model_type != OWN:
        raise RequestError(
            f"model.implementation: {directory} is a {config.model_type}, not a saved module of "
            f"{model.implementation}; set it to transformers"
        )
    config.implementation = model.implementation if model.is_own else None


def _quantize(model: PreTrainedModel, adapter: AdapterSection) -> None:
    if adapter.quantization != "none":
        from trainwright.models.adapters.files import list_fully_trained
        from trainwright.models.quantization import quantize

        quantize(
            model,
            adapter.quantization,
            double=adapter.double_quantization,
            keep=list_fully_trained(adapter),
            experts=adapter.quantize_experts,
        )


def _own_memory(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert weights to ``dtype``, and copy views of the memory-mapped file one at a time.

    Mapped weights would be copied page by page in the first optimizer step, have the alignment of the file (which
    changes the last bits of matrix products), and break if the file is truncated during training.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() % 64:
            mapped_data = tensor.data
            tensor.data = mapped_data.clone()
            leave_to_system(mapped_data.data_ptr(), mapped_data.nbytes)  # otherwise the whole file stays in memory too


def _fit(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the special ids of another tokenizer; raise RequestError if its vocabulary exceeds the embeddings."""
    size = config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise RequestError(
            f"model.tokenizer: it has {len(tokenizer):,} tokens, but the model has only {size:,} embeddings; remove "
            "model.tokenizer to use the model's tokenizer"
        )
    for name in configuration.SPECIAL_IDS:
        setattr(config, name, getattr(tokenizer, name))


def _set_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Write default values of variables into the chat template of a tokenizer, or into each of several."""
    template = tokenizer.chat_template
    if template is None:
        raise RequestError("model.template_arguments: the tokenizer has no chat template; set model.chat_template")
    several = template if isinstance(template, dict) else {"": template}
    variables = {name: list_arguments(text) for name, text in several.items()}
    for argument in arguments:
        if not any(argument in names for names in variables.values()):
            read = ", ".join(sorted(set().union(*variables.values()))) or "no arguments"
            raise RequestError(
                f"model.template_arguments.{argument}: the chat template does not read it; it reads {read}"
            )
    new_templates = {
        name: set_defaults(text, {key: value for key, value in arguments.items() if key in variables[name]})
        for name, text in several.items()
    }
    tokenizer.chat_template = new_templates if isinstance(template, dict) else new_templates[""]
