"""The key-value cache of a model: what differs between the supported versions of transformers."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainwright.errors import RequestError
from trainwright.recipe.sections.model import OWN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Arguments under which architectures take a cache: from transformers 5.24 on, before, and in recurrent models.
_NAMES = ("cache", "past_key_values", "cache_params")
# The name in outputs of transformers, and in its mask functions.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


def new_cache(model: PreTrainedModel) -> tuple[str, Any]:
    """Return the name of the argument under which the model takes its cache, and an empty one; None as the cache of a
    model without one, which computes the whole text for every token.

    Raises:
        RequestError: the architecture's cache is not supported.
    """
    if model.config.model_type == OWN:
        return "", None
    arguments = inspect.signature(model.forward).parameters
    for name in _NAMES:
        if name in arguments and "dict" not in str(arguments[name].annotation):  # a table that XLM calls its cache
            return name, DynamicCache(config=model.config)
    raise RequestError(f"{type(model).__name__} has an unsupported kind of cache")
