"""Several machines, each with our launcher: they meet at node 0, share one run, and end together.

The user numbers the nodes. Node 0 hosts the store at host:port and creates the run directory, which all nodes can see.
It decides which nodes run each launch of the workers (`launches.py`), as others may be lost and come back. The kernel
of a machine that fails may still answer for its programs, so each launcher also says now and then that it runs.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright import __version__
from trainwright.errors import EXIT_FAULT, EXIT_TRAINING, MachineError, RequestError, Stopped, TrainwrightError
from trainwright.run import run_directory
from trainwright.run.group.addresses import format_address, set_interfaces
from trainwright.run.group.environment import NodeRendezvous, find_srun_node
from trainwright.run.group.peers import GONE, Membership, Message, build_job
from trainwright.run.group.rendezvous import Rendezvous, meet
from trainwright.run.launches import Launch, Spread
from trainwright.run.shutdown.failure import Failure, find_first_failure
from trainwright.run.shutdown.stop import Stopping
from trainwright.run.worker_processes import WorkerRanks
from trainwright.utils.text import say


@dataclass(frozen=True)
class NodeInfo:
    """What a node reports before anything is created; all fields but `host` must be the same on all nodes.

    `processes`: how many it is to run at most.
    """

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


def check_same(nodes: Mapping[int, NodeInfo]) -> None:
    """Raise an error that names a node that differs from node 0."""
    for index in nodes:
        check_machine(nodes[0], index, nodes[index])
    for index in nodes:
        _check_request(nodes[0], index, nodes[index])


def check_machine(first: NodeInfo, index: int, node: NodeInfo) -> None:
    """Raise MachineError if the machine or the installation of a node differs from that of node 0."""
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


def _check_request(first: NodeInfo, index: int, node: NodeInfo) -> None:
    if (node.processes, node.recipe, node.resume) != (first.processes, first.recipe, first.resume):
        raise RequestError(
            f"node {index} ({node.host}) was started with another recipe, other overrides or other options than "
            f"node 0 ({first.host}); only --node-rank may differ"
        )


def check_visible_run(run: Path, recipe: str, node: int) -> Path:
    """Return the run directory. Raises MachineError if ``node``, this one, does not see it with this recipe."""
    run_directory.check_visible(run, recipe, f"node {node} ({socket.gethostname()})", "node 0")
    return run


SILENCE_LIMIT = 30.0
_RUNS_SECONDS = 2.0
# A longer gap between two calls is time in which this process did not run, and has not heard of anybody.
_MAX_LOOK_GAP = 5.0


class Silence:
    """Count how long the other nodes have been silent; call `list_silent` repeatedly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at: dict[int, float] = {}
        self._looked_at = self._reported_at = clock()

    def hear(self, node: int) -> None:
        """Note a message of a node."""
        self._heard_at[node] = self._clock()

    def is_time(self) -> bool:
        """Return whether this node is to say that it runs."""
        now = self._clock()
        if now - self._reported_at < _RUNS_SECONDS:
            return False
        self._reported_at = now
        return True

    def list_silent(self, nodes: Iterable[int]) -> list[int]:
        """Return which of these nodes have been silent for `SILENCE_LIMIT` seconds in which this process ran."""
        now, node_list = self._clock(), list(nodes)
        if now - self._looked_at > _MAX_LOOK_GAP:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._looked_at = now
        return [node for node in node_list if now - self._heard_at.setdefault(node, now) > SILENCE_LIMIT]


