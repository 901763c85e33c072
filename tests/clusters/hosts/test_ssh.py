"""`train --hosts` over a real ssh server: two addresses of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.test_launch import NODES
from tests.support.commands import ROOT, descendants, started, trainwright, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, difference, events
from trainwright.engine.event_reader import read_events

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs openssh-server and openssh-client"),
]
HOSTS = "127.0.0.1,127.0.0.2"


class Hosts:
    """Ssh servers at addresses of this machine, with keys of their own.

    Attributes:
        ssh: the value for TRAINWRIGHT_SSH.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / key], check=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        (home / "known").touch()
        self.ssh = (
            f"ssh -F none -p {self._port} -i {home / 'user'} -o IdentitiesOnly=yes "
            f"-o UserKnownHostsFile={home / 'known'} -o StrictHostKeyChecking=accept-new"
        )

    def start(self, address: str) -> None:
        """Start the server of an address."""
        config, log = self._home / f"{address}.config", self._home / f"{address}.log"
        config.write_text(
            f"Port {self._port}\nListenAddress {address}\nHostKey {self._home / 'host'}\n"
            f"AuthorizedKeysFile {self._home / 'user.pub'}\nStrictModes no\nPidFile none\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        assert SSHD is not None
        with log.open("wb") as out:
            self._servers[address] = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=out)
        wait_for(lambda: b"Server listening" in log.read_bytes() or None)

    def kill(self, address: str) -> None:
        """End everything on a host at once."""
        server = self._servers.pop(address)
        processes = [psutil.Process(server.pid), *descendants(server.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                process.send_signal(number)
        server.wait()

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.terminate()
            server.wait()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "ssh").mkdir()
    found = Hosts(tmp_path / "ssh")
    for address in HOSTS.split(","):
        found.start(address)
    yield found
    found.close()


@pytest.fixture
def ssh(hosts: Hosts) -> str:
    return hosts.ssh


def command(run: Path, *more: str) -> tuple[str, ...]:
    return ("train", str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *more)


def test_two_hosts_are_the_same_run(runs: Runs, ssh: str, tmp_path: Path) -> None:
    run, steps = tmp_path / "run", "train.max_steps=6"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    done = trainwright(*command(run, steps), "--hostfile", str(hostfile), cwd=tmp_path, TRAINWRIGHT_SSH=ssh)
    assert done.returncode == 0, done.stderr
    reference = runs.trained("parallel.num_processes=2", steps)
    assert difference(column(run, "loss"), column(reference, "loss")) < 1e-6
    assert "finished at step 6" in (run / "logs" / "host-127.0.0.1.log").read_text()
    assert (run / "logs" / "host-127.0.0.2.log").is_file()


def test_a_script_of_ones_own_runs_on_two_hosts(ssh: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NODES)
    words = (
        "launch",
        "--cpu",
        "--hosts",
        "127.0.0.1:2,127.0.0.2:2",
        "--logs",
        "logs",
        "own.py",
        "a b",
        "$(touch pwned)",
    )
    done = trainwright(*words, cwd=tmp_path, TRAINWRIGHT_SSH=ssh)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        said = f"variables: {rank} {rank % 2} 4 2 {rank // 2} 127.0.0.1 10 a b $(touch pwned)"
        assert said in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert "variables: 0 0" in done.stdout and (tmp_path / "logs" / "host-127.0.0.2.log").is_file()
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "runs").exists()
    done = trainwright(*words[:-2], "exit", cwd=tmp_path, TRAINWRIGHT_SSH=ssh)
    assert done.returncode == 7, done.stderr


