"""Data and keys that are nearly right: understood whole, or refused in words that say what would be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from support.faults.setting import in_bounds, refused
from trainwright.faults.drills.invariants import require
from trainwright.faults.drills.kinds import register_fault
from trainwright.faults.drills.trial_environment import FINISHED, REQUEST, Scene

_ROWS = 40


def _conversation(n: int, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": f"{text} {n}"} for role, text in turns]}


def _messages(n: int, *turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text if text is None else f"{text} {n}"} for role, text in turns]}


_CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
# A row of each layout.
_LAYOUTS: dict[str, Callable[[int], Any]] = {
    "ShareGPT with function_call": lambda n: {
        **_conversation(
            n, ("human", "add 1 and 2"), ("function_call", _CALL), ("observation", "3"), ("gpt", "it is 3")
        ),
        "tools": json.dumps([{"name": "add", "description": "adds", "parameters": {}}]),
    },
    "two user turns in a row": lambda n: _messages(n, ("user", "one"), ("user", "two"), ("assistant", "three")),
    "two answers in a row": lambda n: _messages(n, ("user", "one"), ("assistant", "two"), ("assistant", "three")),
    "an answer first": lambda n: _messages(n, ("assistant", "hello"), ("user", "one"), ("assistant", "two")),
    "roles in capitals": lambda n: _messages(n, ("User", "one"), ("Assistant", "two")),
    "a role bot": lambda n: _messages(n, ("user", "one"), ("bot", "two")),
    "an unknown role": lambda n: _messages(n, ("user", "one"), ("narrator", "two"), ("assistant", "three")),
    "query and response": lambda n: {"query": f"one {n}", "response": f"two {n}"},
    "input and output": lambda n: {"input": f"one {n}", "output": f"two {n}"},
    "prompt and response": lambda n: {"prompt": f"one {n}", "response": f"two {n}"},
    "system, user and assistant": lambda n: {"system": "be kind", "user": f"one {n}", "assistant": f"two {n}"},
    "instruction, context and response": lambda n: {"instruction": "add", "context": f"{n}", "response": f"two {n}"},
    "question and answers": lambda n: {"question": f"one {n}", "answers": {"text": [f"two {n}"], "answer_start": [0]}},
    "columns in capitals": lambda n: {"Question": f"one {n}", "Answer": f"two {n}"},
    "an output that is null": lambda n: {"instruction": f"one {n}", "output": None if n % 4 else f"two {n}"},
    "content in parts": lambda n: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"one {n}"}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"two {n}"}]},
        ]
    },
    "content with an image": lambda n: {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
            {"role": "assistant", "content": f"two {n}"},
        ]
    },
    "messages as a text": lambda n: {"messages": json.dumps(_messages(n, ("user", "one"), ("assistant", "two")))},
    "tool calls of OpenAI": lambda n: {
        "messages": [
            {"role": "user", "content": f"add {n}"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "assistant", "content": "3"},
        ]
    },
    "a list of turns": lambda n: [{"role": "user", "content": f"one {n}"}, {"role": "assistant", "content": "two"}],
    "HH pairs": lambda n: {
        "chosen": f"\n\nHuman: one {n}\n\nAssistant: two {n}",
        "rejected": f"\n\nHuman: one {n}\n\nAssistant: three {n}",
    },
    "a column that says nothing": lambda n: {"id": n, "body": f"one {n}"},
    "two layouts": lambda n: {"question": f"one {n}", "answer": "two"} if n % 2 else {"prompt": "o", "completion": "t"},
}
_FILES = ("CSV with semicolons", "CSV with tabs", "one object with a list", "saved by save_to_disk",
          "a DatasetDict saved by save_to_disk", "Parquet", "Arrow", "one file of two is empty",
          "one file of two is not UTF-8")  # fmt: skip
# What a user writes, and what has to be suggested.
_KEYS = {
    "optimizer.lr=1e-3": "optimizer.learning_rate",
    "optimizer.schedule=wsd": "warmup_stable_decay",
    "train.per_device_train_batch_size=2": "micro_batch_size",
    "train.gradient_checkpointing=true": "activation_checkpointing",
    "train.num_train_epochs=1": "epochs",
    "train.bf16=true": "mixed_precision",
    "optimizer.lr_scheduler_type=cosine": "schedule",
    "train.learning_rate=1e-3": "optimizer.learning_rate",
    "data.max_seq_length=64": "max_length",
    "checkpoint.save_steps=5": "every",
    "evaluate.eval_steps=5": "every",
    "train.batch_size=4": "batch_size",
    "parallel.strategy=deepspeed": "zero",
    "optimizer.name=adam": "adamw",
    "tasks=sft": "task",
}


@register_fault("rows that are nearly right", variants=list(_LAYOUTS), share=3)
def near_rows(scene: Scene) -> None:
    """All rows are understood, or what is not is told."""
    make = _LAYOUTS[scene.variant]
    (scene.work / "near.jsonl").write_text("".join(json.dumps(make(n)) + "\n" for n in range(_ROWS)))
    task = ("task=dpo",) if scene.variant == "HH pairs" and scene.draw.random() < 0.5 else ()
    _understood(scene, "near.jsonl", *task)


@register_fault("files of rows that are nearly right", variants=list(_FILES), share=1.2)
def near_files(scene: Scene) -> None:
    """The same of files."""
    _understood(scene, _make(scene))


@register_fault("keys that are nearly right", variants=list(_KEYS), share=1.5)
def near_keys(scene: Scene) -> None:
    """Refused with the name that is meant."""
    words = scene.draw.choice((("recipe", "check"), ("plan",), ("train", "--dry-run")))
    refused(
        scene, scene.wait(scene.trainwright(*words, scene.recipe.name, scene.variant)), re.escape(_KEYS[scene.variant])
    )


def _understood(scene: Scene, name: str, *overrides: str) -> None:
    scene.use_own_cache()
    words = scene.draw.choice((("data", "check"), ("data", "check"), ("train",)))
    where = (f"logging.run_directory={scene.run}", "train.max_steps=2") if words[0] == "train" else ()
    more = (f"data.train={name}", "data.validation=4", *where, *overrides)
    ended = scene.wait(scene.trainwright(*words, scene.recipe.name, *more))
    scene.expect(ended, (FINISHED, REQUEST), re.escape(name.rpartition("/")[2]))
    in_bounds(ended)
    if ended.code == FINISHED:
        text = " ".join(ended.text.split())
        found = re.search(r"(\d+) (?:rows|pairs)", text)
        told = re.search(r"left out|without|skipp|not read|empty|joined|ignored", text)
        require(found and (int(found[1]) == _ROWS or told), f"not all {_ROWS} rows, and nothing said of it: {ended}")
        if words[0] == "data":
            examples = re.search(r"(\d+) examples", text)
            whole = examples and int(examples[1]) >= _ROWS
            require(whole or told, f"not an example for each of {_ROWS} rows, and nothing said of it: {ended}")


def _make(scene: Scene) -> str:
    """The file or directory of the variant; its name."""
    rows = [{"question": f"one {n}", "answer": f"two {n}"} for n in range(_ROWS)]
    lines = [json.dumps(row) + "\n" for row in rows]
    work = scene.work
    if scene.variant.startswith("CSV"):
        mark = ";" if "semicolons" in scene.variant else "\t"
        text = "".join(f"{row['question']}{mark}{row['answer']}\n" for row in rows)
        (work / "near.csv").write_text(f"question{mark}answer\n{text}")
        return "near.csv"
    if scene.variant.startswith("one file"):
        (work / "near").mkdir()
        (work / "near" / "a.jsonl").write_text("".join(lines))
        (work / "near" / "b.jsonl").write_bytes(b"" if "empty" in scene.variant else b"\xff\xfe\xfa" * 40)
        return "near"
    if scene.variant == "one object with a list":
        (work / "near.json").write_text(json.dumps({"data": rows}))
        return "near.json"
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(rows)
    if scene.variant == "Parquet":
        made.to_parquet(work / "near.parquet")
        return "near.parquet"
    if scene.variant == "a DatasetDict saved by save_to_disk":
        datasets.DatasetDict(train=made, test=made.select(range(4))).save_to_disk(work / "near")
        return "near"
    made.save_to_disk(work / "near")
    if scene.variant == "Arrow":
        next((work / "near").glob("*.arrow")).rename(work / "near.arrow")
        return "near.arrow"
    return "near"
