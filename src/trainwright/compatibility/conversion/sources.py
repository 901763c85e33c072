"""The data of a conversion: the names, splits and columns of other tools as sources of a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.compatibility.conversion.convert import PASS_ROWS, Conversion, Rule, Setting, read_document
from trainwright.compatibility.conversion.script_values import Code
from trainwright.compatibility.conversion.scripts import find_file_near, format_value
from trainwright.errors import RequestError
from trainwright.recipe.files import read_json
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.recipe.yaml_text import Origin

# datasets' names of kinds of files, whose files are in another key.
_FILE_KINDS = ("json", "csv", "parquet", "text", "arrow")
# Keys of an item that make up the name of its source, and those that are of its setting only.
_OF_NAME = ("source", "config", "split", "files", "directory", "setting", "fraction")
_USES = {"train": "data.train", "validation": "data.validation", "forget": "data.forget", "retain": "data.retain"}


def set_sources(conversion: Conversion) -> None:
    """Set the sections' sources from the items that keys have described, and check what depends on them."""
    for use, items in conversion.sources.items():
        items = dict(_iterate_parts(items))
        source_items = [
            item for item in items.values() if item.get("source") or item.get("files") or item.get("directory")
        ]
        if not source_items:
            continue
        sources = [source for item in source_items if (source := _build_source(conversion, item, use)) is not None]
        setting = source_items[0]["setting"]
        if use == "validation" and len(sources) > 1:
            _set_several(
                conversion, setting, [str(key) for key, item in items.items() if item in source_items], sources
            )
            continue
        if use != "train" or len(sources) == 1:
            if len(sources) > 1:
                conversion.refuse(setting, f"names {len(sources)} {use} sets; one is supported")
            elif sources:
                _set_one(conversion, setting, use, sources[0])
        elif sources:
            for key in ("system", "format"):
                if (value := conversion.values.pop(f"data.{key}", None)) is not None:
                    sources = [{key: value[0], **source} for source in sources]
            conversion.take(setting, "data.train", sources, computed=f"{len(sources)} sources")
            if "data.mixing" not in conversion.values:
                conversion.take(setting, "data.mixing", "concatenate", computed="one after another")
    _widen_states(conversion)
    stopping = conversion.values.get("evaluate.early_stopping")
    if stopping is not None and "evaluate.every" not in conversion.values:
        conversion.need(stopping[1], "counts evaluations: pass --rows N, the training rows, for their steps")
    conversion.values.setdefault("task", ("sft", Setting("", "", None, Origin("default"), is_default=True)))
    if "data.validation" not in conversion.values and "forget" not in conversion.sources:  # which are measured
        default = Setting("validation rows", "", None, Origin("default"), is_default=True)
        conversion.take(default, "data.validation", None)
    validation = conversion.values.get("data.validation")
    if validation is not None and validation[0] is None and "evaluate.every" in conversion.values:
        conversion.drop(conversion.values.pop("evaluate.every")[1], "there are no validation rows")


