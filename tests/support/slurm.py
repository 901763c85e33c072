"""A real Slurm on this machine: a controller and two nodes, in a mount namespace of their own.

Needs root, Slurm's and munge's daemons and unshare. Nothing outside of its directory is changed: the nodes' names are
in an /etc/hosts that only its processes see. With control groups for freezing processes, what a step leaves behind is
killed, as on clusters. Several may run at once: each has its own ports and its own names of nodes.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.commands import PATIENCE, environment, wait_for
from tests.support.networks import Networks

_numbers = itertools.count(1)
CONTROLLER = "slurmctld"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_FREEZER = Path("/sys/fs/cgroup/freezer")


def why_not() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    namespace = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    return "mount namespaces are not allowed" if namespace.returncode else None


class Slurm:
    """The daemons; ``close`` ends them and every job. ``directory`` holds all of it.

    Args:
        more: further variables of the environment of commands, and so of jobs.
        apart: each node has its own network, host name and address; otherwise they share this machine's.
        loopback_names: with ``apart``, a node's own name is 127.0.1.1 to itself, as Debian's installer has it.
        unshared: a directory that is another, empty one on the second node.
        settings: further lines of slurm.conf; ``{etc}`` is its directory.

    Attributes:
        nodes: their names, which no other Slurm on this machine has: control groups are named by them.
    """

    def __init__(
        self,
        directory: Path,
        more: Mapping[str, str] | None = None,
        *,
        apart: bool = False,
        loopback_names: bool = False,
        unshared: Path | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.more = dict(more or {})
        self._unshared, self._settings = unshared, settings
        prefix = f"t{os.getpid()}x{next(_numbers)}n"
        self.nodes = (f"{prefix}1", f"{prefix}2")
        self._networks = Networks(self.nodes) if apart else None
        self._loopback_names = loopback_names
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # The paths of sockets are short, and pytest's directories are not.
        self._short = Path(tempfile.mkdtemp(prefix="slurm-"))
        for name in ("etc", "log", "state"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        for name in ("run", *(f"spool/{node}" for node in self.nodes)):
            (self._short / name).mkdir(parents=True)
        for each in (directory, self._short):
            os.chmod(each, 0o755)
        self._configure()
        self._start()

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of Slurm's commands needs."""
        return {"SLURM_CONF": str(self.directory / "etc" / "slurm.conf"), **self.more}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm, or of ours, to its end; return its output."""
        done = subprocess.run(
            command, cwd=cwd, env=environment(**self.variables), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def code(self, *command: str) -> int:
        """Run a command to its end; return its exit code."""
        return subprocess.run(command, env=environment(**self.variables), capture_output=True).returncode

    def state(self, job: str) -> str:
        """The state of a job."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").partition("\n")[0]

    def wait_for(self, job: str, *states: str) -> None:
        """Wait until a job has one of these states."""
        wait_for(lambda: self.state(job) in states, every=0.3)

    def processes(self, job: str | None = None, node: str | None = None) -> list[psutil.Process]:
        """The processes of a job's tasks, on one node or all."""
        found = []
        for process in psutil.process_iter():
            variables = _environment(process)
            of_job = variables.get("SLURM_JOB_ID") == job if job else "SLURM_JOB_ID" in variables
            on_node = node is None or variables.get("SLURMD_NODENAME") == node
            if of_job and on_node and variables.get("SLURMD_NODENAME") in self.nodes:
                found.append(process)
        return found

    def step_daemons(self, node: str) -> list[psutil.Process]:
        """The processes of Slurm that supervise the steps of a node: the parents of what runs there."""
        parents = {each.pid: each for each in map(_parent, self.processes(node=node)) if each is not None}
        return [each for each in parents.values() if _name(each).startswith("slurmstepd")]

    def tasks(self, job: str, node: str | None = None) -> list[psutil.Process]:
        """The processes of a job that train: the commands of its nodes, and their workers."""
        return [each for each in self.processes(job, node) if "SLURM_STEP_ID" in _environment(each) and _trains(each)]

    def nodes_of(self, job: str) -> list[str]:
        """The names of a job's nodes."""
        listed = self.run("squeue", "--noheader", "--format=%N", f"--jobs={job}")
        return self.run("scontrol", "show", "hostnames", listed).split() if listed else list(self.nodes)

    def node_state(self, node: str) -> str:
        """The state of a node."""
        return self._answer("sinfo", "-h", "-p", "low", "-n", node, "-N", "-o", "%T").strip()

    def resume_nodes(self) -> None:
        """Put nodes that were drained or set down back to work."""
        for node in self.nodes:
            if node not in self._daemons:
                self.start_daemon(node)
            if any(word in self.node_state(node) for word in ("drain", "down")):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def answers(self) -> bool:
        """Whether the controller answers."""
        return bool(self._answer("sinfo", "-h", "-p", "low", "-N", "-o", "%T"))

    def kill_daemon(self, name: str) -> None:
        """Kill the daemon of a node, or ``slurmctld``; its steps go on."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def start_daemon(self, name: str) -> None:
        """Start the daemon of a node, or ``slurmctld``."""
        if name == CONTROLLER:
            self._daemon(CONTROLLER, "slurmctld", "-D")
        else:
            self._daemon(name, "slurmd", "-D", "-N", name)

    def kill_node(self, node: str) -> None:
        """Kill everything on a node, as if it had lost its power."""
        steps, tasks = self.step_daemons(node), self.processes(node=node)
        self.kill_daemon(node)
        for process in (*steps, *tasks):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def is_idle(self) -> bool:
        """Whether both nodes are free and there is no job."""
        states = self._answer("sinfo", "-h", "-p", "low", "-N", "-o", "%T").split()
        return states == ["idle"] * len(self.nodes) and not self._answer("squeue", "--noheader")

    def close(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(AssertionError, subprocess.SubprocessError):
            self.run("scancel", "--user=root")
            wait_for(lambda: not self.run("squeue", "--noheader"), every=0.3)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if self._networks is not None:
            self._networks.close()
        shutil.rmtree(self._short, ignore_errors=True)
        for node in self.nodes:
            for group in sorted((_FREEZER / f"slurm_{node}").rglob("*"), reverse=True):
                with suppress(OSError):
                    group.rmdir()
            with suppress(OSError):
                (_FREEZER / f"slurm_{node}").rmdir()

    def _configure(self) -> None:
        at, short, etc, ports = self.directory, self._short, self.directory / "etc", _free_ports(1 + len(self.nodes))
        (etc / "munge.key").write_bytes(os.urandom(1024))
        os.chmod(etc / "munge.key", 0o400)
        apart = self._networks
        addresses = [f"127.0.0.{11 + i}" for i in range(len(self.nodes))] if apart is None else apart.addresses
        controller = "127.0.0.1" if apart is None else apart.controller
        hosts = Path("/etc/hosts").read_text().rstrip("\n").splitlines()
        hosts += [f"{address} {node}" for address, node in zip(addresses, self.nodes, strict=True)]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        for node in self.nodes:
            own = [line for line in hosts if line.split()[1:2] != [node] or not self._loopback_names]
            own += [f"127.0.1.1 {node}"] if self._loopback_names else []
            (etc / f"hosts.{node}").write_text("\n".join(own) + "\n")
        track = "cgroup" if os.access(_FREEZER, os.W_OK) else "linuxproc"
        (etc / "cgroup.conf").write_text("CgroupMountpoint=/sys/fs/cgroup\nIgnoreSystemd=yes\n")
        lines = [
            "ClusterName=test",
            # Ports follow from the numbers of jobs, which are not to be those of another cluster on this machine.
            f"FirstJobId={random.randrange(1, 60_000)}",
            f"SlurmctldHost={socket.gethostname().partition('.')[0]}({controller})",
            f"SlurmctldPort={ports[0]}",
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "MailProg=/bin/true"),
            # How long a requeued job waits is the lifetime of a credential.
            f"AuthInfo=socket={short}/run/munge.socket,cred_expire=5",
            f"SlurmctldPidFile={short}/run/slurmctld.pid",
            f"SlurmctldLogFile={at}/log/slurmctld.log",
            f"StateSaveLocation={at}/state",
            f"SlurmdPidFile={short}/run/slurmd.%n.pid",
            f"SlurmdLogFile={at}/log/slurmd.%n.log",
            f"SlurmdSpoolDir={short}/spool/%n",
            f"ProctrackType=proctrack/{track}",
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "SlurmdParameters=config_overrides"),
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            *("JobRequeue=1", "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "KillWait=60"),
            *("MinJobAge=600", "ReturnToService=2", "SlurmctldTimeout=10", "SlurmdTimeout=20"),
            *(
                f"NodeName={node} NodeHostname={node if apart else 'localhost'} NodeAddr={address} Port={port} "
                "CPUs=2 RealMemory=8000"
                for node, address, port in zip(self.nodes, addresses, ports[1:], strict=True)
            ),
            "PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
            "PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
            *self._settings,
        ]
        (etc / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self) -> None:
        at, short = self.directory, self._short
        munge = [
            f"--key-file={at}/etc/munge.key",
            f"--socket={short}/run/munge.socket",
            f"--pid-file={short}/run/munged.pid",
        ]
        munge += [f"--log-file={at}/log/munged.log", f"--seed-file={at}/state/munge.seed"]
        self._daemon("munged", "munged", "--foreground", "--force", *munge)
        wait_for((short / "run" / "munge.socket").exists)
        for name in (CONTROLLER, *self.nodes):
            self.start_daemon(name)
        wait_for(self.is_idle)

    def _answer(self, *command: str) -> str:
        done = subprocess.run(command, env=environment(**self.variables), capture_output=True, text=True)
        return done.stdout

    def _daemon(self, name: str, *command: str) -> None:
        etc = self.directory / "etc"
        hosts, inside = etc / "hosts", 'mount --bind "$0" /etc/hosts'
        enter, more = [], ["--mount"]
        if name in self.nodes:
            hosts = etc / f"hosts.{name}"
            if self._networks is not None:
                enter, more = ["nsenter", f"--net=/run/netns/{name}"], ["--uts", "--mount"]
                inside += f" && hostname {name}"
            if self._unshared is not None and name == self.nodes[1]:
                inside += f" && mount -t tmpfs none {shlex.quote(str(self._unshared))}"
        unshare = ["unshare", *more, "--propagation", "private"]
        with (self.directory / "log" / "start.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*enter, *unshare, "bash", "-c", f'{inside} && exec "$@"', str(hosts), *command],
                env={**environment(**self.variables), "PATH": _PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _trains(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "train" in words and "srun" not in words[:1]


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
