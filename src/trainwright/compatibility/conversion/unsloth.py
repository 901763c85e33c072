"""What the table of Unsloth's scripts computes."""

from __future__ import annotations

import re

from trainwright.compatibility.conversion import functions
from trainwright.compatibility.conversion.convert import Conversion, Setting
from trainwright.compatibility.conversion.reading import script_of, shown
from trainwright.compatibility.conversion.row_functions import Unclear, settings_of
from trainwright.compatibility.conversion.table import Rule

_TEMPLATES = {"chatml": "chatml", "llama-3": "llama3", "llama3": "llama3"}
_OWN = ("unsloth", "alpaca", "vicuna", "vicuna_old", "vicuna old")  # texts that no tokenizer brings
_LOSSES = {"KTOTrainer": "kto", "ORPOTrainer": "orpo", "CPOTrainer": "cpo"}


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


def responses(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train on answers alone."""
    conversion.values.pop("data.targets", None)
    conversion.take(setting, "data.targets", "answers")


def files(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the files of a split."""
    value = setting.value
    conversion.take(setting, "@train.files", value.get("train") if isinstance(value, dict) else value)


def rows(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Read the rows as the functions of the script write them."""
    try:
        settings = settings_of(script_of(conversion.file))
    except Unclear as error:
        why = f"changes the rows by a function of the script ({shown(str(error))}); write them to a file"
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
    chosen = re.fullmatch(r"range\((?:(\d+), )?(\d+)\)", str(setting.value))
    if chosen is None:
        conversion.refuse(setting, "chooses rows by what the script computes; write them to a file")
    elif chosen[1] in (None, "0"):
        conversion.take(setting, "@train.limit", int(chosen[2]), "the first rows of the file, not of shuffled ones")
    else:
        conversion.refuse(setting, f"chooses rows; end the source with [{chosen[1]}:{chosen[2]}]")


def preference(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Set the task that the trainer is for."""
    trainer, _, name = setting.pattern.partition(".")
    conversion.take(setting, "task", "dpo")
    if trainer in _LOSSES:
        conversion.take(setting, "dpo.loss", _LOSSES[trainer])
    if name == "beta":
        conversion.take(setting, "dpo.beta", setting.value)
    elif name in ("max_length", "max_seq_length"):
        conversion.take(setting, "data.max_length", setting.value)
    elif name == "ref_model" and setting.is_on:
        conversion.drop(setting, "is the model that training starts from")
