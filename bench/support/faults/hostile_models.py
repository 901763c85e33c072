"""Model directories of somebody else's: code to run, files outside, sizes that are lies, patterns without an end."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.faults.setting import in_bounds
from trainwright.faults.drills.invariants import require
from trainwright.faults.drills.kinds import register_fault
from trainwright.faults.drills.trial_environment import FAILED, FINISHED, MACHINE, REQUEST, Scene

_WEIGHTS = "model.safetensors"


def _json(name: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / name
        read = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**read, **values}))

    return change


def _header(change_header: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        data = (model / _WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change_header(header)
        text = json.dumps(header).encode()
        (model / _WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change


def _first(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[next(name for name in header if name != "__metadata__")].update(values)


def _length(length: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        data = (model / _WEIGHTS).read_bytes()
        (model / _WEIGHTS).write_bytes(length.to_bytes(8, "little") + data[8:])

    return change


def _pattern(regex: str) -> Callable[[Path], None]:
    """A tokenizer that splits at a pattern of somebody else's."""

    def change(model: Path) -> None:
        file = model / "tokenizer.json"
        read = json.loads(file.read_text())
        read["pre_tokenizer"] = {
            "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        read["normalizer"] = None
        file.write_text(json.dumps(read))

    return change


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch pwned",))


def _pickle(model: Path) -> None:
    (model / _WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs()))


def _code(model: Path) -> None:
    (model / "evil.py").write_text("open('pwned', 'w').close()\nclass Model: pass\nclass Config: pass\n")
    maps = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    _json("config.json", auto_map=maps, model_type="evil")(model)


def _index(model: Path) -> None:
    (model / _WEIGHTS).rename(model.parent / "outside.safetensors")
    header = (model.parent / "outside.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    names.pop("__metadata__", None)
    weights = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(weights))


def _template(text: str) -> Callable[[Path], None]:
    return lambda model: (model / "chat_template.jinja").write_text(text) and None


_SYSTEM = "{{ cycler.__init__.__globals__.os.system('touch pwned') }}"
_CHANGES: dict[str, Callable[[Path], None]] = {
    "1,000,000,000 layers": _json("config.json", num_hidden_layers=10**9),
    "a hidden size of 10^12": _json("config.json", hidden_size=10**12),
    "a vocabulary of 10^12": _json("config.json", vocab_size=10**12),
    "no hidden size": _json("config.json", hidden_size=0),
    "a hidden size that is a text": _json("config.json", hidden_size="many"),
    "an unknown architecture": _json("config.json", model_type="martian", architectures=["Martian"]),
    "an encoder and decoder": _json("config.json", model_type="t5", architectures=["T5ForConditionalGeneration"]),
    "code of its own": _code,
    "a pickle": _pickle,
    "an index that leads outside": _index,
    "a header of 2 GiB": _length(2**31),
    "a header of 2^63 bytes": _length(2**63),
    "a header of 2^64-1 bytes": _length(2**64 - 1),
    "negative offsets": _header(_first(data_offsets=[-64, 0])),
    "offsets beyond the end": _header(_first(data_offsets=[0, 2**40])),
    "offsets that are turned round": _header(_first(data_offsets=[128, 0])),
    "another shape": _header(_first(shape=[3, 5])),
    "a shape of 10^18": _header(_first(shape=[10**9, 10**9])),
    "an unknown type": _header(_first(dtype="F7")),
    "a tensor too few": _header(lambda header: header.pop(next(n for n in header if n != "__metadata__"))),
    "weights that are cut": lambda model: os.truncate(model / _WEIGHTS, 5000),
    "weights that are empty": lambda model: os.truncate(model / _WEIGHTS, 0),
    "no weights": lambda model: (model / _WEIGHTS).unlink(),
    "weights that are a link to nothing": lambda model: (
        (model / _WEIGHTS).unlink(), (model / _WEIGHTS).symlink_to("nowhere"))[0],
    "a pattern without an end": _pattern(r"((a+)+)+$|(.*)*(.*)*b"),
    "a pattern of a million repetitions": _pattern("(?:a{1000}){1000}"),
    "a pattern that is none": _pattern("((("),
    "a pattern that calls itself": _pattern(r"(?<a>\g<a>)"),
    "a tokenizer that is cut": lambda model: (model / "tokenizer.json").write_text('{"version": "1.0"') and None,
    "a tokenizer that is empty": lambda model: (model / "tokenizer.json").write_text("{}") and None,
    "a config that is cut": lambda model: (model / "config.json").write_text('{"model_type": "lla') and None,
    "a config that is a list": lambda model: (model / "config.json").write_text("[1]") and None,
    "a template that runs a program": _template(_SYSTEM),
    "a template without an end": _template("{% for i in range(10**9) %}{{ messages[0].content }}{% endfor %}"),
    "a template that is no template": _template("{% for"),
    "a template of escapes": _template("\x1b]52;c;cHduZWQ=\x07{{ messages[0].content }}{{ messages[-1].content }}"),
    "a template that fails": _template("{{ raise_exception('\x1b[2J no') }}"),
}  # fmt: skip
# What may be trained on all the same.
_HARMLESS = ("a template of escapes", "a pattern without an end", "a pattern of a million repetitions",
             "a pattern that calls itself", "an index that leads outside")  # fmt: skip
_LOOKS = (("train",), ("generate",), ("data", "check"))


@register_fault("a hostile model", variants=list(_CHANGES), share=4)
def hostile_model(scene: Scene) -> None:
    """Refused in words, in bounded time and memory; nothing of it is run."""
    model = scene.work / "model"
    shutil.copytree(scene.reference() / "final", model)
    _CHANGES[scene.variant](model)
    scene.use_own_cache()
    words = scene.draw.choice(_LOOKS[:2] if "template" not in scene.variant else (_LOOKS[0], _LOOKS[2]))
    if words[0] == "generate":
        command = scene.trainwright("generate", "model", "--prompt", "What is 2 and 3?")
    else:
        recipe = scene.recipe.read_text()
        begin, end = recipe.index("model:"), recipe.index("data:")
        scene.recipe.write_text(recipe[:begin] + "model: {name: model}\n" + recipe[end:])
        where = (f"logging.run_directory={scene.run}", "train.max_steps=2") if words[0] == "train" else ()
        command = scene.trainwright(*words, "recipe.yaml", *where)
    ended = scene.wait(command)
    require(not list(scene.directory.rglob("pwned")), f"code of the model's was run: {ended}")
    harmless = scene.variant in _HARMLESS or ("tokenizer" in scene.variant and words[0] == "data")
    codes = (FINISHED, REQUEST, MACHINE, FAILED) if harmless else (REQUEST, MACHINE)
    scene.expect(ended, codes)
    in_bounds(ended)
