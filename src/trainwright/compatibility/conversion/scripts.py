"""Read a script or a notebook in Python: the arguments of the calls that configure its training.

Nothing in a script is executed. Values that it computes are ``Code``, which no key accepts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.compatibility.conversion.loaded import add_imported_functions, replace_loaded_files
from trainwright.compatibility.conversion.script_values import (
    Code,
    Constants,
    find_last_name,
    find_option,
    is_absent,
    iterate_parameters,
    iterate_passed,
    iterate_returned,
)
from trainwright.errors import RequestError
from trainwright.recipe.files import parse_json, read_text
from trainwright.recipe.yaml_text import Origin, Tree

_LARGEST = {".ipynb": 16 * 2**20}  # bytes; notebooks have pictures in them
_LARGEST_OTHER = 2**20
_DEEPEST_NESTING = 150  # of expressions


def read_source_text(path: Path) -> str:
    """Return the text of a file of another tool; raise RequestError if it is not readable, or too large."""
    return read_text(path, _LARGEST.get(path.suffix, _LARGEST_OTHER))


def put(tree: Tree, key: str, value: Any, origin: Origin) -> None:
    """Set a dotted key."""
    *above, last = key.lstrip("-+").split(".")
    values = tree.values
    for part in above:
        inside = values.get(part)
        values[part] = values = inside if isinstance(inside, dict) else {}
    values[last] = value
    tree.origins[(*above, last)] = origin


def find_file_near(name: str, beside: Path) -> Path | None:
    """Return the file ``name`` in the working directory, beside a file or in a directory above that, or None."""
    path = Path(name)
    folders = [Path(), *beside.absolute().parents] if not path.is_absolute() else [Path()]
    return next((folder / path for folder in folders[:8] if (folder / path).is_file()), None)


# The calls of a script whose arguments are keys of their own, by the words with which their names end; all arguments of
# configurations of trainers are keys at the top, as in a file.
_CONFIGURATIONS = ("Config", "TrainingArguments")
_OF_PAIRS = re.compile(r"(DPO|KTO|ORPO|CPO)Trainer")  # whose arguments have defaults of their own
_OF_TRAINERS = re.compile(
    r"(?:SFT|DPO|KTO|ORPO|CPO|BCO|GRPO|PPO\w*|RLOO|Reward|PRM|GKD|XPO|NashMD|OnlineDPO)Config|\w*TrainingArguments"
)
_CALLS = [
    *("get_peft_model", "load_dataset", "load_from_disk", "SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer"),
    *("CPOTrainer", "UnslothTrainer", "Trainer", "RewardTrainer", "GRPOTrainer", "PPOTrainer"),
    *("DataCollatorForCompletionOnlyLM", "DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq"),
    *("EarlyStoppingCallback", "train_on_responses_only", "get_chat_template", "standardize_sharegpt"),
    *("standardize_data_formats", "apply_chat_template", "map", "rename_column", "rename_columns", "filter"),
    *("select", "shuffle", "train_test_split", "concatenate_datasets", "interleave_datasets", "from_json"),
    *("from_csv", "from_parquet", "from_generator", "from_list", "from_dict", "from_pandas", "to_sharegpt"),
]
_LOADS = ("load_dataset", "load_from_disk", "from_json", "from_csv", "from_parquet")
_SEVERAL = (*_LOADS, "map", "rename_column")  # each call has keys of its own: map, map_1, …
_WITH_SETTINGS = (
    *("FastLanguageModel", "FastModel", "get_peft_model", "LoraConfig", "BitsAndBytesConfig", "load_dataset"),
)
_MODELS = ("AutoModelForCausalLM", "AutoLigerKernelForCausalLM", "FastLanguageModel", "FastModel")
_NAMES_OF_MODELS = ("model_name", "pretrained_model_name_or_path")
_WITH_REFERENCE = ("DPOTrainer", "KTOTrainer")
_TRAINERS = (*_WITH_REFERENCE, "ORPOTrainer", "CPOTrainer", "SFTTrainer", "UnslothTrainer", "Trainer")
_PLACES = ("model", "args", "data_collator", "train_dataset", "eval_dataset")  # of the arguments of trainers
_OF_ADAPTERS = ("LoraConfig", "BitsAndBytesConfig", "GenerationConfig", "AutoConfig")


def _join_cells(text: str, path: Path) -> str:
    notebook = parse_json(text, str(path))
    cells = notebook.get("cells", []) if isinstance(notebook, dict) else []
    code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    sources = ["".join(cell.get("source", "")) for cell in code]
    lines: list[str] = []
    for source in sources:
        if not re.match(r"\s*%%(?!capture|time|prun)", source):  # not of another language, as %%bash
            lines += _replace_commands(source.splitlines())
    return "\n".join(lines)


def _replace_commands(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a cell, with ``pass`` for commands of the notebook, which may be all of a block."""
    goes_on = False
    for line in lines:
        code = line.lstrip()
        is_command = not goes_on and code.startswith(("!", "%"))
        yield "" if goes_on else f"{line[: len(line) - len(code)]}pass" if is_command else line
        goes_on = (goes_on or is_command) and line.rstrip().endswith("\\")


