"""Records what a command shows on a terminal of some width, and when: a real pseudo-terminal and a screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyte

from tests.support.commands import PATIENCE, ROOT, environment

_ROWS, _HISTORY = 50, 10_000
_END = "(the end)"
# A line that is drawn while something is going on: its seconds, a bar, or a count with the time left.
_GOING_ON = re.compile(r" (?:…|\.\.\.) \d+:\d\d|^step \d+/\d+\b|: [\d,]+/[\d,]+ \w+ .* left$")
# What is never broken, and may be longer than the terminal is wide: one word such as a path, a command, or Python.
_UNBROKEN = re.compile(
    r"\s*(\S+|`?(trainwright|tensorboard) .*|(\w+ = )?\w+\.from_pretrained\(.*\).*|from \w+ import .*)"
)


@dataclass(frozen=True)
class Silence:
    """A time in which the screen did not say what is being done, and its last lines before and after."""

    seconds: float
    before: str
    after: str


@dataclass
class Recording:
    """What a command showed that was run in ``directory``.

    ``lines``: as they stay in the end, each as it was printed even where the terminal had to break it. ``code``: the
    exit code. ``written``: everything that was written. ``seconds``: from its start to its end.
    """

    columns: int
    directory: Path
    code: int = -1
    written: str = ""
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _moments: list[tuple[float, str]] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    def silences(self) -> Iterator[Silence]:
        """Yield the times in which nothing said what was going on."""
        since, before = 0.0, ""
        for moment, last in [*self._moments, (self.seconds, _END)]:
            if not _GOING_ON.search(before):
                yield Silence(moment - since, before, last)
            since, before = moment, last

    def check_announced(self, most: float) -> None:
        """Check that no silence before the last output takes more than this share of the command's time.

        Afterwards the interpreters end, which nothing can announce. Recorded with `announcing`, so that the check does
        not depend on how fast the machine is.
        """
        silences = [silence for silence in self.silences() if silence.after != _END]
        long = [silence for silence in silences if silence.seconds > most * self.seconds]
        assert not long, (f"of {self.seconds:.1f} s", long, self.shown)

    def check_unbroken(self) -> None:
        """Check that no line is longer than the terminal is wide, but for what is never broken."""
        for line in self.lines:
            plain = line.replace(str(self.directory), "/directory")  # its name may have spaces
            assert len(line) <= self.columns or _UNBROKEN.fullmatch(plain), line


def record(
    *arguments: str,
    cwd: Path,
    columns: int = 80,
    announcing: bool = False,
    while_running: Callable[[subprocess.Popen[bytes], str], None] = lambda process, written: None,
    **variables: str,
) -> Recording:
    """Run ``trainwright ARGUMENTS`` on a terminal; return what it showed.

    Args:
        announcing: have it say at once what it does, and not only after two seconds.
        while_running: called after each output with the process and all that was written.
    """
    chosen = {**environment(), "TERM": "xterm-256color", "PYTHONPATH": _path(announcing), **variables}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "TRAINWRIGHT_QUIET"):
        if name not in variables:
            chosen.pop(name, None)
    found, screen = Recording(columns, cwd), pyte.HistoryScreen(columns, _ROWS, history=_HISTORY)
    stream = pyte.ByteStream(screen)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    written, begun = b"", time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainwright", *arguments],
        cwd=cwd,
        env=chosen,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        while part := _read(master, begun + PATIENCE):
            written += part
            stream.feed(part)
            found._moments.append((time.monotonic() - begun, _last(screen.display)))
            while_running(process, written.decode(errors="replace"))
        found.code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(master)
    found.seconds = time.monotonic() - begun
    found.written = written.decode(errors="replace")
    found.lines = lines(found.written)
    return found


def lines(written: str) -> list[str]:
    """Lines as they stay, without what was drawn over and the terminal's own sequences."""
    kept = re.sub(r"[^\n]*\n(?:\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K", "", written)  # a bar that was removed
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", kept)
    return [line.rpartition("\r")[2].rstrip() for line in plain.replace("\r\n", "\n").split("\n")]


def _path(announcing: bool) -> str:
    first = [str(ROOT / "tests" / "support" / "announcing")] if announcing else []
    return os.pathsep.join([*first, str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])


def _read(master: int, deadline: float) -> bytes:
    """Return the next output; nothing once every process has closed the terminal."""
    ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
    assert ready, "the command neither writes nor ends"
    try:
        return os.read(master, 65536)
    except OSError:  # Linux: the other end is closed
        return b""


def _last(display: list[str]) -> str:
    return next((line.rstrip() for line in reversed(display) if line.strip()), "")
