"""Hosts as pdsh and MPI write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.clusters.hosts import Host, check_clocks, choose_exit_code, parse_hosts, read_hostfile, sum_processes
from trainwright.errors import EXIT_FAULT, EXIT_STOPPED, MachineError, RequestError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1,node2", ["node1", "node2"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,12].lan, me@other", ["node08.lan", "node09.lan", "node10.lan", "node12.lan", "me@other"]),
        ("[::1],me@[fd00::2]", ["::1", "me@fd00::2"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_lists_of_hosts(text: str, names: list[str]) -> None:
    assert sorted(host.name for host in parse_hosts(text)) == sorted(names)


def test_slots_are_processes() -> None:
    assert sum_processes(parse_hosts("a:4,b:4")) == 8
    assert sum_processes(parse_hosts("a,b")) is None
    assert parse_hosts("me@[fd00::2]:4") == [Host("me@fd00::2", 4)]
    with pytest.raises(RequestError, match=r"same number of slots \(a: 4, b: not written\)"):
        sum_processes(parse_hosts("a:4,b"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "-oProxyCommand=x",
        "a;b",
        "$(id)",
        "a b",
        "node[3-1]",
        "node[1-999999]",
        "a:0",
        "a:x",
        "a,a",
        "::1",
        "[1::2::3]",
    ],
)
def test_what_is_not_a_host_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--hosts: "):
        parse_hosts(text)


def test_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# machines\nnode1 slots=2\n\nme@node[2-3] slots=2  # more\nnode4:2\n")
    hosts = read_hostfile(file)
    assert hosts == [Host("node1", 2), Host("me@node2", 2), Host("me@node3", 2), Host("node4", 2)]
    assert hosts[1].address == "node2"
    for wrong in (
        "node2 slots",
        "node2 slots=2 boards=2",
        "node2 2",
        "node2:2 slots=2",
        "node2 slots=0",
        "node2 slots=",
    ):
        file.write_text(f"node1 slots=2\n{wrong}\n")
        with pytest.raises(RequestError, match="hosts:2: "):
            read_hostfile(file)
    with pytest.raises(RequestError, match="--hostfile"):
        read_hostfile(tmp_path / "none")


def test_hostfiles_of_open_mpi(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2 max_slots=8\nb slots = 2 max-slots = 4\nc max_slots=2  slots=2 # last\n[::1] slots=2\n")
    assert read_hostfile(file) == [Host("a", 2), Host("b", 2), Host("c", 2), Host("::1", 2)]
    file.write_text("a max_slots=8\nb\n")
    assert read_hostfile(file) == [Host("a"), Host("b")]


def test_clocks_that_differ_are_refused() -> None:
    hosts = [Host("a"), Host("b")]
    check_clocks(hosts, [-20.0, 5.0])
    with pytest.raises(MachineError, match="the clock of b is 90 s ahead of that of a"):
        check_clocks(hosts, [10.0, 100.0])


@pytest.mark.parametrize(
    ("codes", "together"),
    [
        ([0, 0], 0),
        ([EXIT_STOPPED, EXIT_STOPPED], EXIT_STOPPED),
        ([EXIT_STOPPED, EXIT_FAULT], EXIT_FAULT),
        ([EXIT_FAULT, 4], 4),
        ([EXIT_FAULT, 255], 255),
        ([2, 2], 2),
    ],
)
def test_exit_code_of_all(codes: list[int], together: int) -> None:
    assert choose_exit_code(codes) == together
