"""Tokenizers whose pattern backtracks without end: refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.commands import trainwright
from trainwright.data.rows.chat_encoding import ChatEncoder, encode_messages
from trainwright.data.rows.texts import TextEncoder
from trainwright.data.rows.tokenizer_calls import TokenizerError
from trainwright.data.tokens.shard_writer import build_settings
from trainwright.data.tokens.token_worker import Encoder
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer

PANICS = "a" * 40 + "b"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<unk>": 2, "<end>": 3}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")


def test_a_panic_is_told_in_words(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerError, match=r"the tokenizer fails: .*retry-limit.*use another tokenizer"):
        TextEncoder(tokenizer).encode([PANICS])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    turns = [{"role": "user", "content": PANICS}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TokenizerError, match="retry-limit"):
        encode_messages(tokenizer, turns)
    with pytest.raises(RequestError, match="retry-limit"):
        Encoder(build_settings(tokenizer))([("a.txt", PANICS, True, True)])


def test_the_command_ends_with_2(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": PANICS}) + "\n")
    result = trainwright("data", "check", "rows.jsonl", "--model", "model", cwd=tmp_path, RUST_BACKTRACE="0")
    assert result.returncode == 2 and "retry-limit" in result.stderr
    assert "Traceback" not in result.stderr


def test_messages_name_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert ChatEncoder(build_bytes_tokenizer()).name == "bytes"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert ChatEncoder(tokenizer).name == "(unnamed)"
    tokenizer.name_or_path = "owner/name/"
    assert ChatEncoder(tokenizer).name == "name"
