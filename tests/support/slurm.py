"""A real Slurm on this machine: a controller and two nodes, in a mount namespace of their own.

Needs root, Slurm's and munge's daemons and unshare. Nothing outside of its directory is changed: the nodes' names are
in an /etc/hosts that only its processes see. With control groups for freezing processes, what a step leaves behind is
killed, as on clusters.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.support.commands import PATIENCE, environment, wait_for

NODES = ("n1", "n2")
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
    """The daemons; ``close`` ends them and every job. ``directory`` holds all of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("etc", "run", "log", "state", *(f"spool/{node}" for node in NODES)):
            (directory / name).mkdir(parents=True)
        os.chmod(directory, 0o755)
        self._configure()
        self._start()

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of Slurm's commands needs."""
        return {"SLURM_CONF": str(self.directory / "etc" / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm, or of ours, to its end; return its output."""
        done = subprocess.run(
            command, cwd=cwd, env=environment(**self.variables), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").partition("\n")[0]

    def wait_for(self, job: str, *states: str) -> None:
        """Wait until a job has one of these states."""
        wait_for(lambda: self.state(job) in states, every=0.3)

    def close(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(AssertionError, subprocess.SubprocessError):
            self.run("scancel", "--user=root")
            wait_for(lambda: not self.run("squeue", "--noheader"), every=0.3)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _configure(self) -> None:
        at, etc, ports = self.directory, self.directory / "etc", _free_ports(1 + len(NODES))
        (etc / "munge.key").write_bytes(os.urandom(1024))
        os.chmod(etc / "munge.key", 0o400)
        addresses = [f"127.0.0.{11 + number}" for number in range(len(NODES))]
        hosts = Path("/etc/hosts").read_text().rstrip("\n").splitlines()
        hosts += [f"{address} {node}" for address, node in zip(addresses, NODES, strict=True)]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        track = "cgroup" if os.access(_FREEZER, os.W_OK) else "linuxproc"
        (etc / "cgroup.conf").write_text("CgroupMountpoint=/sys/fs/cgroup\nIgnoreSystemd=yes\n")
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={socket.gethostname().partition('.')[0]}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "MailProg=/bin/true"),
            # How long a requeued job waits is the lifetime of a credential.
            f"AuthInfo=socket={at}/run/munge.socket,cred_expire=5",
            f"SlurmctldPidFile={at}/run/slurmctld.pid",
            f"SlurmctldLogFile={at}/log/slurmctld.log",
            f"StateSaveLocation={at}/state",
            f"SlurmdPidFile={at}/run/slurmd.%n.pid",
            f"SlurmdLogFile={at}/log/slurmd.%n.log",
            f"SlurmdSpoolDir={at}/spool/%n",
            f"ProctrackType=proctrack/{track}",
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "SlurmdParameters=config_overrides"),
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            *("JobRequeue=1", "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "KillWait=20"),
            *("MinJobAge=600", "ReturnToService=2", "SlurmctldTimeout=10", "SlurmdTimeout=20"),
            *(
                f"NodeName={node} NodeHostname=localhost NodeAddr={address} Port={port} CPUs=2 RealMemory=8000"
                for node, address, port in zip(NODES, addresses, ports[1:], strict=True)
            ),
            "PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
            "PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
        ]
        (etc / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self) -> None:
        at = self.directory
        munge = [f"--key-file={at}/etc/munge.key", f"--socket={at}/run/munge.socket", f"--pid-file={at}/run/munged.pid"]
        munge += [f"--log-file={at}/log/munged.log", f"--seed-file={at}/state/munge.seed"]
        self._daemon("munged", "--foreground", "--force", *munge)
        wait_for((at / "run" / "munge.socket").exists)
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        idle = len(NODES)
        wait_for(lambda: self._answer("sinfo", "-h", "-p", "low", "-N", "-o", "%T").split().count("idle") == idle)

    def _answer(self, *command: str) -> str:
        done = subprocess.run(command, env=environment(**self.variables), capture_output=True, text=True)
        return done.stdout

    def _daemon(self, *command: str) -> None:
        hosts = self.directory / "etc" / "hosts"
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        with (self.directory / "log" / "start.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    ["unshare", "--mount", "--propagation", "private", "bash", "-c", inside, str(hosts), *command],
                    env={**environment(**self.variables), "PATH": _PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
