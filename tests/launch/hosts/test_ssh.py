"""`train --hosts` over a real ssh server: two addresses of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import trainwright, wait_for
from tests.support.runs import TINY, Runs, column, difference

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs openssh-server and openssh-client"),
]
HOSTS = "127.0.0.1,127.0.0.2"


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server with a key of its own; return the value for TRAINWRIGHT_SSH."""
    home = tmp_path_factory.mktemp("ssh")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / key], check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = home / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {home / 'host'}\n"
        f"AuthorizedKeysFile {home / 'user.pub'}\nStrictModes no\nPidFile none\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    assert SSHD is not None
    with (home / "log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=log)
    wait_for(lambda: b"Server listening on 127.0.0.2" in (home / "log").read_bytes() or None)
    (home / "known").touch()
    yield (
        f"ssh -F none -p {port} -i {home / 'user'} -o IdentitiesOnly=yes "
        f"-o UserKnownHostsFile={home / 'known'} -o StrictHostKeyChecking=accept-new"
    )
    server.terminate()
    server.wait()


def command(run: Path, *more: str) -> tuple[str, ...]:
    return ("train", str(TINY), f"logging.run_directory={run}", "logging.tensorboard=false", *more)


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


def test_ctrl_c_stops_all_and_the_same_command_continues(ssh: str, tmp_path: Path) -> None:
    from tests.support.commands import started

    run = tmp_path / "run"
    words = (*command(run, "train.max_steps=4000"), "--hosts", HOSTS, "--num-processes", "2", "--resume", "auto")
    with started("-m", "trainwright", *words, cwd=tmp_path, TRAINWRIGHT_SSH=ssh) as process:
        wait_for(lambda: ((run / "events.jsonl").is_file() and '"step"' in (run / "events.jsonl").read_text()) or None)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 75
    assert any((run / "checkpoints").iterdir())


def test_hosts_that_cannot_take_part_are_named(ssh: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def failed(hosts: str, with_ssh: str) -> tuple[int, str]:
        done = trainwright(*command(run), "--hosts", hosts, cwd=tmp_path, TRAINWRIGHT_SSH=with_ssh)
        return done.returncode, " ".join(done.stderr.split())

    code, text = failed("127.0.0.1,no-such-host.invalid", ssh)
    assert code == 2
    assert "no-such-host.invalid: unknown host" in text
    code, text = failed(HOSTS, ssh.replace("/user ", "/host "))
    assert code == 3
    assert "ssh-copy-id 127.0.0.1" in text
    assert not run.exists()