class NodeFailed(TrainwrightError):
    """Another node failed while no workers run here; it reports the reason itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NodesLost(Exception):
    """Another node failed while workers run here."""


class NodeDropped(Exception):
    """Node 0 has taken this node for gone, and goes on without it. It can arrive once more."""


@dataclass(frozen=True)
class NodeRules:
    """What the recipe says about nodes that are lost.

    Attributes:
        may_lose: whether the run can go on with fewer nodes than it began with.
        on_hang: ``faults.on_hang``, for a node that does not answer though its connection stands.
    """

    may_lose: bool
    on_hang: str


_STOP, _KILLED, _FAILED, _FINISHED, _RUNS = "stop", "killed", "failed", "finished", "runs"
# The messages between launches: a node waits for one, node 0 begins or refuses one, or the run is over.
_READY, _LAUNCH, _REFUSED, _OVER, _DROPPED = "ready", "launch", "refused", "over", "dropped"
# How long a failed node waits for the reports of the others, and node 0 at the end for their leaving.
_REPORT_SECONDS, _LEAVE_SECONDS = 6.0, 5.0
_POLL_SECONDS = 0.1
_LOST = "is gone: it was killed, lost its network or lost its power"
_FIX = "; resume the run with --resume, on the nodes that are left"
_SILENT = f"has not answered for {SILENCE_LIMIT:.0f} s: it is suspended, hangs or has lost its network"


class LinkedStopping(Stopping):
    """Pass a stop request on one node to all nodes."""

    nodes: Nodes | None = None

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested on any node."""
        if self.nodes is not None:
            self.nodes.poll()
        return super().requested


