"""Read a model's configuration, and the parts that a recipe sets: a fresh one, its vocabulary, the dropout."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.models.gpt.variants import MODEL_TYPE as GPT
from trainwright.models.supported import check_supported
from trainwright.recipe.files import read_json
from trainwright.recipe.modalities import select_text_config
from trainwright.recipe.sections.model import OLDER_ROPE_KEYS, OWN, ModelSection, check_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
WHOLE = "_whole_model"  # attribute of a config: the directory of the model of several modalities that it is a part of
SOURCE_DROPOUT = "_source_dropout"  # attribute of a config: the previous dropout values

# Exceptions that module constructors raise for inconsistent values.
NOT_MADE = (
    *(KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError, NotImplementedError),
    *(AssertionError, ImportError),
)
# Keys of a file that do not describe the language model itself, and make transformers fetch kernels, read other files,
# or create tables of any size.
_IGNORED = {
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
    *("_experts_implementation", "_experts_implementation_internal", "transformers_weights", "auto_map"),
    *("custom_pipelines", "num_labels", "id2label", "label2id", "problem_type", "output_attentions"),
    *("output_hidden_states", "return_dict", "torchscript", "pruned_heads", "chunk_size_feed_forward"),
    *("base_model_tp_plan", "base_model_pp_plan", "_name_or_path", "name_or_path"),
    "implementation",  # of a module of one's own: code, which only a recipe names
}


def drop_ignored(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration without keys that do not describe the model, also in its sub-configurations."""
    return {
        key: drop_ignored(value) if isinstance(value, Mapping) and key.endswith("config") else value
        for key, value in fields.items()
        if key not in _IGNORED
    }


@contextmanager
def convert_creation_errors(config: PretrainedConfig) -> Iterator[None]:
    """Convert errors while a model is created from ``config`` to a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except NOT_MADE as error:
        reason = f"{type(error).__name__}: {error}"
        raise RequestError(f"model: cannot create a {config.model_type} from this configuration ({reason})") from error


def build_fresh_config(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the configuration of a new model from the recipe's ``model.config``.

    By default ``vocab_size`` is the tokenizer's length, and the special ids are the tokenizer's.

    Raises:
        RequestError: an architecture or key is unknown (the message has the nearest known one), or a value is invalid.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dict(fields)
    kind = _check_causal_kind(fields)
    del fields["model_type"]
    _check_keys(fields, CONFIG_MAPPING[kind], "model.config")
    size = fields.setdefault("vocab_size", len(tokenizer))
    if isinstance(size, int) and size < len(tokenizer):
        raise RequestError(
            f"model.config.vocab_size: {size:,} is less than the tokenizer's {len(tokenizer):,} tokens; remove it"
        )
    for name in SPECIAL_IDS:
        fields.setdefault(name, getattr(tokenizer, name))
    return build_config(kind, fields)


def build_config(kind: str, fields: Mapping[str, Any], key: str = "model.config") -> PretrainedConfig:
    """Return the configuration of a model type; raise RequestError, which names ``key``, for values that it refuses."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # validation errors of huggingface_hub, or errors in a config's own arithmetic
        raise RequestError(f"{key}: {kind}: {' '.join(str(error).split())}") from error