def build_tree(text: str, path: Path, options: dict[str, Any]) -> tuple[Tree, str | None]:
    """Return the arguments of the calls of a script that configure a training, or the script's docstring if it has
    none and may have the command in its docstring.

    Args:
        options: values of the options of its command, by their names; those that it has are removed.
    """
    module = _parse_statements(text, path, options)
    tree = Tree(file=path)
    constants = Constants(module)
    models = _Models(module, constants)
    uses = {
        id(inner): ast.unparse(node.targets[0])
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for inner in ast.walk(node.value)
    }
    for node, branch in _list_dead_branches(module):
        calls = sorted({name for part in branch for child in ast.walk(part) if (name := _find_known_name(child))})
        if calls and not _list_loaded_rows(branch) and not isinstance(node.test, ast.Constant):
            why = (
                f"{format_value(ast.unparse(node.test))} is {bool(branch is node.orelse)} by default: no "
                f"{', '.join(calls)}"
            )
            put(tree, f"skipped_calls.line_{branch[0].lineno}", why, Origin(str(path), branch[0].lineno))
    for name, call in list_calls(module):
        top = _OF_TRAINERS.fullmatch(name) is not None
        arguments: dict[str, Any] = {}
        named_words = [
            ast.keyword(parameter, value)
            for parameter, value in zip(_list_first_arguments(name), call.args, strict=False)
        ]
        words = [*call.keywords, *named_words]
        for word in words:
            value = constants.value(word.value)
            if word.arg is not None:
                arguments[word.arg] = value
            elif isinstance(value, dict):
                arguments |= value
            elif top or name in _WITH_SETTINGS:
                unknown = value if is_absent(value) else f"{name}(**{ast.unparse(word.value)})"
                put(tree, "computed_arguments", unknown, Origin(str(path), call.lineno))
            if word.arg in ("eval_dataset", "data_collator"):
                arguments[word.arg] = Code(ast.unparse(constants.find_expression(word.value)))
        arguments |= {
            f"argument_{at}": constants.value(call.args[at]) for at in range(len(named_words), len(call.args))
        }
        if name in _WITH_REFERENCE and "ref_model" in arguments:
            arguments["ref_model"] = models.reference(call)
        elif name in _MODELS and models.find_owner(call) is not None:
            name = f"{models.find_owner(call)}_model"
        elif name in _MODELS and len(models.trained) > 1:
            several = Code(" or ".join(sorted(map(repr, models.trained))))
            arguments |= {key: several for key in ("argument_0", *_NAMES_OF_MODELS) if key in arguments}
        if not arguments and not top:
            arguments = {"called": True}
        if name in _LOADS and _is_validation(arguments, uses.get(id(call), "")):
            name = f"{name}_validation"
        if not top and isinstance(tree.values.get(name), dict) and name in _SEVERAL:
            name = f"{name}_{sum(key.startswith(name) for key in tree.values)}"
        lines = {word.arg: word.value.lineno for word in words}
        for key, value in arguments.items():
            put(tree, key if top else f"{name}.{key}", value, Origin(str(path), lines.get(key, call.lineno)))
    for key, part in _iterate_other_kinds(module):
        put(tree, key, True, Origin(str(path), getattr(part, "lineno", 1)))
    put(tree, "trainer_arguments", _find_argument_owner(module), Origin(str(path), 1))
    trainers = (_OF_PAIRS.fullmatch(name) for name, _ in list_calls(module))
    if (trainer := next(filter(None, trainers), None)) is not None:
        put(tree, "launcher.program", trainer[1].lower(), Origin(str(path), 1))
    docstring = ast.get_docstring(module, clean=False)
    is_library = docstring and not {"learning_rate", "per_device_train_batch_size"} & tree.values.keys()
    return tree, docstring if is_library else None