def _iterate_parts(items: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an item for each file and split of an item with several."""
    for key, item in items.items():
        files, splits = item.get("files"), item.get("split")
        parts = [
            {**item, "files": file, "split": split}
            for file in (files if isinstance(files, list) else [files])
            for split in (splits.split("+") if isinstance(splits, str) else [splits])
        ]
        yield from ((f"{key}.{number}" if number else key, part) for number, part in enumerate(parts))


def _widen_states(conversion: Conversion) -> None:
    """Use states of 32 bits where the strategy cannot shard those of 8: the same rule with more memory."""
    name, strategy = conversion.values.get("optimizer.name"), conversion.values.get("parallel.strategy")
    if name is None or strategy is None or not str(name[0]).endswith("_8bit"):
        return
    limits = [limit for limit in look_up_strategy(strategy[0]).limits if limit.key == "optimizer.name"]
    wide = str(name[0]).removesuffix("_8bit")
    if any(not limit.takes(name[0]) and limit.takes(wide) for limit in limits):
        del conversion.values["optimizer.name"]
        conversion.take(name[1], "optimizer.name", wide, f"{strategy[0]} does not shard states of 8 bits")


def _set_several(conversion: Conversion, setting: Setting, keys: list[str], sources: list[dict[str, Any]]) -> None:
    """Set validation sets with the names of the data sets, or of their sources."""
    names = [
        Path(str(source["source"]).split("[")[0]).stem if key.endswith("]") else key
        for key, source in zip(keys, sources, strict=True)
    ]
    names = [re.sub(r"[^\w-]", "_", name).strip("-") for name in names]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names, 1)]
    sets = {name: source if len(source) > 1 else source["source"] for name, source in zip(names, sources, strict=True)}
    conversion.values.pop("data.validation", None)
    conversion.take(setting, "data.validation", sets, computed=f"{len(sets)} sets: {', '.join(sets)}")


def _set_one(conversion: Conversion, setting: Setting, use: str, source: dict[str, Any]) -> None:
    """Set a single source, whose other keys are keys of the section."""
    name = source.pop("source")
    if use == "validation":
        conversion.values.pop("data.validation", None)
    conversion.values[_USES[use]] = (name, setting)
    for key, value in source.items():
        if use == "train":
            conversion.values[f"data.{key}"] = (value, setting)


def _build_source(conversion: Conversion, item: dict[str, Any], use: str) -> dict[str, Any] | None:
    """Return a source with its name, its slice, and how its rows are read."""
    setting: Setting = item["setting"]
    name, config, split = (item.get(key) for key in ("source", "config", "split"))
    files = item.get("files")
    if isinstance(files, dict) or (files and re.search(r"[*?\[]", str(files))):
        conversion.refuse(setting, f"reads the files {format_value(files)}; put them in a directory of their own")
        return None
    if (directory := item.get("directory")) is not None:
        if not files and name not in (None, *_FILE_KINDS):
            conversion.refuse(setting, f"reads the directory {directory} of {format_value(name)}; download and name it")
            return None
        name, files = (str(directory), None) if not files else (name, str(Path(str(directory)) / str(files)))
    if files and re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) and not Path(str(name)).is_dir():
        name = f"{name}:{files}"  # a file of a dataset of the Hub
    elif files:
        name = files if name in (None, *_FILE_KINDS) or str(files).startswith(("/", ".")) else str(Path(name) / files)
    if isinstance(name, Code) or not isinstance(name, str):
        conversion.refuse(setting, f"the script makes the rows: {format_value(name)}")
        return None
    if wrong := [part for part in (config, split) if part is not None and not isinstance(part, str)]:
        conversion.refuse(setting, f"{format_value(wrong[0])} names no part of {name}")
        return None
    split = "train" if split is None else split
    plain, rows = re.fullmatch(r"([^\[]*)((?:\[.*\])?)", split).groups()  # type: ignore[union-attr]
    is_file = Path(name).suffix in (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz", ".zst")
    parts = [name]
    if config not in (None, "default"):
        parts += [str(config), plain]
    elif not is_file and plain not in ("train", ""):
        parts += [plain]
    source = {key: value for key, value in item.items() if key not in _OF_NAME and value not in (None, {}, "")}
    columns = {key.partition(".")[2]: source.pop(key) for key in list(source) if key.startswith("columns.")}
    if columns := {field: column for field, column in columns.items() if field != column}:
        source["columns"] = columns
    fraction = item.get("fraction")
    if isinstance(fraction, int | float) and fraction > 1:
        source["limit"] = int(fraction)
    elif isinstance(fraction, int | float) and 0 < fraction < 1 and not rows:
        rows = f"[:{float(f'{fraction * 100:.9g}'):.9g}%]"
    return {"source": ":".join(parts) + rows, **source}


def llamafactory_datasets(
    conversion: Conversion, setting: Setting, rule: Rule, folder: str, limit: str = "", stage: str = ""
) -> None:
    """Read the data sets by their names in dataset_info.json (LLaMA-Factory, data/README.md)."""
    use = str(rule.to)
    names = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    directory = str(conversion.value(folder) or "data")
    file = find_file_near(str(Path(directory) / "dataset_info.json"), conversion.file)
    builtin_infos = read_document("llamafactory")["data_sets"]
    try:
        infos = read_json(file) if file is not None else builtin_infos
    except RequestError as error:
        conversion.refuse(setting, str(error))
        return
    for name in filter(None, (str(name).strip() for name in names)):
        is_online = directory == "ONLINE" or (file is None and "/" in name and conversion.is_on("messages"))
        info = _build_hub_dataset(conversion, name) if is_online else infos.get(name)
        if info is None:
            cause = "dataset_info.json is not here" if file is None else f"{file} does not have it"
            conversion.need(setting, f"{name}: {cause}; run the command beside it, or pass {folder}=DIRECTORY")
            continue
        item = conversion.sources.setdefault(use, {}).setdefault(name, {"setting": setting})
        _fill_llamafactory_item(conversion, setting, item, info, file.parent if file is not None else Path(directory))
        if limit and conversion.is_on(limit) and use == "train":
            item["limit"] = conversion.value(limit)
        if use == "train":
            note = ", the first rows, not drawn ones" if item.get("fraction") else ""
            note += "" if file is not None or is_online else ", as LLaMA-Factory's own dataset_info.json has it"
            conversion.add(
                "taken", setting, f"data.train: {name}, {format_value(item.get('source'))}{note}", differs=bool(note)
            )


def _build_hub_dataset(conversion: Conversion, name: str) -> dict[str, Any]:
    """Return a data set of the Hub, with the columns that forks have in the file itself."""
    columns = {"messages": conversion.value("messages")} if conversion.is_on("messages") else {}
    return {"hf_hub_url": name, "formatting": conversion.value("formatting") or "alpaca", "columns": columns}


def _fill_llamafactory_item(
    conversion: Conversion, setting: Setting, item: dict[str, Any], info: dict[str, Any], folder: Path
) -> None:
    columns = dict(info.get("columns") or {})
    if media := [key for key in ("images", "videos", "audios") if key in columns]:
        conversion.refuse(setting, f"has {', '.join(media)}", "vision" if "audios" not in media else "audio")
    if info.get("script_url"):
        conversion.refuse(setting, "is a script")
        return
    if columns.get("history"):
        conversion.refuse(setting, f"has earlier turns in the column {columns['history']}")
    hub = info.get("hf_hub_url") or info.get("ms_hub_url")
    item["source"] = hub or str(folder / str(info.get("file_name", "")))
    item["config"], item["split"] = info.get("subset"), info.get("split")
    item["fraction"] = info.get("num_samples")
    layout = info.get("formatting", "alpaca")
    ranking = bool(info.get("ranking"))
    if layout in ("sharegpt", "openai"):
        item["columns.messages" if layout == "openai" else "columns.conversations"] = columns.get("messages")
    elif ranking:
        item["columns.prompt"] = columns.get("prompt", "instruction")
    elif "kto_tag" in columns:
        item |= {"columns.prompt": columns.get("prompt", "instruction"), "columns.label": columns["kto_tag"]}
    else:
        columns = {field: column for field, column in columns.items() if column}
        prompt, query = columns.get("prompt", "instruction"), columns.get("query", "input")
        if set(columns) <= {"prompt"} and columns:
            item |= {"format": "text", "columns.text": prompt}
        else:
            item |= {"prompt": f"{{{prompt}}}\n{{{query}}}", "prompt_without_input": f"{{{prompt}}}"}
            item |= {"columns.answer": columns.get("response", "output"), "columns.input": query}
            if columns and "query" not in columns:
                item["prompt"] = item.pop("prompt_without_input")
                del item["columns.input"]
    for field in ("chosen", "rejected"):
        item[f"columns.{field}"] = columns.get(field)
    item["columns.system"] = columns.get("system")
    item["columns.tools"] = columns.get("tools")


def mixer(conversion: Conversion, setting: Setting, rule: Rule, splits: str, configs: str) -> None:
    """Take the data sets and parts of alignment-handbook's older dataset_mixer, and of open-instruct's."""
    value = conversion.value(splits)
    split_names = value if isinstance(value, list) else [value] if value else ["train"]
    if not isinstance(setting.value, dict):
        conversion.refuse(setting, "is not a mapping of data sets to parts of them")
        return
    subsets = conversion.value(configs)
    names = subsets if isinstance(subsets, list) and len(subsets) == len(setting.value) else [None] * len(setting.value)
    for (name, part), config in zip(setting.value.items(), names, strict=True):
        for use, split in (("train", split_names[0]), ("validation", split_names[1] if len(split_names) > 1 else None)):
            if split is not None:
                item = {"setting": setting, "source": name, "config": config, "split": split}
                item["fraction"] = part if use == "train" and part != 1.0 else None
                conversion.sources.setdefault(use, {})[name] = item
        conversion.add("taken", setting, f"data.train: {name}, {format_value(part)} of it", differs=part != 1.0)
    conversion.values.setdefault("data.validation", (None, setting))


def mixer_list(conversion: Conversion, setting: Setting, rule: Rule, splits: str, configs: str) -> None:
    """Take the data sets and parts of open-instruct's dataset_mixer_list: names and parts by turns."""
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    parts = {str(name): float(share) for name, share in zip(words[::2], words[1::2], strict=False)}
    mixer(conversion, setting._replace(value=parts), rule, splits, configs)


def part(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take a part of a data set: its first rows, where the tool draws them."""
    value = setting.value
    if value in (None, 1, 1.0):
        conversion.drop(setting, "is all of it")
        return
    conversion.source("train", setting)["fraction"] = value
    conversion.add(
        "taken", setting, f"data.train: the first {format_value(value)} of the rows, not drawn ones", differs=True
    )


def trl_targets(conversion: Conversion, setting: Setting, rule: Rule, answers: str) -> None:
    """Set what is trained on: TRL trains on every token of a conversation, unless it is told otherwise."""
    if conversion.is_on(answers) or setting.value is True:
        conversion.take(conversion.settings.get(answers, setting), "data.targets", "answers")
    else:
        by_default = "as TRL does for turns and texts; for rows of prompt and completion set answers"
        conversion.take(setting, "data.targets", "all", computed=by_default if setting.is_default else "")


_PROGRAMS_OF_PAIRS = ("dpo", "kto", "orpo", "cpo", "simpo")  # of TRL, and of people's scripts
ORDER_OF_TRL = ["messages", "conversations", "prompt_completion", "text", "instruction", "question_answer"]


def trl_texts(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Read the column of texts before those of questions and answers, which TRL does not know."""
    if not setting.value or conversion.value("launcher.program") in _PROGRAMS_OF_PAIRS:
        conversion.drop(setting, "is for the texts of fine-tuning")
        return
    if setting.value != "text":
        conversion.take(setting, "data.columns.text", setting.value)
    conversion.take(setting, "data.format", ORDER_OF_TRL, computed="a text comes before an instruction, as in TRL")


def test_split(conversion: Conversion, setting: Setting, rule: Rule, source: str, config: str, strategy: str) -> None:
    """Take the split to evaluate on, which is read if there are evaluations."""
    if str(conversion.value(strategy)).lower() in ("no", "false", "none"):
        if not setting.is_default:
            conversion.drop(setting, f"has no effect with {strategy}: no")
        conversion.take(setting, "data.validation", None)
        return
    item = conversion.source("validation", setting)
    item |= {"source": conversion.value(source), "config": conversion.value(config), "split": setting.value}
    conversion.add("taken", setting, f"data.validation: the split {setting.value}")


_TORCHTUNE_SOURCES = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "chat"),
    "samsum_dataset": ("Samsung/samsum", "summary"),
    "grammar_dataset": ("liweili/c4_200m", "grammar"),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "pairs"),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", "preference"),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text"),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", "article"),
}
_TORCHTUNE_ROWS = ("chat_dataset", "instruct_dataset", "text_completion_dataset", "preference_dataset")
_OF_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{{instruction}}\n\n{input}### Response:\n"
)