def untie(model: PreTrainedModel) -> None:
    """Correct the configuration of a loaded model if it ties the head to the embedding and the files do not.

    If they have both with different values, transformers loads both.
    """
    tied_pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if any(model.get_parameter_or_buffer(a) is not model.get_parameter_or_buffer(b) for a, b in tied_pairs):
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def list_layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration of each layer, where transformers has one; otherwise the one of all layers."""
    return list(config.per_layer_config) if config.is_heterogeneous else [config]


def set_dropout(config: PretrainedConfig, probability: float) -> None:
    """Set all dropout probabilities of ``config``; ``restore_source`` restores them.

    Raises:
        RequestError: the architecture has no dropout; the message names it.
    """
    has_dropout = False
    for part in _list_parts(config):
        before = dict(_iterate_dropout_values(part))
        for name in before:
            setattr(part, name, float(probability))
        setattr(part, SOURCE_DROPOUT, before)
        has_dropout |= bool(before)
    if not has_dropout and probability > 0:
        raise RequestError(f"model.dropout: {config.model_type} has no dropout; remove model.dropout")


def restore_source(config: PretrainedConfig) -> PretrainedConfig:
    """Restore in place the values that training changed in ``config``, and return it as files have it."""
    vars(config).pop(WHOLE, None)
    for part in _list_parts(config):
        for name, value in part.__dict__.pop(SOURCE_DROPOUT, {}).items():
            setattr(part, name, value)
    return config


def _list_parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def _iterate_dropout_values(config: PretrainedConfig) -> Iterator[tuple[str, float]]:
    """Yield the dropout probabilities of a language model, without those of classification heads."""
    for name, value in vars(config).items():
        of_the_model = not name.startswith(("classifier", "summary", "_"))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if of_the_model and is_number and ("dropout" in name or name.endswith("pdrop")):
            yield name, value


def _check_causal_kind(fields: Mapping[str, Any]) -> str:
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise RequestError("model.config.model_type: missing; set it to an architecture, such as llama")
    check_supported(fields, "model.config")
    register(kind)
    return kind


def register(model_type: object) -> None:
    """Register an architecture that transformers does not have; do nothing for others."""
    if model_type == GPT:
        from trainwright.models.gpt import model as gpt

        gpt.register()
    elif model_type == OWN:
        from trainwright.models import own_module as own

        own.register()


def _suggest_nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def read_config(directory: Path, model: ModelSection | None = None) -> PretrainedConfig:
    """Return the configuration in ``directory``, with the overrides of ``model``; of several modalities, that of the
    language model.

    Raises:
        RequestError: it is not of a decoder-only language model, or does not have a key of the overrides.
    """
    from transformers import AutoConfig

    file, location = directory / "config.json", f"model.name: {directory}"
    if file.is_file() and isinstance(fields := read_json(file, f"model.name: {file}"), dict):
        check_sizes(fields, f"model.name: {file}")
        check_supported(fields, location)
        register(fields.get("model_type"))
    else:
        raise RequestError(f"{location}/config.json is not a model's configuration, which is a JSON object")
    if model is not None:
        fields = dict(model.override_configuration(fields))
        check_sizes(model.overrides, "model.overrides")
    try:
        with TemporaryDirectory(prefix="trainwright-") as directory_name:
            (Path(directory_name) / "config.json").write_text(json.dumps(drop_ignored(fields)), encoding="utf-8")
            config = AutoConfig.from_pretrained(directory_name, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # json, huggingface_hub and validation errors share no base class
        raise RequestError(f"{location}/config.json cannot be used: {error}") from error
    if select_text_config(fields) is not fields:
        config = build_text_config(config, fields, directory)
    if model is not None:
        _check_keys(model.overrides, type(config), "model.overrides")
    config.name_or_path = str(directory)
    return config


def build_text_config(whole: PretrainedConfig, fields: Mapping[str, Any], directory: Path) -> PretrainedConfig:
    """Return the configuration of the language model in the whole model in ``directory``, whose file has ``fields``."""
    config = copy.deepcopy(whole.get_text_config())
    for name in SPECIAL_IDS:
        if (value := select_text_config(fields).get(name)) is not None:
            setattr(config, name, value)
    config.tie_word_embeddings = whole.tie_word_embeddings  # its default depends on the architecture
    setattr(config, WHOLE, str(directory))
    return config


def list_keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Return the keys of a kind of configuration, without ``model_type``."""
    keys = {f.name for f in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    return keys | set(OLDER_ROPE_KEYS) if "rope_parameters" in keys else keys


def _check_keys(fields: Mapping[str, Any], config_class: type[PretrainedConfig], where: str) -> None:
    keys = list_keys(config_class)
    if unknown := [key for key in fields if key not in keys]:
        kind = config_class.model_type
        raise RequestError(
            "\n".join(f"{where}.{key}: not a key of {kind}{_suggest_nearest(key, keys)}" for key in unknown)
        )


@contextmanager
def disable_progress_bars(*, reports: bool = True) -> Iterator[None]:
    """Read or write weights without the progress bars of transformers, or without its ``reports`` too."""
    from transformers.utils import logging as progress

    enabled: Any = progress.is_progress_bar_enabled()
    verbosity: Any = progress.get_verbosity()
    progress.disable_progress_bar()
    if not reports:
        progress.set_verbosity_error()
    try:
        yield
    finally:
        progress.set_verbosity(verbosity)
        if enabled:
            progress.enable_progress_bar()
