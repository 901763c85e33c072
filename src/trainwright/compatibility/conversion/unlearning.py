"""What the table of open-unlearning computes."""

from __future__ import annotations

import re

from trainwright.compatibility.conversion.convert import Conversion, Rule, Setting


def tokenizer(conversion: Conversion, setting: Setting, rule: Rule, model: str) -> None:
    """Take the tokenizer if it is not the model's."""
    if setting.value == conversion.value(model):
        conversion.drop(setting, "is the model's")
    else:
        conversion.take(setting, "model.tokenizer", setting.value)


def template(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Use the tokenizer's template, or one with the texts around a question that the configuration has."""
    if setting.is_on:
        conversion.drop(setting, "is what is done")
        return
    parts = {
        name: str(conversion.value(f"model.template_args.{name}") or "")
        for name in ("user_start_tag", "user_end_tag", "asst_start_tag", "asst_end_tag")
    }
    system = str(conversion.value("model.template_args.system_prompt_with_special_tokens") or "")

    def quoted(text: str) -> str:
        return "{{ " + repr(text) + " }}" if text else ""

    jinja = (
        f"{quoted(system)}{{% for message in messages %}}{{% if message['role'] == 'user' %}}"
        f"{quoted(parts['user_start_tag'])}{{{{ message['content'] }}}}{quoted(parts['user_end_tag'])}"
        f"{{% elif message['role'] == 'assistant' %}}{quoted(parts['asst_start_tag'])}{{{{ message['content'] }}}}"
        f"{quoted(parts['asst_end_tag']) if parts['asst_end_tag'].strip() else '{{ eos_token }}'}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{quoted(parts['asst_start_tag'])}{{% endif %}}"
    )
    conversion.take(setting, "model.chat_template", jinja, computed="the texts around the turns")


def layer(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the index of the block that a pattern means."""
    match = re.search(r"layers\\?\.(\d+)$", str(setting.value))
    if match is None:
        conversion.refuse(setting, "steers the output of another module than a block")
    else:
        conversion.take(setting, "unlearn.layer", int(match[1]), computed="the block of the pattern")


def trainable(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the patterns of parameters to train, unless they are all."""
    if setting.value in (None, [".*"], ".*"):
        conversion.drop(setting, "all parameters are trained")
    else:
        conversion.take(setting, "model.trainable", setting.value)


def column(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take a column that is not called as the field that it is."""
    field = setting.pattern.rpartition(".")[2].removesuffix("_key")
    if setting.value == field:
        conversion.drop(setting, "is found")
    else:
        conversion.take(setting, f"data.columns.{field}", setting.value)


def choice(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Say that only the script knows which file of a group counts."""
    group = setting.key.rpartition("choice_")[2]
    conversion.need(setting, f"the script chooses it: {str(setting.value).replace('shell.', '')}; pass {group}=NAME")
