"""Templates by name write what the models of their families were trained on, and their turns are found."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from tests.data.test_templates import byte_level
from trainwright.data.rows.chat_encoding import ChatEncoder
from trainwright.data.rows.chat_templates import list_templates, read_template, resolve_template, set_template

SYSTEM = [{"role": "system", "content": "Be brief."}]
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there!"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "More."},
]
MARKS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_sep|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|end|>",
]
MARKS += ["<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>"]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
)
# With and without a system turn; None: it has no such turn, and its text is in the user's.
WRITTEN: dict[str, tuple[str, str | None]] = {
    "chatml": (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there!<|im_end|>\n"
        "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\nMore.<|im_end|>\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n",
    ),
    "qwen": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi there!<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n"
        "<|im_start|>assistant\nMore.<|im_end|>\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n",
    ),
    "llama2": (
        "<s>[INST] Hello [/INST] Hi there! </s><s>[INST] And then? [/INST] More. </s>",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]",
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi there!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd then?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nMore.<|eot_id|>",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
    ),
    "gemma": (
        "<s><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\nHi there!<end_of_turn>\n"
        "<start_of_turn>user\nAnd then?<end_of_turn>\n<start_of_turn>model\nMore.<end_of_turn>\n",
        None,
    ),
    "mistral": ("<s>[INST] Hello [/INST] Hi there!</s>[INST] And then? [/INST] More.</s>", None),
    "phi3": (
        "<|user|>\nHello<|end|>\n<|assistant|>\nHi there!<|end|>\n"
        "<|user|>\nAnd then?<|end|>\n<|assistant|>\nMore.<|end|>\n",
        "<|system|>\nBe brief.<|end|>\n<|user|>\n",
    ),
    "phi4": (
        "<|im_start|>user<|im_sep|>Hello<|im_end|><|im_start|>assistant<|im_sep|>Hi there!<|im_end|>"
        "<|im_start|>user<|im_sep|>And then?<|im_end|><|im_start|>assistant<|im_sep|>More.<|im_end|>",
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|>",
    ),
    "zephyr": (
        "<|user|>\nHello</s>\n<|assistant|>\nHi there!</s>\n<|user|>\nAnd then?</s>\n<|assistant|>\nMore.</s>\n",
        "<|system|>\nBe brief.</s>\n<|user|>\n",
    ),
    "tulu": (
        "<|user|>\nHello\n<|assistant|>\nHi there!</s>\n<|user|>\nAnd then?\n<|assistant|>\nMore.</s>\n",
        "<|system|>\nBe brief.\n<|user|>\n",
    ),
    "vicuna": (
        f"{VICUNA}USER: Hello ASSISTANT: Hi there!</s>USER: And then? ASSISTANT: More.</s>",
        "Be brief. USER: Hello ASSISTANT: Hi there!</s>",
    ),
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nHello\n\n### Response:\nHi there!</s>\n\n"
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAnd then?\n\n### Response:\nMore.</s>\n\n",
        "Be brief.\n\n### Instruction:\nHello\n\n### Response:\nHi there!</s>\n\n",
    ),
    "plain": ("HelloHi there!</s>And then?More.</s>", "Be brief.Hello"),
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_template_writes_the_turns_of_its_family_and_answers_are_the_targets(name: str) -> None:
    tokenizer = byte_level(MARKS, resolve_template(name), bos_token="<s>", eos_token="</s>")
    bare, with_system = WRITTEN[name]
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == bare
    encoder = ChatEncoder(tokenizer)
    plain, folded = encoder.encode([TURNS, [*SYSTEM, *TURNS]])
    answers = [tokenizer.decode([i for i, trained in zip(*one, strict=True) if trained]) for one in (plain, folded)]
    for answer in answers:
        assert "Hi there!" in answer and "More." in answer and "Hello" not in answer and "then" not in answer
        assert answer.rstrip().endswith(encoder.stop.strip()) and encoder.stop.strip()
    text = tokenizer.decode(folded[0])
    if with_system is None:
        assert "Be brief.\n\nHello" in text
    else:
        assert text.startswith(with_system)
    # What is generated from is what was trained on.
    (prompt,) = encoder.prompts([TURNS[:1]])
    assert plain[0][: len(prompt)] == prompt or name in ("vicuna", "llama2", "mistral")


def test_every_template_is_tested_and_described() -> None:
    from trainwright.recipe.sections.model import ModelSection

    assert sorted(WRITTEN) == list_templates()
    described = ModelSection.model_fields["chat_template"].description or ""
    assert all(name in described for name in list_templates())
    assert read_template("chatml") == resolve_template("chatml")


@pytest.mark.parametrize("name", ["alpaca", "plain", "vicuna", "chatml"])
def test_formats_of_texts_begin_as_texts_of_the_tokenizer_do(name: str) -> None:
    tokenizer = byte_level(MARKS, None, bos_token="<s>", eos_token="</s>")
    set_template(tokenizer, name)
    assert not tokenizer.apply_chat_template(TURNS, tokenize=False).startswith("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    set_template(tokenizer, name)
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert text.startswith("<s>") == (name != "chatml") and text.count("<s>") <= 1


def test_alpaca_with_an_input_says_so() -> None:
    tokenizer = byte_level(MARKS, resolve_template("alpaca"), bos_token="<s>", eos_token="</s>")
    turns = [{"role": "user", "content": "Add.\n\n### Input:\n1 and 2"}, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n"
        "### Response:\n3</s>\n\n"
    )
