"""Prepare a run on each machine of another launcher's processes, before any of them trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.launch.group.rendezvous import Rendezvous

_PREPARED = "prepared"


def prepare_each_machine(prepare: Callable[[], None], rendezvous: Rendezvous | None, firsts: Sequence[int]) -> None:
    """Call ``prepare`` if this process is the first of its machine; return when it is done on every machine.

    The machines may share a cache or each have one of its own. There is no time limit, as there is for joining the
    process group: preparing takes as long as it takes.

    Args:
        firsts: the first rank of each machine but rank 0's, which is prepared.
    """
    if rendezvous is None or not firsts:
        return
    if rendezvous.index in firsts:
        prepare()
        rendezvous.publish(f"{_PREPARED}/{rendezvous.index}", True)
    if rendezvous.index == 0:
        for first in firsts:
            rendezvous.wait_for(f"{_PREPARED}/{first}")
        rendezvous.publish(_PREPARED, True)
    else:
        rendezvous.wait_for(_PREPARED)
