"""Read a configuration of another tool as one mapping of its keys: YAML, JSON, a command line, a Python script.

Nothing in a file is executed. Values that a script computes are ``Code``, which no key accepts.

Configurations of Hydra are composed, and interpolations replaced, as documented by Hydra 1.3 and OmegaConf 2.3:
defaults lists (groups, ``override``, packages, ``_self_``), ``@package``, and interpolations of keys. Resolvers such as
``${oc.env:…}`` are left as they are.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.recipe.files import parse_json, read_text
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, parse_mapping, parse_value

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch", ".bash", ".py", ".ipynb")
LAUNCHER = "launcher"  # the key with the options of the launcher of a command

_LARGEST = {".ipynb": 16 * 2**20}  # bytes; notebooks have pictures in them
_LARGEST_OTHER = 2**20
_PROGRAMS = re.compile(
    r"(?:^|/)(?:trl|llamafactory-cli|lmf|axolotl|tune)$|\baxolotl\.cli\.train$|"
    r"(?:^|/)[\w.-]*(?:sft|dpo|kto|orpo|cpo|simpo|reward|grpo|run_|train|tun|lora|unsloth-cli)[\w.-]*\.py$"
)
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3", "llamafactory-cli", "trl", "axolotl", "tune")
_LOSSES = ("sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "grpo")  # in names of programs
_WORDS = ("train", "launch", "run", *_LOSSES)  # of programs' commands
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+(?:\[@\])?)(?::?-([^}]{0,300}))?\})")
_COMMENT = re.compile(r"(^|\s)#.*")
_OF_SHELL, _FOR_HYDRA = re.compile(r"\$\{?(\w+)\}?"), r"${shell.\1}"
_ARRAY = re.compile(r"^\s*(?:declare\s+-a\s+|local\s+|export\s+)?(\w+)(\+?)=\((.*)$")
_TEXT = re.compile(r"^\s*(?:local\s+|export\s+)?(\w+)=\"([^\"]*)$")  # that ends on another line
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;$`(]*)\s*(?:#.*)?$")
_FILES = ("config", "config_file")
# Of what a file may compute, so that no file takes long or much memory.
_DEEPEST_NESTING, _LONGEST_CHAIN, _LARGEST_NUMBER, _LONGEST_TEXT = 150, 16, 1e15, 10_000
_LONGEST_LINE = 100_000  # characters of a command, with the values of its variables
_LONGEST_PATH = 4096
_DEVICES = "CUDA_VISIBLE_DEVICES"
_NO_COMMANDS = {"echo", "printf", "cat"}  # what follows these is text


class Code(str):
    """An expression of a script, whose value is only known when it runs."""


def read(path: Path, overrides: Sequence[str] = ()) -> list[Tree]:
    """Return the keys of a file, with ``KEY=VALUE`` over them, and the lines they are from; of a script with several
    commands, the keys of each.

    Raises:
        RequestError: the file is not readable, or has no keys.
    """
    text = read_text(path, _LARGEST.get(path.suffix, _LARGEST_OTHER))
    if (root := configuration_root(path)) is not None:
        return [compose(path, root, overrides)]
    if path.suffix == ".json":
        trees = [parse_mapping(text, str(path))]
    elif path.suffix in (".ipynb", ".py"):
        trees = _script(text, path)
    elif path.suffix in (".yaml", ".yml"):
        trees = [parse_mapping(text, str(path))]
    else:
        trees = _commands(text, path, overrides)
    for tree in trees:
        tree.file = path
        launcher = tree.values.get(LAUNCHER)
        if not (isinstance(launcher, dict) and launcher.get("composed")):
            _override(tree, overrides)
        resolve(tree)
    return trees


def _override(tree: Tree, overrides: Sequence[str]) -> None:
    for override in overrides:
        key, equals, written = override.partition("=")
        if not equals:
            raise RequestError(f"{override}: expected KEY=VALUE, a key of the file's tool")
        put(tree, key, parse_value(written, f"argument {override!r}", ())[0], Origin(f"argument {override!r}"))


def put(tree: Tree, key: str, value: Any, origin: Origin) -> None:
    """Set a dotted key."""
    *above, last = key.lstrip("-+").split(".")
    values = tree.values
    for part in above:
        inside = values.get(part)
        values[part] = values = inside if isinstance(inside, dict) else {}
    values[last] = value
    tree.origins[(*above, last)] = origin


def _commands(text: str, path: Path, overrides: Sequence[str] = ()) -> list[Tree]:
    """Return the options of each command of a shell script that starts a training."""
    trees = [tree for line, words in _lines(text, 1) if (tree := _options(words, path, line, overrides)) is not None]
    if not trees:
        raise RequestError(f"{path}: has no command that starts a training of a known tool")
    return trees


def _lines(text: str, first_line: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each command, with variables that the text itself sets."""
    variables: dict[str, str] = {}

    def keep(name: str, text: str) -> None:
        variables.pop(name, None)
        if len(text) < _LONGEST_TEXT:
            variables[name] = text

    lines = text.splitlines()
    plain = [_COMMENT.sub("", line).rstrip() for line in lines]
    ends = {end: [at for at, line in enumerate(plain) if line.endswith(end)] for end in (")", '"')}
    at = 0
    while at < len(lines):
        start, parts = at, [lines[at]]
        while parts[-1].rstrip().endswith("\\") and at + 1 < len(lines):
            at += 1
            parts[-1:] = [parts[-1].rstrip()[:-1], lines[at].strip()]
        line = " ".join(parts)
        at += 1
        if match := _ARRAY.match(line) or _TEXT.match(line):
            is_array = _ARRAY.match(line) is not None
            end = ")" if is_array else '"'
            body = _COMMENT.sub("", match.groups()[-1]).rstrip()
            if not body.endswith(end):
                found = bisect_left(ends[end], at)
                if found == len(ends[end]):
                    continue  # it ends nowhere
                last = ends[end][found]
                body = " ".join((body, *(part.strip().removesuffix("\\") for part in plain[at : last + 1])))
                at = last + 1
            body = _substituted(body.removesuffix(end), variables)
            name = f"{match[1]}[@]" if is_array else match[1]
            keep(name, f"{variables.get(name, '')} {body}" if match[2] == "+" else body)
            continue
        line = _substituted(re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", line), variables)
        if match := _ASSIGNMENT.match(line):
            keep(match[1], match[2].strip("\"'"))
            continue
        if len(line) > _LONGEST_LINE or not any(name in line for name in (*_LAUNCHERS, ".py")):
            continue
        devices = [f"{_DEVICES}={variables[_DEVICES]}"] if _DEVICES in variables else []
        try:
            yield start + first_line, devices + shlex.split(line, comments=True)
        except ValueError:  # a quote that ends on another line, as in texts
            continue


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of variables, as long as they are not too much of it."""
    added = 0

    def value(match: re.Match[str]) -> str:
        nonlocal added
        name, default = match[1] or match[2], match[3]
        known = variables.get(name, default)
        added += len(known or "")
        return match[0] if known is None or added > _LONGEST_LINE else known

    return _VARIABLE.sub(value, text)


def _is_program(word: str) -> bool:
    return len(word) < _LONGEST_PATH and _PROGRAMS.search(word) is not None


def _options(words: list[str], path: Path, line: int, overrides: Sequence[str]) -> Tree | None:
    """Return the options of a command that starts a training; None if it does not. ``overrides``: of Hydra's groups."""
    program = next((at for at, word in enumerate(words) if _is_program(word)), None)
    starts = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS), len(words))
    if program and starts > program and words[program - 1].startswith("$"):
        starts = program - 1  # as $PYTHON train.py
    if program is None or starts > program or _NO_COMMANDS & set(words[:starts]):
        return None
    if words[starts + 1 : starts + 2] in (["chat"], ["eval"], ["export"], ["api"], ["webui"], ["download"]):
        return None
    tree = Tree(file=path)
    if words[program].endswith("tune") and words[program + 1 : program + 2] == ["run"]:
        starts, program = program + 1, _recipe_of_torchtune(words, program + 2)
    launcher = dict(_pairs(words[starts + 1 : program]))
    devices = [word.partition("=")[2] for word in words[:starts] if word.startswith(f"{_DEVICES}=")]
    if words[starts].endswith("llamafactory-cli") and re.fullmatch(r"\d+(,\d+)*", "".join(devices[-1:])):
        launcher["num_processes"] = devices[-1].count(",") + 1  # it starts one for each device
    arguments = dict(_pairs(words[program + 1 :]))
    origin = Origin(str(path), line)
    if any(
        word.startswith("--config-name") for word in words
    ):  # Hydra's; --config_name is one of transformers' scripts
        tree = _composed(str(arguments["config_name"]), words[program + 1 :], path, line, overrides)
        arguments = {}
    files = [arguments.pop(name) for name in _FILES if name in arguments]
    after = list(pairwise(words[program:]))
    files += [
        word
        for before, word in after
        if word.endswith((".yaml", ".yml")) and "=" not in word and not before.startswith("-")
    ][:1]
    if files and (file := near(re.sub(r"^\$\{?\w+\}?/", "", str(files[0])), path)) is not None:
        tree = parse_mapping(read_text(file), str(file))
        tree.file = path
    elif files and len(arguments) < 3:
        raise RequestError(f"{path}:{line}: {files[0]}, which the command reads, is not here")
    for name, value in arguments.items():
        off = name.startswith("no_") and value is True
        put(tree, name.removeprefix("no_") if off else name, False if off else value, origin)
    kind = next((word for word in words[program + 1 :][:1] if word in _WORDS), None)
    script = re.sub(r"\.py$", "", words[program].rpartition("/")[2])
    named = kind or next((word for word in re.split(r"\W|_", script) if word in _LOSSES), script)
    put(tree, f"{LAUNCHER}.program", named, origin)
    for name, value in launcher.items():
        put(tree, f"{LAUNCHER}.{name}", value, origin)
    return tree if arguments or files or len(tree.values) > 1 else None


