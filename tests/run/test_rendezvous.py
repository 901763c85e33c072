"""Where processes meet: on machines whose names say little, and beside programs that are not of the job."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PATIENCE, environment, wait_for
from trainwright.errors import MachineError
from trainwright.run.group.addresses import find_interface, format_address, resolve_own_address
from trainwright.run.group.peers import Job, Membership, build_job
from trainwright.run.group.rendezvous import Rendezvous, meet

FIX = "take another port"
JOB = build_job(2, ["recipe.yaml"], "slurm-7-0", {})


@pytest.fixture
def place() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return "127.0.0.1", int(probe.getsockname()[1])


@pytest.fixture
def first(place: tuple[str, int]) -> Iterator[Rendezvous]:
    """Member 0 of a job of two, which listens all the time."""
    rendezvous = meet("rank", Membership(0, 2, place, 10), JOB, FIX)
    ended = threading.Event()

    def listen() -> None:
        while not ended.is_set():
            rendezvous.listen()
            time.sleep(0.02)

    thread = threading.Thread(target=listen)
    thread.start()
    yield rendezvous
    ended.set()
    thread.join()
    rendezvous.close()


def refusal(place: tuple[str, int], job: Job = JOB, index: int = 1, seconds: float = 10) -> str:
    with pytest.raises(MachineError) as caught:
        meet("rank", Membership(index, 2, place, seconds, patience=1), job, FIX)
    assert str(caught.value).endswith(FIX) or seconds < 10
    return str(caught.value)


def test_the_members_of_a_job_meet(first: Rendezvous, place: tuple[str, int]) -> None:
    second = meet("rank", Membership(1, 2, place, 10), JOB, FIX)
    second.post({"here": 1})
    first.post({"here": 0})
    assert first.gather(10) == {0: {"here": 0}, 1: {"here": 1}}
    first.publish("word", "hello")
    assert second.wait_for("word", seconds=10) == "hello"
    second.peers.send("note", text="x")
    wait_for(lambda: first.early)
    assert [(message["kind"], message["peer"]) for message in first.early] == [("note", 1)]
    second.close()


def test_messages_to_a_member_that_does_not_read_arrive_whole_and_in_order(place: tuple[str, int]) -> None:
    first = meet("rank", Membership(0, 2, place, 10), JOB, FIX)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(meet, "rank", Membership(1, 2, place, 10), JOB, FIX)
        wait_for(lambda: first.listen() or first.peers.list_connected())
        second = joining.result()
    for number in range(2000):  # more than the buffers of the sockets hold
        first.peers.send_direct("note", number=number, text="x" * 10_000)
    received: list[int] = []

    def read() -> bool:
        first.listen()
        received.extend(message["number"] for message in second.peers.poll())
        return len(received) == 2000

    wait_for(read)
    assert received == list(range(2000))
    for each in (second, first):
        each.close()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (build_job(3, ["recipe.yaml"], "slurm-7-0", {}), "of another size"),
        (build_job(2, ["other.yaml"], "slurm-7-0", {}), "of another recipe"),
        (build_job(2, ["recipe.yaml"], "slurm-8-0", {}), "another job's"),
        ({**JOB, "user": "nobody"}, "another user's"),
    ],
)
def test_a_member_of_another_job_is_refused(first: Rendezvous, place: tuple[str, int], job: Job, says: str) -> None:
    said = refusal(place, job)
    assert f"is of another run ({says}): two jobs use port {place[1]}" in said
    assert first.early == []


def test_a_member_that_is_there_already_is_refused(first: Rendezvous, place: tuple[str, int]) -> None:
    second = meet("rank", Membership(1, 2, place, 10), JOB, FIX)
    assert f"rank 1 of the run at 127.0.0.1:{place[1]} is already there: two jobs use port" in refusal(place)
    assert first.early == []
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 300_000])
def test_another_program_at_the_port_is_told_from_rank_0(place: tuple[str, int], answer: bytes | None) -> None:
    with socket.create_server(place) as listener:
        kept = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    if answer is None:
                        kept.append(connection)
                    else:
                        connection.sendall(answer)
                        connection.close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        said = refusal(place)
        listener.shutdown(socket.SHUT_RDWR)
    assert f"port {place[1]} at 127.0.0.1:{place[1]} is used by another program, not rank 0 of this run" in said


def test_what_a_stranger_sends_harms_nobody(first: Rendezvous, place: tuple[str, int]) -> None:
    hello = {"kind": "hello", "peer": "one", "job": 5}
    for data in (b"\x00\xff" * 5000, b"[1]\n", b"{}\n", json.dumps(hello).encode() + b"\n", b'{"kind": "failed"}\n'):
        with socket.create_connection(place) as stranger:
            stranger.sendall(data)
    with socket.create_connection(place) as stranger, pytest.raises(OSError):
        for _ in range(100):  # is hung up on, not listened to forever
            stranger.sendall(b"x" * 2**16)
            time.sleep(0.02)
    second = meet("rank", Membership(1, 2, place, 10), JOB, FIX)
    assert first.early == []
    second.close()


def test_nobody_at_the_port_is_told_in_the_time_given(place: tuple[str, int]) -> None:
    assert "rank 0 did not open 127.0.0.1" in refusal(place, seconds=1)


def test_a_machine_whose_name_is_loopback_is_reached_by_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes /etc/hosts: 127.0.1.1 beside the machine's own name."""
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *more, **options: known("127.0.1.1", None, **options))
    assert find_interface("node0") not in ("lo", "lo0")
    assert find_interface("127.0.0.1") in ("lo", "lo0", None)


