"""Follow the storages of tensors as the bytes of a device: views share theirs; freed and resized ones count less."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class _Entry(NamedTuple):
    finalizer: weakref.finalize | None
    size: int


class Storages:
    """Storages that are followed.

    Args:
        released: called with the identity and the bytes of a storage whose last tensor is gone.
        existing: storages that are not counted. They must stay alive.
        block: bytes that sizes are rounded up to a multiple of.
    """

    def __init__(
        self,
        released: Callable[[int, int], None],
        existing: Iterable[torch.UntypedStorage] = (),
        block: int = 1,
    ) -> None:
        self._released, self._block = released, block
        self._existing = list(existing)
        self._entries: dict[int, _Entry] = {id(storage): _Entry(None, 0) for storage in self._existing}

    def follow(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes by which a storage has grown since it was last seen: all of a new one."""
        key, size = id(storage), -(-storage.nbytes() // self._block) * self._block
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(weakref.finalize(storage, self._release, key), 0)
        elif entry.finalizer is None:
            return 0
        self._entries[key] = entry._replace(size=size)
        return size - entry.size

    def forget(self, storage: torch.UntypedStorage) -> int:
        """Stop following a storage, and return its bytes; 0 if it is not followed."""
        entry = self._entries.get(id(storage))
        if entry is None or entry.finalizer is None or entry.finalizer.detach() is None:
            return 0
        self._entries[id(storage)] = _Entry(None, 0)
        return entry.size

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._entries

    def _release(self, key: int) -> None:
        self._released(key, self._entries.pop(key).size)