def test_ctrl_c_stops_all_and_the_same_command_continues(ssh: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (*command(run, "train.max_steps=4000"), "--hosts", HOSTS, "--num-processes", "2", "--resume", "auto")
    with started("-m", "trainwright", *words, cwd=tmp_path, TRAINWRIGHT_SSH=ssh) as process:
        wait_for(lambda: ((run / "events.jsonl").is_file() and '"step"' in (run / "events.jsonl").read_text()) or None)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 75
    assert any((run / "checkpoints").iterdir())
    before = (run / "logs" / "host-127.0.0.1.log").read_text()
    assert before
    step = events(run, "step")[-1]["step"] + 2
    done = trainwright(*words, "--until", f"step {step}", cwd=tmp_path, TRAINWRIGHT_SSH=ssh)
    assert done.returncode == 75, done.stderr
    assert events(run, "step")[-1]["step"] == step
    after = (run / "logs" / "host-127.0.0.1.log").read_text()
    assert after.startswith(before) and len(after) > len(before)


def test_hosts_that_cannot_take_part_are_named(ssh: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def failed(hosts: str, with_ssh: str) -> tuple[int, str]:
        done = trainwright(*command(run), "--hosts", hosts, cwd=tmp_path, TRAINWRIGHT_SSH=with_ssh)
        return done.returncode, " ".join(done.stderr.split())

    code, text = failed("no-such-host.invalid,127.0.0.1", ssh)
    assert code == 2
    assert "no-such-host.invalid: unknown host" in text
    code, text = failed(HOSTS, ssh.replace("/user ", "/host "))
    assert code == 3
    assert "ssh-copy-id 127.0.0.1" in text
    assert not run.exists()


def sizes(run: Path) -> list[int]:
    log = run / "events.jsonl"
    return [event["world_size"] for event in read_events(log) if event["event"] == "start"] if log.exists() else []


def trains(run: Path, *expected: int) -> bool | None:
    """Whether the launches had these sizes, and the last one has taken a step."""
    return (sizes(run) == list(expected) and '"step"' in (run / "events.jsonl").read_text().splitlines()[-1]) or None


LONG = (ON_ROWS, "data.validation=null", "checkpoint.every=5", "train.max_steps=100", "optimizer.learning_rate=1e-6")
RANGE = "parallel.num_processes={min: 1, max: 2}"
SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"


@pytest.mark.parametrize(
    ("dies", "stays_away", "settings", "expected"),
    [
        ("127.0.0.2", False, (RANGE,), (2, 1, 2)),
        ("127.0.0.1", True, (RANGE,), (2, 1)),
        ("127.0.0.2", False, ("parallel.num_processes=2",), (2, 2)),
    ],
)
def test_a_run_goes_on_when_a_host_dies(
    runs: Runs,
    hosts: Hosts,
    tmp_path: Path,
    dies: str,
    stays_away: bool,
    settings: tuple[str, ...],
    expected: tuple[int, ...],
) -> None:
    undisturbed, run, output = runs.trained(*LONG, "parallel.num_processes=2"), tmp_path / "run", tmp_path / "output"
    words = (*command(run, *LONG, *settings, SLOW), "--hosts", HOSTS)
    variables = {"TRAINWRIGHT_SSH": hosts.ssh, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with started("-m", "trainwright", *words, cwd=tmp_path, output=output, **variables) as process:
        wait_for(lambda: trains(run, 2))
        hosts.kill(dies)
        if not stays_away:
            hosts.start(dies)
        wait_for(lambda: trains(run, *expected) or process.poll() is not None or None)
        code = process.wait(400)
    assert code == 0, output.read_text()
    assert sizes(run) == list(expected)
    assert [event["cause"] for event in events(run, "restart")] == ["node"]
    assert f"{dies}: its connection was lost" in output.read_text()
    assert difference(column(run, "loss"), column(undisturbed, "loss")) < 1e-5


def test_a_run_of_fixed_size_ends_with_5_when_a_host_stays_away(hosts: Hosts, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    words = (*command(run, *LONG, SLOW), "--hosts", HOSTS, "--num-processes", "2")
    variables = {"TRAINWRIGHT_SSH": hosts.ssh, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with started("-m", "trainwright", *words, cwd=tmp_path, output=output, **variables) as process:
        wait_for(lambda: trains(run, 2))
        hosts.kill("127.0.0.2")
        assert process.wait(400) == 5, output.read_text()
    told = output.read_text()
    assert "127.0.0.2: its connection was lost" in told and "resume the run on other hosts" in told
