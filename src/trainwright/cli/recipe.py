"""``trainwright recipe``: inspect recipes without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.cli.command import Commands, TrustCode
from trainwright.utils.text import format_table, say

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Show, check and describe recipes.")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Overrides of recipe values, in YAML.")
]


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a recipe, such as sft/tiny.")] = "",
    all_names: Annotated[bool, typer.Option("--list", help="List the recipes that come with Trainwright.")] = False,
) -> None:
    """Write a recipe that comes with Trainwright as recipes/NAME.yaml, with the recipes that it includes."""
    from trainwright.utils.installation import list_shipped_recipes, write_recipe

    if all_names or not name:
        for line in format_table(list(list_shipped_recipes().items())):
            say(line)
        return
    files = write_recipe(name, Path("recipes"))
    say(f"wrote {' and '.join(map(str, files))}; the first lines of {files[0]} say how to run it")


@app.command()
def show(recipe: RecipeFile, overrides: Overrides = None, trust_code: TrustCode = False) -> None:
    """Print the complete recipe, merged from includes, overrides and defaults, and where each value comes from."""
    from trainwright.recipe.loading import dump_recipe, load_with_origins

    loaded_recipe = load_with_origins(recipe, overrides or [])
    say(dump_recipe(loaded_recipe.recipe, loaded_recipe.origins), end="")


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None, trust_code: TrustCode = False) -> None:
    """Check a recipe, its model, and the first rows of its data, and print in one line what it runs.

    Ends with 2 and the reasons if something is wrong.
    """
    from trainwright.api.recipe import Recipe, check_recipe

    line, notes, is_checked = check_recipe(Recipe.load(recipe, *(overrides or [])))
    say(f"{recipe}: {'ok' if is_checked else 'valid, but the model was not checked'}: {line}")
    for note in notes:
        say(f"note: {note}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipe files, for editors."""
    import json

    say(json.dumps(recipe_json_schema(), indent=2), wrap=False)


@app.command()
def objectives() -> None:
    """List the unlearning objectives: what each does, its paper, and its settings."""
    from trainwright.recipe.registries import OBJECTIVES
    from trainwright.tasks.unlearn.section import UnlearnSection

    for name in OBJECTIVES.names():
        facts = OBJECTIVES.get(name)
        section = UnlearnSection(objective=name)
        takes = {"gamma": 1.0, "alpha": 1.0, **facts.defaults}
        parts = [f"{key} {('required' if value is None else value)}" for key, value in takes.items()]
        if section.needs_reference_model:
            parts.append("the reference model in memory")
        elif section.compares:
            parts.append("the reference's log-probabilities, computed once")
        if facts.idk:
            parts.append("data.idk")
        if facts.alternates:
            parts.append("alternate answers in data.forget")
        say(f"{name:12} {facts.line} ({facts.paper})\n{'':12}   takes {', '.join(parts)}")


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file.

    No key is required, unlike in a complete recipe: a file can get any key from its includes.
    """
    from trainwright.recipe.schema import build_recipe_model

    schema = build_recipe_model().model_json_schema()
    file_names = {"type": "array", "items": {"type": "string", "minLength": 1}}
    schema["properties"]["include"] = {
        "anyOf": [{"type": "string", "minLength": 1}, file_names],
        "description": "Recipe files to merge first, relative to this one; the later file wins.",
    }
    _tidy_schema(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Trainwright recipe", **schema}


def _tidy_schema(node: Any) -> None:
    """Remove what pydantic adds (titles from key names) and what partial files do not need."""
    if isinstance(node, list):
        for item in node:
            _tidy_schema(item)
    elif isinstance(node, dict):
        node.pop("required", None)
        for key, value in list(node.items()):
            if key == "title" and isinstance(value, str):
                del node[key]
            else:
                _tidy_schema(value)
