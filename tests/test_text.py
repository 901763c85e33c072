"""Text that somebody else wrote, as it is printed."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest

from trainwright.utils.text import (
    escape_controls,
    format_change,
    format_clause,
    format_plural,
    format_ratio,
    say,
    wrap_lines,
)


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
    assert escape_controls(text) == shown
    assert escape_controls(shown) == shown
    shown.encode()


def test_no_control_character_at_all_is_left() -> None:
    left = escape_controls("".join(map(chr, range(sys.maxunicode + 1))))
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


RUN = "runs/tiny-20261122-110556"
LINES = [
    f"stopped after a checkpoint; continue with: trainwright train --resume {RUN}",
    f'  in Python      AutoModelForCausalLM.from_pretrained("{RUN}/final")',
    f"  curves         tensorboard --logdir {RUN}/tensorboard",
    "chosen         parallel.strategy ddp: the fastest that fits; fsdp would take 1.62 times as long per step, mostly "
    "because of communication",
    f"error: {RUN}/rows.jsonl: no such file; write it with `trainwright data prepare raw.json --out {RUN}` first",
]


@pytest.mark.parametrize("width", [20, 40, 80, 100])
@pytest.mark.parametrize("line", LINES)
def test_lines_are_broken_at_spaces_and_never_inside_a_command(line: str, width: int) -> None:
    shown = wrap_lines(line, width)
    assert " ".join(shown.split()) == " ".join(line.split())  # nothing is lost, and no word is broken
    command = next((part for part in (f"train --resume {RUN}", f"--logdir {RUN}", f"raw.json --out {RUN}")), "")
    assert command not in line or command in shown
    assert len(shown.splitlines()) == 1 or len(line) > width
    assert all(len(part) <= width for part in shown.splitlines() if part.strip().count(" ") > 3 and "`" not in part)


def test_what_is_continued_stands_under_its_own_text() -> None:
    shown = wrap_lines(LINES[3], 60).splitlines()
    assert shown[0].startswith("chosen         parallel.strategy") and shown[1].startswith(" " * 15 + "f")
    assert wrap_lines("short\n\n  as it is", 40) == "short\n\n  as it is"


def test_counts_have_their_nouns() -> None:
    assert [format_plural(n, "row") for n in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]
    assert format_plural(3, "batch", "batches") == "3 batches"


def test_no_percentage_is_absurd() -> None:
    assert [format_change(2.0, last) for last in (1.5, 4.0, 5.2, 844.0)] == [
        "-25.0%",
        "+100.0%",
        "2.6 times as much",
        "422 times as much",
    ]
    assert format_change(0.0, 1.0) == format_change(-1.0, 1.0) == format_change(1.0, float("nan")) == ""
    assert [format_ratio(ratio) for ratio in (0.384, 2.64, 421.8)] == ["0.38", "2.6", "422"]


def test_what_one_does_is_said_of_one() -> None:
    assert format_clause(1, "row", "have no answer") == "1 row has no answer"
    assert format_clause(1, "row", "begin with the assistant") == "1 row begins with the assistant"
    assert (
        format_clause(2, "row", "were cut") == "2 rows were cut"
        and format_clause(1, "row", "were cut") == "1 row was cut"
    )