def _recipe_of_torchtune(words: Sequence[str], at: int) -> int:
    """Return the place of the recipe's name in ``tune run``, which follows the options of torchrun."""
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] == "--standalone" else 2
    return min(at, len(words) - 1)


def _composed(name: str, words: Sequence[str], path: Path, line: int, overrides: Sequence[str]) -> Tree:
    """Return the configuration of a command of Hydra, of the folder ``configs``, with the command's overrides.

    A value that the script computes stays ``${shell.NAME}``; a group that it chooses is ``launcher.choice_GROUP``.
    """
    primary = near(f"configs/{name.removesuffix('.yaml')}.yaml", path)
    if primary is None:
        raise RequestError(f"{path}:{line}: configs/{name}, which the command reads, is not here")
    written: dict[str, str] = {}
    for word in (*words, *overrides):
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.+/@][\w.+/@-]*", key):
            written[key] = value
    root = primary.parent.absolute()
    chosen = {key: text for key, text in written.items() if "$" in text and (root / key.lstrip("+")).is_dir()}
    known = [f"{key}={_OF_SHELL.sub(_FOR_HYDRA, text)}" for key, text in written.items() if key not in chosen]
    tree = compose(primary, root, known)
    tree.file = path
    put(tree, f"{LAUNCHER}.composed", True, Origin(str(path), line))  # the overrides are in it
    for key, text in chosen.items():
        put(tree, f"{LAUNCHER}.choice_{key.lstrip('+')}", _OF_SHELL.sub(_FOR_HYDRA, text), Origin(str(path), line))
    return tree


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield options and values: ``--key value``, ``--key=value``, ``--key one two``, ``--flag``, ``key=value``."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            if equals and re.fullmatch(r"[\w.+/@-]+", name):
                yield name, _value(value)
            continue
        values = [value] if equals else []
        while not equals and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]) and words[at] not in "|>&;":
            values.append(words[at])
            at += 1
            if name.lstrip("-") in _FILES:
                break
        if any(map(_is_program, values)):
            values = []
        name = name.lstrip("-").replace("-", "_")
        yield name, True if not values else _value(values[0]) if len(values) == 1 else [_value(one) for one in values]


