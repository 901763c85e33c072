"""Plain texts that were written with a chat template have a beginning and an end already."""

from __future__ import annotations

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.data.test_templates import CHATML, GEMMA, HELLO, IM, LLAMA_3, byte_level
from trainwright.data.rows.texts import TextEncoder
from trainwright.inference.prompts import PromptEncoder


def opening(specials: list[str], template: str, eos: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes its beginning-of-text token before every text."""
    bos = specials[0]
    tokenizer = byte_level(specials, template, bos_token=bos, eos_token=eos)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]


@pytest.mark.parametrize(
    ("tokenizer", "stop"),
    [
        (opening(LLAMA, LLAMA_3, "<|eot_id|>"), "<|eot_id|>"),
        (opening(LLAMA, LLAMA_3, "<|end_of_text|>"), "<|eot_id|>"),
        (opening(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA, "<eos>"), "<end_of_turn>"),
        (byte_level(IM, CHATML, eos_token="<|im_end|>"), "<|im_end|>"),
    ],
    ids=["llama-3", "llama-3 base", "gemma", "chatml"],
)
def test_a_text_in_the_template_gets_no_second_beginning_or_end(tokenizer: PreTrainedTokenizerFast, stop: str) -> None:
    text = str(tokenizer.apply_chat_template(HELLO, tokenize=False))
    remarks: list[set[str]] = [set(), set()]
    (ids, targets), (plain, _) = TextEncoder(tokenizer).encode([text, "Hello there"], remarks)
    assert tokenizer.decode(ids) == text.rstrip() and tokenizer.convert_ids_to_tokens(ids[-1]) == stop
    assert all(targets) and any(remark.startswith("end with") for remark in remarks[0])
    assert any(remark.startswith("begin with") for remark in remarks[0]) == (tokenizer.bos_token is not None)
    assert plain[-1] == tokenizer.eos_token_id and not remarks[1]
    assert PromptEncoder(tokenizer, plain=True)(text).count(ids[0]) == ids.count(ids[0])