def _is_validation(arguments: dict[str, Any], name: str) -> bool:
    """Return whether rows are loaded to evaluate on, by their split or by the name that they get."""
    split = str(arguments.get("split", arguments.get("argument_2", "")))
    hint = split if split else name
    return re.search(r"eval|valid|test|dev|(?:^|_)val(?:_|$)", hint) is not None and "train" not in hint


def _iterate_other_kinds(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
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


def _find_argument_owner(module: ast.Module) -> str:
    """Return whose defaults the arguments of the trainer have: those of transformers, of TRL, or of Unsloth's TRL."""
    calls = [ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)]
    configures = any(re.search(r"\b(?:SFT|DPO|KTO|ORPO|CPO)Config$", name) for name in calls)
    if any(name.endswith("TrainingArguments") for name in calls) and not configures:
        return "transformers"
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    return "unsloth" if any("unsloth" in ast.unparse(node) for node in imports) else "trl"


def parse_script(path: Path) -> ast.Module:
    """Return the statements of a script or of a notebook's cells.

    Raises:
        RequestError: the file is not readable or not Python.
    """
    return _parse_statements(read_source_text(path), path, {})


def _parse_statements(text: str, path: Path, options: dict[str, Any]) -> ast.Module:
    """Return the statements of a script, with ``options`` as the defaults of its command and with what it loads."""
    module = add_imported_functions(
        _parse_syntax(text, path), path, lambda file: _parse_syntax(read_source_text(file), file)
    )
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (name := find_option(node)) is not None and name in options:
            node.keywords = [word for word in node.keywords if word.arg not in ("default", "action")]
            node.keywords.append(ast.keyword("default", ast.parse(repr(options.pop(name)), mode="eval").body))
    constants = Constants(module)
    return replace_loaded_files(
        module, constants.value, constants.find_expression, lambda name: find_file_near(name, path)
    )


def _parse_syntax(text: str, path: Path) -> ast.Module:
    if path.suffix == ".ipynb":
        text = _join_cells(text, path)
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


