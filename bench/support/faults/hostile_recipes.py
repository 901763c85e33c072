"""Recipes that want to take all time, all memory, the terminal, or somebody else's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from support.faults.setting import refused
from trainwright.faults.drills.kinds import register_fault
from trainwright.faults.drills.trial_environment import MACHINE, REQUEST, Scene

# What a row, a key or a name may carry to a terminal: set the clipboard, clear the screen, retitle the window.
ESCAPES = ("\x1b]52;c;cHduZWQ=\x07", "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x9b31m", "\x08\x08\x7f", "\x1bc")
_LOOKS = (("recipe", "check"), ("plan",), ("train", "--dry-run"), ("train",))

Writer = Callable[[Scene, str], str]


def _bomb(opening: str, closing: str, levels: int = 12, width: int = 9) -> str:
    lines = [f"a0: &a0 {opening}{'x: 1' if opening == '{' else 'x'}{closing}"]
    for level in range(1, levels):
        if opening == "{":
            inner = ", ".join(f"k{n}: *a{level - 1}" for n in range(width))
        else:
            inner = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {opening}{inner}{closing}")
    return "\n".join(lines) + "\n"


def _merge_bomb(levels: int = 14, width: int = 8) -> str:
    lines = ["a0: &a0 {" + ", ".join(f"k{n}: {n}" for n in range(50)) + "}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * width)}], x{level}: 1}}")
    return "\n".join(lines) + "\n"


# Text that is put before the recipe.
_BEFORE: dict[str, Callable[[], str | bytes]] = {
    "aliases that multiply, of lists": lambda: _bomb("[", "]"),
    "aliases that multiply, of mappings": lambda: _bomb("{", "}"),
    "merge keys that multiply": _merge_bomb,
    "an alias of itself": lambda: "a: &a [*a]\n",
    "a mapping of itself": lambda: "model: &a {config: *a}\n",
    "brackets 100,000 deep": lambda: "a: " + "[" * 100_000 + "]" * 100_000 + "\n",
    "mappings 20,000 deep": lambda: "a: " + "{b: " * 20_000 + "1" + "}" * 20_000 + "\n",
    "a Python object": lambda: "a: !!python/object/apply:os.system ['touch pwned']\n",
    "an unknown tag": lambda: "a: !run 'touch pwned'\n",
    "bytes that are not UTF-8": lambda: b"a: \xff\xfe\xfa\n",
    "a null byte": lambda: b"a: x\x00y\n",
    "300,000 keys": lambda: "".join(f"k{n}: {n}\n" for n in range(300_000)),
    "a key twice": lambda: "task: dpo\n",
    "a scalar of 30 MB": lambda: "a: " + "x" * 30_000_000 + "\n",
    "an integer of 100,000 digits": lambda: "a: " + "9" * 100_000 + "\n",
    "tabs": lambda: "train:\n\tmax_steps: 3\n",
    "a list of documents": lambda: "---\na: 1\n---\nb: 2\n",
    "a date": lambda: "task: 2026-11-22\n",
    "an escape in a key": lambda: '"' + "\\e]52;c;cHduZWQ=\\a" + '": 1\n',
    "an escape in a value": lambda: 'include: "\\e[2J\\e[H.yaml"\n',
    "a lone surrogate in a key": lambda: '"\\ud800": 1\n',
}
# An include that is put before the recipe, of a file that is made.
_INCLUDED = ("itself", "a directory", "/dev/zero", "a pipe", "a thing that is not there", "two that include each other")
# What is put over the recipe.
_OVERRIDES = (
    "model.config.num_hidden_layers=1000000000",
    "model.config.num_hidden_layers=-1",
    "model.config.num_hidden_layers=1e9",
    "model.config.num_hidden_layers=99999999999999999999999999",
    "model.config.hidden_size=1000000000000",
    "model.config.hidden_size=0",
    "model.config.vocab_size=1000000000000000",
    "model.config.intermediate_size=10000000000",
    "model.config.max_position_embeddings=-5",
    "model.config.num_attention_heads=0",
    "model.config.num_attention_heads=3",
    "model.config.hidden_size=.nan",
    "model.config.hidden_act=os.system",
    "model.config.model_type=../../etc/passwd",
    "train.global_batch_size=1000000000000000000",
    "train.global_batch_size=99999999999999999999999999999999",
    "train.max_steps=.inf",
    "train.epochs=1e300",
    "train.seed=-1",
    "optimizer.learning_rate=.nan",
    "optimizer.learning_rate=-1",
    "parallel.num_processes=1000000000",
    "parallel.num_processes=0",
    "data.pack_length=1000000000000000",
    "data.max_length=0",
    "data.validation=1000000000000",
    "data.train=/dev/zero",
    "data.train=/proc/self/mem",
    "data.train=\x1b]52;c;cHduZWQ=\x07",
    "model.name=\x1b[2J\x1b[H",
    "\x1b]0;title\x07.x=1",
    "train.max_steps={a: &a [x,x,x,x,x,x,x,x,x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b,*b,*b], "
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d,*d,*d], f: &f [*e,*e,*e,*e,*e,*e,*e,*e], "
    "g: &g [*f,*f,*f,*f,*f,*f,*f,*f], h: [*g,*g,*g,*g,*g,*g,*g,*g]}",
    "train.max_steps=" + "[" * 50_000,
)


@register_fault("a hostile recipe", variants=[*_BEFORE, *(f"include {name}" for name in _INCLUDED)], share=4)
def hostile_recipe(scene: Scene) -> None:
    """Refused in words, in bounded time and memory."""
    if scene.variant in _BEFORE:
        before = _BEFORE[scene.variant]()
        data = before if isinstance(before, bytes) else before.encode("utf-8", "surrogatepass")
    else:
        data = _included(scene, scene.variant.removeprefix("include ")).encode()
    scene.recipe.write_bytes(data + scene.recipe.read_bytes())
    _look(scene)


@register_fault("a hostile value", variants=[text[:60] for text in _OVERRIDES], share=4)
def hostile_value(scene: Scene) -> None:
    """The same of a value on the command line."""
    value = next(text for text in _OVERRIDES if text[:60] == scene.variant)
    # Only a plan knows which sizes agree, and only the model's own code what an activation is called.
    looks = _LOOKS if not value.startswith("model.config.") else _LOOKS[3:] if "hidden_act" in value else _LOOKS[1:]
    _look(scene, value, looks=looks)


@register_fault("a recipe that is no file", variants=("/dev/zero", "a directory", "a name of escapes"), share=0.8)
def no_recipe(scene: Scene) -> None:
    """The same of what is given as the recipe itself."""
    place = {"/dev/zero": "/dev/zero", "a directory": str(scene.work)}
    scene.recipe = Path(place.get(scene.variant, "\x1b]52;c;cHduZWQ=\x07.yaml"))
    words = scene.draw.choice(_LOOKS)
    command = scene.trainwright(*words, str(scene.recipe))
    refused(scene, scene.wait(command), ())


def _look(scene: Scene, *overrides: str, looks: Sequence[tuple[str, ...]] = _LOOKS) -> None:
    words = scene.draw.choice(looks)
    where = (f"logging.run_directory={scene.run}",) if words[0] == "train" else ()
    command = scene.trainwright(*words, scene.recipe.name, *where, *overrides)
    # What no machine has room for may be the machine's fault rather than the request's.
    refused(scene, scene.wait(command), (), codes=(REQUEST, MACHINE))


def _included(scene: Scene, name: str) -> str:
    made = {
        "itself": "recipe.yaml",
        "a directory": ".",
        "/dev/zero": "/dev/zero",
        "a thing that is not there": "../../nothing.yaml",
        "two that include each other": "one.yaml",
    }
    if name == "a pipe":
        return f"include: {_pipe(scene).name}\n"
    if name.startswith("two"):
        (scene.work / "one.yaml").write_text("include: two.yaml\n")
        (scene.work / "two.yaml").write_text("include: one.yaml\n")
    return f"include: {made[name]}\n"


def _pipe(scene: Scene) -> Path:
    path = scene.work / "pipe.yaml"
    if not path.exists():
        os.mkfifo(path)
    return path