def _value(text: str) -> Any:
    if _VARIABLE.search(text) or text.startswith(("$(", "`")):
        return Code(text)
    try:
        return parse_value(text, "", ())[0] if text and not text.startswith(("*", "&", "!", "%", "@")) else text
    except RequestError:
        return text


def near(name: str, beside: Path) -> Path | None:
    """Return the file ``name`` in the working directory, beside a file, or in a directory above that; None if it is
    nowhere.
    """
    path = Path(name)
    folders = [Path(), *beside.absolute().parents] if not path.is_absolute() else [Path()]
    return next((folder / path for folder in folders[:8] if (folder / path).is_file()), None)


# The calls of a script whose arguments are keys of their own, by the words with which their names end; all arguments of
# configurations of trainers are keys at the top, as in a file.
_CONFIGURATIONS = ("Config", "TrainingArguments")
_OF_TRAINERS = re.compile(
    r"(?:SFT|DPO|KTO|ORPO|CPO|BCO|GRPO|PPO\w*|RLOO|Reward|PRM|GKD|XPO|NashMD|OnlineDPO)Config|\w*TrainingArguments"
)
_CALLS = [
    "get_peft_model",
    "load_dataset",
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "ORPOTrainer",
    "CPOTrainer",
    "UnslothTrainer",
    "Trainer",
    "RewardTrainer",
    "GRPOTrainer",
    "PPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "EarlyStoppingCallback",
    "train_on_responses_only",
    "get_chat_template",
    "standardize_sharegpt",
    "standardize_data_formats",
    "apply_chat_template",
    "map",
    "rename_column",
    "rename_columns",
    "filter",
    "select",
    "shuffle",
    "train_test_split",
    "concatenate_datasets",
    "interleave_datasets",
    "from_json",
    "from_csv",
    "from_parquet",
    "from_generator",
    "from_list",
    "from_dict",
    "from_pandas",
    "to_sharegpt",
]
_SEVERAL = ("load_dataset", "map", "rename_column")  # each call has keys of its own: map, map_1, …
_WITH_SETTINGS = (
    "FastLanguageModel",
    "FastModel",
    "get_peft_model",
    "LoraConfig",
    "BitsAndBytesConfig",
    "load_dataset",
)
_OF_ADAPTERS = ("LoraConfig", "BitsAndBytesConfig", "GenerationConfig", "AutoConfig")


