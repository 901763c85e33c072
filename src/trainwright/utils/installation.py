"""What depends on where Trainwright is installed: the recipes that come with it, and the command for an extra."""

from __future__ import annotations

import difflib
import os
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from trainwright.errors import MachineError, RequestError, convert_write_errors

FIRST = "trainwright recipe new sft/tiny, then trainwright {} recipes/sft/tiny.yaml"

_PACKAGE = Path(__file__).parents[1]
_CHECKOUT = _PACKAGE.parents[1]
_RECIPES = _PACKAGE / "recipes"  # in a checkout a link to its folder of that name
_NAME = "trainwright"


def list_shipped_recipes() -> dict[str, str]:
    """Return the first line of each recipe's comment, by its name, such as ``sft/tiny``."""
    files = {file.relative_to(_RECIPES).with_suffix("").as_posix(): file for file in sorted(_RECIPES.glob("*/*.yaml"))}
    return {name: file.read_text("utf-8").partition("\n")[0].lstrip("# ") for name, file in files.items()}


def write_recipe(name: str, folder: Path) -> list[Path]:
    """Write ``folder/NAME.yaml``, and the recipes that it includes beside it; return the files, the recipe's first.

    Raises:
        RequestError: there is no such recipe, or a file exists and has another content.
    """
    import yaml

    if name not in (recipe_names := list_shipped_recipes()):
        close = difflib.get_close_matches(name, recipe_names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise RequestError(f"{name}: no recipe has this name{hint}; trainwright recipe new --list prints all")
    texts, names = {}, [f"{name}.yaml"]
    for file_name in names:
        texts[file := folder / file_name] = text = (_RECIPES / file_name).read_text("utf-8")
        if file.exists() and file.read_text("utf-8", "replace") != text:
            raise RequestError(f"{file}: exists with another content; move it away, or use it")
        if (include := yaml.safe_load(text).get("include")) is not None:
            names.append(os.path.normpath(Path(file_name).parent / include))
    for file, text in texts.items():
        with convert_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    return list(texts)


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra.

    In a checkout it names its folder; from a wheel it names the requirements, as the index may not have Trainwright.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return shlex.join(["pip", "install", "-e", f"{_CHECKOUT}[{extra}]"])
    return shlex.join(["pip", "install", *_list_requirements(extra)])


def _list_requirements(extra: str) -> list[str]:
    names = []
    for line in metadata.requires(_NAME) or ():
        requirement, _, marker = line.partition(";")
        if marker.strip() == f'extra == "{extra}"':
            if requirement.startswith(f"{_NAME}["):
                extras = requirement.strip()[len(_NAME) + 1 : -1].split(",")
                names += [dependency for extra_name in extras for dependency in _list_requirements(extra_name)]
            else:
                names.append(requirement.strip())
    return names


# By module name: the package, and our extra that installs it.
_PACKAGES = {
    "rouge_score": ("rouge-score", "evaluation"),
    "jsonschema": ("jsonschema", "evaluation"),
    "scipy": ("scipy", "evaluation"),
    "bitsandbytes": ("bitsandbytes", "quantization"),
    "matplotlib": ("matplotlib", "charts"),
    "lm_eval": ("lm-eval", "lm-eval"),
}


def require(module: str, what: str) -> None:
    """Raise MachineError if ``module``, which ``what`` needs, is not installed."""
    if find_spec(module) is None:
        package, extra = _PACKAGES[module]
        raise MachineError(f"{what} needs {package}, which is not installed; {install_command(extra)}")