class Nodes:
    """All nodes of a run, seen from this one.

    Attributes:
        running: whether workers run here, so that `poll` raises NodesLost.
        launch: the newest launch; None before the first.
        rooms: how many processes each connected node has room for, if it has prepared the run.
        room: returns how many this node has room for, which is told while the run is trained; None: it never changes.
        waiting: those of the nodes that wait for the next launch.
    """

    def __init__(
        self, rendezvous: Rendezvous, stopping: LinkedStopping, hosts: dict[int, str], mine: NodeInfo, rules: NodeRules
    ) -> None:
        self.rendezvous = rendezvous
        self.index = rendezvous.index
        self.running = False
        self.launch: Launch | None = None
        self.rooms: dict[int, int] = {}
        self.room: Callable[[], int] | None = None
        self.waiting: set[int] = set()
        self._mine, self._rules, self._stopping = mine, rules, stopping
        self._hosts = hosts
        self._expected = set(hosts)  # of the launch, and before the first one all that have arrived
        self._ended: dict[int, Message] = {}  # the final report of each of them
        self._gone: dict[int, str] = {}  # those that were lost, and how
        self._over: Message | None = None
        self._stop_sent = self._dropped = False
        self._store = rendezvous.store  # of the workers, if it is hosted here
        self._opened: list[str] = []  # the run directory
        self._late = self.index != 0 and rendezvous.is_published("begun")
        self._silence, self._warned = Silence(), set[int]()
        stopping.nodes = self

    @classmethod
    def meet(
        cls,
        met: NodeRendezvous,
        mine: NodeInfo,
        stopping: LinkedStopping,
        rules: NodeRules,
        enough: Callable[[int], bool] = lambda number: False,
        shared: Path = run_directory.RUNS,
    ) -> Nodes:
        """Meet the other nodes.

        Args:
            enough: whether the run can begin with this number of nodes, if the others have not come by then.
            shared: a directory that all nodes see, for the secret of the job.

        Raises:
            MachineError: nodes are missing, the port is in use, or nodes differ.
            FaultError: node 0 does not know the same secret.
        """

        def patient() -> None:
            if stopping.flag.value:
                raise Stopped()

        def admit() -> None:
            patient()
            rendezvous.listen()

        member = Membership(met.node_rank, met.nodes, (met.host, met.port), met.seconds)
        rendezvous = meet("node", member, build_job(met.nodes), _describe_port_fix(member), patient, shared=shared)
        set_interfaces(met.host)
        rendezvous.post(asdict(mine))
        if met.node_rank == 0:
            try:
                infos = {i: NodeInfo(**fields) for i, fields in rendezvous.gather(met.seconds, admit, enough).items()}
                check_same(infos)
            except TrainwrightError as error:
                rendezvous.publish("met", {"refused": str(error), "exit_code": error.exit_code})
                rendezvous.wait_until_left(2.0)
                rendezvous.close()
                raise
            rendezvous.publish("met", {"hosts": {str(i): node.host for i, node in infos.items()}})
        reply = rendezvous.wait_for("met", patient)
        if "refused" in reply:
            rendezvous.leave()
            rendezvous.close()
            raise NodeFailed(f"node 0: {reply['refused']}", reply["exit_code"])
        hosts = {int(i): host for i, host in reply["hosts"].items()} | {met.node_rank: mine.host}
        return cls(rendezvous, stopping, hosts, mine, rules)

    def open(
        self, make: Callable[[], tuple[Path, str]], open_here: Callable[[Path, str, int], Path] = check_visible_run
    ) -> Path:
        """Return the run directory: node 0 creates it by `make`, which also returns its recipe's text; the others only
        open it, by `open_here`, of the directory, that text and their index.
        """
        if self.index == 0:
            run, recipe = self.run_reporting_failure(make)
            self._opened = [str(run), str(run.absolute())]
            self.rendezvous.publish("opened", [*self._opened, recipe])
            return run
        shown_path, absolute, recipe = self.rendezvous.wait_for("opened", self.poll)
        directory = Path(shown_path) if Path(shown_path).absolute() == Path(absolute) else Path(absolute)
        return self.run_reporting_failure(lambda: open_here(directory, recipe, self.index))

    def run_reporting_failure(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; report an exception to the other nodes before it is raised."""
        try:
            return work()
        except NodeFailed:
            raise
        except BaseException as error:
            code = error.exit_code if isinstance(error, TrainwrightError) else EXIT_TRAINING
            if not self._late:  # the run goes on without this node
                self._report(_FAILED, text=str(error) or type(error).__name__, code=code)
            raise

    def poll(self) -> None:
        """Process the messages of the others.

        Raises:
            NodeFailed: a node that the run needs has failed, and no workers run here.
            NodesLost: one has failed, the user kills the run, or node 0 goes on without this one, and workers run here.
            NodeDropped: node 0 goes on without this one, and no workers run here.
        """
        self.listen()
        failures = {index: report for index, report in self._ended.items() if report["kind"] == _FAILED}
        if self.running and (failures or self._gone or self._dropped or self._stopping.killed):
            raise NodesLost
        if self._over is not None:  # node 0 leaves
            return
        if self._dropped:
            raise NodeDropped
        preparing = self.launch is None
        for index, report in failures.items() if preparing else ():
            raise NodeFailed(f"{self._name(index)}: {report.get('text', 'failed')}", int(report["code"]))
        for index, how in self._gone.items():
            if index == 0 or (preparing and not self._rules.may_lose):
                raise NodeFailed(f"{self._name(index)} {how}{'' if preparing else _FIX}", EXIT_FAULT)

    def begin(self, spread: Spread, recipe: str) -> Launch:
        """Begin a launch on these nodes, as node 0.

        Args:
            recipe: text of the run's recipe, for nodes that arrive later.
        """
        number = 0 if self.launch is None else self.launch.number + 1
        if number:  # process groups leave their keys in a store
            self._store = self.rendezvous.host_store()
        launch = Launch(number, spread, int(self._store.port))
        self.rendezvous.publish("opened", [*self._opened, recipe])
        self.rendezvous.publish("begun", number)
        self.rendezvous.peers.send_direct(
            _LAUNCH, number=number, nodes=spread.nodes, each=spread.each, port=launch.port
        )
        self.rendezvous.peers.forget()
        self._take_launch(launch)
        return launch

    def follow(self, room: int) -> Launch | int:
        """Wait as another node for the next launch that it is part of; return the exit code if the run is over.

        Args:
            room: how many processes this node has room for.

        Raises:
            TrainwrightError: the run has failed, or node 0 is gone.
            NodeDropped: node 0 went on without this one.
        """
        self.running, before = False, self.launch
        self._ended.clear()
        description = {"host": self._mine.host, "gpus": self._mine.gpus, "version": self._mine.version}
        self.rendezvous.peers.send_direct(_READY, room=room, **description)
        while self._over is None:
            self.poll()
            launch = self.launch
            if launch is not None and launch is not before and self.index in launch.spread.nodes:
                return launch
            time.sleep(_POLL_SECONDS)
        code, text = int(self._over["code"]), str(self._over["text"])
        if text:
            raise NodeFailed(text, code)
        return code

    def settle(self) -> None:
        """Wait as node 0 until all nodes that are still there have prepared the run, or ended the launch."""
        self.running = False
        self._ended.clear()
        while self._expected - self._gone.keys() - self.waiting - {0} and not self._stopping.requested:
            time.sleep(_POLL_SECONDS)

    def over(self, code: int, text: str = "") -> None:
        """Tell nodes that wait for a launch how the run has ended, as node 0."""
        if self.index == 0:
            self.rendezvous.peers.send_direct(_OVER, code=code, text=text)

    @property
    def lost(self) -> str | None:
        """Say which node of the launch is gone, and how; None if all are there."""
        return next((f"{self._name(index)} {how}" for index, how in self._gone.items()), None)

    def ranks(self) -> WorkerRanks:
        """Return the ranks here in the current launch."""
        assert self.launch is not None, "it has begun"
        spread, port = self.launch.spread, self.rendezvous.peers.reach(self.launch.port)
        return WorkerRanks(spread.find_first_rank(self.index), spread.each, spread.processes, port)

    def kill(self) -> None:
        """Have all nodes end without a checkpoint, as the user has asked for."""
        self.rendezvous.peers.send(_KILLED)

    def finish(self, codes: dict[int, int | None]) -> list[int]:
        """Wait for the others to finish; return the exit codes of their workers. Raises NodesLost."""
        self._report(_FINISHED, codes=codes)
        while self._expected - self._ended.keys() - {self.index}:
            self.poll()
            time.sleep(_POLL_SECONDS)
        self.running = False
        return [int(code or 0) for report in self._ended.values() for code in report["codes"].values()]

    def fail(
        self, logs: Path, codes: dict[int, int | None], records: dict[int, dict[str, Any]], out_of_memory: bool
    ) -> Failure:
        """Report the failure here, collect those of the others, and return the first of all."""
        mine = find_first_failure(logs, 0, codes, out_of_memory, records=records)
        self._report(_FAILED, codes=codes, records=records, memory=out_of_memory, code=mine.exit_code)
        deadline = time.monotonic() + _REPORT_SECONDS
        while self._expected - self._ended.keys() - self._gone.keys() - {self.index} and time.monotonic() < deadline:
            self.listen()
            if 0 in self._gone or self._dropped:
                break
            time.sleep(_POLL_SECONDS)
        for report in self._ended.values():
            codes |= {int(rank): code for rank, code in report.get("codes", {}).items()}
            records |= {int(rank): record for rank, record in report.get("records", {}).items()}
            out_of_memory |= bool(report.get("memory", False))
        self.running = False
        return find_first_failure(logs, 0, codes, out_of_memory, records=records, gone=self.lost)

    def leave(self) -> None:
        """Leave; must be called at the end in every case."""
        self._stopping.nodes = None
        peers, until = self.rendezvous.peers, time.monotonic() + _LEAVE_SECONDS
        while self.index == 0 and peers.list_connected() and time.monotonic() < until:
            peers.poll(_POLL_SECONDS)
        self.rendezvous.close()

    def listen(self) -> None:
        """Process the messages of the others, pass a stop request on, and say that this node runs."""
        early, self.rendezvous.early = self.rendezvous.early, []
        for message in early + self.rendezvous.peers.poll():
            if (peer := message["peer"]) != self.index:  # its own from before it was lost
                self._hear(message["kind"], peer, message)
        connected_nodes = self.rendezvous.peers.list_connected()
        for index in (self._expected if self.index == 0 else {0}) - connected_nodes - {self.index}:
            self._forget(index, _LOST)
        if self._stopping.flag.value and not self._stop_sent:
            self._stop_sent = True
            self.rendezvous.peers.send(_STOP)
        if self._silence.is_time():
            room = {} if self.room is None else {"room": self.room()}
            self.rendezvous.peers.send_direct(_RUNS, **room)
        others = self._expected - self._gone.keys() - {self.index} if self.index == 0 else {0} - self._gone.keys()
        for index in self._silence.list_silent(others) if self.launch is not None else ():
            self._is_silent(index)

    def _hear(self, kind: str, peer: int, message: Message) -> None:
        if kind == GONE:
            self._forget(peer, _LOST)
            return
        self._silence.hear(peer)
        if peer in self._warned:
            self._warned.remove(peer)
            say(f"{self._name(peer)} answers again", file=sys.stderr)
        if kind in (_FAILED, _FINISHED):
            if message["number"] == self._number and peer in self._expected and not self._late:
                self._ended[peer] = message
        elif kind == _RUNS and self.index == 0:
            if peer in self.rooms:
                self.rooms[peer] = int(message.get("room", self.rooms[peer]))
        elif kind == _READY and self.index == 0:
            self._admit(peer, message)
        elif kind == _LAUNCH:
            spread = Spread(tuple(message["nodes"]), int(message["each"]))
            self._take_launch(Launch(int(message["number"]), spread, int(message["port"])))
        elif kind == _OVER or (kind == _REFUSED and message["node"] == self.index):
            self._over = message
        elif kind == _DROPPED:
            self._dropped = True
        elif kind == _STOP:
            self._stop_sent = True
            self._stopping.flag.value = 1
        elif kind == _KILLED:
            self._stopping.killed = True
            self._stopping.flag.value = 1

    def _admit(self, peer: int, message: Message) -> None:
        try:
            theirs = NodeInfo(message["host"], 0, message["gpus"], "", resume=False, version=message["version"])
            check_machine(self._mine, peer, theirs)
        except TrainwrightError as error:
            self.rendezvous.peers.send_direct(_REFUSED, node=peer, text=str(error), code=error.exit_code)
            return
        self._hosts[peer] = str(message["host"])
        self.rooms[peer] = int(message["room"])
        self.waiting.add(peer)

    def _forget(self, peer: int, how: str) -> None:
        self.rooms.pop(peer, None)
        self.waiting.discard(peer)
        if peer in self._expected | {0} and self._ended.get(peer, {}).get("kind") != _FINISHED:
            self._gone.setdefault(peer, how)

    def _is_silent(self, peer: int) -> None:
        if self._rules.on_hang == "warn":
            if peer not in self._warned:
                self._warned.add(peer)
                goes_on = "waiting on; with faults.on_hang: restart, the run would go on without it"
                say(f"warning: {self._name(peer)} {_SILENT}; {goes_on}", file=sys.stderr)
            return
        if self.index == 0:
            self.rendezvous.peers.drop(peer, _DROPPED)
        self._forget(peer, _SILENT)

    def _take_launch(self, launch: Launch) -> None:
        self.launch, self._late = launch, False
        self._expected = set(launch.spread.nodes)
        self.waiting -= self._expected
        self._ended.clear()
        self._gone.clear()

    @property
    def _number(self) -> int:
        return -1 if self.launch is None else self.launch.number

    def _report(self, kind: str, **content: Any) -> None:
        self.rendezvous.peers.send(kind, number=self._number, **content)

    def _name(self, index: int) -> str:
        return f"node {index} ({self._hosts.get(index, 'unknown')})"


def _describe_port_fix(member: Membership) -> str:
    """Return what to do if the port at which the nodes meet is taken."""
    if find_srun_node(member.count) == (member.index, format_address(*member.address)):
        return "set MASTER_PORT to another one, or unset it for one of the job's own"
    return "choose another one with --rendezvous, on every node"
