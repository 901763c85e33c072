"""Text that somebody else wrote, as it is printed."""

from __future__ import annotations

import pytest

from trainwright.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nGrüße 漢字 🙂 שלום", "plain\ttext\nGrüße 漢字 🙂 שלום"),
        ("\x1b]52;c;cm0=\x07", "\\x1b]52;c;cm0=\\x07"),  # writes to the clipboard
        ("\x1b[2J\r\x08\x00", "\\x1b[2J\\x0d\\x08\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_control_characters_are_printed_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()
