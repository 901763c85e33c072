"""The built-in tokenizer: one id a byte, any text back, the same after saving."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trainwright.models.tokenization import build_bytes_tokenizer

TEXTS = [
    "",
    "plain ascii, with  two spaces\n\tand a tab ",
    "naïve café — “quotes” …",
    "日本語 русский العربية हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈",
    "".join(chr(c) for c in [*range(0x20), 0x7F, 0x80, 0xA0, 0xAD, 0xFF, 0x2028, 0xFFFD, 0x10FFFF]),
    " leading space, don't can't, 12345",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_is_a_token_and_comes_back(text: str) -> None:
    tokenizer = build_bytes_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_ids_are_fixed() -> None:
    tokenizer = build_bytes_tokenizer()
    assert len(tokenizer) == 259
    assert tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_start|>", "<|im_end|>"]) == [256, 257, 258]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (256, 258, None)


def test_chat_is_chatml() -> None:
    tokenizer = build_bytes_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello é<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids.count(257) == ids.count(258) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi\nassistant\nHello é\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    tokenizer = build_bytes_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>" + "".join(TEXTS) + "<|im_end|>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (256, 258, None)