def _cells(text: str, path: Path) -> str:
    notebook = parse_json(text, str(path))
    cells = notebook.get("cells", []) if isinstance(notebook, dict) else []
    code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    sources = ["".join(cell.get("source", "")) for cell in code]
    lines: list[str] = []
    for source in sources:
        if not re.match(r"\s*%%(?!capture|time|prun)", source):  # not of another language, as %%bash
            lines += _without_commands(source.splitlines())
    return "\n".join(lines)


def _without_commands(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a cell, with ``pass`` for commands of the notebook, which may be all of a block."""
    goes_on = False
    for line in lines:
        code = line.lstrip()
        is_command = not goes_on and code.startswith(("!", "%"))
        yield "" if goes_on else f"{line[: len(line) - len(code)]}pass" if is_command else line
        goes_on = (goes_on or is_command) and line.rstrip().endswith("\\")


def _script(text: str, path: Path) -> list[Tree]:
    """Return the arguments of the calls that configure a training, or of the command in the script's docstring."""
    module = _parsed(text, path)
    tree = Tree(file=path)
    constants = _Constants(module)
    uses = {
        id(inner): ast.unparse(node.targets[0])
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for inner in ast.walk(node.value)
    }
    for node, branch in _dead_branches(module):
        calls = sorted({name for part in branch for one in ast.walk(part) if (name := _known_call(one))})
        if calls and not _rows_loaded(branch) and not isinstance(node.test, ast.Constant):
            why = f"{shown(ast.unparse(node.test))} is {bool(branch is node.orelse)} by default: no {', '.join(calls)}"
            put(tree, f"skipped_calls.line_{branch[0].lineno}", why, Origin(str(path), branch[0].lineno))
    for name, call in calls_of(module):
        top = _OF_TRAINERS.fullmatch(name) is not None
        arguments: dict[str, Any] = {}
        for word in call.keywords:
            value = constants.value(word.value)
            if word.arg is not None:
                arguments[word.arg] = value
            elif isinstance(value, dict):
                arguments |= value
            elif top or name in _WITH_SETTINGS:
                put(tree, "computed_arguments", f"{name}(**{ast.unparse(word.value)})", Origin(str(path), call.lineno))
            if word.arg == "eval_dataset":
                arguments["eval_dataset"] = Code(ast.unparse(constants.expression(word.value)))
        arguments |= {f"argument_{at}": constants.value(value) for at, value in enumerate(call.args)}
        if not arguments and not top:
            arguments = {"called": True}
        if name == "load_dataset" and _is_validation(arguments, uses.get(id(call), "")):
            name = f"{name}_validation"
        if not top and isinstance(tree.values.get(name), dict) and name in _SEVERAL:
            name = f"{name}_{sum(key.startswith(name) for key in tree.values)}"
        lines = {word.arg: word.value.lineno for word in call.keywords}
        for key, value in arguments.items():
            put(tree, key if top else f"{name}.{key}", value, Origin(str(path), lines.get(key, call.lineno)))
    for key, part in _other_kinds(module):
        put(tree, key, True, Origin(str(path), getattr(part, "lineno", 1)))
    put(tree, "trainer_arguments", _whose_arguments(module), Origin(str(path), 1))
    docstring = ast.get_docstring(module, clean=False)
    is_library = docstring and not {"learning_rate", "per_device_train_batch_size"} & tree.values.keys()
    return _commands(docstring, path) if is_library and docstring else [tree]


def _is_validation(arguments: dict[str, Any], name: str) -> bool:
    """Return whether rows are loaded to evaluate on, by their split or by the name that they get."""
    split = str(arguments.get("split", arguments.get("argument_2", "")))
    return re.search(r"eval|valid|test|dev", split if split else name) is not None and "train" not in split


def _other_kinds(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield a key for what a script does that is no training on texts, and where."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    trains = [name for name in names if name.endswith(("Trainer", ".backward", *_CONFIGURATIONS))]
    if not set(trains).difference(_OF_ADAPTERS):
        yield "no_trainer", module
    indices = [node.slice for node in ast.walk(module) if isinstance(node, ast.Subscript)]
    columns = [call.args[0] for call in calls if ast.unparse(call.func).endswith(".cast_column") and call.args]
    for node in (*indices, *columns):
        if isinstance(node, ast.Constant) and node.value == "audio":
            yield "rows_of_sound", node
            return


def _whose_arguments(module: ast.Module) -> str:
    """Return whose defaults the arguments of the trainer have: those of transformers, of TRL, or of Unsloth's TRL."""
    calls = [ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)]
    configures = any(re.search(r"\b(?:SFT|DPO|KTO|ORPO|CPO)Config$", name) for name in calls)
    if any(name.endswith("TrainingArguments") for name in calls) and not configures:
        return "transformers"
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    return "unsloth" if any("unsloth" in ast.unparse(node) for node in imports) else "trl"


def script_of(path: Path) -> ast.Module:
    """Return the statements of a script or of a notebook's cells.

    Raises:
        RequestError: the file is not readable or not Python.
    """
    return _parsed(read_text(path, _LARGEST.get(path.suffix, _LARGEST_OTHER)), path)


def _parsed(text: str, path: Path) -> ast.Module:
    if path.suffix == ".ipynb":
        text = _cells(text, path)
    try:
        module = ast.parse("\n".join("" if line.startswith(("!", "%")) else line for line in text.splitlines()))
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{path}: is not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise RequestError(f"{path}: its expressions are nested too deeply to be read") from None
    nodes: list[ast.AST] = [module]
    for _ in range(_DEEPEST_NESTING):
        nodes = [inner for node in nodes for inner in ast.iter_child_nodes(node)]
    if nodes:
        raise RequestError(f"{path}: its expressions are nested too deeply to be read")
    return module


def calls_of(module: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return the calls that say how to train and on what, with their names, in the order in which they end.

    What comes after the training, as loading what was saved, says nothing about it, nor does a branch that is not run.
    """
    return [(name, call) for call in _run_calls(module) if (name := _called(call))]


def _run_calls(module: ast.Module) -> list[ast.Call]:
    """Return the calls up to that of the training, in the order in which they end."""
    off = {id(statement) for _, branch in _dead_branches(module) for statement in branch}
    calls = [node for node in _nodes_without(module, off) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))
    trains = [at for at, call in enumerate(calls) if re.fullmatch(r"\w*trainer\w*\.train", ast.unparse(call.func))]
    return calls[: trains[0] if trains else None]


def _nodes_without(node: ast.AST, off: set[int]) -> Iterator[ast.AST]:
    yield node
    for inner in ast.iter_child_nodes(node):
        if id(inner) not in off:
            yield from _nodes_without(inner, off)


def _dead_branches(module: ast.Module) -> list[tuple[ast.If, list[ast.stmt]]]:
    """Return the branches that are not run with the values that the script sets, each with its ``if``.

    One that loads the same rows in another way as the branch before it counts as not run, too.
    """
    constants = _Constants(module)
    dead: list[tuple[ast.If, list[ast.stmt]]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.If):
            value = constants.value(node.test)
            if not isinstance(value, Code):
                dead.append((node, node.orelse if value else node.body))
            elif _rows_loaded(node.body) and _rows_loaded(node.body) == _rows_loaded(node.orelse):
                dead.append((node, node.orelse))
    return dead


def _rows_loaded(statements: Sequence[ast.stmt]) -> list[tuple[str, str]]:
    """Return the names that statements give to rows they load, each with what they load; none if they do more."""
    loaded: list[tuple[str, str]] = []
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if _called(call) == "load_dataset":
                words = {word.arg: word.value for word in call.keywords}
                source = words.get("data_files", words.get("path", call.args[0] if call.args else call))
                loaded.append((name, ast.unparse(source)))
            case ast.Expr(value=ast.Call()):  # as print and logger.info
                pass
            case _:
                return []
    return loaded


def _known_call(node: ast.AST) -> str | None:
    return _called(node) if isinstance(node, ast.Call) else None


def _called(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Name):
        name, owner = function.id, ""
    elif isinstance(function, ast.Attribute):
        name = function.attr
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
    else:
        return None
    if name == "from_pretrained":
        return owner or None
    is_known = name in _CALLS or _OF_TRAINERS.fullmatch(name) is not None or name in _OF_ADAPTERS
    return name if is_known else None


class _Constants:
    """The values of names and attributes that a script sets to one value, and of expressions of them.

    Of attributes the objects are not told apart: an argument of the command, a field of a class and ``self.rate`` have
    the value that is set where they are defined. Arguments of functions and commands have their defaults.
    """

    def __init__(self, module: ast.Module) -> None:
        self._nodes: dict[str, list[ast.expr | None]] = {}  # by name, and by .attribute; None: any value
        self._following: list[str] = []
        self._values: dict[str, Any] = {}
        in_classes = {
            id(statement) for node in ast.walk(module) if isinstance(node, ast.ClassDef) for statement in node.body
        }
        for node in ast.walk(module):
            for name, value in _bindings(node):
                self._nodes.setdefault(f".{name}" if id(node) in in_classes else name, []).append(value)
        parameters = dict(_parameters(module))
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                for name, value in _passed(node, parameters.get(_last_name(node.func), [])):
                    self._nodes.setdefault(name, []).append(value)

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression of constants; ``Code`` for others."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._of_name(name, node)
            case ast.Attribute(value=ast.Name(), attr=name):
                return self._of_name(f".{name}", node)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                return {key.value: self.value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._of_mapping(inner, key, node)
            case ast.JoinedStr(values=parts):
                texts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in parts]
                return (
                    Code(ast.unparse(node)) if any(isinstance(one, Code) for one in texts) else "".join(map(str, texts))
                )
            case ast.Call(func=ast.Name(id="str" | "int" | "float" | "Path" as kind), args=[inner], keywords=[]):
                return self._converted(kind, inner, node)
            case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=key), default]) if (
                ast.unparse(inner) != "os.environ"
            ):
                values = self.value(inner)
                return values.get(key, self.value(default)) if isinstance(values, dict) else Code(ast.unparse(node))
            case ast.Call(func=function, args=[_, default]) if ast.unparse(function) in ("os.getenv", "os.environ.get"):
                return self.value(default)
            case ast.Call(func=ast.Name(id="field"), keywords=words):
                defaults = [word.value for word in words if word.arg == "default"]
                return self.value(defaults[0]) if defaults else Code(ast.unparse(node))
            case ast.Call(func=ast.Name(id="range"), args=[*bounds], keywords=[]):
                return Code(f"range({', '.join(str(self._smallest(bound)) for bound in bounds)})")
            case ast.IfExp(test=test, body=body, orelse=other):
                choice = self.value(test)
                return Code(ast.unparse(node)) if isinstance(choice, Code) else self.value(body if choice else other)
            case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=operand):
                value = self.value(operand)
                if isinstance(value, int | float):
                    return -value if isinstance(sign, ast.USub) else not value
            case ast.BinOp(left=left, op=operator, right=right):
                return self._computed(self.value(left), operator, self.value(right), node)
        return Code(ast.unparse(node))

    def expression(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name is set to, if it is set once."""
        for _ in range(_LONGEST_CHAIN):
            nodes = self._nodes.get(node.id, []) if isinstance(node, ast.Name) else []
            if len(nodes) != 1 or nodes[0] is None:
                break
            node = nodes[0]
        return node

    def _smallest(self, bound: ast.expr) -> Any:
        """Return a bound; of ``min(n, len(rows))`` n, as there is no row after the last."""
        if isinstance(bound, ast.Call) and ast.unparse(bound.func) == "min":
            numbers = [value for value in map(self.value, bound.args) if isinstance(value, int)]
            if len(numbers) == 1:
                return numbers[0]
        return self.value(bound)

    def _of_name(self, name: str, node: ast.AST) -> Any:
        nodes = self._nodes.get(name, [None])
        if None in nodes or name in self._following or len(self._following) >= _LONGEST_CHAIN:
            return Code(ast.unparse(node))
        if name not in self._values:
            self._following.append(name)
            try:
                self._values[name] = [self.value(one) for one in nodes if one is not None]
            finally:
                self._following.remove(name)
        values = self._values[name]
        is_one = all(value == values[0] and type(value) is type(values[0]) for value in values)
        # An expression about what the device supports stays one: it decides the precision.
        is_known = is_one and (not isinstance(values[0], Code) or "supported" in values[0])
        return values[0] if is_known else Code(ast.unparse(node))

    def _of_mapping(self, mapping: ast.expr, key: Any, node: ast.AST) -> Any:
        values = self.value(mapping)
        return values[key] if isinstance(values, dict) and key in values else Code(ast.unparse(node))

    def _converted(self, kind: str, inner: ast.expr, node: ast.AST) -> Any:
        value = self.value(inner)
        if isinstance(value, Code) or not isinstance(value, str | int | float):
            return Code(ast.unparse(node))
        try:
            return {"int": int, "float": float}.get(kind, str)(value)
        except ValueError:
            return Code(ast.unparse(node))

    @staticmethod
    def _computed(left: Any, operator: ast.operator, right: Any, node: ast.AST) -> Any:
        numbers = all(isinstance(one, int | float) and abs(one) < _LARGEST_NUMBER for one in (left, right))
        texts = all(
            isinstance(one, str) and not isinstance(one, Code) and len(one) < _LONGEST_TEXT for one in (left, right)
        )
        match operator:
            case ast.Add() if numbers or texts:
                return left + right
            case ast.Sub() if numbers:
                return left - right
            case ast.Mult() if numbers:
                return left * right
            case ast.Div() if numbers and right:
                return left / right
            case ast.FloorDiv() if numbers and right:
                return left // right
        return Code(ast.unparse(node))


def _parameters(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield functions and classes of a script with the names that their arguments get: fields are ``.attribute``s."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            names = [name.arg for name in (*node.args.posonlyargs, *node.args.args)]
            yield node.name, [*names[names[:1] == ["self"] :], *(name.arg for name in node.args.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            fields = [statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)]
            yield node.name, [f".{field.id}" for field in fields if isinstance(field, ast.Name)]


def _passed(call: ast.Call, parameters: list[str]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield what a call of the script's own functions and classes passes; with values that are unpacked, anything."""
    if not parameters:
        return
    if any(word.arg is None for word in call.keywords) or any(isinstance(one, ast.Starred) for one in call.args):
        yield from ((name, None) for name in parameters)
        return
    yield from zip(parameters, call.args, strict=False)
    words = {word.arg: word.value for word in call.keywords}
    yield from ((name, words[name.lstrip(".")]) for name in parameters if name.lstrip(".") in words)


def _last_name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a node sets, and ``.attribute``s, with their values; None if they are others."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _bound(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _bound(target, value)
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
            yield from _bound(target, None)
        case ast.FunctionDef(args=arguments):
            names = [*arguments.posonlyargs, *arguments.args]
            defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
            yield from ((name.arg, value) for name, value in zip(names, [*defaults, *arguments.defaults], strict=True))
            yield from (
                (name.arg, value) for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            )
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "setdefault" | "pop")):
            yield name, None
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=str() as flag)]):
            words = {word.arg: word.value for word in node.keywords}
            constants = {key: value.value for key, value in words.items() if isinstance(value, ast.Constant)}
            name = str(constants.get("dest", flag.lstrip("-").replace("-", "_")))
            action = constants.get("action")
            is_flag = action in ("store_true", "store_false")
            yield f".{name}", words.get("default", ast.Constant(action == "store_false") if is_flag else None)


