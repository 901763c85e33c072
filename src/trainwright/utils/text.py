"""Format numbers and texts for a console. Imports no other module of the package."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

# Control characters except the tab and the line break, line separators at which some programs break lines, directional
# overrides and isolates, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Leading spaces, and a label followed by two spaces, as in rows of a summary.
_LABEL = re.compile(r" *(?:\S+(?: \S+){0,2} {2,})?(?=\S)| *")
# Text to be copied without line breaks: between backticks, and from a program's name to the end of the sentence.
_COMMAND = (
    r"`[^`]*`\S*|(?:trainwright|tensorboard|torchrun|accelerate|python3?) (?:[^;,]|[;,](?! ))+|"
    r"\w+\.from_pretrained\(.*?\)+"
)
_WORDS = re.compile(rf"(\s*)({_COMMAND}|\S+)")


def format_count(value: float) -> str:
    """Format a count: 134_515_008 -> '134.5M'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:,.0f}"


def format_plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Format a number with its noun: '1 row', '1,200 rows', '3 batches' (``nouns``: the plural if not noun + s)."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def format_clause(number: int, noun: str, do: str) -> str:
    """Format a clause with a plural verb: format_clause(1, "row", "have no answer") -> '1 row has no answer'."""
    verb, space, rest = do.partition(" ")
    if number == 1:
        verb = {"have": "has", "are": "is", "were": "was", "do": "does"}.get(verb, f"{verb}s")
    return f"{format_plural(number, noun)} {verb}{space}{rest}"


def format_ranges(numbers: Iterable[int], to: str = "-") -> str:
    """Format whole numbers in ascending order: '1, 2, 4-7'; 'none' without any."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return (
        ", ".join(
            f"{first}{to}{last}" if last > first + 1 else ", ".join(map(str, sorted({first, last})))
            for first, last in spans
        )
        or "none"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: 'rank 3', 'ranks 0-2, 5'."""
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def format_ratio(ratio: float) -> str:
    """Format a ratio with two digits or in full: 0.38, 2.6, 421."""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"


def format_change(first: float, last: float) -> str:
    """Format the change from ``first`` to ``last``: '+20.0%', above double '2.6 times as much'; or '' if unknown."""
    if first <= 0 or not math.isfinite(last / first):
        return ""
    ratio = last / first
    return f"{ratio - 1:+.1%}" if ratio <= 2 else f"{format_ratio(ratio)} times as much"


