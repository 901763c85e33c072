"""Start a run on several hosts once more, after its first host was lost or, with a fixed number of processes, any host.

The launchers on the hosts go on by themselves after everything else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainwright.engine.event_log import append_event
from trainwright.errors import EXIT_FAULT, FaultError
from trainwright.launch.ending.failure import Cause, Failure
from trainwright.launch.ending.restarts import Restarts
from trainwright.launch.hosts.asking import Answer, answers_of
from trainwright.launch.hosts.names import Host
from trainwright.launch.hosts.starting import exports
from trainwright.text import quoted, say

# A host whose command was killed, or that restarts its network, may answer again soon.
_TRIES, _TRY_SECONDS = 6, 10.0


class Again:
    """Decide whether and where a run is started again.

    Args:
        allowed: ``faults.restarts``.
        may_lose: whether the run can go on with some of its hosts.
        begun: when it was started on them, in seconds since the epoch.
    """

    def __init__(self, run: Path, allowed: str, may_lose: bool, begun: float) -> None:
        self._run, self._may_lose = run, may_lose
        self._restarts = Restarts(run, allowed, begun=begun)

    def decide(self, hosts: Sequence[Host], lost: Mapping[Host, str]) -> tuple[list[Host], int]:
        """Return the hosts in their new order, those that answer first, and a free port of the first.

        Raises:
            FaultError: the run has been restarted too often, or too few hosts answer.
        """
        told = "; ".join(f"{host.name}: {how}" for host, how in lost.items())
        found = self._restarts.decide(Failure(f"{told}; logs: {self._run}/logs", EXIT_FAULT, cause=Cause.NODE))
        if isinstance(found, Failure):
            raise FaultError(found.message)
        for _ in range(_TRIES):
            answers = dict(zip(hosts, answers_of(hosts, exports()), strict=True))
            there = [host for host, answer in answers.items() if isinstance(answer, Answer)]
            if len(there) == len(hosts) or (there and self._may_lose):
                say(found.line(), file=sys.stderr)
                with suppress(OSError):
                    append_event(self._run / "events.jsonl", found)
                first = answers[there[0]]
                assert isinstance(first, Answer), "it is there"
                return [*there, *(host for host in hosts if host not in there)], first.port
            time.sleep(_TRY_SECONDS)
        missing = "; ".join(str(answer) for answer in answers.values() if not isinstance(answer, Answer))
        raise FaultError(
            f"{told}\nnot restarted: {missing}; resume the run on other hosts with --resume {quoted(self._run)}"
        )
