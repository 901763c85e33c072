"""Count what the encoding of rows leaves out or changes, with the first row of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from trainwright.utils.text import they

_ACCEPT = "data.accept_omissions=true"


class Remarks:
    """Verb phrases about rows, such as ``have reasoning that …``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, remarks: Iterable[str], location: Callable[[], str]) -> None:
        """Count one row, whose place ``location`` returns."""
        for remark in sorted(remarks):
            if remark not in self._first:
                self._first[remark] = location()
            self._counts[remark] += 1

    def lines(self) -> list[str]:
        """Return a line for each remark, with the number of rows and the first one."""
        return [f"{they(count, 'row', what)} (first: {self._first[what]})" for what, count in self._counts.items()]


def to_keep(ways: Sequence[str], *, accepted: bool) -> list[str]:
    """Return the line with the settings that keep what a chat template leaves out, unless the user accepts that."""
    if accepted or not ways:
        return []
    return [f"to train on what the chat template leaves out: {' or '.join(ways)}; to leave it out: {_ACCEPT}"]
