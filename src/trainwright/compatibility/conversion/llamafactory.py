"""What the table of LLaMA-Factory computes."""

from __future__ import annotations

import re

from trainwright.compatibility.conversion import functions
from trainwright.compatibility.conversion.convert import Conversion, Rule, Setting


def alpha(conversion: Conversion, setting: Setting, rule: Rule, rank: str) -> None:
    """Set twice the rank, which alpha is without a value."""
    if "lora_alpha" not in conversion.settings:
        conversion.take(setting, "model.adapter.alpha", 2 * int(conversion.value(rank)), computed=f"2 x {rank}")


def modules_to_save(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take names with commas."""
    if setting.is_on:
        conversion.take(setting, "model.adapter.modules_to_save", _parse_names(setting.value))


def frozen_layers(conversion: Conversion, setting: Setting, rule: Rule, modules: str, extra: str) -> None:
    """Train the last blocks, or the first ones for a negative number, or parts of them, and modules beside them."""
    count, layers = int(setting.value), conversion.options.layers
    if count > 0 and layers is None:
        conversion.need(setting, f"trains the last {count} blocks: pass --layers N, the number of the model's blocks")
        return
    numbers = range(max(0, layers - count), layers) if count > 0 and layers is not None else range(-count)
    parts = _parse_names(conversion.value(modules))
    inside = "" if "all" in parts else f"({'|'.join(map(re.escape, parts))})"
    patterns = [rf".*\.({'|'.join(map(str, numbers))})\.{inside}.*"]
    patterns += [f".*{re.escape(name)}.*" for name in _parse_names(conversion.value(extra))]
    conversion.take(setting, "model.trainable", patterns, computed=f"blocks {numbers[0]} to {numbers[-1]}")


def _parse_names(value: object) -> list[str]:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()]


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


# Templates (src/llamafactory/data/template.py) whose answers have more after their end: their begin and end.
_CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")
_GEMMA = ("<start_of_turn>model\n", "<end_of_turn>\n")
_LONGER_ENDS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), _GEMMA),
    **dict.fromkeys(("phi", "phi_small"), ("<|assistant|>\n", "<|end|>\n")),
    **dict.fromkeys(
        ("chatml", "mimo", "mimo_v2", "opencoder", "sailor", "smollm", "smollm2", "yi", "falcon_h1"), _CHATML
    ),
    **dict.fromkeys(("qwen", "qwen3", "qwen3_nothink", "qwen3_5", "qwen3_5_nothink", "qwen3_6", "lfm2"), _CHATML),
}


_STAGES_OF_PAIRS = ("rm", "ppo", "dpo", "kto")


def answers(conversion: Conversion, setting: Setting, rule: Rule, template: str, stage: str) -> None:
    """Train on all tokens, or on the answers with all that the template writes after them."""
    ends = _LONGER_ENDS.get(str(conversion.value(template)))
    if setting.is_on:
        conversion.take(setting, "data.targets", "all")
    elif ends is None or conversion.value(stage) in _STAGES_OF_PAIRS:
        conversion.take(setting, "data.targets", "answers")
    else:
        begin, end = (re.escape(mark).replace("\\\n", r"\n") for mark in ends)
        conversion.take(
            setting, "data.targets", f"/{begin}([\\s\\S]*?{end})/", computed="with the line break at their end"
        )


_ROWS = "new rows begin at the mean of the others without noise, and there are no rows to spare"


def added_tokens(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Add tokens, named with commas, and train their rows beside an adapter, too."""
    if not setting.is_on:
        conversion.drop(setting, "asks for nothing")
        return
    kind = "special" if "special" in setting.pattern else "ordinary"
    conversion.take(setting, f"model.added_tokens.{kind}", _parse_names(setting.value), _ROWS)
    if conversion.value("finetuning_type") == "lora" and not conversion.is_on("additional_target"):
        conversion.take(setting, "model.adapter.modules_to_save", ["embed_tokens", "lm_head"], computed="the new rows")


def resize_vocab(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Drop what added tokens do in any case; rows for the others are not added."""
    if not setting.is_on or conversion.is_on("add_tokens") or conversion.is_on("add_special_tokens"):
        conversion.drop(setting, "is done for the tokens that are added")
    else:
        conversion.refuse(setting, "adds rows for tokens of the tokenizer; name them in model.added_tokens")


def system(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Begin conversations with a text in place of the template's own."""
    conversion.values.pop("data.system", None)
    if setting.is_on:
        conversion.take(setting, "data.system", setting.value)
