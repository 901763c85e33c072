"""What is known of a task without its code, so that recipes are read, checked and planned without torch.

A spec stands beside the task's code and is registered in ``registries.py``, or by an entry point of the group
``trainwright.tasks`` in another package. Its module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.sections.fields import Section

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

# examples: a text or a conversation. pairs: two answers that were compared. answers: pairs, or one answer with a label.
# refused: conversations, each also with a refusal of data.idk as its answer.
RowKind = Literal["examples", "pairs", "answers", "refused"]


@dataclass(frozen=True)
class ReferenceModel:
    """A model that the trained one is compared with.

    Args:
        every_step: it computes in every step; else it is asked once, before the first.
        own_weights: it is another model than the one that training starts from.
        last_block: the last block that computes; None: all do.
        share: the part of the batch that it sees.
    """

    every_step: bool
    own_weights: bool
    last_block: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class OwnModel:
    """A model that is made by the task itself and reads no texts, as a plan sees it.

    Args:
        config: the configuration of the most similar transformer.
        tokens: of an example.
        target_fraction: the part of the tokens that are predicted.
        assumption: what is taken for granted, in words.
    """

    config: Mapping[str, Any]
    tokens: int
    target_fraction: float
    assumption: str


@dataclass(frozen=True)
class Needs:
    """What a plan has to know of a task with its recipe.

    Args:
        documents: rows that are one example.
        full: every example has exactly data.max_length tokens.
        last_block: the block whose output the loss is of; None: the whole model.
        trainable: patterns of the names of the parameters that are trained, and the key that has them; None: all.
        reference: a model that is in memory beside the trained one.
        own_model: of a task that reads no texts.
    """

    documents: int = 1
    full: bool = False
    last_block: int | None = None
    trainable: tuple[Sequence[str], str] | None = None
    reference: ReferenceModel | None = None
    own_model: OwnModel | None = None


def _nothing_to_check(recipe: Recipe) -> Iterable[Contradiction]:
    return ()


def _as_written(values: dict[str, Any]) -> dict[str, Any]:
    return values


def _examples(recipe: Recipe, key: str) -> RowKind:
    return "examples"


def _a_pass_over_the_model(recipe: Recipe) -> Needs:
    return Needs()


def _model_and_data(recipe: Recipe) -> tuple[str, str]:
    return recipe.model.name or f"a fresh {(recipe.model.config or {})['model_type']}", recipe.data.name


@dataclass(frozen=True)
class TaskSpec:
    """A kind of training, as recipes, checks and plans know it.

    Args:
        name: its name, which is that of its section in a recipe too.
        summary: what it is, for the description of the key ``task``.
        module: where its code is; has ``build(recipe, cache) -> Task`` and ``prepare_once(recipe, cache) -> int``.
        section: the keys of its section; None: it has none.
        section_description: the section, in the schema.
        check: what contradicts itself in a recipe of the task.
        fill: a recipe's values as written, with those that follow from the task.
        rows: what the rows at a key of the section ``data`` are.
        needs: what a plan has to know.
        inputs: the model and the data in words.
        reads_texts: the sections ``model`` and ``data`` apply.
        corpus: trains on windows of a corpus rather than on rows.
        data_keys: keys of ``data`` that say what is trained on; those of other tasks have no effect.
        keeps_best: the lowest validation loss says which checkpoint is best.
        no_validation_rows: why ``eval`` cannot measure on a run's own validation rows; None: it can.
        examples: the key and the parts that decide what the examples are, for messages.
        length_keys: the keys that make examples shorter; None: those of ``data``.
        also_called: what other tools call the task.
        other_keys: keys of the section, dotted, and what other tools call them, separated by spaces.
    """

    name: str
    summary: str
    module: str
    section: type[Section] | None = None
    section_description: str = ""
    check: Callable[[Recipe], Iterable[Contradiction]] = _nothing_to_check
    fill: Callable[[dict[str, Any]], dict[str, Any]] = _as_written
    rows: Callable[[Recipe, str], RowKind] = _examples
    needs: Callable[[Recipe], Needs] = _a_pass_over_the_model
    inputs: Callable[[Recipe], tuple[str, str]] = _model_and_data
    reads_texts: bool = True
    corpus: bool = False
    data_keys: tuple[str, ...] = ("train",)
    keeps_best: bool = True
    no_validation_rows: str | None = None
    examples: tuple[str, str] = ("data.train", "the data, the tokenizer or its chat template")
    length_keys: str | None = None
    also_called: tuple[str, ...] = ()
    other_keys: Mapping[str, str] = field(default_factory=dict)
