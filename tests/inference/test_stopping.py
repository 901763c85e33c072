"""What ends an answer."""

from __future__ import annotations

from typing import Any

from tests.data.test_templates import CHATML, byte_level
from tests.inference.models import TOKENIZER, model_of
from trainwright.inference.generation import Stop, stop_of
from trainwright.models.tokenization import build_bytes_tokenizer


def test_the_models_own_ends_and_that_of_the_templates_turns() -> None:
    model: Any = model_of("llama")
    model.generation_config.eos_token_id = [7, 9]
    assert stop_of(model, TOKENIZER, chat=True).tokens == {7, 9, 258}
    tokenizer = build_bytes_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    assert stop_of(model, tokenizer, chat=True).tokens == {7, 9, 256, 258}
    assert stop_of(model, tokenizer, chat=False).tokens == {7, 9, 256, 258}, "258 is the model's own"


def test_a_token_that_only_the_template_closes_turns_with_ends_answers_of_conversations() -> None:
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer = byte_level(specials, CHATML, eos_token="<|endoftext|>")
    end, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    model: Any = model_of("llama")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert stop_of(model, tokenizer, chat=True).tokens == {end, turn}
    assert stop_of(model, tokenizer, chat=False).tokens == {end}


def test_a_template_that_closes_turns_with_a_text() -> None:
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n###\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    stop = stop_of(model_of("llama"), tokenizer, chat=True)
    assert stop.texts == ("\n###",)


def test_the_first_stop_text_counts_wherever_its_tokens_begin() -> None:
    stop = Stop(frozenset()).add_texts(["\n\n", "Q:", ""])
    assert stop.before("one Q: two\n\n") == "one "
    assert stop.before("none") == "none"
    assert stop.ended(TOKENIZER, list(b"a long line before it\n\n"))
    assert not stop.ended(TOKENIZER, list(b"a\n"))
