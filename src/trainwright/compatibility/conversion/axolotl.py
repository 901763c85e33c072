"""What the table of Axolotl computes."""

from __future__ import annotations

import re
from typing import Any

from trainwright.compatibility.conversion import functions
from trainwright.compatibility.conversion.convert import Conversion, Rule, Setting
from trainwright.compatibility.conversion.scripts import format_value
from trainwright.data.rows.chat_templates import read_template

_ALPACA = "{instruction}\n\n### Input:\n{input}"
_TASK = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n"
_CONCISE = (
    "Below is an instruction from a USER that describes a task{}. "
    "The ASSISTANT writes a response that {} completes the request.\n\n\n"
)
_WITH_INPUT = ", paired with an input that provides further context"
_USER = "USER: {}\nASSISTANT:"
_ADVERBS = "appropriately and concisely"  # without an input; with one, the two are the other way round

# Types of rows that are written as texts (prompt_strategies, prompters.py): the prompt, that without an input, the
# column of the input, and that of the answer.
_TEXTS = {
    "alpaca_chat": (
        "SYSTEM: " + _TASK.format(_WITH_INPUT) + _USER.format("{instruction}\n{input}"),
        "SYSTEM: " + _TASK.format("") + _USER.format("{instruction}"),
        "input",
        "output",
    ),
    "alpaca_chat.load_concise": (
        "SYSTEM: "
        + _CONCISE.format(_WITH_INPUT, "concisely and appropriately")
        + _USER.format("{instruction}\n{input}"),
        "SYSTEM: " + _CONCISE.format("", _ADVERBS) + _USER.format("{instruction}"),
        "input",
        "output",
    ),
    "alpaca_chat.load_qa": (
        "SYSTEM: " + _CONCISE.format("", _ADVERBS) + _USER.format("{question}"),
        None,
        None,
        "answer",
    ),
    "alpaca_chat.load_camel_ai": (
        "SYSTEM: " + _CONCISE.format("", _ADVERBS) + _USER.format("{message_1}"),
        None,
        None,
        "message_2",
    ),
    "alpaca_chat.load_no_prompt": (
        _USER.format("{instruction}\n{input}"),
        _USER.format("{instruction}"),
        "input",
        "output",
    ),
    "alpaca_instruct.load_no_prompt": (
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "input",
        "output",
    ),
    "alpaca_w_system.load_open_orca": (
        "### System:\n{system_prompt}\n### Human:\n{question}\n### Assistant:\n",
        "### Human:\n{question}\n### Assistant:\n",
        "system_prompt",
        "response",
    ),
    "context_qa": (
        "SYSTEM: Use the following contextual information to concisely answer the question.\n\n"
        + _USER.format("{article}\n===\n{question}"),
        None,
        None,
        "answer",
    ),
    "summarizetldr": (
        "USER: Summarize the following article as a TL;DR.\n{article}\nASSISTANT:",
        None,
        None,
        "summary",
    ),
}


