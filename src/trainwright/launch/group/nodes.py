"""Several machines, each with our launcher: they meet at node 0, share one run, and end together.

The user numbers the nodes. Node 0 hosts the store at host:port and creates the run directory, which all nodes can see.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from trainwright import __version__
from trainwright.errors import EXIT_FAULT, EXIT_TRAINING, MachineError, RequestError, Stopped, TrainwrightError
from trainwright.launch import run_directory
from trainwright.launch.ending.failure import Failure, first_failure
from trainwright.launch.ending.stop import Stopping
from trainwright.launch.group.environment import node_of_srun
from trainwright.launch.group.identity import job_of
from trainwright.launch.group.peers import GONE
from trainwright.launch.group.rendezvous import Rendezvous, meet, set_interfaces
from trainwright.text import say

_STOP, _KILLED, _FAILED, _FINISHED = "stop", "killed", "failed", "finished"
# How long a failed node waits for the reports of the others.
_REPORT_SECONDS = 6.0
_POLL_SECONDS = 0.1
_CLOCK_SECONDS = 10.0  # of clocks that count as the same: nodes that have much to do answer late


@dataclass(frozen=True)
class NodeInfo:
    """What a node reports before anything is created; all fields but `host` must be the same on all nodes."""

    host: str
    processes: int
    gpus: int
    recipe: str
    resume: bool
    version: str = __version__

    @classmethod
    def here(cls, processes: int, gpus: int, recipe: str, resume: bool) -> NodeInfo:
        """Describe this node."""
        return cls(socket.gethostname(), processes, gpus, recipe, resume)


class NodeFailed(TrainwrightError):
    """Another node failed before training began; it reports the reason itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NodesLost(Exception):
    """Another node failed while workers run here."""