def torchtune_dataset(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Set the rows of a data set of torchtune (torchtune/datasets), and what is trained on."""
    use, name = str(rule.to), str(setting.value).rpartition(".")[2]
    item = conversion.source(use, setting)
    if "multimodal" in str(setting.value):
        conversion.refuse(setting, "has images", "vision")
        return
    source, kind = _TORCHTUNE_SOURCES.get(name, (None, None))
    replaced = use == "train" and conversion.options.train is not None
    if source is None and name not in _TORCHTUNE_ROWS and not replaced:
        conversion.need(setting, f"is a data set that torchtune builds in a way of its own; {PASS_ROWS}")
        return
    if source is not None:
        item.setdefault("source", source)
    if use == "train":
        train_on_input = conversion.value(setting.key.removesuffix("_component_") + "train_on_input")
        on_input = train_on_input if train_on_input is not None else kind == "alpaca"
        if kind != "text" and "preference" not in name and kind != "preference":
            conversion.take(setting, "data.targets", "all" if on_input else "answers")
    if replaced:
        return
    if kind == "alpaca":
        more = ", paired with an input that provides further context"
        item["prompt"] = _OF_ALPACA.format(more=more, input="### Input:\n{input}\n\n")
        item["prompt_without_input"] = _OF_ALPACA.format(more="", input="")
    elif kind in ("summary", "grammar", "pairs", "article"):
        conversion.refuse(setting, f"{name} has a prompt of its own; write it as data.prompt")
        return
    elif kind == "text" or name == "text_completion_dataset":
        item["format"] = "text"
    if use == "train":
        conversion.add("taken", setting, f"data.train: {format_value(item.get('source') or name)}")
