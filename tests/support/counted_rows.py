"""Rows that count in a file how often they are tokenized for a cache."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from trainwright.data.sources.registry import Source

COUNT = "COUNTED_ROWS"  # names the file
SECONDS = "COUNTED_ROWS_SECONDS"  # how long it takes


def _rows() -> Iterator[dict[str, str]]:
    frame, names = sys._getframe(), set()
    while frame := frame.f_back:  # type: ignore[assignment]
        names.add(frame.f_code.co_name)
    if "tokenize_and_split" in names:  # other callers only look at the first rows
        with open(os.environ[COUNT], "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(float(os.environ.get(SECONDS, "0")))
    return ({"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(60))


SOURCE = Source(_rows, lambda: "1", {"question": "What is it?", "answer": "It is this."})
