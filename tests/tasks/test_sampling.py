"""What a model is asked during training, and when it stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.data.templates import encode_messages
from trainwright.models.bytes_tokenizer import bytes_tokenizer
from trainwright.models.load import load_model, load_tokenizer
from trainwright.recipe.schema import ModelSection
from trainwright.tasks.sampling import Sampler

SECTION = ModelSection(
    config={
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    },
    tokenizer="bytes",
)
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def asked() -> tuple[Any, list[torch.Tensor]]:
    """A small model, and the tokens of every forward pass through it."""
    model = load_model(SECTION, torch.float32, 0, load_tokenizer(SECTION))
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    return model, seen


def test_the_prompt_is_what_the_model_is_trained_on_to_the_day(asked: tuple[Any, list[torch.Tensor]]) -> None:
    model, seen = asked
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}" + tokenizer.chat_template
    Sampler(tokenizer, plain=False, max_new_tokens=2)(model, "Hi")
    ids, targets = encode_messages(tokenizer, [*QUESTION, {"role": "assistant", "content": "Hello"}])
    assert seen[0].tolist() == [ids[: targets.index(True)]]
    assert tokenizer.decode(seen[0][0]).startswith("Today: 26 Jul 2024\n<|im_start|>user\nHi")


def test_a_plain_text_is_continued_as_it_is(asked: tuple[Any, list[torch.Tensor]]) -> None:
    model, seen = asked
    Sampler(bytes_tokenizer(), plain=True, max_new_tokens=2)(model, "Hi")
    assert seen[0].tolist() == [list(b"Hi")]
