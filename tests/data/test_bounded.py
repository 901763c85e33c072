"""Tokenizers whose pattern backtracks without end: refused in words, in bounded time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.commands import trainwright
from trainwright.data.rows import tokenizer_guard as bounded
from trainwright.data.rows.chat_encoding import encode_messages
from trainwright.data.rows.texts import TextEncoder
from trainwright.data.rows.tokenizer_guard import TokenizerError
from trainwright.data.tokens.shard_writer import settings_of
from trainwright.data.tokens.token_worker import Encoder
from trainwright.errors import RequestError

PANICS = "a" * 40 + "b"
SLOW = ("a" * 21 + "b") * 20  # each of these takes a good part of a second


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
        Encoder(settings_of(tokenizer))([("a.txt", PANICS, True, True)])


def test_what_does_not_end_is_given_up(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    with pytest.raises(TokenizerError, match="takes more than 0 s of CPU time for 440 characters"):
        TextEncoder(tokenizer).encode([SLOW])


@pytest.mark.parametrize("marked", ["", "{% generation %}{% endgeneration %}"])
def test_a_chat_template_that_does_not_end_is_given_up(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, marked: str
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    loops = "{% for i in range(2000) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{loops}{{{{ m['content'] }}}}{{% endfor %}}{marked}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TokenizerError, match=r"the chat template of .* takes more than 0 s of CPU time"):
        encode_messages(tokenizer, turns)


def test_what_goes_wrong_otherwise_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        bounded.bounded("x", 1, lambda: 1 / 0)
    assert bounded.bounded("x", 1, lambda: 3) == 3


def test_all_calls_are_made_by_one_thread_until_one_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first = bounded.bounded("x", 1, threading.get_ident)
    assert {bounded.bounded("x", 1, threading.get_ident) for _ in range(20)} == {first}
    monkeypatch.setattr(bounded, "SECONDS", 0.0)
    given_up, ended = threading.Event(), threading.Event()

    def long() -> None:
        while not given_up.is_set():
            sum(range(1000))
        ended.set()

    with pytest.raises(TokenizerError, match="takes more than 0 s of CPU time"):
        bounded.bounded("x", 1, long)
    assert bounded.bounded("x", 1, lambda: 3) == 3  # not what the call given up returns later
    given_up.set()
    assert ended.wait(60)
    assert bounded.bounded("x", 1, lambda: 4) == 4


def test_the_command_ends_with_2(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": PANICS}) + "\n")
    result = trainwright("data", "check", "rows.jsonl", "--model", "model", cwd=tmp_path, RUST_BACKTRACE="0")
    assert result.returncode == 2 and "retry-limit" in result.stderr
    assert "Traceback" not in result.stderr
