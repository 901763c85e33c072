"""Prepare the rows of an unlearning run: forget rows with their refusals, and retain rows as companions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.data.rows.kinds import EXAMPLES, FORGET, REFUSAL, kind_of_rows
from trainwright.data.stream.dataset_cache import Prepared, prepare
from trainwright.data.stream.unlearning import joined, some_of, with_roles
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.recipe.schema import Recipe
from trainwright.tasks.language_model import check_prepared, positions_of
from trainwright.tasks.unlearn.section import UnlearnSection
from trainwright.text import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rows:
    """The rows of an unlearning run.

    Attributes:
        prepared: pairs of forget and retain rows, for training and validation.
        forget: only the forget rows, with their refusals; documents have the same indices as in the pairs.
    """

    prepared: Prepared
    forget: TokenDataset


def prepare_rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Rows:
    """Return the rows of a resolved recipe, prepared or from the cache.

    Raises:
        RequestError: a source or a row is wrong.
    """
    section = recipe.own(UnlearnSection)
    data, seed = recipe.data, recipe.train.seed
    positions = positions_of(recipe, tokenizer)
    parts = {"forget": kind_of_rows(recipe, "data.forget")}
    if section.retains:
        parts["retain"] = EXAMPLES
    found = {
        part: prepare(data.part(part), tokenizer, kind, seed=seed, cache=cache, model_max_length=positions)
        for part, kind in parts.items()
    }
    forget = found["forget"].train
    everything = joined(forget, found["retain"].train if "retain" in found else None, cache)
    validation = None
    if data.validation is not None:
        assert not isinstance(data.validation, str), "a recipe that was read has none"
        validation = some_of(everything, data.validation, seed)
    taught = (REFUSAL,) if section.facts.learns == "refusals" else (FORGET, REFUSAL)
    lines = [line for part in found.values() for line in part.summary if not line.startswith("split: ")]
    lines.append(_line(everything, validation))
    prepared = Prepared(with_roles(everything, taught), validation, lines, found["forget"].directory)
    check_prepared(recipe, prepared, cache)
    return Rows(prepared, forget)


def _line(pairs: TokenDataset, validation: TokenDataset | None) -> str:
    line = f"unlearning: {plural(len(pairs), 'row')} to forget"
    if pairs.companions is not None:
        line += (
            f", each paired with one of {plural(pairs.companions.count, 'row')} to retain, a different one every epoch"
        )
    return line if validation is None else f"{line}; {len(validation):,} of them are measured"
