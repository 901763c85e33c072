"""Text as it is written."""

from __future__ import annotations

from tests.inference.models import TOKENIZER
from trainwright.inference.chat import TextStream
from trainwright.inference.generation import Stop


def pieces(text: str, *stops: str, strip: bool = False) -> list[str]:
    written: list[str] = []
    stream = TextStream(TOKENIZER, Stop(frozenset(), stops), written.append, strip=strip)
    for token in text.encode():
        stream(0, token)
    stream.close()
    return written


def test_no_piece_is_half_a_character() -> None:
    assert pieces("aé漢😀.") == ["a", "é", "漢", "😀", "."]


def test_a_text_that_ends_inside_a_character_says_so_in_the_end() -> None:
    written: list[str] = []
    stream = TextStream(TOKENIZER, Stop(frozenset()), written.append, strip=False)
    for token in "né".encode()[:-1]:
        stream(0, token)
    stream.close()
    assert written == ["n", "\ufffd"]


def test_what_may_begin_a_stop_is_held_back_until_it_is_none() -> None:
    assert "".join(pieces("one\nUser: two", "\nUser:")) == "one"
    assert pieces("a\nUsual", "\nUser:") == ["a", "\nUsu", "a", "l"]


def test_white_space_in_front_is_left_out() -> None:
    assert "".join(pieces("  a b", strip=True)) == "a b"