class LinkedStopping(Stopping):
    """Pass a stop request on one node to all nodes."""

    nodes: Nodes | None = None

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested on any node."""
        if self.nodes is not None:
            self.nodes.poll()
        return bool(self.flag.value)


class Nodes:
    """All nodes of a run, seen from this one."""

    def __init__(self, rendezvous: Rendezvous, stopping: LinkedStopping, hosts: list[str]) -> None:
        self.rendezvous = rendezvous
        self.index = rendezvous.index
        self.count = rendezvous.count
        self.running = False  # whether workers run, so that the agent handles a lost node
        self._stopping = stopping
        self._hosts = hosts
        self._stop_sent = False
        self._ended: dict[int, dict[str, Any]] = {}  # final report of each node
        self._gone: list[int] = []
        self._launches = 1
        stopping.nodes = self

    @classmethod
    def meet(
        cls, index: int, count: int, place: tuple[str, int], seconds: float, mine: NodeInfo, stopping: LinkedStopping
    ) -> Nodes:
        """Meet the other nodes at `place`, host and port of node 0, within `seconds`.

        Raises MachineError naming missing nodes, a port in use, or the differences between nodes.
        """

        def patient() -> None:
            if stopping.flag.value:
                raise Stopped()

        def admit() -> None:
            patient()
            rendezvous.listen()

        fix = "choose another one with --rendezvous, on every node"
        if node_of_srun(count) == (index, f"{place[0]}:{place[1]}"):
            fix = "set MASTER_PORT to another one, or unset it for one of the job's own"
        rendezvous = meet("node", index, count, place, job_of(count), seconds, fix, patient)
        set_interfaces(place[0])
        rendezvous.post(asdict(mine))
        if index == 0:
            try:
                found = [NodeInfo(**posted) for posted in rendezvous.gather(seconds, admit)]
                _check_same(found)
            except TrainwrightError as error:
                rendezvous.publish("met", {"refused": str(error), "exit_code": error.exit_code})
                rendezvous.wait_until_left(2.0)
                rendezvous.close()
                raise
            rendezvous.publish("met", {"hosts": [node.host for node in found]})
        reply = rendezvous.wait_for("met", patient)
        if "refused" in reply:
            rendezvous.leave()
            rendezvous.close()
            raise NodeFailed(f"node 0: {reply['refused']}", reply["exit_code"])
        return cls(rendezvous, stopping, reply["hosts"])

    def open(self, make: Callable[[], tuple[Path, str]]) -> Path:
        """Return the run directory: node 0 creates it by `make`, which also returns its recipe's text; the others only
        open it.
        """
        if self.index == 0:
            run, recipe = self.reporting_failure(make)
            self.rendezvous.publish("opened", [str(run), str(run.absolute()), recipe])
            return run
        shown, absolute, recipe = self.rendezvous.wait_for("opened", self.poll)
        found = Path(shown) if Path(shown).absolute() == Path(absolute) else Path(absolute)
        return self.reporting_failure(lambda: self._visible(found, recipe))

    def all_ready(self) -> None:
        """Wait until every node has reached this point; node 0 warns of clocks that differ."""
        self._gathered("ready", True)
        clocks = self._gathered("clock", time.time())
        for index, clock in enumerate(clocks):
            apart = clock - clocks[0]
            if self.index == 0 and abs(apart) > _CLOCK_SECONDS:
                say(
                    f"warning: the clock of {self._name(index)} is {abs(apart):.0f} s "
                    f"{'ahead of' if apart > 0 else 'behind'} that of {self._name(0)}: times in their logs and in the "
                    "ledger do not match; synchronize them (chronyd)",
                    file=sys.stderr,
                )

    def _gathered(self, key: str, value: Any) -> list[Any]:
        """Publish this node's value; return those of all nodes as soon as they are there."""
        self.rendezvous.publish(f"{key}/{self.index}", value)
        return [self.rendezvous.wait_for(f"{key}/{index}", self.poll) for index in range(self.count)]

    def reporting_failure(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; report an exception to the other nodes before it is raised."""
        try:
            return work()
        except NodeFailed:
            raise
        except BaseException as error:
            code = error.exit_code if isinstance(error, TrainwrightError) else EXIT_TRAINING
            self.rendezvous.peers.send(_FAILED, text=str(error) or type(error).__name__, code=code)
            raise

    def poll(self) -> None:
        """Process the messages of the others. Raises NodeFailed or, while workers run here, NodesLost."""
        self._listen()
        if self._stopping.flag.value and not self._stop_sent:
            self._stop_sent = True
            self.rendezvous.peers.send(_STOP)
        failed = [index for index, report in self._ended.items() if report["kind"] == _FAILED]
        if not failed and not self._gone:
            return
        if self.running:
            raise NodesLost
        if failed:
            report = self._ended[failed[0]]
            raise NodeFailed(f"{self._name(failed[0])}: {report.get('text', 'failed')}", int(report["code"]))
        raise NodeFailed(f"{self._name(self._gone[0])} is gone: it was killed or is not reachable", EXIT_FAULT)

    def killed(self) -> None:
        """Report that the user has asked to end without a checkpoint."""
        self.rendezvous.peers.send(_KILLED)

    def finish(self, codes: dict[int, int | None]) -> list[int]:
        """Wait for the others to finish; return the exit codes of their workers. Raises NodesLost."""
        self.rendezvous.peers.send(_FINISHED, codes=_texts(codes))
        while len(self._ended) < self.count - 1:
            self.poll()
            time.sleep(_POLL_SECONDS)
        return [int(code or 0) for report in self._ended.values() for code in report["codes"].values()]

    def fail(
        self, logs: Path, codes: dict[int, int | None], records: dict[int, dict[str, Any]], out_of_memory: bool
    ) -> Failure:
        """Report the failure here, collect those of the others, and return the first of all."""
        mine = first_failure(logs, 0, codes, out_of_memory, records=records)
        self.rendezvous.peers.send(
            _FAILED, codes=_texts(codes), records=_texts(records), memory=out_of_memory, code=mine.exit_code
        )
        deadline = time.monotonic() + _REPORT_SECONDS
        while len(self._ended.keys() | set(self._gone)) < self.count - 1 and time.monotonic() < deadline:
            self._listen()
            time.sleep(_POLL_SECONDS)
        for report in self._ended.values():
            codes |= {int(rank): code for rank, code in report.get("codes", {}).items()}
            records |= {int(rank): record for rank, record in report.get("records", {}).items()}
            out_of_memory |= bool(report.get("memory", False))
        gone = self._name(self._gone[0]) if self._gone else None
        return first_failure(logs, 0, codes, out_of_memory, records=records, gone=gone)

    def agree_on_relaunch(self, decide: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Return node 0's decision about another launch after a failure, if every node is still there; None for
        none.
        """
        self.running = False
        place = f"launch/{self._launches}"
        try:
            if self.index == 0:
                everyone = len(self._ended) == self.count - 1 and not self._gone
                self.rendezvous.publish(place, {"fault": decide() if everyone else None})
            fault: dict[str, Any] | None = self.rendezvous.wait_for(place, self._check_connected)["fault"]
            if fault is None:
                return None
            # Later messages of a node belong to the next launch.
            self._ended.clear()
            self._launches += 1
            self.rendezvous.publish(f"{place}/{self.index}", True)
            for index in range(self.count):
                self.rendezvous.wait_for(f"{place}/{index}", self._check_connected)
        except (TrainwrightError, RuntimeError):  # a node, or the store, is gone: already reported
            return None
        return fault

    def _check_connected(self) -> None:
        self._listen()
        if self._gone:
            raise NodeFailed(f"{self._name(self._gone[0])} is gone", EXIT_FAULT)

    def leave(self) -> None:
        """Leave; must be called at the end in every case."""
        self._stopping.nodes = None
        try:
            self.rendezvous.leave()
            if self.index == 0:
                self.rendezvous.wait_until_all_left(self.count - len(self._gone), 5.0)
        except RuntimeError:  # node 0 is gone
            pass
        self.rendezvous.close()

    def _listen(self) -> None:
        early, self.rendezvous.early = self.rendezvous.early, []
        for message in early + self.rendezvous.peers.poll():
            kind, peer = message["kind"], int(message["peer"])
            if kind in (_FAILED, _FINISHED):
                self._ended[peer] = message
            elif kind == GONE and self._ended.get(peer) is None:
                self._gone.append(peer)
            elif kind == _STOP:
                self._stop_sent = True
                self._stopping.flag.value = 1
            elif kind == _KILLED:
                self._stopping.killed = True
                self._stopping.flag.value = 1
                if self.running:
                    raise SignalException("killed on another node", sigval=signal.SIGKILL)

    def _visible(self, run: Path, recipe: str) -> Path:
        file = run / run_directory.RECIPE
        if not file.is_file() or file.read_text(encoding="utf-8") != recipe:
            raise MachineError(
                f"node {self.index} ({socket.gethostname()}) does not see the run directory {run}, which node 0 "
                "created; set logging.run_directory to a file system that all nodes share"
            )
        return run

    def _name(self, index: int) -> str:
        return f"node {index} ({self._hosts[index]})"


def _check_same(nodes: list[NodeInfo]) -> None:
    first = nodes[0]
    for index, node in enumerate(nodes):
        if node.version != first.version:
            raise MachineError(
                f"node 0 ({first.host}) has trainwright {first.version}, and node {index} ({node.host}) has "
                f"{node.version}; install the same on both"
            )
        if node.gpus != first.gpus:
            raise MachineError(
                f"all nodes must have the same number of GPUs: node 0 ({first.host}) has {first.gpus} and node "
                f"{index} ({node.host}) has {node.gpus}; hide the others with CUDA_VISIBLE_DEVICES"
            )
        if (node.processes, node.recipe, node.resume) != (first.processes, first.recipe, first.resume):
            raise RequestError(
                f"node {index} ({node.host}) was started with another recipe, other overrides or other options than "
                f"node 0 ({first.host}); only --node-rank may differ"
            )


def _texts(values: dict[int, Any]) -> dict[str, Any]:
    return {str(rank): value for rank, value in values.items()}
