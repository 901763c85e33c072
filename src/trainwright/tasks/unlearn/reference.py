"""The reference model of unlearning: which model it is, and how it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from trainwright.errors import RequestError
from trainwright.models.load import load_config, load_tokenizer
from trainwright.models.source import resolve
from trainwright.models.weights import Weights
from trainwright.parallel.shards import Shard
from trainwright.parallel.world import World
from trainwright.recipe.schema import Recipe
from trainwright.recipe.sections.model import AdapterSection, ModelSection
from trainwright.tasks.language_model import load
from trainwright.tasks.unlearn.module import UnlearnLM
from trainwright.tasks.unlearn.section import UnlearnSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "reference."
_KEY = "unlearn.reference"
_OWN = ("start", "base")


def other_model(recipe: Recipe) -> ModelSection | None:
    """Return the model that the recipe names as its reference, or None if it is the run's own or not needed."""
    section = recipe.own(UnlearnSection)
    if not section.compares or section.reference in _OWN:
        return None
    return ModelSection(name=section.reference)


def check_reference(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the reference available locally and check that it fits.

    Raises:
        RequestError: it cannot be found, has another tokenizer, or a different activation size.
    """
    if (other := other_model(recipe)) is None:
        return
    try:
        resolve(other)
        its = load_tokenizer(other)
    except RequestError as error:
        raise RequestError(f"{_KEY}: {str(error).removeprefix('model.name: ')}") from None
    if its.get_vocab() != tokenizer.get_vocab():
        different = len(set(its.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
        raise RequestError(
            f"{_KEY}: {other.name} has a different tokenizer ({different:,} differences in the vocabulary), so "
            "probabilities cannot be compared; use a model with the same tokenizer"
        )
    own, theirs = (load_config(each).get_text_config() for each in (recipe.model, other))
    keys = ["vocab_size"] if own.vocab_size != theirs.vocab_size else []
    if recipe.own(UnlearnSection).facts.of == "activations" and own.hidden_size != theirs.hidden_size:
        keys.append("hidden_size")
    for key in keys:
        raise RequestError(
            f"{_KEY}: {other.name} has a {key} of {getattr(theirs, key):,} and the model {getattr(own, key):,}; they "
            "cannot be compared"
        )


def frozen_copy(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, packed: bool, layer: int | None
) -> tuple[UnlearnLM, Weights | None] | None:
    """Return the reference as a separate model, and its weights, or None if no separate model is needed.

    Args:
        layer: the last block to keep if only its output is needed.
    """
    section = recipe.own(UnlearnSection)
    other = other_model(recipe)
    adapted = recipe.model.adapter.type != "none"
    if other is None and (adapted or not section.needs_reference_model):
        return None
    wanted = other or recipe.model.model_copy(update={"adapter": AdapterSection()})
    model, weights = load(recipe, wanted, tokenizer, f"{PREFIX}model.")
    model.requires_grad_(False)
    lm = UnlearnLM(model, packed=packed, layer=layer, attention=recipe.model.attention)
    if layer is not None:
        _cut(lm, layer + 1)
    return lm.eval(), weights


def _cut(lm: UnlearnLM, count: int) -> None:
    """Permanently remove the blocks after the first ``count``."""
    blocks = lm.blocks()
    for module in lm.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[count:]
            return


class CombinedWeights:
    """The weights of the trained model and of its reference, combined."""

    def __init__(self, own: Weights, reference: Weights) -> None:
        self._own, self._reference = own, reference

    def load(self, rank: int) -> None:
        """Load the weights of both models."""
        self._own.load(rank)
        self._reference.load(rank)

    def fill(self, name: str, block: Shard, world: World) -> None:
        """Fill a block of the model that the name belongs to."""
        (self._reference if name.startswith(PREFIX) else self._own).fill(name, block, world)

    def fingerprint(self) -> str | None:
        """Return the combined fingerprints, or None if one is None."""
        both = self._own.fingerprint(), self._reference.fingerprint()
        return None if None in both else "+".join(map(str, both))
