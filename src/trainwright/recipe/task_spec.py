"""The description of a task without its code, to read, check and plan recipes without torch.

A spec is in a module next to the task's code and registered in ``recipe/registries.py``, or by an entry point of
the group ``trainwright.tasks`` in another package. The module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.recipe.sections.data import DataSection
from trainwright.recipe.sections.fields import Contradiction, Section

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


@dataclass(frozen=True)
class ReferenceModel:
    """The reference model of a task.

    Args:
        every_step: whether it computes in every step; otherwise once, before the first.
        own_weights: whether it differs from the model that training starts from.
        last_block: the last block that computes; None: all do.
        share: the fraction of the batch that it processes.
    """

    every_step: bool
    own_weights: bool
    last_block: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class TaskModel:
    """A model that the task makes itself and that reads no texts, as seen by a plan.

    Args:
        config: the configuration of the most similar transformer.
        tokens: per example.
        target_fraction: the fraction of the tokens that are predicted.
        assumption: what the plan assumes, as text.
    """

    config: Mapping[str, Any]
    tokens: int
    target_fraction: float
    assumption: str


@dataclass(frozen=True)
class Needs:
    """What a plan needs to know about a task and its recipe.

    Args:
        sequences_per_example: the number of sequences in one example.
        full: whether every example has exactly data.max_length tokens.
        last_block: the block whose output the loss uses; None: the full model.
        of_losses: whether the loss is a function of the losses of single targets, for which the head runs twice.
        reference: a model that is in memory in addition to the trained one.
        own_model: of a task that reads no texts.
    """

    sequences_per_example: int = 1
    full: bool = False
    last_block: int | None = None
    of_losses: bool = False
    reference: ReferenceModel | None = None
    own_model: TaskModel | None = None


def _describe_model_and_data(recipe: RecipeSchema) -> tuple[str, str]:
    return recipe.model.name or f"a fresh {(recipe.model.fresh or {})['model_type']}", recipe.data.name


@dataclass(frozen=True)
class TaskSpec:
    """A kind of training, as recipes, checks and plans know it.

    Args:
        name: also the name of its section in a recipe.
        summary: for the description of the key ``task``.
        module: its code, with ``build(recipe, cache) -> Task`` and ``prepare_once(recipe, cache) -> int``.
        section: the keys of its section; None: it has none.
        section_description: of the section in the schema.
        check: returns contradictions in a recipe of the task.
        fill: returns the recipe's values as written with those that follow from the task; see ``fill_values``.
        rows: the kind of rows at a key of the section ``data``, a name in
            ``registries.ROW_KINDS``, or ``module:Name``.
        needs: returns what a plan needs to know.
        inputs: describes the model and the data.
        reads_texts: whether the sections ``model`` and ``data`` apply.
        corpus: whether it trains on windows of a corpus rather than on rows.
        streams: whether rows may be read while training (``data.streaming``): each is used by itself, in any order.
        data: the section ``data`` with keys of its own; those of all tasks are in one.
        data_keys: keys of ``data`` for the training data; those of other tasks have no effect.
        keeps_best: whether the lowest validation loss determines the best checkpoint.
        no_validation_rows: why ``eval`` cannot measure on a run's own validation rows; None: it can.
        examples: the key and the parts that determine the examples, for messages.
        length_keys: the keys that make examples shorter; None: those of ``data``.
        also_called: other tools' names of the task.
    """

    name: str
    summary: str
    module: str
    section: type[Section] | None = None
    section_description: str = ""
    check: Callable[[RecipeSchema], Iterable[Contradiction]] = lambda recipe: ()
    fill: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values
    rows: Callable[[RecipeSchema, str], str] = lambda recipe, key: "examples"
    needs: Callable[[RecipeSchema], Needs] = lambda recipe: Needs()
    inputs: Callable[[RecipeSchema], tuple[str, str]] = _describe_model_and_data
    reads_texts: bool = True
    corpus: bool = False
    streams: bool = False
    data: type[DataSection] = DataSection
    data_keys: tuple[str, ...] = ("train",)
    keeps_best: bool = True
    no_validation_rows: str | None = None
    examples: tuple[str, str] = ("data.train", "the data, the tokenizer or its chat template")
    length_keys: str | None = None
    also_called: tuple[str, ...] = ()

    def fill_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a recipe's values with the task's section and what ``fill`` adds; a value as written stays."""
        if self.section is not None and values.get(self.name) is None:
            values = {**values, self.name: {}}
        return _merge_written(self.fill(values), values)


def _merge_written(filled: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Merge ``written`` over ``filled``, mappings key by key."""
    result = dict(filled)
    for key, value in written.items():
        earlier = filled.get(key)
        result[key] = _merge_written(earlier, value) if isinstance(earlier, dict) and isinstance(value, dict) else value
    return result
