"""Answers to prompts while training: greedy, in the model's own chat format, to its own stop token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainwright.data.plain_templates import fixed_date
from trainwright.data.templates import encode_messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Sampler:
    """Turns a prompt into the model's continuation.

    Args:
        plain: prompts are continued as they are instead of being a user's turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, plain: bool, max_new_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._stop = _stop_tokens(tokenizer, plain)
        # What the model is trained on, to the day that is written in it.
        self._template = None if plain else fixed_date(tokenizer.get_chat_template(), [])

    def __call__(self, model: PreTrainedModel, prompt: str) -> str:
        if self._template is None:
            ids = self._tokenizer(prompt)["input_ids"]
        else:
            ids = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                chat_template=self._template,
                add_generation_prompt=True,
                return_dict=False,
            )
        inputs = torch.tensor([ids], device=model.device)
        output = model.generate(  # type: ignore[operator]
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=self._max_new_tokens,
            do_sample=False,
            eos_token_id=self._stop,
            pad_token_id=self._stop[0] if self._stop else 0,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        text = self._tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
        return str(text).strip()


def _stop_tokens(tokenizer: PreTrainedTokenizerBase, plain: bool) -> list[int]:
    """The end-of-text token, and the one that ends a turn in this chat template: the last target of a turn."""
    stop = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if not plain:
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids, targets = encode_messages(tokenizer, turn)
        last = max(index for index, is_target in enumerate(targets) if is_target)
        if ids[last] in tokenizer.all_special_ids or ids[last] in tokenizer.added_tokens_decoder:
            stop.append(ids[last])
    return list(dict.fromkeys(stop))
