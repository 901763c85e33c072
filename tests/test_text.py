"""Text that somebody else wrote, as it is printed."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest

from trainwright.text import printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nGrüße 漢字 🙂 שלום", "plain\ttext\nGrüße 漢字 🙂 שלום"),
        ("\x1b]52;c;cm0=\x07", "\\x1b]52;c;cm0=\\x07"),  # writes to the clipboard
        ("\x1b[2J\r\x08\x00", "\\x1b[2J\\x0d\\x08\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("half \ud800", "half \\ud800"),
        ("line\u2028line", "line\\u2028line"),
        ("[red]no markup[/red] 👩‍👩‍👧 e\u0301", "[red]no markup[/red] 👩‍👩‍👧 e\u0301"),
    ],
)
def test_control_characters_are_printed_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    shown.encode()


def test_no_control_character_at_all_is_left() -> None:
    left = printable("".join(map(chr, range(sys.maxunicode + 1))))
    assert {c for c in left if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} == {"\n", "\t"}
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not [c for c in left if unicodedata.bidirectional(c) in directions]


def test_what_is_said_is_printable_in_the_encoding_of_the_stream() -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    say("größer \x1b[2J\udc80", file=narrow)
    assert narrow.buffer.getvalue() == b"gr\\xf6\\xdfer \\x1b[2J\\udc80\n"  # type: ignore[attr-defined]
    wide = io.StringIO()
    say("größer \x07", file=wide, end="")
    assert wide.getvalue() == "größer \\x07"
