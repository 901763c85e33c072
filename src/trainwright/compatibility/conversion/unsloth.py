"""What the table of Unsloth's scripts computes."""

from __future__ import annotations

import re

from trainwright.compatibility.conversion import functions
from trainwright.compatibility.conversion.convert import TEXT_FIELDS, Conversion, Rule, Setting, is_text_first
from trainwright.compatibility.conversion.row_functions import Unclear, find_row_settings
from trainwright.compatibility.conversion.script_values import Code
from trainwright.compatibility.conversion.scripts import format_value, parse_script
from trainwright.compatibility.conversion.sources import ORDER_OF_TRL

_TEMPLATES = {"chatml": "chatml", "llama-3": "llama3", "llama3": "llama3"}
_OWN = ("unsloth", "alpaca", "vicuna", "vicuna_old", "vicuna old")  # texts that no tokenizer brings
_TASKS = ("dpo", "kto", "orpo", "cpo")


def trainer(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Set the task of a trainer of pairs."""
    if setting.value in _TASKS:
        conversion.take(setting, "task", "dpo")
    else:
        conversion.drop(setting, "is seen from the trainer")


def quantization(conversion: Conversion, setting: Setting, rule: Rule, full: str) -> None:
    """Quantize the frozen weights; without an adapter nothing is frozen."""
    if setting.is_on and not conversion.is_on(full):
        conversion.take(setting, "model.adapter.quantization", "nf4")
    elif not setting.is_default:
        conversion.drop(setting, "asks for nothing")


def rank(conversion: Conversion, setting: Setting, rule: Rule, full: str, others: str) -> None:
    """Train an adapter of this rank."""
    if conversion.is_on(full) or conversion.is_on(others):
        conversion.refuse(setting, "makes an adapter, beside full_finetuning: Unsloth trains all weights then")
        return
    conversion.take(setting, "model.adapter.rank", setting.value)
    earlier = conversion.values.get("model.adapter.type")
    if earlier is not None and earlier[1].is_default:
        del conversion.values["model.adapter.type"]
    conversion.take(setting, "model.adapter.type", "lora")


def template(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the template that is named, or the tokenizer's own of a later family."""
    name = _TEMPLATES.get(str(setting.value))
    if setting.value in _OWN:
        conversion.refuse(setting, "writes texts of its own around the turns; write them as model.chat_template")
    elif name is None:
        functions.chat_template(conversion, setting, rule)
    else:
        conversion.take(setting, "model.chat_template", name)


_OF_MODELS = ("FastLanguageModel.max_seq_length", "FastModel.max_seq_length")
_OF_TRAINERS = ("SFTTrainer.max_seq_length", "UnslothTrainer.max_seq_length", "max_seq_length")
_OF_PAIRS = ("DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer")


def length(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the maximum length that counts."""
    deciding = _find_length(conversion)
    if setting is deciding:
        conversion.take(setting, "data.max_length", setting.value)
    elif deciding is not None:
        conversion.drop(setting, f"has no effect beside {deciding.key}: {format_value(deciding.value)}")


def _find_length(conversion: Conversion) -> Setting | None:
    """Return the length that counts: of SFT the trainer's up to the model's (unsloth/models/rl.py), of pairs TRL's."""
    settings = conversion.settings
    of_pairs = [settings[f"{name}.max_length"] for name in _OF_PAIRS if f"{name}.max_length" in settings]
    if any(key.partition(".")[0] in _OF_PAIRS for key in settings):
        return of_pairs[0] if of_pairs else settings.get("max_length")
    model = next((settings[key] for key in _OF_MODELS if key in settings), None)
    trainer = next((settings[key] for key in _OF_TRAINERS if key in settings and settings[key].value), None)
    if model is None:
        return trainer or settings.get("max_length")
    is_longer = (
        trainer is not None
        and all(isinstance(setting.value, int) for setting in (model, trainer))
        and trainer.value > model.value
    )
    return model if trainer is None or is_longer else trainer


def packing(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Pack to the maximum length that counts."""
    deciding = _find_length(conversion)
    if setting.is_on and deciding is not None:
        conversion.take(setting, "data.pack_length", deciding.value, computed=f"as {deciding.key}")
        conversion.take(setting, "train.batch_unit", "packs", computed="a batch counts packs")
    else:
        conversion.drop(setting, "asks for nothing")


def text_field(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the column of the texts, unless a function of the script writes it, or the trainer is given another."""
    if setting.is_default and TEXT_FIELDS[0] in conversion.settings:
        return
    if _has_row_functions(conversion):
        conversion.drop(setting, "is read with the function that makes the rows")
    elif is_text_first(conversion):
        conversion.take(setting, "@train.columns.text", setting.value)
        conversion.take(setting, "@train.format", "text")
    else:
        if setting.value != "text":
            conversion.take(setting, "@train.columns.text", setting.value)
        conversion.take(setting, "@train.format", ORDER_OF_TRL)


def _has_row_functions(conversion: Conversion) -> bool:
    return any(key.partition(".")[0] == "map" or key.endswith("formatting_func") for key in conversion.settings)


def model(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the name of a model that the trainer loads."""
    if isinstance(setting.value, str) and not isinstance(setting.value, Code):
        conversion.take(setting, "model.name", setting.value)


def responses(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train on answers alone."""
    conversion.values.pop("data.targets", None)
    conversion.take(setting, "data.targets", "answers")


_COLLATOR = "DataCollatorForCompletionOnlyLM"
_COLLATORS = re.compile(
    rf"(?:\w+\.)*(?:{_COLLATOR}|DataCollatorFor(?:LanguageModeling|Seq2Seq|Preference)|DataCollatorWith(?:Padding|Flattening)"
    r"|DPODataCollatorWithPadding|default_data_collator)\b(?:\(.*\))?",
    re.DOTALL,
)


def collator(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Leave out a collator that is known: it pads, or its own arguments are read."""
    if not setting.is_on or _COLLATORS.fullmatch(str(setting.value)):
        conversion.drop(setting, "is about how batches are padded, or read with its own arguments")
    else:
        conversion.refuse(setting, f"makes batches by the script: {format_value(setting.value)}")


def completions(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train on what follows the beginning of an answer: of all answers if the collator knows questions, too."""
    if any(map(conversion.is_on, TEXT_FIELDS)) and not _has_row_functions(conversion):
        conversion.refuse(setting, "trains on a part of each text; write rows with a prompt and a completion")
        return
    conversion.values.pop("data.targets", None)
    of_all = any(conversion.is_on(f"{_COLLATOR}.{name}") for name in ("instruction_template", "argument_1"))
    conversion.take(setting, "data.targets", "answers" if of_all else "last")


def evaluation_rows(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Evaluate on another split of the data set that is loaded; parts that are held out are known."""
    split = re.fullmatch(r"\w+\[['\"](\w+)['\"]\]", str(setting.value))
    is_held_out = any(key.startswith("train_test_split") for key in conversion.settings)
    is_loaded = any(key.startswith("load_dataset_validation") for key in conversion.settings)
    values = {name: conversion.value(f"load_dataset.{name}") for name in ("argument_0", "path", "argument_1", "name")}
    files = conversion.value("load_dataset.data_files")
    if str(setting.value) == "None" or is_held_out or is_loaded:
        conversion.drop(setting, "is what the other calls have made")
    elif split is None or conversion.is_on("load_dataset.split") or (files and not isinstance(files, dict)):
        conversion.drop(
            setting, f"evaluates on {format_value(setting.value)}: name these rows in data.validation", differs=True
        )
    else:
        item = conversion.source("validation", setting)
        item["source"] = values["argument_0"] or values["path"]
        item["config"], item["split"] = values["argument_1"] or values["name"], split[1]
        if isinstance(files, dict):
            item["files"], item["split"] = files.get(split[1]), None
        conversion.add("taken", setting, f"data.validation: the split {split[1]}")


def early_stopping(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Stop as the callback of transformers does, whose patience is one evaluation."""
    values = {name: conversion.value(f"EarlyStoppingCallback.{name}") for name in ("argument_0", *_OF_STOPPING)}
    patience = values["argument_0"] or values["early_stopping_patience"] or 1
    threshold = values["early_stopping_threshold"] or 0.0
    value = {"patience": int(patience), **({"min_delta": float(threshold)} if threshold else {})}
    conversion.take(setting, "evaluate.early_stopping", value)


_OF_STOPPING = ("early_stopping_patience", "early_stopping_threshold")


def skipped(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Say which calls the script does not make with the values that it sets."""
    conversion.drop(setting, str(setting.value), differs=True)


def files(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the files of a split."""
    value = setting.value
    use = rule.to or "train"
    names = (use, "test", "eval") if use == "validation" else (use,)
    if isinstance(value, dict):
        value = next((value[name] for name in names if name in value), None)
    conversion.take(setting, f"@{use}.files", value)


def rows(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Read the rows as the functions of the script write them."""
    try:
        settings = find_row_settings(parse_script(conversion.file))
    except Unclear as error:
        why = f"changes the rows by a function of the script ({format_value(str(error))})"
        conversion.refuse(setting, why)
        return
    template = settings.pop("chat_template", None)
    if template is not None:
        conversion.take(setting, "model.chat_template", template)
    for key, value in settings.items():
        conversion.take(setting, f"@train.{key}", value)
    if template is None and not settings:
        conversion.drop(setting, "rows are written by the chat template", differs=True)


def selection(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the first rows, or a range of them."""
    match = re.fullmatch(r"range\((?:(\d+), )?(\d+)\)", str(setting.value))
    if re.fullmatch(r"range\([A-Za-z_][\w.]*\)", str(setting.value)):
        conversion.need(setting, f"the script computes how many: {setting.value}; pass {setting.key}='range(N)'")
    elif match is None:
        conversion.refuse(setting, "chooses rows by what the script computes")
    elif match[1] in (None, "0"):
        conversion.take(setting, "@train.limit", int(match[2]), "the first rows of the file, not of shuffled ones")
    else:
        conversion.refuse(setting, f"chooses rows; end the source with [{match[1]}:{match[2]}]")