def known_after(monkeypatch: pytest.MonkeyPatch, attempts: int) -> list[str]:
    """Let the resolver know the name node0 only after some attempts; return those that there were."""
    known, asked = socket.getaddrinfo, list[str]()

    def look_up(name: str, *more: Any, **options: Any) -> Any:
        if name != "node0":
            return known(name, *more, **options)
        asked.append(name)
        if len(asked) <= attempts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def test_a_name_that_dns_publishes_late_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a pod's own name is on Kubernetes when the pod has just started."""
    asked = known_after(monkeypatch, 2)
    assert resolve_own_address("node0", 60) == (socket.AF_INET, "")
    assert len(asked) == 3
    assert capsys.readouterr().err.count("cannot resolve the host name node0 yet") == 1


def test_a_name_that_stays_unknown_is_told_in_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    known_after(monkeypatch, 10**6)
    with pytest.raises(MachineError, match="cannot resolve the host name node0 within 1 s"):
        meet("rank", Membership(0, 2, ("node0", 29400), 1), JOB, FIX)


def test_members_meet_over_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            place = "::1", int(probe.getsockname()[1])
    except OSError:
        pytest.skip("no IPv6 here")
    assert format_address(*place) == f"[::1]:{place[1]}"
    assert find_interface("::1") in ("lo", "lo0")
    first = meet("rank", Membership(0, 2, place, 10), JOB, FIX)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(meet, "rank", Membership(1, 2, place, 10), JOB, FIX)
        while not coming.done():
            first.listen()
        second = coming.result()
    second.post({"here": 1})
    first.post({"here": 0})
    assert first.gather(10) == {0: {"here": 0}, 1: {"here": 1}}
    assert f"{place[1]} of ::1 is used by another program" in refusal(place, index=0)
    second.close()
    first.close()


ISOLATED = """
set -e
cd "$1"
echo "nameserver 10.99.0.53" > resolv.conf; echo "hosts: files dns" > nsswitch.conf
echo "127.0.0.1 localhost" > hosts; echo "127.0.1.1 node0" >> hosts
for file in resolv.conf nsswitch.conf hosts; do mount --bind $file /etc/$file; done
ip link set lo up; ip addr add 10.99.0.53/24 dev lo
ip link add outside type veth peer name inside; ip addr add 10.98.0.1/24 dev outside
ip link set outside up; ip link set inside up
ip route add default dev outside
shift; exec "$@"
"""
PROGRAM = """
import json, socket, time
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); silent.bind(("10.99.0.53", 53))
from trainwright.run.group.peers import Membership, build_job
from trainwright.run.group.addresses import find_interface
from trainwright.run.group.rendezvous import meet
begun = time.monotonic()
rendezvous = meet("rank", Membership(0, 2, ("10.98.0.1", 0), 10), build_job(2), "")
print(json.dumps([find_interface("node0"), time.monotonic() - begun]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="takes a superuser")
def test_a_machine_without_names_that_dns_does_not_answer(tmp_path: Path) -> None:
    """Its own name is loopback, and a name server takes questions and never answers."""
    into = ["unshare", "-m", "-n", "sh", "-c", ISOLATED, "sh", str(tmp_path)]
    if subprocess.run([*into, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    command = [*into, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    interface, seconds = json.loads(done.stdout)
    assert interface == "outside"
    assert seconds < 9  # each question to the server would take 10 s
