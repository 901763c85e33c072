from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, environment

PROBE = """
import sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    try:
        page = opener.open(sys.argv[1], timeout=5)
    except OSError:
        time.sleep(0.1)
    else:
        print(page.status)
        sys.exit(7)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", "tensorboard", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["--port {port} {runs}", "{runs} --port {port}", "{runs} --port={port} --"])
def test_curves_are_there_while_a_command_runs_and_gone_after(tmp_path: Path, order: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    done = run(*order.format(port=port, runs=tmp_path).split(), sys.executable, "-c", PROBE, url)
    assert (done.returncode, done.stdout.strip()) == (7, "200"), done.stderr
    assert url in done.stderr
    with socket.socket() as listener:  # nobody listens there any more
        assert listener.connect_ex(("127.0.0.1", port)) != 0


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = run("--port", str(port), str(tmp_path), "true")
    assert done.returncode == 3
    assert f"--port {port}" in done.stderr and "0 for any free one" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"), [(["nowhere"], "is not a directory"), ([".", "no-such-program"], "program not found")]
)
def test_what_is_not_there_is_refused(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and complaint in done.stderr