def list_calls(module: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return the calls that say how to train and on what, with their names, in the order in which they end.

    What comes after the training, as loading what was saved, says nothing about it, nor does a branch that is not run.
    """
    off = {id(statement) for _, branch in _list_dead_branches(module) for statement in branch}
    calls = [node for node in _iterate_nodes_without(module, off) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))
    trains = [at for at, call in enumerate(calls) if re.fullmatch(r"\w*trainer\w*\.train", ast.unparse(call.func))]
    calls_to_training = calls[: trains[0] if trains else None]
    return [(name, call) for call in calls_to_training if (name := _find_call_name(call))]


def _iterate_nodes_without(node: ast.AST, off: set[int]) -> Iterator[ast.AST]:
    yield node
    for inner in ast.iter_child_nodes(node):
        if id(inner) not in off:
            yield from _iterate_nodes_without(inner, off)


def _list_dead_branches(module: ast.Module) -> list[tuple[ast.If, list[ast.stmt]]]:
    """Return the branches that are not run with the values that the script sets, each with its ``if``.

    One that loads the same rows in another way as the branch before it counts as not run, too.
    """
    constants = Constants(module)
    dead: list[tuple[ast.If, list[ast.stmt]]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.If):
            value = constants.value(node.test)
            if not isinstance(value, Code):
                dead.append((node, node.orelse if value else node.body))
            elif _list_loaded_rows(node.body) and _list_loaded_rows(node.body) == _list_loaded_rows(node.orelse):
                dead.append((node, node.orelse))
    return dead


def _list_loaded_rows(statements: Sequence[ast.stmt]) -> list[tuple[str, str]]:
    """Return the names that statements give to rows they load, each with what they load; none if they do more."""
    row_sources: list[tuple[str, str]] = []
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if _find_call_name(call) in _LOADS:
                words = {word.arg: word.value for word in call.keywords}
                source = words.get("data_files", words.get("path", call.args[0] if call.args else call))
                row_sources.append((name, ast.unparse(source)))
            case ast.Expr(value=ast.Call()):  # as print and logger.info
                pass
            case _:
                return []
    return row_sources


def _find_known_name(node: ast.AST) -> str | None:
    return _find_call_name(node) if isinstance(node, ast.Call) else None


def _find_call_name(call: ast.Call) -> str | None:
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


def _list_first_arguments(trainer: str) -> tuple[str, ...]:
    """Return the names of a trainer's first arguments, which a script may pass without them; none of other calls."""
    if trainer in _WITH_REFERENCE:
        return ("model", "ref_model", *_PLACES[1:])
    return _PLACES if trainer in _TRAINERS else ()


class _Models:
    """Which of the models that a script loads its trainers train, and which they compare with.

    Attributes:
        trained: the names of the models that may be the one that is trained.
    """

    def __init__(self, module: ast.Module, constants: Constants) -> None:
        self._constants = constants
        calls = list_calls(module)
        self._loads = {id(call): call for name, call in calls if name in _MODELS}
        trainers = [(name, call) for name, call in calls if name.endswith("Trainer")]
        results = {id(call) for _, call in trainers}  # what a model is after the training says nothing about it before
        off = {id(statement) for _, branch in _list_dead_branches(module) for statement in branch}
        self._set: dict[str, list[ast.expr]] = {}  # by name, of which expressions its values are made
        for name, value in _iterate_assignments(module, off):
            if name and id(value) not in results:
                self._set.setdefault(name, []).append(value)
        models = [node for _, call in trainers if (node := _find_argument(call, 0, "model"))]
        reference_models = [
            node
            for name, call in trainers
            if name in _WITH_REFERENCE and (node := _find_argument(call, 1, "ref_model"))
        ]
        self._compared = self._find_loads(reference_models)
        self._trained = self._find_loads(models) or self._loads.keys() - self._compared
        self.trained = self._names(models, self._trained)

    def find_owner(self, load: ast.Call) -> str | None:
        """Return whose model a call loads, reference or other; None: the one that is trained."""
        at = id(load)
        return None if at in self._trained else "reference" if at in self._compared else "other"

    def reference(self, trainer: ast.Call) -> Any:
        """Return the model that a trainer compares with; None if there is none, or the one that is trained."""
        node = _find_argument(trainer, 1, "ref_model")
        if node is None or all(
            self._constants.value(item) is None for item in self._set.get(find_last_name(node), [node])
        ):
            return None
        names = self._names([node], self._find_loads([node]))
        return None if len(names) == 1 and names == self.trained else Code(" or ".join(sorted(names)) or "unknown")

    def _find_loads(self, nodes: Sequence[ast.expr]) -> set[int]:
        """Return the loads, by their ids, of which expressions are made."""
        stack, seen_names, loads = list(nodes), set[str](), set[int]()
        visited_ids: set[int] = set()
        while stack:
            expression = stack.pop()
            if id(expression) in visited_ids:
                continue  # several names are set to it
            visited_ids.add(id(expression))
            for node in ast.walk(expression):
                if id(node) in self._loads:
                    loads.add(id(node))
                name = find_last_name(node)
                if name and name not in seen_names:
                    seen_names.add(name)
                    stack += self._set.get(name, [])
        return loads

    def _names(self, nodes: Sequence[ast.expr], loads: Iterable[int]) -> set[str]:
        """Return the names of models: those that are given as texts, and those that are loaded."""
        texts = [value for node in nodes if isinstance(value := self._constants.value(node), str)]
        arguments = [_find_argument(self._loads[load], 0, *_NAMES_OF_MODELS) for load in loads]
        names = [value for value in texts if not isinstance(value, Code)]
        return {*names, *(str(self._constants.value(node)) for node in arguments if node is not None)}


def _iterate_assignments(module: ast.Module, off: set[int]) -> Iterator[tuple[str, ast.expr]]:
    """Yield names, also of attributes, functions and their arguments, each with an expression that gives it a value."""
    parameters = dict(iterate_parameters(module))
    yield from iterate_returned(module)
    for node in _iterate_nodes_without(module, off):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((find_last_name(inner), value) for target in targets for inner in ast.walk(target))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield find_last_name(target), value
            case ast.Call():
                arguments = iterate_passed(node, parameters.get(find_last_name(node.func), []))
                yield from ((name.lstrip("."), value) for name, value in arguments if value is not None)


def _find_argument(call: ast.Call, at: int, *names: str) -> ast.expr | None:
    """Return what a call passes as an argument, by a name or by its place."""
    return next((word.value for word in call.keywords if word.arg in names), next(iter(call.args[at : at + 1]), None))


def format_value(value: Any) -> str:
    """Return a value on one line, shortened."""
    text = str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
