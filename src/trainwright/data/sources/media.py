"""Notice images, videos and sounds beside texts: only the texts are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainwright.utils.text import they

if TYPE_CHECKING:
    from datasets import Dataset

_NAMES = {"image": "images", "images": "images", "video": "videos", "videos": "videos", "audio": "sounds"}
_NAMES["audios"] = "sounds"


def media_notes(rows: Dataset, columns: Sequence[str]) -> list[str]:
    """Return a line about each of the unused ``columns`` that has images, videos or sounds, without reading them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    notes = []
    for name in columns:
        if name.lower() not in _NAMES:
            continue
        column = rows.data.column(name)
        lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        there = pc.greater(pc.list_value_length(column), 0) if lists else pc.is_valid(column)
        if count := pc.sum(there).as_py():
            media = _NAMES[name.lower()]
            what = f"have {media} in the column {name}"
            notes.append(f"{they(count, 'row', what)}: only text is trained on, and a text such as <image> stays in it")
    return notes
