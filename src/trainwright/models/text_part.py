"""The language model in a model of several modalities: what is trained of Gemma 3, Llama 4, Qwen3.5, Mistral 3, ….

It is read from the files of the whole model, trained as the causal model that transformers has for it, and saved as
the whole model: with its trained weights, and everything else as it was.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.models.configuration import NOT_MADE, WHOLE, disable_progress_bars, read_config
from trainwright.recipe.files import read_json
from trainwright.recipe.modalities import select_text_config
from trainwright.recipe.sections.model import OLDER_ROPE_KEYS

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_INDEX = ".index.json"
# Names of the language model's parts in the whole model, and in the causal model. Files are named as in transformers 5,
# or as in versions before.
_NAMES = {
    r"^(?:model\.)?language_model\.model\b": "model",
    r"^(?:model\.)?language_model\.lm_head\b": "lm_head",
    r"^model\.(?:language_model|text_model)\b": "model",
}


def find_whole(config: PretrainedConfig) -> Path | None:
    """Return the directory of the whole model that a configuration is a part of."""
    directory = getattr(config, WHOLE, None)
    return None if directory is None else Path(directory)


def read_causal(directory: Path, config: PretrainedConfig | None = None, **options: Any) -> Any:
    """Return what ``AutoModelForCausalLM.from_pretrained`` does; of a model of several modalities, its language model.

    Only safetensors are read, and no code of the directory is run.

    Args:
        config: of the model; None: that of the directory.
    """
    from transformers import AutoModelForCausalLM

    if config is None and is_whole(directory):
        config = read_config(directory)
    is_part = config is not None and find_whole(config) is not None
    if is_part:
        options["key_mapping"] = _NAMES
    with disable_progress_bars(reports=not is_part):  # it would list the tensors of other modalities
        return AutoModelForCausalLM.from_pretrained(
            directory, config=config, use_safetensors=True, trust_remote_code=False, local_files_only=True, **options
        )


def is_whole(directory: Path) -> bool:
    """Return whether a directory has a model of several modalities."""
    file = directory / "config.json"
    fields = read_json(file) if file.is_file() else None
    return isinstance(fields, dict) and select_text_config(fields) is not fields


def iterate_whole_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], files: Sequence[Path], causal: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a trained language model by their names in the ``files`` of the whole model, then the
    tensors of the files that the ``causal`` model does not have.
    """
    from safetensors import safe_open

    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            names |= {convert_to_causal_name(name): name for name in reader.keys()}  # noqa: SIM118 (not a mapping)
    written_names = {names[name] for name in names.keys() & causal.state_dict().keys()}
    for name, tensor in tensors:
        written_names.add(stored_name := names.get(convert_to_causal_name(name), name))
        yield stored_name, tensor
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in sorted(set(reader.keys()) - written_names):
                yield name, reader.get_tensor(name)


def convert_to_causal_name(name: str) -> str:
    """Return the causal model's name of a module or tensor of the whole model's language model; others as they are."""
    for pattern, replacement in _NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def convert_to_whole_name(name: str, whole: Path) -> str:
    """Return the name in the model in ``whole`` of a module or tensor of the causal model."""
    part, dot, rest = name.partition(".")
    return map_part_names(whole)[part] + dot + rest


@lru_cache
def map_part_names(whole: Path) -> Mapping[str, str]:
    """Return the names in the model in ``whole`` of the parts of its causal model, its decoder and its head.

    Raises:
        RequestError: transformers cannot build the model here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(whole, trust_remote_code=False, local_files_only=True)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
            causal: PreTrainedModel = AutoModelForCausalLM.from_config(config.get_text_config())
    except NOT_MADE as error:
        raise RequestError(f"model.name: {whole}, which the adapter is to load on, cannot be built: {error}") from error
    decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    kinds = {type(module): name for name, module in reversed(list(model.named_modules()))}
    ours, theirs = ({module: name for name, module in root.named_modules()} for root in (causal, model))
    return {ours[decoder]: kinds[type(decoder)], ours[head]: theirs[model.get_output_embeddings()]}


def write_whole_settings(config: PretrainedConfig, directory: Path, whole: Path) -> None:
    """Write the configuration of the model in ``whole`` with ``config`` as that of its language model, and copy its
    other files, such as the processor of images, unless ``directory`` has them.
    """
    fields = read_json(whole / "config.json")
    text, changes = (json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True))
    before = {name: value for name, value in fields["text_config"].items() if name not in OLDER_ROPE_KEYS}
    fields["text_config"] = {**before, **{name: text[name] for name in before.keys() & text.keys()}, **changes}
    for name in ("eos_token_id", "dtype"):
        if name in fields:
            fields[name] = text[name]
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    for file in whole.iterdir():
        is_setting = file.suffix in (".json", ".jinja") and not file.name.endswith(_INDEX)
        if is_setting and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)