def _bound(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    match target:
        case ast.Name(id=name):
            yield name, value
        case ast.Attribute(attr=name):
            yield f".{name}", value
        case ast.Subscript(value=inner):
            yield from _bound(inner, None)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            for item in items:
                yield from _bound(item, None)


def shown(value: Any) -> str:
    """Return a value on one line, shortened."""
    text = str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


_REFERENCE = re.compile(r"\$\{([\w.@-]+)\}")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_DEEPEST = 20


def configuration_root(path: Path) -> Path | None:
    """Return the folder of configurations that ``path`` is composed in; None if it is no configuration of Hydra."""
    if path.suffix not in (".yaml", ".yml"):
        return None
    text = read_text(path)
    if not re.search(r"^defaults:\s*(?:#.*)?$", text, re.MULTILINE):
        return None
    for folder in path.absolute().parents:
        if (folder / "experiment").is_dir() or any((folder / name).is_file() for name in ("train.yaml", "config.yaml")):
            return folder
    return path.absolute().parent


def compose(path: Path, root: Path, overrides: Sequence[str]) -> Tree:
    """Return the composition of a configuration, or of an experiment in the one that it is for.

    Raises:
        RequestError: a file is missing or wrong, or an override is malformed.
    """
    values: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise RequestError(f"{override}: expected KEY=VALUE")
        value, _ = parse_value(text, f"argument {override!r}", ())
        is_group = isinstance(value, str) and (root / key.lstrip("+").partition("@")[0]).is_dir()
        (groups if is_group else values)[key.lstrip("+")] = value
    inside = path.absolute().relative_to(root).with_suffix("")
    primary = path.absolute()
    if inside.parts[0] == "experiment":
        # It is composed over the configuration that its folder is for.
        files = (root / f"{part}.yaml" for part in inside.parts)
        primary = next((file for file in files if file.is_file()), root / "train.yaml")
        groups["experiment"] = "/".join(inside.parts[1:])
    tree = _Composer(root, groups).composed(primary)
    tree.file = path
    for key, value in values.items():
        _merge(tree, _nested(key, value), {tuple(key.split(".")): Origin(f"argument {key}={value}")})
    resolve(tree)
    return tree


@dataclass
class _Composer:
    root: Path
    chosen: dict[str, Any] = field(default_factory=dict)  # by group, with its package: what overrides choose

    def composed(self, primary: Path) -> Tree:
        """Compose the primary file; overrides in it and in what it includes are found first, as in Hydra."""
        self._find_overrides(primary, "", 0)
        tree = Tree()
        self._add(tree, primary, "", 0)
        return tree

    def _find_overrides(self, file: Path, package: str, depth: int) -> None:
        package = self._declared(read_text(file), package)
        for group, name, is_override in self._defaults(file):
            if is_override:
                self.chosen.setdefault(self._key(group, file, package), name)
        for group, name, is_override in self._defaults(file):
            option = self.chosen.get(self._key(group, file, package), name) if group else name
            for choice in option if isinstance(option, list) else [option]:
                included = self._file(group, choice, file) if choice and not is_override and depth < _DEEPEST else None
                if included is not None and choice != "_self_":
                    self._find_overrides(included, self._package(group, package), depth + 1)

    def _key(self, group: str, file: Path, package: str) -> str:
        """Return a group by its folder from the root, and by its package if that is another: `data/sets@data.train`."""
        folder, at, _ = group.partition("@")
        beside = file.parent.relative_to(self.root) if file.is_relative_to(self.root) else Path()
        path = folder.strip("/") if folder.startswith("/") else (beside / folder).as_posix()
        return f"{path}@{self._package(group, package)}" if at else path

    @staticmethod
    def _declared(text: str, package: str) -> str:
        match = _PACKAGE.search(text)
        return package if match is None else "" if match[1] == "_global_" else match[1]

    def _defaults(self, file: Path) -> list[tuple[str, Any, bool]]:
        entries = parse_mapping(read_text(file), str(file)).values.get("defaults") or []
        result: list[tuple[str, Any, bool]] = []
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, str):
                result.append(("", entry, False))
            elif isinstance(entry, dict):
                key, value = next(iter(entry.items()))
                words = str(key).split()
                result.append((words[-1], value, "override" in words[:-1]))
        return result

    def _file(self, group: str, name: Any, beside: Path) -> Path | None:
        folder = group.partition("@")[0]
        bases = [self.root] if folder.startswith("/") else [beside.parent, self.root]
        option = str(name).removesuffix(".yaml").lstrip("/")
        files = (base / folder.strip("/") / f"{option}.yaml" for base in bases)
        return next((file for file in files if file.is_file()), None)

    def _add(self, tree: Tree, file: Path, package: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise RequestError(f"{file}: defaults are nested more than {_DEEPEST} deep")
        text = read_text(file)
        own = parse_mapping(text, str(file))
        own.values.pop("defaults", None)
        package = self._declared(text, package)
        defaults = [item for item in self._defaults(file) if not item[2]]
        if ("", "_self_", False) not in defaults:
            defaults.append(("", "_self_", False))
        for group, name, _ in defaults:
            option = self.chosen.get(self._key(group, file, package), name) if group else name
            if option == "_self_":
                prefix: KeyPath = tuple(package.split(".")) if package else ()
                _merge(tree, _nested(package, own.values), {prefix + key: at for key, at in own.origins.items()})
                continue
            for choice in option if isinstance(option, list) else [option]:
                if choice in (None, "null"):
                    continue
                included = self._file(group, choice, file)
                if included is None:
                    raise RequestError(f"{file}: defaults: there is no {group or '.'}/{choice}.yaml in {self.root}")
                self._add(tree, included, self._package(group, package), depth + 1)

    @staticmethod
    def _package(group: str, package: str) -> str:
        folder, at, own = group.partition("@")
        if at:
            absolute = folder.startswith("/") or own.startswith("_global_")
            own = own.removeprefix("_global_").lstrip(".")
            return own if absolute or not package else f"{package}.{own}"
        name = folder.strip("/").replace("/", ".")
        return ".".join(filter(None, ("" if folder.startswith("/") else package, name)))


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    return value


def _merge(tree: Tree, over: Mapping[str, Any], origins: Mapping[KeyPath, Origin]) -> None:
    def merge(base: dict[str, Any], values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                merge(base[key], value)
            else:
                base[key] = deepcopy(value)

    merge(tree.values, over)
    tree.origins.update({path: origin for path, origin in origins.items() if path[:1] != ("defaults",)})


def resolve(tree: Tree) -> None:
    """Replace ``${key}`` by the value of the key, in place; what it does not have stays as it is."""

    def value_of(key: str) -> Any:
        value: Any = tree.values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def replaced(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, depth) for item in value]
        if not isinstance(value, str) or "${" not in value or depth > _DEEPEST:
            return value
        if match := _REFERENCE.fullmatch(value):
            inside = value_of(match[1])
            return value if inside is None else replaced(inside, depth + 1)

        def text(match: re.Match[str]) -> str:
            inside = value_of(match[1])
            return match[0] if inside is None or isinstance(inside, dict | list) else str(replaced(inside, depth + 1))

        return _REFERENCE.sub(text, value)

    tree.values = replaced(tree.values)
