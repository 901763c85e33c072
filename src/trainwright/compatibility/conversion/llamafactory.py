"""What the table of LLaMA-Factory computes."""

from __future__ import annotations

from trainwright.compatibility.conversion import functions
from trainwright.compatibility.conversion.convert import Conversion, Setting
from trainwright.compatibility.conversion.table import Rule


def alpha(conversion: Conversion, setting: Setting, rule: Rule, rank: str) -> None:
    """Set twice the rank, which alpha is without a value."""
    if "lora_alpha" not in conversion.settings:
        conversion.take(setting, "model.adapter.alpha", 2 * int(conversion.value(rank)), computed=f"2 x {rank}")


def modules_to_save(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take names with commas."""
    if setting.is_on:
        names = [name.strip() for name in str(setting.value).split(",")]
        conversion.take(setting, "model.adapter.modules_to_save", names)


def neat_packing(conversion: Conversion, setting: Setting, rule: Rule, packing: str, length: str) -> None:
    """Pack, as neat_packing does without packing."""
    if setting.is_on and not conversion.is_on(packing):
        conversion.settings[packing] = setting._replace(key=packing, pattern=packing)
        functions.pack_length(conversion, setting, rule, length)
    else:
        conversion.drop(setting, "examples of a pack do not attend to each other in any case")


def precision(conversion: Conversion, setting: Setting, rule: Rule, fp16: str, pure: str) -> None:
    """Take the precision; without one it is that of the model's files."""
    if conversion.is_on(pure):
        conversion.drop(setting, f"is decided by {pure}")
    elif setting.is_on or conversion.is_on(fp16):
        functions.precision(conversion, setting, rule, fp16)
    else:
        conversion.take(setting, "train.mixed_precision", "auto", computed="that of the model's files, if it has one")


def system(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Begin conversations with a text in place of the template's own."""
    conversion.values.pop("data.system", None)
    if setting.is_on:
        conversion.take(setting, "data.system", setting.value)
