"""Which examples are held back to validate on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trainwright.errors import RequestError


def split(hashes: Sequence[bytes], validation: float | int | None, seed: int) -> tuple[list[int], list[int]]:
    """``(train, validation)`` indices, each in order and every example in exactly one.

    Who is held back depends on the seed and on an example's own content, so examples that are equal land on
    the same side, and a row added to the data moves hardly any other.

    Args:
        hashes: of the examples' content.
        validation: a fraction below 1, a number of examples, or None.

    Raises:
        RequestError: nothing would be left to train on, or to validate on.
    """
    everything = range(len(hashes))
    if validation is None:
        return list(everything), []
    total = len(hashes)
    wanted = max(1, round(validation * total)) if isinstance(validation, float) else int(validation)
    if wanted >= total:
        raise RequestError(
            f"data.validation: {validation} of {total:,} examples leaves none to train on; lower it, or set it to null"
        )
    groups: dict[bytes, list[int]] = {}
    for index, content in enumerate(hashes):
        groups.setdefault(content, []).append(index)
    aside: list[int] = []
    for content in sorted(groups, key=lambda content: hashlib.sha256(f"{seed}/".encode() + content).digest()):
        if len(aside) + len(groups[content]) <= wanted:
            aside += groups[content]
    if not aside:
        raise RequestError(
            f"data.validation: the examples are too much alike to hold {wanted:,} of them back; "
            "remove the duplicates, or set it to null"
        )
    held = set(aside)
    return [index for index in everything if index not in held], sorted(aside)