def format_bytes(value: float) -> str:
    """Format bytes in binary units with two or three digits: 4_404_019_200 -> '4.1 GiB', 512 MiB, 154 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        unit, value = larger, value / 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_seconds(seconds: float) -> str:
    """Format seconds with a unit: 40 µs, 5.3 ms, 300 ms, 12.5 s, 12 min, 3.4 h, 2.1 days."""
    if 0 < seconds < 0.00095:
        return f"{seconds * 1e6:.0f} µs"
    if 0 < seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def format_metric(value: object) -> str:
    """Format a loss, a perplexity or an accuracy with enough digits to compare runs."""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
    return str(value)


def format_metric_name(name: str) -> str:
    """Return a metric's name in words, without the module of one of the user's own."""
    return name.rpartition(":")[2].replace("_", " ")


def wrap_block(text: str, indent: str, width: int) -> str:
    """Wrap `text` to `width` columns, keeping its own line breaks; every line starts with `indent`."""
    lines: list[str] = []
    wrapper = textwrap.TextWrapper(max(20, width - len(indent)), break_long_words=False, break_on_hyphens=False)
    for line in text.strip().splitlines() or [""]:
        lines += wrapper.wrap(line) or [""]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def format_table(rows: Sequence[Sequence[str]], width: int | None = None, *, numbers: bool = False) -> Iterator[str]:
    """Yield the lines of a table whose first row is its head.

    If it is wider than ``width``, each row becomes a list: its first cell, and a line for each other cell that is not
    empty, with the head as label. No width: never.

    Args:
        numbers: all columns but the first have numbers, and are aligned to the right.
    """
    printable_rows = [[escape_controls(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in printable_rows) for column in range(len(printable_rows[0]))]
    alignments = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    lines = [
        "  ".join(align(cell, size) for align, cell, size in zip(alignments, row, widths, strict=True)).rstrip()
        for row in printable_rows
    ]
    if width is None or all(len(line) <= width for line in lines):
        yield from lines
        return
    head, *body = printable_rows
    label = max(map(len, head[1:]), default=0)
    for row in body:
        yield row[0]
        for name, cell in zip(head[1:], row[1:], strict=True):
            if cell:
                yield from wrap_lines(f"  {name:<{label}}  {cell}", width).split("\n")


def choose_table_width(stream: TextIO) -> int | None:
    """Return the width for a `format_table` on ``stream``; None if programs read it, as it is no terminal."""
    return find_terminal_width(stream, 80) if stream.isatty() else None


_drawn: TextIO | None = None  # the stream with a drawn line that must be erased before printing another
_said = 0
# Replacements for encodings without these characters, such as code pages 437 and 1252 of Windows.
_PLAIN = {
    "…": "...",
    "×": "x",
    "→": "->",
    "←": "<-",
    "–": "-",
    "—": "-",
    "−": "-",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "•": "*",
    "≈": "~",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
    "µ": "u",
}


def quote_word(word: object) -> str:
    """Return a path or name as a shell takes it, for a command that is printed."""
    return shlex.quote(str(word))


def escape_controls(text: str) -> str:
    """Return `text` with characters that could control a terminal escaped, such as `\x1b` and `\u202e`.

    Use it for foreign text (rows, generated text, file names) before printing. Lone surrogates, which terminals do not
    accept, are escaped too; tabs and line breaks are kept.
    """
    return _UNPRINTABLE.sub(_escape_match, text)


def say(line: str = "", *, file: TextIO | None = None, end: str = "\n", wrap: bool = True) -> None:
    """Print ``line`` as `escape_controls` text and flush; to standard output unless a ``file`` is given.

    Characters that the stream's encoding lacks are replaced, see `replace_unencodable`. All console output goes through
    this function. On a terminal `wrap_lines` wraps the line, unless ``end`` is not a newline; without ``wrap`` it is
    left unchanged, for output that other programs read.
    """
    global _said
    _said += 1
    if _drawn is not None:
        draw("", _drawn)
    stream = sys.stdout if file is None else file
    text = escape_controls(line)
    if wrap and end == "\n" and stream.isatty():
        text = wrap_lines(text, find_terminal_width(stream, 80))
    print(replace_unencodable(text, stream), file=stream, end=end, flush=True)


def count_said_lines() -> int:
    """Return the number of calls of `say` so far in this process."""
    return _said


def replace_unencodable(text: str, stream: TextIO) -> str:
    """Return ``text`` with what the stream's encoding lacks replaced: by plain characters, or else escaped."""
    encoding = getattr(stream, "encoding", None)
    if encoding is None or text.isascii():
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        replaced_text = "".join(_PLAIN.get(char, char) if not _has(encoding, char) else char for char in text)
        return replaced_text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _has(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def wrap_lines(text: str, width: int) -> str:
    """Wrap lines longer than ``width`` at spaces, and indent continuation lines to the start of the text.

    Words, and so paths, are not broken, nor are commands: between backticks, or from a program's name to its end.
    """
    return "\n".join(part for line in text.split("\n") for part in _iterate_wrapped_lines(line, width))


def _iterate_wrapped_lines(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    label = _LABEL.match(line)
    current = label[0] if label else ""
    indent = " " * len(current) if len(current) <= width // 2 else "    "
    begins = True  # whether the current line has only the label or the indentation
    for space, word in _WORDS.findall(line[len(current) :]):
        if begins and len(current) + len(word) > width and current.strip():
            yield current.rstrip()  # does not even fit alone after its label
            current = indent if len(indent) + len(word) <= width else ""
        elif not begins and len(current) + len(space) + len(word) > width:
            yield current
            current = indent if len(indent) + len(word) <= width else indent[:4]
        elif not begins:
            current += space
        current, begins = current + word, False
    yield current


def is_terminal(stream: TextIO) -> bool:
    """Return whether a line on ``stream`` can be redrawn: it is a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def find_terminal_width(stream: TextIO, otherwise: int = 100) -> int:
    """Return the width of the terminal of ``stream``; ``otherwise`` if it is not one. COLUMNS overrides it."""
    width = os.environ.get("COLUMNS", "")
    if width.isascii() and width.isdigit() and int(width) > 0:
        return int(width)
    try:
        return os.get_terminal_size(stream.fileno()).columns or otherwise
    except (OSError, ValueError):  # not a terminal, or not a file
        return otherwise


def draw(line: str, stream: TextIO, ending: str = "") -> None:
    """Draw ``line`` and ``ending`` in place of the terminal's last line; a long ``line`` is cut, but not the ending."""
    global _drawn
    _drawn = stream if line else None
    text, ending = replace_unencodable(escape_controls(line), stream), replace_unencodable(ending, stream)
    room = find_terminal_width(stream, 80) - 1
    stream.write(f"\r\x1b[K{text[: max(0, room - len(ending))]}{ending[:room]}")
    stream.flush()


def clear(stream: TextIO) -> None:
    """Clear the terminal of ``stream``, to draw a page from its top."""
    stream.write("\x1b[H\x1b[2J")


def _escape_match(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
