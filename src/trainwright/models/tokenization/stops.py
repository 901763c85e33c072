"""The token that ends an answer: the one that a chat template teaches, and where other programs look for it."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.chat_encoding import ChatEncoder, encode_messages

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


def turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, str]:
    """Return the token that ends a turn in this chat template; if it is not a single token, the text that does."""
    if not tokenizer.added_tokens_decoder:  # without special tokens, a text of the template's is all there can be
        return None, ChatEncoder(tokenizer).stop
    ids, targets = encode_messages(tokenizer, [_turn("user", "a"), _turn("assistant", "b")])
    trained = [token for token, is_target in zip(ids, targets, strict=True) if is_target]
    if trained[-1] in tokenizer.all_special_ids or trained[-1] in tokenizer.added_tokens_decoder:
        return trained[-1], ""
    return None, str(tokenizer.decode(trained)).rpartition("b")[2].rstrip(" ")


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def token_ids(value: int | list[int] | None) -> list[int]:
    """Return the ids in a setting that holds one id, several or none."""
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, (list, tuple)) else [int(value)]


def ending_turns(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, generation: GenerationConfig | None
) -> tuple[PreTrainedTokenizerBase, PretrainedConfig, GenerationConfig | None]:
    """Return copies in which the token that ends a turn in the chat template is the end of a text.

    Other programs stop at the tokens that these three name. Generation also still stops at the earlier ones, and the
    template renders as before, even if it writes ``eos_token``. If a turn does not end with a single token, nothing
    changes.
    """
    from transformers import GenerationConfig

    stop, _ = turn_end(tokenizer)
    if stop is None:
        return tokenizer, config, generation
    settings = generation if generation is not None else GenerationConfig.from_model_config(config)
    # If a generation config is marked as derived from the model's config, transformers derives it again.
    values = {key: value for key, value in settings.to_dict().items() if key != "_from_model_config"}
    stopping = GenerationConfig.from_dict(values)
    earlier = [*token_ids(stopping.eos_token_id), *token_ids(config.eos_token_id), *token_ids(tokenizer.eos_token_id)]
    stops = list(dict.fromkeys([stop, *earlier]))
    stopping.eos_token_id = stops[0] if len(stops) == 1 else stops
    config = copy.deepcopy(config)
    if stop not in token_ids(config.eos_token_id):
        config.eos_token_id = stop
    if tokenizer.eos_token_id != stop:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = _with_eos_token(tokenizer.chat_template, tokenizer.eos_token or "")
        tokenizer.eos_token = tokenizer.added_tokens_decoder[stop]
    return tokenizer, config, stopping


def _with_eos_token(template: Any, token: str) -> Any:
    """Return a chat template, or several by name, in which ``eos_token`` remains ``token``."""
    if isinstance(template, dict):
        return {name: _with_eos_token(text, token) for name, text in template.items()}
    if not isinstance(template, str) or "eos_token" not in template:
        return template
    # Templates are rendered with trim_blocks, which removes the line end after a block, and nothing else.
    return f"{{%- set eos_token = {json.dumps(token, ensure_ascii=False)} %}}\n{template}"
