"""Recipes as Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from trainwright.recipe import schema
    from trainwright.recipe.sections.data import DataSection
    from trainwright.recipe.sections.model import ModelSection
    from trainwright.recipe.sections.parallel import ParallelSection
    from trainwright.recipe.yaml_text import Tree


class Recipe:
    """A training recipe: which model is trained, on what, how and for how long.

    Sections and keys are those of recipe files (``trainwright recipe schema`` lists them); a section is read as an
    attribute. A recipe does not change: `override` makes another one.

    Args:
        sections: by name: ``task`` and mappings of keys, such as ``train={"max_steps": 100}``.

    Raises:
        RequestError: unknown keys, wrong values, or keys that contradict each other, each with the fix.

    Examples:
        >>> import trainwright as tw
        >>> recipe = tw.Recipe(
        ...     task="sft",
        ...     model={"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}, "tokenizer": "bytes"},
        ...     data={"train": "pydoc", "max_length": 64},
        ... )
        >>> recipe.optimizer.learning_rate
        2e-05
        >>> recipe.override("train.max_steps=3", optimizer={"learning_rate": 1e-3}).optimizer.learning_rate
        0.001
        >>> tw.Recipe(task="sft", data={"trian": "pydoc"}, model={"name": "gpt2"})
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: argument data: data.trian: unknown key; did you mean train?
    """

    if TYPE_CHECKING:
        task: str
        model: ModelSection
        data: DataSection
        optimizer: schema.OptimizerSection
        train: schema.TrainSection
        parallel: ParallelSection
        checkpoint: schema.CheckpointSection
        evaluate: schema.EvaluateSection
        logging: schema.LoggingSection

    def __init__(self, **sections: Any) -> None:
        from trainwright.recipe.loading import merge_values
        from trainwright.recipe.yaml_text import Tree

        self._set(merge_values(Tree(), _convert_to_plain(sections)))

    @classmethod
    def load(cls, path: str | PathLike[str], *overrides: str, **sections: Any) -> Recipe:
        """Read a recipe file and what it includes.

        Args:
            overrides: ``section.key=value`` as on the command line, the value in YAML.
            sections: the same as mappings: ``train={"max_steps": 100}``.

        Raises:
            RequestError: every problem, with file and line.

        Examples:
            >>> import trainwright as tw
            >>> tw.Recipe.load("tiny.yaml", "train.max_steps=5", data={"max_length": 32}).train.max_steps
            5
        """
        from trainwright.recipe.loading import read_merged

        return cls._of(read_merged(Path(path), overrides))._merge_sections(sections)

    def override(self, *overrides: str, **sections: Any) -> Recipe:
        """Return this recipe with other values: ``section.key=value``, or mappings by section."""
        from trainwright.recipe.loading import read_merged

        return self._of(read_merged(self._tree, overrides))._merge_sections(sections)

    def check(self) -> str:
        """Check the model and the first rows of the data too, which ``trainwright recipe check`` does.

        Returns:
            What a run of the recipe does, in one line, and lines with notes.

        Raises:
            RequestError: the model or a row is invalid.

        Examples:
            >>> import trainwright as tw
            >>> tw.Recipe.load("tiny.yaml").check()
            'sft of a fresh llama on ..., 4 steps of ... examples'
        """
        line, notes, _ = check_recipe(self)
        return "\n".join([line, *(f"note: {note}" for note in notes)])

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a recipe file with every key, including defaults."""
        Path(path).write_text(str(self), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return every key, including defaults, as plain values by section."""
        return self._recipe.model_dump()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._recipe, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return self._of, (self._tree,)

    def __str__(self) -> str:
        from trainwright.recipe.loading import dump_recipe

        return dump_recipe(self._recipe)

    def __repr__(self) -> str:
        shown_file = "" if self._tree.file is None else f" {self._tree.file}"
        return f"<Recipe{shown_file}: {self.task}>"

    @classmethod
    def _of(cls, tree: Tree) -> Recipe:
        recipe = cls.__new__(cls)
        recipe._set(tree)
        return recipe

    def _merge_sections(self, sections: Mapping[str, Any]) -> Recipe:
        from trainwright.recipe.loading import merge_values

        return self._of(merge_values(self._tree, _convert_to_plain(sections))) if sections else self

    def _set(self, tree: Tree) -> None:
        from trainwright.recipe.loading import load_tree

        self._tree = tree
        self._recipe = load_tree(tree).recipe


def extract_source(recipe: Recipe | str | PathLike[str]) -> Tree | Path:
    """Return what load_recipe accepts for a recipe: its file, or the tree of a `Recipe`."""
    return recipe._tree if isinstance(recipe, Recipe) else Path(recipe)


def choose_stem(source: Tree | Path) -> str:
    """Return the name of a recipe's file without its suffix; ``recipe`` for one that has no file."""
    file = source if isinstance(source, Path) else source.file
    return "recipe" if file is None else Path(file).stem


def _convert_to_plain(value: Any) -> Any:
    """Convert to mappings, lists and texts, as in YAML."""
    if isinstance(value, Mapping):
        return {key: _convert_to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_plain(item) for item in value]
    return str(value) if isinstance(value, PathLike) else value


def check_recipe(recipe_given: Recipe) -> tuple[str, list[str], bool]:
    """Return what a run does, notes about it, and whether its model was looked at; raise RequestError as ``check``."""
    from trainwright.data.check import check_data
    from trainwright.models.resolve_model import is_here, is_hub_id, locate
    from trainwright.parallel.zero import deepspeed_config
    from trainwright.recipe.registries import MODEL_CHECKS
    from trainwright.run.request import check_extensions

    recipe = recipe_given._recipe
    section, name = recipe.model, recipe.model.name
    notes: list[str] = []
    is_checked, readable = True, False
    deepspeed_config.check_keys(recipe)
    check_extensions(recipe, runs=False)
    if recipe.has_texts:
        checked_by = [check(section, recipe.data.pack_length) for check in MODEL_CHECKS.present()]
        is_checked = any(checked_by) or name is None or is_here(name)
        if name is not None and not is_here(name):
            if not is_hub_id(name):
                locate(name, "model.name", section.gguf_file)  # says what is wrong with the path
            kind = "its files are not" if is_checked else "neither its configuration nor its files are"
            notes.append(f"model.name: {name}: {kind} on this machine, so whether they fit the recipe was not checked")
        elif readable := _is_read_directly(section):
            from trainwright.models.load import check_files

            notes += check_files(section, recipe.train.seed)
    check_data(recipe)
    if readable:
        _check_tokens(recipe)
    train = recipe.train
    length = f"{train.epochs or 0:g} epoch{'s' * (train.epochs != 1)} in batches"
    if train.max_steps is not None:
        length = format_plural(train.max_steps, "step")
    if train.max_tokens is not None:
        length = f"{format_plural(train.max_tokens, 'token')} in batches"
    model, data = recipe.spec.inputs(recipe)
    batch = format_plural(train.global_batch_size, train.batch_unit.removesuffix("s"))
    line = f"{recipe.task} of {model} on {data}, {length} of {batch}"
    return line, notes, is_checked


def _check_tokens(recipe: schema.RecipeSchema) -> None:
    """Raise RequestError with the row if a file has a token that the model has no embedding for, as training does.

    Every row is read, but only if the tokenizer has such tokens.
    """
    from trainwright.data.check import check_sources
    from trainwright.data.rows.formats import look_up_reader
    from trainwright.models.load import load_config, load_tokenizer

    tokenizer = load_tokenizer(recipe.model)
    embeddings = load_config(recipe.model, tokenizer).get_text_config().vocab_size
    if len(tokenizer) <= embeddings:
        return
    for source_check in check_sources(recipe, look_up_reader(recipe), tokenizer, embeddings, only_files=True):
        if source_check.problems:
            raise RequestError(source_check.problems[0])


def _is_read_directly(model: ModelSection) -> bool:
    """Return whether a model, or the base of an adapter, can be looked at without converting a GGUF file."""
    from trainwright.models.resolve_model import is_packaged

    if model.name is None:
        return model.adapter.type != "none"
    return model.gguf_file is None and not model.name.endswith(".gguf") and not is_packaged(model.name)
