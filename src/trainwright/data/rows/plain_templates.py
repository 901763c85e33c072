"""Chat templates for tokenizers without one, and a fixed date for templates that write the current date."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# As in https://huggingface.co/docs/transformers/chat_templating
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ END }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# Some templates write the current date. The same data must give the same tokens every day, so the date is fixed to the
# one Llama 3.1's template falls back to.
_DATE = (
    "{%- macro strftime_now(format) -%}"
    "{{ {'%d %b %Y': '26 Jul 2024', '%B %d, %Y': 'July 26, 2024', '%d %B %Y': '26 July 2024'}"
    ".get(format, '2024-07-26') }}"
    "{%- endmacro -%}"
)


def install_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Set a plain chat template on a tokenizer without one, in place; return a message about it, or None.

    The template is ChatML if the vocabulary has its two tokens, otherwise ``User: …`` and ``Assistant: …`` lines with
    the end-of-text token after each answer.
    """
    if tokenizer.chat_template is not None:
        return None
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        tokenizer.chat_template = CHATML
        return "the tokenizer has no chat template: ChatML is used, because it has ChatML tokens"
    opens = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    end = "eos_token" if tokenizer.eos_token is not None else "''"
    tokenizer.chat_template = ("{{ bos_token }}" if opens else "") + _PLAIN.replace("END", end)
    return "the tokenizer has no chat template: plain 'User:' and 'Assistant:' lines are used"


def fixed_date(template: str, notes: list[str]) -> str:
    """Return the template with a fixed date if it writes the current one; add a line about it to ``notes``."""
    if "strftime_now" not in template:
        return template
    notes.append("the chat template contains the current date: 26 July 2024 is used, so that the data stay the same")
    return _DATE + template
