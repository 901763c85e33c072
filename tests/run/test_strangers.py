"""Attacks over the network on processes that meet, and on a run of two nodes: by strangers, and by members."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from tests.run.test_nodes import STEPS, ended, start
from tests.support.commands import wait_for
from tests.support.runs import Runs, column, difference
from trainwright.errors import EXIT_FAULT, FaultError
from trainwright.parallel import world
from trainwright.run.group.peers import Membership, build_job
from trainwright.run.group.rendezvous import Rendezvous, meet
from trainwright.run.group.trust import BYTES, PEERS, VARIABLE, prove, read_secret

JOB = build_job(3, ["recipe.yaml"], "slurm-7-0", {})
HELLO = json.dumps({"kind": "hello", "peer": 1, "job": JOB}).encode() + b"\n"
SENT = (b"", b"\x00" * 7, os.urandom(98), os.urandom(70_000), HELLO, b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "failed"}\n')


def free_place(address: str = "127.0.0.1") -> tuple[str, int]:
    with socket.create_server((address, 0)) as probe:
        return address, int(probe.getsockname()[1])


@pytest.fixture
def place() -> tuple[str, int]:
    return free_place("127.0.0.2")


@pytest.fixture
def first(place: tuple[str, int]) -> Iterator[Rendezvous]:
    """Member 0 of a job of three, which listens all the time."""
    rendezvous, over = meet("rank", Membership(0, 3, place, 10), JOB, "fix"), threading.Event()

    def listen() -> None:
        while not over.is_set():
            rendezvous.listen()
            time.sleep(0.02)

    thread = threading.Thread(target=listen)
    thread.start()
    yield rendezvous
    over.set()
    thread.join()
    rendezvous.close()


def join(place: tuple[str, int], index: int = 1) -> Rendezvous:
    return meet("rank", Membership(index, 3, place, 10, patience=5), JOB, "fix")


def heard_by(place: tuple[str, int], sent: bytes) -> bytes:
    """Return all that a stranger hears that sends this."""
    with socket.create_connection(place, timeout=10) as stranger:
        received = b""
        with suppress(OSError):  # hung up on while it sends: what it was sent before can still be read
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while data := stranger.recv(65536):
                received += data
        return received


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: f"{len(sent)} bytes")
def test_a_stranger_hears_a_nonce_and_no_word(first: Rendezvous, place: tuple[str, int], sent: bytes) -> None:
    nonces = {heard_by(place, sent) for _ in range(3)} - {b""}
    assert all(len(nonce) == BYTES for nonce in nonces)
    assert len({heard_by(place, b"") for _ in range(3)}) == 3


def test_half_open_connections_keep_no_member_out(first: Rendezvous, place: tuple[str, int]) -> None:
    silent = [socket.create_connection(place) for _ in range(400)]
    begun = time.monotonic()
    join(place).close()
    assert time.monotonic() - begun < 3
    dripping = silent[-1]
    with pytest.raises(OSError):  # in time, though each byte comes in time
        for _ in range(100):
            dripping.sendall(b"x")
            time.sleep(0.1)
    for each in silent:
        each.close()


class Eavesdropper:
    """Pass a connection on, and record what the member says."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._listener, self._place, self.said = socket.create_server(("127.0.0.3", 0)), place, b""
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        member, _ = self._listener.accept()
        listener = socket.create_connection(self._place)
        member.sendall(listener.recv(BYTES, socket.MSG_WAITALL))
        self.said = member.recv(65536)
        listener.sendall(self.said)
        member.sendall(listener.recv(BYTES, socket.MSG_WAITALL))
        while data := member.recv(65536):
            self.said += data


def test_a_recorded_proof_is_worth_nothing(first: Rendezvous, place: tuple[str, int]) -> None:
    between = Eavesdropper(place)
    with socket.create_connection(("127.0.0.3", between.port)) as member:
        secret, _ = read_secret(place, Path())
        prove(member, secret, PEERS, time.monotonic() + 5, lambda: None)
        member.sendall(HELLO)
        wait_for(lambda: HELLO in between.said)
    assert len(heard_by(place, between.said)) == BYTES
    assert first.peers.list_connected() == set()


