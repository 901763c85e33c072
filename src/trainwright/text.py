"""Numbers and texts as a person reads them on a console. Imports nothing of the house."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from typing import TextIO

# Control characters but for the tab and the line break, line separators that some programs break lines at,
# directional overrides and isolates, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def count(value: float) -> str:
    """134_515_008 -> '134.5M'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:,.0f}"


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
    """A loss, a perplexity or an accuracy in as many digits as tell runs apart."""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
    return str(value)


def block(text: str, indent: str, width: int) -> str:
    """`text` wrapped to `width` columns with its own line breaks kept, every line after `indent`."""
    lines: list[str] = []
    for line in text.strip().splitlines() or [""]:
        lines += textwrap.wrap(line, max(20, width - len(indent)), drop_whitespace=False) or [""]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def printable(text: str) -> str:
    """`text` with the characters that could control a terminal written as escapes, such as `\\x1b` and `\\u202e`.

    For whatever somebody else wrote (rows, generated text, file names) before it is printed. Lone surrogates, which no
    terminal takes, are escaped too; tabs and line breaks stay.
    """
    return _UNPRINTABLE.sub(_escaped, text)


def say(line: str = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print ``line`` as `printable` text, at once; to standard output unless a ``file`` is given.

    Characters that the stream's encoding lacks are escaped too. Everything for a terminal is printed by this.
    """
    stream = sys.stdout if file is None else file
    shown = printable(line)
    if (encoding := getattr(stream, "encoding", None)) is not None:
        shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    print(shown, file=stream, end=end, flush=True)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
