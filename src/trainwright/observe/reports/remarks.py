"""The tags and the note that a person has given to a run, in a file of its directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.utils.paths import open_inside, write_file

REMARKS = "remarks.json"
_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 20, 40, 10_000
_MOST_BYTES = 2**17


@dataclass(frozen=True)
class RunRemarks:
    """Raises RequestError for more or longer ones than a table can show."""

    tags: list[str] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.tags, list) or not all(isinstance(tag, str) for tag in self.tags):
            raise RequestError("tags: expected a list of texts")
        if len(self.tags) > _MOST_TAGS or any(not 0 < len(tag) <= _LONGEST_TAG for tag in self.tags):
            raise RequestError(f"tags: at most {_MOST_TAGS}, of 1 to {_LONGEST_TAG} characters each")
        if not isinstance(self.note, str) or len(self.note) > _LONGEST_NOTE:
            raise RequestError(f"note: expected a text of at most {_LONGEST_NOTE:,} characters")


def read_remarks(run: Path) -> RunRemarks:
    """Return the remarks of a run that may be anybody's; empty ones if there is no such file or it is damaged."""
    try:
        with open_inside(run, REMARKS) as file:
            content = json.loads(file.read(_MOST_BYTES))
        return RunRemarks(content.get("tags", []), content.get("note", ""))
    except (OSError, ValueError, RecursionError, AttributeError, RequestError):
        return RunRemarks()


def write_remarks(run: Path, remarks: RunRemarks) -> None:
    """Write the remarks of a run. Raises OSError."""
    write_file(run / REMARKS, json.dumps(asdict(remarks), indent=2, ensure_ascii=False) + "\n")