def test_the_store_is_not_on_the_network(first: Rendezvous, place: tuple[str, int]) -> None:
    """As a stranger reads the recipe: torch's own client."""
    first.publish("opened", "the recipe")
    port = int(first.store.port)
    with pytest.raises(RuntimeError):
        TCPStore(place[0], port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
    second = join(place)
    assert second.wait_for("opened", seconds=10) == "the recipe"
    second.close()


def test_a_member_without_the_secret_ends_with_5_and_hears_no_details(
    first: Rendezvous, place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "another secret, of 30 characters")
    with pytest.raises(FaultError) as refused:
        meet("rank", Membership(1, 3, place, 10, patience=1), JOB, "fix")
    assert refused.value.exit_code == EXIT_FAULT
    said = str(refused.value)
    assert f"{place[0]}:{place[1]} refuses this process" in said and "\n" not in said
    assert not any(word in said for word in ("size", "user", "recipe", "slurm"))


def test_the_secret_is_this_users_file_and_removed_in_the_end(tmp_path: Path) -> None:
    place = "node0", 29400
    secret, file = read_secret(place, tmp_path / "runs")
    assert read_secret(place, tmp_path / "runs") == (secret, file) and len(secret) == BYTES
    assert file is not None and file.stat().st_mode & 0o777 == 0o600
    assert read_secret(("node0", 29401), tmp_path / "runs")[0] != secret
    file.chmod(0o644)
    with pytest.raises(Exception, match="not this user's alone"):
        read_secret(place, tmp_path / "runs")
    at = free_place()
    _, of_run = read_secret(at, tmp_path)  # as a run that was killed leaves it
    rendezvous = meet("rank", Membership(0, 2, at, 10), JOB, "fix")
    assert of_run is not None and read_secret(at, tmp_path)[1] == of_run
    rendezvous.close()
    assert not of_run.exists()


def test_a_member_cannot_speak_for_another_one_nor_end_the_run_with_a_message(
    first: Rendezvous, place: tuple[str, int]
) -> None:
    second = join(place)
    with socket.create_connection(place) as hostile:
        secret, _ = read_secret(place, Path())
        prove(hostile, secret, PEERS, time.monotonic() + 5, lambda: None)
        hostile.sendall(json.dumps({"kind": "hello", "peer": 2, "job": JOB}).encode() + b"\n")
        assert b"welcome" in hostile.recv(65536)
        for message in ({"kind": "gone", "peer": 1}, {"kind": "note", "peer": 1}, {"peer": 1}, {"kind": 5}, [1], 7):
            hostile.sendall(json.dumps(message).encode() + b"\n")
        hostile.sendall(b'{"kind":' + b"[" * 200_000 + b"\n" + b"\xff\xfe\n" + b"1" * 10_000 + b"\n")
        wait_for(lambda: any(message["kind"] == "note" for message in first.early))
        assert [(message["kind"], message["peer"]) for message in first.early] == [("note", 2)]
        with pytest.raises(OSError):  # a message that never ends
            for _ in range(40):
                hostile.sendall(b"x" * 2**20)
                time.sleep(0.05)
    wait_for(lambda: first.peers.list_connected() == {1})
    second.close()


@pytest.mark.parametrize("peer", [-1, 0, 3, 10**30, True, "1", None, [1]])
def test_an_index_that_no_member_has_is_refused(first: Rendezvous, place: tuple[str, int], peer: object) -> None:
    with socket.create_connection(place, timeout=10) as hostile:
        secret, _ = read_secret(place, Path())
        prove(hostile, secret, PEERS, time.monotonic() + 5, lambda: None)
        hostile.sendall(json.dumps({"kind": "hello", "peer": peer, "job": JOB}).encode() + b"\n")
        assert b"refused" in hostile.recv(65536)
    assert first.peers.list_connected() == set()


class Shell:
    """What a hostile rank sends another one."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch ran",)


def test_no_object_of_another_rank_runs_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Shell())
    types = (b'{"__type__": "Shell", "fields": {}}', b'{"__type__": "os", "fields": {}}', b"[" * 100_000, b'"' + b"x")
    for content in (pickled, *types, b'{"__type__": "array", "dtype": "torch.object", "shape": [1], "data": ""}'):
        with pytest.raises(ValueError):
            world.loads(content)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="no Shell"):
        world.dumps([Shell()])


def test_objects_arrive_as_they_were() -> None:
    plain = [None, True, 3, -(2**70), 0.1, 5e-324, float("inf"), "é\ud800", [(), (1, ("a",))], {1: 2, (3, "b"): None}]
    tagged = {"__type__": "tuple", "items": [1]}
    assert world.loads(world.dumps([*plain, tagged])) == [*plain, tagged]
    assert isinstance(world.loads(world.dumps(np.float64(0.1))), float)
    generator = np.random.default_rng(0)
    for array in (generator.normal(size=(3, 2)), generator.integers(0, 9, 5), np.zeros((0, 4), np.float32)):
        found = world.loads(world.dumps(array))
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    tensor = torch.randn(2, 3, dtype=torch.bfloat16)
    assert torch.equal(world.loads(world.dumps(tensor)), tensor)


class Flood:
    """Strangers of all kinds at one port, until it is over."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._place, self._over, self.count = place, threading.Event(), 0
        self._threads = [threading.Thread(target=self._attack, args=(seed,), daemon=True) for seed in range(4)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _attack(self, seed: int) -> None:
        chance, open_ones = random.Random(seed), list[socket.socket]()
        while not self._over.is_set():
            time.sleep(0.002)
            try:
                stranger = socket.create_connection(self._place, timeout=1)
                self.count += 1
                stranger.sendall(chance.choice(SENT))
            except OSError:
                continue
            open_ones.append(stranger)
            if len(open_ones) > 100:
                open_ones.pop(chance.randrange(len(open_ones))).close()
        for each in open_ones:
            each.close()


def test_a_flood_of_strangers_changes_nothing_of_a_run_of_two_nodes(runs: Runs) -> None:
    place = free_place()
    flood = Flood(place)
    nodes = start(runs, f"{place[0]}:{place[1]}", STEPS, "--num-processes", "2")
    first, second = ended(nodes)
    flood.end()
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    run, reference = nodes[0].run, runs.trained("parallel.num_processes=2", STEPS)
    assert run is not None
    assert flood.count > 100
    assert "connections that are not of this run were refused" in first.stderr
    assert first.stderr.count("were refused") < 12
    assert difference(column(run, "loss"), column(reference, "loss")) < 1e-6
    assert difference(column(run, "grad_norm"), column(reference, "grad_norm")) < 1e-6