def rows(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Set how the rows of a data set of Axolotl are read: its type (prompt_strategies)."""
    item = conversion.source("train", setting)
    kind = setting.value
    if isinstance(kind, dict):
        _ignore_template(conversion)
        _set_own_prompt(conversion, setting, item, kind)
        return
    word, _, style = str(kind).partition(":")
    word = word.removesuffix(".load")
    if word == "alpaca" and style == "chat":
        word = "alpaca_chat"
    elif word in ("alpaca", "gpteacher") and style not in ("", "instruct"):
        word = str(kind)
    if word in ("alpaca", "alpaca_instruct", "gpteacher", "input_output", *_TEXTS):
        _ignore_template(conversion)
    if word in ("alpaca", "alpaca_instruct", "gpteacher"):
        item |= {"prompt": _ALPACA, "prompt_without_input": "{instruction}"}
        if word == "gpteacher":
            item["columns.answer"] = "response"
        conversion.take(setting, "model.chat_template", _add_end(conversion, "alpaca"))
    elif word in _TEXTS:
        prompt, without_input, column, answer = _TEXTS[word]
        item |= {"prompt": prompt, "prompt_without_input": without_input}
        item |= {"columns.input": column, "columns.answer": answer}
        conversion.take(setting, "model.chat_template", _add_end(conversion, "plain"))
    elif re.fullmatch(r"completion|pretrain", word):
        item["format"] = "text"
        conversion.add("taken", setting, "data.train: format text")
    elif word == "input_output":
        item["format"] = "segments"
        conversion.add("taken", setting, "data.train: format segments")
    elif word == "alpaca_w_system.load_open_orca_chatml":
        item |= {"columns.system": "system_prompt", "columns.question": "question", "columns.answer": "response"}
        conversion.take(setting, "model.chat_template", "chatml")
    elif word in ("chat_template", "chat_template.default", "chat_template.argilla_chat", "chat_template.ultra"):
        conversion.add("taken", setting, "the turns of the rows, written by model.chat_template")
    elif word.startswith("sharegpt"):
        item["format"] = "conversations"
        conversion.add("taken", setting, "data.train: format conversations", differs=True)
        if not conversion.is_on("chat_template"):
            has_style = conversion.is_on(f"{setting.key.removesuffix('type')}conversation")
            if "chatml" in word or not has_style:
                conversion.take(setting, "model.chat_template", "chatml" if "chatml" in word else "vicuna")
    elif match := re.fullmatch(r"(chatml|llama3|zephyr)\.(\w+)(?:\.load)?", word):
        conversion.take(setting, "model.chat_template", match[1])
        columns = {"intel": "question", "icr": "input"}.get(match[2])
        if columns:
            item["columns.prompt"] = columns
    else:
        conversion.refuse(setting, "builds the prompts of the rows in a way of its own")


def _add_end(conversion: Conversion, name: str) -> str:
    """Return a template for rows that are written as texts, which end with the end of text that the file sets."""
    tokens = conversion.value("special_tokens")
    end = tokens.get("eos_token") if isinstance(tokens, dict) else None
    return name if end in (None, *_USUAL_ENDS) else read_template(name).replace("eos_token", repr(str(end)))


def _ignore_template(conversion: Conversion) -> None:
    """Leave out the chat template if no rows are turns: it is saved with the tokenizer then, and not used."""
    setting = conversion.settings.get("chat_template")
    kinds = [entry.value for entry in conversion.settings.values() if entry.pattern == "datasets[].type"]
    paths = [entry for entry in conversion.settings.values() if entry.pattern == "datasets[].path"]
    has_turns = any(isinstance(kind, str) and kind.startswith(("chat_template", "sharegpt")) for kind in kinds)
    if setting is None or not setting.is_on or has_turns or len(kinds) < len(paths) or conversion.is_on("rl"):
        return
    conversion.lines[:] = [line for line in conversion.lines if line.setting != setting]
    if conversion.values.get("model.chat_template", (None, None))[1] == setting:
        del conversion.values["model.chat_template"]
    del conversion.settings["chat_template"]
    conversion.drop(setting, "is not used for rows of this type")


def long_rows(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Leave out rows that are too long, unless they are texts, which are split."""
    kinds = [entry.value for entry in conversion.settings.values() if entry.pattern == "datasets[].type"]
    are_texts = any(str(kind).startswith(("completion", "pretrain")) for kind in kinds)
    if are_texts or conversion.is_on("pretraining_dataset"):
        conversion.take(setting, "data.long_documents", "auto", computed="texts are split")
    elif str(setting.value) == "truncate":
        conversion.take(setting, "data.long_documents", "cut")
    elif setting.value in (None, "drop"):
        conversion.take(setting, "data.long_documents", "drop")
    else:
        conversion.take(setting, "data.long_documents", "cut", "rows that are cut are counted and shown")


def _set_own_prompt(conversion: Conversion, setting: Setting, item: dict[str, Any], kind: dict[str, Any]) -> None:
    """Set the prompt of one's own format, where the text around the fields is written as it is."""
    read = {"format", "no_input_format", "system_prompt", "system_format", "field_output", "field_instruction"}
    unknown = [key for key in kind if key not in read | {"field_input", "field_system"} and kind[key] is not None]
    if unknown or kind.get("system_format") not in (None, "{system}", "{system}\n"):
        conversion.refuse(setting, f"has {', '.join(unknown or ['system_format'])}, which changes the text of the rows")
        return
    text = str(kind.get("format") or "{instruction}")
    names = {"instruction": kind.get("field_instruction"), "input": kind.get("field_input")}
    system = kind.get("field_system")

    def renamed(text: str) -> str:
        for field, column in {**names, "system": system}.items():
            text = text.replace(f"{{{field}}}", f"{{{column or field}}}")
        return text

    item["prompt"] = str(kind.get("system_prompt") or "") + renamed(text)
    if kind.get("no_input_format"):
        item["prompt_without_input"] = renamed(str(kind["no_input_format"]))
    if names["input"]:
        item["columns.input"] = names["input"]
    item["columns.answer"] = kind.get("field_output") or "output"
    conversion.take(setting, "model.chat_template", _add_end(conversion, "plain"))


def messages(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the column of the turns, which only types of turns read."""
    kind = str(conversion.value(setting.key.removesuffix("field_messages") + "type"))
    if kind.startswith(("chat_template", "sharegpt", "None")) or conversion.is_on("rl"):
        conversion.take(setting, "@train.columns.messages", setting.value)
    else:
        conversion.drop(setting, f"has no effect with type: {kind}")


def field(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Use a column in the prompt in place of the field that it is."""
    name = setting.pattern.rpartition("_")[2]
    item = conversion.source("train", setting)
    for key in ("prompt", "prompt_without_input"):
        if key in item:
            item[key] = item[key].replace(f"{{{name}}}", f"{{{setting.value}}}")
    if name == "input":
        item["columns.input"] = setting.value
    conversion.add("taken", setting, f"data.prompt: {{{setting.value}}}")


def trainable(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train the parameters whose names begin with a pattern."""
    patterns = [
        f"{pattern.removesuffix('$')}{'' if pattern.endswith('$') else '.*'}"
        for pattern in map(str, setting.value or ())
    ]
    ranges = [pattern for pattern in patterns if re.search(r"\[\d*:\d*\]", pattern)]
    if ranges:
        conversion.refuse(setting, f"trains some rows of a matrix only: {format_value(ranges[0])}")
    elif patterns:
        conversion.take(setting, "model.trainable", patterns)
    else:
        conversion.drop(setting, "asks for nothing")


def rates(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train the parameters with a word in their names at rates of their own."""
    groups = setting.value if isinstance(setting.value, list) else []
    parameter_groups = [
        {"pattern": f".*{re.escape(str(module))}.*", "learning_rate": float(group["lr"])}
        for group in groups
        for module in group.get("modules", [])
    ]
    if parameter_groups:
        conversion.take(setting, "optimizer.groups", parameter_groups)
    else:
        conversion.drop(setting, "asks for nothing")


def embedding_rate(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train the embeddings and the head at a rate of their own."""
    if setting.is_on:
        patterns = (".*embed_tokens.*", ".*lm_head.*")
        groups = [{"pattern": pattern, "learning_rate": float(setting.value)} for pattern in patterns]
        conversion.take(setting, "optimizer.groups", groups)
    else:
        conversion.drop(setting, "asks for nothing")


def batch_size(conversion: Conversion, setting: Setting, rule: Rule, packing: str) -> None:
    """Take the rows of a process and a step, from which Axolotl computes the accumulation."""
    unit_setting = setting._replace(value=1)
    conversion.settings[setting.key] = setting
    functions.global_batch_size(conversion, unit_setting, rule, micro=setting.key, packing=packing)


def added_tokens(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Add ordinary tokens; a mapping has names of special ones, as ``special_tokens`` has."""
    if isinstance(setting.value, dict):
        special_tokens(conversion, setting, rule)
    elif setting.is_on:
        conversion.take(setting, "model.added_tokens.ordinary", setting.value)
    else:
        conversion.drop(setting, "asks for nothing")


def special_tokens(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Add tokens, and accept others that padding and templates do not need."""
    values = setting.value if isinstance(setting.value, dict) else {}
    if extra_tokens := values.get("additional_special_tokens"):
        conversion.take(setting, "model.added_tokens.special", extra_tokens)
    if end := values.get("eos_token"):
        kinds = [str(entry.value) for entry in conversion.settings.values() if entry.pattern == "datasets[].type"]
        has_turns = all(kind.startswith(("chat_template", "sharegpt", "chatml", "llama3")) for kind in kinds)
        if has_turns or end in _USUAL_ENDS:
            conversion.drop(setting, "the end of an answer is found in the template or the tokenizer", differs=True)
        else:
            earlier = conversion.values.pop("model.added_tokens.special", ([], setting))[0]
            conversion.take(setting, "model.added_tokens.special", [*earlier, *({str(end)} - set(earlier))])
    elif not extra_tokens:
        conversion.drop(setting, "padding is not read")


_USUAL_ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<｜end▁of▁sentence｜>")
_HARMLESS = (
    *("swanlab", "liger", "cut_cross_entropy", "moe_kernels", "kernels", "expert_parallel", "lm_eval"),
    "llm_compressor",
)
_OTHERS = {
    "kd": ("trains against a teacher", "distillation"),
    "spectrum": ("trains the layers with the largest signal-to-noise ratio only", None),
    "grokfast": ("filters the gradients (Grokfast)", None),
    "diffusion": ("trains a diffusion language model", "diffusion"),
}


def plugins(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Leave out plugins that change how it is computed."""
    names = setting.value if isinstance(setting.value, list) else [setting.value] if setting.is_on else []
    for name in map(str, names):
        word = next((word for word in _OTHERS if f".{word}" in name), None)
        if word is not None:
            conversion.refuse(setting, f"{name} {_OTHERS[word][0]}", _OTHERS[word][1])
        elif any(f".{harmless_name}" in name for harmless_name in _HARMLESS):
            conversion.drop(setting, f"{name} is about how it is computed, not what")
        else:
            conversion.refuse(setting, f"{name} is code that changes the training")


def fsdp_config(conversion: Conversion, setting: Setting, rule: Rule, words: str) -> None:
    """Take the options of FSDP, which need no list of words beside them."""
    if setting.is_on and not conversion.is_on(words):
        on = setting._replace(value=["full_shard"])
        functions.fsdp(conversion, on, rule, options=setting.key)
    elif not setting.is_default:
        conversion.drop(setting, "is read with fsdp")


def pretraining(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take texts to go on with pretraining."""
    entries = setting.value if isinstance(setting.value, list) else [{"path": setting.value}]
    read = {"path", "name", "split", "text_column", "type", "trust_remote_code", "data_files", "skip"}
    for number, entry in enumerate(entries):
        entry = entry if isinstance(entry, dict) else {"path": entry}
        unknown = [key for key in entry if key not in read or (key == "skip" and entry[key])]
        if unknown:
            conversion.refuse(setting, f"has {', '.join(unknown)}")
            return
        item = {"setting": setting, "source": entry.get("path"), "config": entry.get("name"), "format": "text"}
        item |= {"split": entry.get("split"), "files": entry.get("data_files")}
        item["columns.text"] = entry.get("text_column")
        conversion.sources.setdefault("train", {})[f"{number}"] = item
        note = "rows are read into a file, and tokenized before training"
        conversion.add("taken", setting, f"data.train: {entry.get('path')}; {note}", differs=True)
