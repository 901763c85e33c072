"""The page on other tools against the tables of conversions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.commands import ROOT
from trainwright.compatibility.conversion.convert import Rule, load_table

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
TOOLS = ("axolotl", "trl", "llamafactory", "torchtune")
# What functions of the tables set.
_COMPUTED = {
    "functions:global_batch_size": "train.global_batch_size",
    "functions:pack_length": "data.pack_length",
    "functions:precision": "train.mixed_precision",
    "functions:targets": "model.adapter.targets",
    "functions:validation_rows": "data.validation",
    "functions:deepspeed_file": "parallel.strategy",
    "functions:chat_template": "model.chat_template",
    "llamafactory:answers": "data.targets",
    "llamafactory:precision": "train.mixed_precision",
    "sources:llamafactory_datasets": "data.train",
    "sources:test_split": "data.validation",
    "sources:trl_targets": "data.targets",
    "sources:torchtune_dataset": "data.train data.validation data.targets",
    "torchtune:model": "model.adapter.type",
    "torchtune:targets": "model.adapter.targets",
    "torchtune:tokenizer": "model.chat_template",
    "torchtune:max_length": "data.max_length",
    "torchtune:steps_per_epoch": "train.max_steps",
}


def rows(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def keys_of(rule: Rule) -> Iterator[str]:
    if rule.to is not None:
        yield rule.to.replace("@train.source", "data.train")
    for value in rule.values.values():
        yield from value if isinstance(value, dict) else ()
    yield from _COMPUTED.get(rule.by or "", "").split()


def test_every_key_of_the_page_becomes_the_key_beside_it() -> None:
    found = rows("The same keys")
    assert len(found) > 25
    for ours, *theirs in found:
        for tool, key in zip(TOOLS, theirs, strict=True):
            rule = load_table(tool).rules[key.strip("`")]
            assert ours.strip("`") in keys_of(rule), f"{tool}: {key} is not {ours}"


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ("learning rate", ("learning_rate", "learning_rate", "learning_rate", "")),
        ("weight decay", ("weight_decay", "weight_decay", "weight_decay", "optimizer.weight_decay")),
        ("gradient clipping", ("max_grad_norm", "max_grad_norm", "max_grad_norm", "clip_grad_norm")),
        ("schedule", ("lr_scheduler", "lr_scheduler_type", "lr_scheduler_type", "")),
        ("epochs", ("num_epochs", "num_train_epochs", "num_train_epochs", "epochs")),
        ("seed", ("seed", "seed", "seed", "")),
        ("maximum length", ("sequence_len", "max_length", "cutoff_len", "")),
        ("LoRA's dropout", ("", "lora_dropout", "", "")),
    ],
)
def test_the_defaults_of_the_page_are_those_of_the_tables(row: str, keys: tuple[str, ...]) -> None:
    (cells,) = [cells for cells in rows("Other defaults") if cells[0] == row]
    for tool, key, cell in zip(TOOLS, keys, cells[2:], strict=True):
        values = [values[key] for when, values in load_table(tool).defaults if not when and key in values]
        if key:
            shown = re.split(r"[;,]", cell)[0]
            assert values and (shown == values[-1] or float(shown) == values[-1]), f"{tool}: {key} {values} {cell}"
