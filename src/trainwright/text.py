"""Numbers and texts as a person reads them on a console. Imports no other module of the package."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

# Control characters but for the tab and the line break, line separators that some programs break lines at,
# directional overrides and isolates, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Leading spaces, and a label with two spaces after it, as the rows of a summary have them.
_LABEL = re.compile(r" *(?:\S+(?: \S+){0,2} {2,})?(?=\S)| *")
# What is copied as a whole: what stands between backticks, and from a program's name to the end of the sentence.
_COMMAND = (
    r"`[^`]*`\S*|(?:trainwright|tensorboard|torchrun|accelerate|python3?) (?:[^;,]|[;,](?! ))+|"
    r"\w+\.from_pretrained\(.*?\)+"
)
_WORDS = re.compile(rf"(\s*)({_COMMAND}|\S+)")


def count(value: float) -> str:
    """134_515_008 -> '134.5M'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:,.0f}"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number and what is counted: '1 row', '1,200 rows', '3 batches' (``nouns`` where it is not noun and
    s).
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def they(number: int, noun: str, do: str) -> str:
    """Return what some do, begun with the verb of several: they(1, "row", "have no answer") -> '1 row has no
    answer'.
    """
    verb, space, rest = do.partition(" ")
    if number == 1:
        verb = {"have": "has", "are": "is", "were": "was", "do": "does"}.get(verb, f"{verb}s")
    return f"{plural(number, noun)} {verb}{space}{rest}"


def times(ratio: float) -> str:
    """Return a ratio in two digits or in full: 0.38, 2.6, 421."""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"


def change(first: float, last: float) -> str:
    """From ``first`` to ``last``: '+20.0%', and beyond the double '2.6 times as much'; '' from nothing, or less."""
    if first <= 0 or not math.isfinite(last / first):
        return ""
    ratio = last / first
    return f"{ratio - 1:+.1%}" if ratio <= 2 else f"{times(ratio)} times as much"


def size(value: float) -> str:
    """Bytes, in binary units with two or three digits: 4_404_019_200 -> '4.1 GiB', 512 MiB, 154 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        unit, value = larger, value / 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float) -> str:
    """As people say it: 300 ms, 12.5 s, 12 min, 3.4 h, 2.1 days."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def metric(value: object) -> str:
    """Return a loss, a perplexity or an accuracy in as many digits as tell runs apart."""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
    return str(value)


def block(text: str, indent: str, width: int) -> str:
    """`text` wrapped to `width` columns with its own line breaks kept, every line after `indent`."""
    lines: list[str] = []
    wrapper = textwrap.TextWrapper(
        max(20, width - len(indent)), drop_whitespace=False, break_long_words=False, break_on_hyphens=False
    )
    for line in text.strip().splitlines() or [""]:
        lines += wrapper.wrap(line) or [""]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


_drawn: TextIO | None = None  # where a line is drawn that is to be gone before another is printed


def printable(text: str) -> str:
    """`text` with the characters that could control a terminal written as escapes, such as `\\x1b` and `\\u202e`.

    For whatever somebody else wrote (rows, generated text, file names) before it is printed. Lone surrogates, which no
    terminal takes, are escaped too; tabs and line breaks stay.
    """
    return _UNPRINTABLE.sub(_escaped, text)


def say(line: str = "", *, file: TextIO | None = None, end: str = "\n", wrap: bool = True) -> None:
    """Print ``line`` as `printable` text, at once; to standard output unless a ``file`` is given.

    Characters that the stream's encoding lacks are escaped too. Everything for a terminal is printed by this. On a
    terminal a line is `wrapped` where that is narrower, unless another ``end`` than a newline is to follow; without
    ``wrap`` it is left as it is, as what other programs are to read must be.
    """
    if _drawn is not None:
        draw("", _drawn)
    stream = sys.stdout if file is None else file
    shown = printable(line)
    if wrap and end == "\n" and stream.isatty():
        shown = wrapped(shown, columns(stream, 80))
    if (encoding := getattr(stream, "encoding", None)) is not None:
        shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    print(shown, file=stream, end=end, flush=True)


def wrapped(text: str, width: int) -> str:
    """Lines longer than ``width`` broken at spaces, and continued below where their own text begins.

    No word is broken, so no path is, and no command: between backticks, or from a program's name to the end of it.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, width))


def _wrapped(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    label = _LABEL.match(line)
    current = label[0] if label else ""
    indent = " " * len(current) if len(current) <= width // 2 else "    "
    begins = True  # nothing but the label, or the indentation, is on the current line yet
    for space, word in _WORDS.findall(line[len(current) :]):
        if begins and len(current) + len(word) > width and current.strip():
            yield current.rstrip()  # not even alone beside its label
            current = indent if len(indent) + len(word) <= width else ""
        elif not begins and len(current) + len(space) + len(word) > width:
            yield current
            current = indent if len(indent) + len(word) <= width else indent[:4]
        elif not begins:
            current += space
        current, begins = current + word, False
    yield current


def is_terminal(stream: TextIO) -> bool:
    """Whether a line can be drawn again on ``stream``: a terminal, and none that calls itself dumb."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def columns(stream: TextIO, otherwise: int = 100) -> int:
    """How wide the terminal is that ``stream`` writes to; ``otherwise`` where it is none. COLUMNS overrides it."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit() and int(asked) > 0:
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or otherwise
    except (OSError, ValueError):  # no terminal, or no file
        return otherwise


def draw(line: str, stream: TextIO) -> None:
    """Show ``line`` in the place of what the terminal's last line shows; cut where it is longer than that is wide."""
    global _drawn
    _drawn = stream if line else None
    stream.write(f"\r\x1b[K{printable(line)[: columns(stream, 80) - 1]}")
    stream.flush()


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
