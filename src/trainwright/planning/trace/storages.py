"""Follow the storages of tensors as the bytes of a device: views share theirs; freed and resized ones count less."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class _Storage(NamedTuple):
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
        self._storages: dict[int, _Storage] = {id(storage): _Storage(None, 0) for storage in self._existing}

    def follow(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes by which a storage has grown since it was last seen: all of a new one."""
        key, size = id(storage), -(-storage.nbytes() // self._block) * self._block
        followed = self._storages.get(key)
        if followed is None:
            followed = _Storage(weakref.finalize(storage, self._release, key), 0)
        elif followed.finalizer is None:
            return 0
        self._storages[key] = followed._replace(size=size)
        return size - followed.size

    def forget(self, storage: torch.UntypedStorage) -> int:
        """Stop following a storage, and return its bytes; 0 if it is not followed."""
        followed = self._storages.get(id(storage))
        if followed is None or followed.finalizer is None or followed.finalizer.detach() is None:
            return 0
        self._storages[id(storage)] = _Storage(None, 0)
        return followed.size

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._storages

    def _release(self, key: int) -> None:
        self._released(key, self._storages.pop(key).size)
