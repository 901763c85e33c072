"""Compose configurations of Hydra, and replace interpolations, as documented by Hydra 1.3 and OmegaConf 2.3.

Read are defaults lists (groups, ``override``, packages, ``_self_``), ``@package``, and interpolations of keys.
Resolvers such as ``${oc.env:…}`` are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.recipe.files import read_text
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, parse_mapping, parse_value

_REFERENCE = re.compile(r"\$\{([\w.@-]+)\}")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_DEEPEST = 20


def find_configuration_root(path: Path) -> Path | None:
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


def compose_configuration(path: Path, root: Path, overrides: Sequence[str]) -> Tree:
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
    tree = _Composer(root, groups).compose_primary(primary)
    tree.file = path
    for key, value in values.items():
        _merge(tree, _nest_value(key, value), {tuple(key.split(".")): Origin(f"argument {key}={value}")})
    resolve(tree)
    return tree


@dataclass
class _Composer:
    root: Path
    chosen: dict[str, Any] = field(default_factory=dict)  # by group, with its package: what overrides choose

    def compose_primary(self, primary: Path) -> Tree:
        """Compose the primary file; overrides in it and in what it includes are found first, as in Hydra."""
        self._find_overrides(primary, "", 0)
        tree = Tree()
        self._add(tree, primary, "", 0)
        return tree

    def _find_overrides(self, file: Path, package: str, depth: int) -> None:
        package = self._parse_package(read_text(file), package)
        for group, name, is_override in self._list_defaults(file):
            if is_override:
                self.chosen.setdefault(self._key(group, file, package), name)
        for group, name, is_override in self._list_defaults(file):
            option = self.chosen.get(self._key(group, file, package), name) if group else name
            for choice in option if isinstance(option, list) else [option]:
                path = self._file(group, choice, file) if choice and not is_override and depth < _DEEPEST else None
                if path is not None and choice != "_self_":
                    self._find_overrides(path, self._join_package(group, package), depth + 1)

    def _key(self, group: str, file: Path, package: str) -> str:
        """Return a group by its folder from the root, and by its package if that is another: `data/sets@data.train`."""
        folder, at, _ = group.partition("@")
        beside = file.parent.relative_to(self.root) if file.is_relative_to(self.root) else Path()
        path = folder.strip("/") if folder.startswith("/") else (beside / folder).as_posix()
        return f"{path}@{self._join_package(group, package)}" if at else path

    @staticmethod
    def _parse_package(text: str, package: str) -> str:
        match = _PACKAGE.search(text)
        return package if match is None else "" if match[1] == "_global_" else match[1]

    def _list_defaults(self, file: Path) -> list[tuple[str, Any, bool]]:
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
        config = parse_mapping(text, str(file))
        config.values.pop("defaults", None)
        package = self._parse_package(text, package)
        defaults = [item for item in self._list_defaults(file) if not item[2]]
        if ("", "_self_", False) not in defaults:
            defaults.append(("", "_self_", False))
        for group, name, _ in defaults:
            option = self.chosen.get(self._key(group, file, package), name) if group else name
            if option == "_self_":
                prefix: KeyPath = tuple(package.split(".")) if package else ()
                _merge(
                    tree, _nest_value(package, config.values), {prefix + key: at for key, at in config.origins.items()}
                )
                continue
            for choice in option if isinstance(option, list) else [option]:
                if choice in (None, "null"):
                    continue
                path = self._file(group, choice, file)
                if path is None:
                    raise RequestError(f"{file}: defaults: there is no {group or '.'}/{choice}.yaml in {self.root}")
                self._add(tree, path, self._join_package(group, package), depth + 1)

    @staticmethod
    def _join_package(group: str, package: str) -> str:
        folder, at, target_package = group.partition("@")
        if at:
            absolute = folder.startswith("/") or target_package.startswith("_global_")
            target_package = target_package.removeprefix("_global_").lstrip(".")
            return target_package if absolute or not package else f"{package}.{target_package}"
        name = folder.strip("/").replace("/", ".")
        return ".".join(filter(None, ("" if folder.startswith("/") else package, name)))


def _nest_value(key: str, value: Any) -> dict[str, Any]:
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
