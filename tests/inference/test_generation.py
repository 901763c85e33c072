"""Answers token by token: those of transformers' own loop, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.inference.models import ARCHITECTURES, PROMPTS, TOKENIZER, model_of
from tests.support.slow import slow_but
from trainwright.errors import RequestError
from trainwright.inference.generation import Sampling, Stop, answer_batch
from trainwright.utils.heartbeat import Use

END = 258
GREEDY = Sampling(max_new_tokens=40)


def of_transformers(model: Any, prompt: list[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=GREEDY.max_new_tokens,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=256,
    )
    tokens = output[0, len(prompt) :].tolist()
    return tuple(tokens[:-1] if tokens[-1] == END else tokens)


@pytest.mark.parametrize("kind", slow_but("llama", "gpt2", among=ARCHITECTURES))
def test_greedy_answers_are_those_of_transformers_together_and_alone(kind: str) -> None:
    model = model_of(kind)
    expected = [of_transformers(model, prompt) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS), "answers that are all the same show nothing"
    together = answer_batch(model, TOKENIZER, PROMPTS, GREEDY, Stop(frozenset({END})))
    assert [answer.tokens for answer in together] == expected
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer_batch(model, TOKENIZER, [prompt], GREEDY, Stop(frozenset({END}))) == [answer]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba", "lfm2"])
def test_a_row_that_ends_leaves_the_others_as_they_are(kind: str) -> None:
    model = model_of(kind)
    whole = [answer.tokens for answer in answer_batch(model, TOKENIZER, PROMPTS, GREEDY, Stop(frozenset()))]
    ends = frozenset(tokens[5 + 7 * row] for row, tokens in enumerate(whole[:3]))
    expected = [tokens[: next((i for i, t in enumerate(tokens) if t in ends), len(tokens))] for tokens in whole]
    assert len(set(map(len, expected))) > 2, "rows that end together show nothing"
    found = answer_batch(model, TOKENIZER, PROMPTS, GREEDY, Stop(ends))
    assert [answer.tokens for answer in found] == expected
    assert [answer.complete for answer in found] == [len(tokens) < 40 for tokens in expected]


def test_what_is_drawn_belongs_to_the_example_and_not_to_the_batch() -> None:
    model = model_of("llama")
    sampling = Sampling(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=3)
    together = answer_batch(model, TOKENIZER, PROMPTS, sampling, Stop(frozenset()))
    alone = [
        answer_batch(model, TOKENIZER, [prompt], sampling, Stop(frozenset()), examples=[number])[0]
        for number, prompt in enumerate(PROMPTS)
    ]
    assert alone == together
    backwards = answer_batch(model, TOKENIZER, PROMPTS[::-1], sampling, Stop(frozenset()), examples=[3, 2, 1, 0])
    assert backwards[::-1] == together
    other = Sampling(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=4)
    assert answer_batch(model, TOKENIZER, PROMPTS, other, Stop(frozenset())) != together


def test_every_token_is_progress(marks: list[Use]) -> None:
    """An answer may become much longer than those before it."""
    (answer,) = answer_batch(model_of("llama"), TOKENIZER, PROMPTS[:1], GREEDY, Stop(frozenset()))
    assert len(marks) == len(answer.tokens) == 40


def test_a_stop_text_ends_an_answer_where_it_begins() -> None:
    model = model_of("llama")
    (whole,) = answer_batch(model, TOKENIZER, PROMPTS[3:], GREEDY, Stop(frozenset()))
    stop = whole.text[6:9]
    (cut,) = answer_batch(model, TOKENIZER, PROMPTS[3:], GREEDY, Stop(frozenset(), (stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.complete
    assert len(cut.tokens) < len(whole.tokens)


def test_an_answer_ends_with_the_positions_of_the_model() -> None:
    model = model_of("llama", positions=32)
    (answer,) = answer_batch(model, TOKENIZER, [PROMPTS[0]], GREEDY, Stop(frozenset()))
    assert len(answer.tokens) == 32 - len(PROMPTS[0]) and not answer.complete
    with pytest.raises(RequestError, match="32 tokens, but the model has 32 positions"):
        answer_batch(model, TOKENIZER, [[97] * 32], GREEDY, Stop(frozenset()))
    with pytest.raises(RequestError, match="empty"):
        answer_batch(model, TOKENIZER, [[]], GREEDY, Stop(frozenset()))


def test_every_token_is_told_when_it_is_written() -> None:
    model = model_of("llama")
    told: list[tuple[int, int]] = []
    answers = answer_batch(
        model, TOKENIZER, PROMPTS[:2], GREEDY, Stop(frozenset()), on_token=lambda row, token: told.append((row, token))
    )
    for row, answer in enumerate(answers):
        assert tuple(token for number, token in told if number == row) == answer.tokens
