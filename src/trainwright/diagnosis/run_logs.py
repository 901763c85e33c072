"""Read the logs of a run directory as one text, in which every line can be traced to its file and line number."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainwright.paths import files_inside, open_inside

_RANK = re.compile(r"rank-(\d{1,9})\.log")
# Logs of preparation come before those of the workers, and the launcher's report after them.
_FIRST, _LAST = re.compile(r"prepare.*\.log"), re.compile(r"launcher.*\.log")


@dataclass(frozen=True)
class LogText:
    """A log.

    Attributes:
        text: its lines; those of ranks begin with ``[rankN]:``, as torchrun writes them.
        files: the first line number of each file, and its path; empty for a log that is one file.
    """

    text: str
    files: tuple[tuple[int, Path], ...] = ()

    def place(self, number: int) -> tuple[Path | None, int]:
        """Return the file of a line of the text, None without files, and the line's number in it."""
        if not self.files:
            return None, number
        first, file = self.files[bisect.bisect_right([begin for begin, _ in self.files], number) - 1]
        return file, number - first + 1


def read_file(file: Path) -> str:
    """Return the text of a log, with invalid UTF-8 replaced. Raises OSError."""
    return file.read_bytes().decode("utf-8", errors="replace")


def read_run(run: Path) -> LogText:
    """Return the logs of a run. Raises OSError if one cannot be read, or if there is none."""
    names = sorted((name for name in files_inside(run, "logs") if name.endswith(".log")), key=_order)
    if not names:
        raise FileNotFoundError(f"there are no logs in {run / 'logs'}")
    return _joined(run, names)


def _order(name: str) -> tuple[int, int, str]:
    rank = _RANK.fullmatch(name)
    kind = 0 if _FIRST.fullmatch(name) else 2 if _LAST.fullmatch(name) else 1
    return kind, int(rank[1]) if rank else -1, name


def _joined(run: Path, names: Iterable[str]) -> LogText:
    lines: list[str] = []
    places = []
    for name in names:
        places.append((len(lines) + 1, run / "logs" / name))
        rank = _RANK.fullmatch(name)
        prefix = f"[rank{rank[1]}]: " if rank else ""
        with open_inside(run, "logs", name) as file:
            content = file.read().decode("utf-8", errors="replace")
        lines += [f"{prefix}{line}" for line in content.removesuffix("\n").split("\n")]
    return LogText("\n".join(lines) + "\n", tuple(places))
