"""Read an Accelerate file, or the environment of a worker that Accelerate started, as one plain mapping.

Files are YAML or JSON whatever their ending. Loose JSON is accepted: Python's True, False and None, single quotes,
commas before a closing bracket, comments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.recipe.files import parse_json, read_text
from trainwright.recipe.yaml_text import Tree, parse_mapping
from trainwright.utils.text import quoted

Place = tuple[str, ...]

_KEY = re.compile(r"""^[ \t{]*["']?[A-Za-z_]\w*["']?\s*:""", re.MULTILINE)
_OF_DEEPSPEED = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
_ENUMS = ("compute_environment", "distributed_type")


@dataclass(frozen=True)
class AccelerateConfig:
    """The settings that Accelerate was given. ``values`` is nested as in a file; ``places`` says where each key was
    written.

    Attributes:
        name: the path of the file as given, or another source of the values.
        directory: the base of relative paths in it; None for an environment.
        remarks: why Accelerate's own reader rejects the file although this one accepts it.
        problems: faults of the text itself, such as a key given twice.
        stated: False if Accelerate fills in its defaults, so that a default need not be a choice of the user.
        device_stated: False if it is unknown whether GPUs are meant.
        one_of_several: Accelerate was asked for several processes and started one.
    """

    name: str
    values: dict[str, Any]
    places: Mapping[Place, str] = field(default_factory=dict)
    directory: Path | None = None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    stated: bool = True
    device_stated: bool = True
    one_of_several: bool = False

    def place(self, *path: str) -> str:
        """Return where ``path`` was written, for a message: file:line, or a variable's name."""
        return self.places.get(path, self.name)

    def with_settings(self, settings: Mapping[str, str]) -> AccelerateConfig:
        """Return a copy in which options of a command, such as ``mixed_precision``, replace the keys."""
        values = {**self.values, **settings}
        part = values.get("dynamo_config")
        if "dynamo_backend" in settings and isinstance(part, dict):
            without = {key: value for key, value in part.items() if key.removeprefix("dynamo_") != "backend"}
            values["dynamo_config"] = without
        options: dict[Place, str] = {(key,): f"--{key.replace('_', '-')}" for key in settings}
        return replace(self, values=values, places={**self.places, **options})


def default_path() -> Path:
    """Return where `accelerate config` writes and `accelerate launch` reads: below HF_HOME or the user's cache.

    The path begins with ``~`` for a user without a home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    # Unlike a path that a user has written, it may have no home directory to be in.
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def without_file(on_cpu: bool) -> AccelerateConfig:
    """Return what a command without a file asks for: data parallelism on the devices of this machine."""
    return AccelerateConfig("the command line", {"distributed_type": "MULTI_CPU" if on_cpu else "MULTI_GPU"})


def read(path: Path) -> AccelerateConfig:
    """Read an Accelerate file.

    Raises RequestError, with the line if known, if the file does not exist or holds no mapping.
    """
    text = read_text(path)
    if not text.strip():
        raise RequestError(f"{path}: is empty; write one with `trainwright setup --config-file {quoted(path)}`")
    strict = _strict_json(text)
    is_json = text.lstrip().startswith("{")
    if strict is None and (not _KEY.search(text) or text.lstrip().startswith("[")):
        raise RequestError(f"{path}: is not an Accelerate file: it has no 'key: value', such as distributed_type: NO")
    tree = _loose_json(text, path) if is_json else parse_mapping(text, str(path))
    values = _plain(strict if strict is not None else tree.values)
    if "distributed_type" not in values and any(key in values for key in _OF_DEEPSPEED):
        return _deepspeed_file(path)
    return AccelerateConfig(
        name=str(path),
        values=values,
        places={tuple(map(str, path_of_key)): str(origin) for path_of_key, origin in tree.origins.items()},
        directory=path.parent,
        problems=tuple(map(str, tree.problems)),
        remarks=tuple(_remarks(path, values, strict=strict is not None, is_json=is_json)),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that an Accelerate file names; loose JSON is accepted. Raises RequestError."""
    text = read_text(path)
    strict = _strict_json(text)
    if strict is not None:
        return strict
    if not text.lstrip().startswith("{"):
        raise RequestError(f"{path}: is not a JSON object")
    values: dict[str, Any] = _plain(_loose_json(text, path).values)
    return values


def _deepspeed_file(path: Path) -> AccelerateConfig:
    """Return a DeepSpeed file in place of the Accelerate file that would name it."""
    return AccelerateConfig(
        name=str(path),
        values={"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(path)}},
        directory=Path(),
        remarks=("it is a DeepSpeed file, which an Accelerate file names by deepspeed_config_file",),
        device_stated=False,
    )


def _strict_json(text: str) -> dict[str, Any] | None:
    try:
        values = parse_json(text, "")
    except RequestError:
        return None
    return values if isinstance(values, dict) else None


def _loose_json(text: str, path: Path) -> Tree:
    try:
        return parse_mapping(_without_comments(text), str(path))
    except RequestError as error:
        raise RequestError(str(error).replace(": not valid YAML: ", ": not valid JSON: ")) from None


def _without_comments(text: str) -> str:
    """Convert loose JSON to YAML's flow style by removing // comments and tabs; line numbers are preserved."""

    def replaced(match: re.Match[str]) -> str:
        token = match.group()
        if token[0] == "'":
            return token.replace("\\'", "''")
        if token[0] == '"':
            return token
        return "\n" * token.count("\n") if token.startswith("/") else "  "

    return re.sub(
        # An unclosed string is taken to its end: retrying from each of its characters would take forever.
        r""" "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | //[^\n]* | /\*.*?(?:\*/|\Z) | \t """,
        replaced,
        text,
        flags=re.VERBOSE | re.DOTALL,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if value in ("None", "") else value


def _remarks(path: Path, values: dict[str, Any], *, strict: bool, is_json: bool) -> list[str]:
    """Return why `accelerate launch` 1.15 rejects the file: it depends on the file's ending and on capitals."""
    remarks = []
    if path.suffix == ".json" and not strict:
        remarks.append("is not strict JSON" if is_json else "is YAML under a name that ends in .json")
    lower = [key for key in _ENUMS if isinstance(values.get(key), str) and values[key] != values[key].upper()]
    if lower:
        remarks.append(f"{' and '.join(lower)} not in capitals")
    if "distributed_type" not in values:
        remarks.append("no distributed_type")
    return remarks
