"""Which nodes take part in a launch as they are lost and come back: real connections, without workers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.commands import wait_for
from trainwright.errors import EXIT_FAULT, EXIT_REQUEST, EXIT_STOPPED, RequestError
from trainwright.run.group.environment import NodeRendezvous
from trainwright.run.launches import NodeLaunches
from trainwright.run.nodes import LinkedStopping, NodeDropped, NodeFailed, NodeInfo, NodeRules, Nodes, NodesLost


class Members:
    """The nodes of a run that prepares nothing, in threads of this process."""

    def __init__(self, directory: Path, count: int, usable: tuple[int, ...], on_hang: str = "restart") -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._place = ("127.0.0.1", int(probe.getsockname()[1]))
        self._directory, self._count, self._usable = directory, count, usable
        self._rules = NodeRules(may_lose=len(usable) > 1, on_hang=on_hang)
        self._threads = ThreadPoolExecutor(8)
        self._nodes: list[Nodes] = []
        (directory / "recipe.yaml").write_text("the recipe")

    def close(self) -> None:
        for nodes in reversed(self._nodes):
            nodes.leave()

    def arrive(self, index: int, recipe: str = "", version: str = "1") -> Future[NodeLaunches]:
        """Have a node meet the others and see the run's directory."""
        mine = NodeInfo("here", 1, 0, recipe, resume=False, version=version)

        def meet() -> NodeLaunches:
            stopping, met = LinkedStopping(), NodeRendezvous(self._count, index, *self._place, 20.0)
            nodes = Nodes.meet(met, mine, stopping, self._rules)
            self._nodes.append(nodes)
            run = nodes.open(lambda: (self._directory, "the recipe"))
            return NodeLaunches(run, nodes, self._usable, lambda: 1, stopping)

        return self._threads.submit(meet)

    def all_arrive(self) -> list[NodeLaunches]:
        """Return the launches of all nodes, as each of them sees it."""
        return [each.result(30) for each in [self.arrive(index) for index in range(self._count)]]

    def together(self, *works: Callable[[], int]) -> list[int]:
        """Return what each node's work returns."""
        return [each.result(30) for each in [self._threads.submit(work) for work in works]]

    def later(self, work: Callable[[], int]) -> Future[int]:
        return self._threads.submit(work)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path, 2, (1, 2))
    yield members
    members.close()


def lose(launches: NodeLaunches) -> None:
    """End a node's connection without a word, as its death does."""
    for line in launches.nodes.rendezvous.peers._lines:
        line.socket.shutdown(socket.SHUT_RDWR)


def trains(launches: NodeLaunches) -> None:
    launches.nodes.running = True


def ranks(launches: NodeLaunches) -> tuple[int, int]:
    ranks = launches.nodes.ranks()
    return ranks.first, ranks.size


def lose_and_come_back(
    two: Members, first: NodeLaunches, second: NodeLaunches, version: str = "1"
) -> tuple[NodeLaunches, Future[int]]:
    """Lose the second node, train on without it, and have it meet the first again; return it and what it waits for."""
    trains(first)
    lose(second)
    with pytest.raises(NodesLost):
        wait_for(lambda: first.nodes.poll())
    assert first.may_go_on and first.nodes.lost is not None and "node 1 (here) is gone" in first.nodes.lost
    assert first.next() == 1 and ranks(first) == (0, 1)
    trains(first)
    back = two.arrive(1, version=version)
    while not back.done():
        first.nodes.poll()
    return back.result(), two.later(back.result().first)


def test_a_lost_node_is_left_out_and_taken_in_again_when_it_is_back(two: Members) -> None:
    first, second = two.all_arrive()
    assert two.together(first.first, second.first) == [1, 1]
    assert (ranks(first), ranks(second)) == ((0, 2), (1, 2))
    back, again = lose_and_come_back(two, first, second)
    wait_for(lambda: first.nodes.poll() or 1 in first.nodes.waiting)
    assert two.together(first.next) == [1]
    assert again.result(30) == 1
    assert (ranks(first), ranks(back)) == ((0, 2), (1, 2))
    assert back.has_launched


def test_what_comes_back_on_another_node_is_noticed_while_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU does that has fallen off the bus."""
    monkeypatch.setattr("trainwright.run.nodes._RUNS_SECONDS", 0.1)
    members, there = Members(tmp_path, 2, (2, 4)), [1]
    first, second = members.all_arrive()
    first.room, second.room = lambda: 2, lambda: there[0]
    assert members.together(first.first, second.first) == [1, 1]
    trains(first)
    trains(second)
    elastic = first.elastic
    assert elastic is not None

    def available() -> int | None:
        for launches in (second, first):
            launches.nodes.poll()
        return elastic.available()

    for there[0], number in ((2, 4), (1, 2)):
        wait_for(lambda number=number: available() == number)  # type: ignore[misc]
    members.close()


def test_a_silent_node_is_dropped_and_told_so_when_it_wakes(two: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.run.nodes.SILENCE_LIMIT", 1.0)
    monkeypatch.setattr("trainwright.run.nodes._RUNS_SECONDS", 0.1)
    first, second = two.all_arrive()
    two.together(first.first, second.first)
    trains(first)
    trains(second)
    with pytest.raises(NodesLost):
        wait_for(lambda: first.nodes.poll())
    assert first.nodes.lost is not None and "has not answered for" in first.nodes.lost
    with pytest.raises(NodesLost):
        wait_for(lambda: second.nodes.poll())
    with pytest.raises(NodeDropped):
        second.next()


def test_a_silent_node_is_only_told_of_if_the_recipe_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainwright.run.nodes.SILENCE_LIMIT", 0.5)
    monkeypatch.setattr("trainwright.run.nodes._RUNS_SECONDS", 0.1)
    members = Members(tmp_path, 2, (1, 2), on_hang="warn")
    first, second = members.all_arrive()
    members.together(first.first, second.first)
    trains(first)
    said: list[str] = []
    wait_for(lambda: first.nodes.poll() or said.append(capsys.readouterr().err) or "warning: node 1" in "".join(said))
    second.nodes.poll()
    wait_for(lambda: first.nodes.poll() or said.append(capsys.readouterr().err) or "answers again" in "".join(said))
    assert first.nodes.lost is None
    members.close()


def test_without_node_0_the_others_end(two: Members) -> None:
    first, second = two.all_arrive()
    two.together(first.first, second.first)
    trains(second)
    lose(first)
    with pytest.raises(NodesLost):
        wait_for(lambda: second.nodes.poll())
    with pytest.raises(NodeFailed, match=r"node 0 \(here\) is gone.*--resume") as failed:
        second.next()
    assert failed.value.exit_code == EXIT_FAULT


def test_a_run_of_fixed_size_does_not_go_on_without_a_node(tmp_path: Path) -> None:
    members = Members(tmp_path, 2, (2,))
    first, second = members.all_arrive()
    members.together(first.first, second.first)
    trains(first)
    lose(second)
    with pytest.raises(NodesLost):
        wait_for(lambda: first.nodes.poll())
    assert not first.may_go_on
    members.close()


def test_a_node_without_use_waits_and_hears_how_the_run_ends(tmp_path: Path) -> None:
    members = Members(tmp_path, 3, (1, 2))
    first, second, third = members.all_arrive()
    spare = members.later(third.first)
    assert members.together(first.first, second.first) == [1, 1]
    assert not spare.done()
    first.nodes.over(EXIT_STOPPED)
    assert spare.result(30) == 0 and third.code == EXIT_STOPPED
    members.close()


def test_a_failure_is_raised_on_the_nodes_that_follow(two: Members) -> None:
    first, second = two.all_arrive()
    two.together(first.first, second.first)
    follows = two.later(second.next)
    first.nodes.over(4, "rank 1 failed")
    with pytest.raises(NodeFailed, match="rank 1 failed") as failed:
        follows.result(30)
    assert failed.value.exit_code == 4


def test_a_node_that_comes_late_with_another_version_is_refused_and_harms_nobody(two: Members) -> None:
    first, second = two.all_arrive()
    two.together(first.first, second.first)
    _, again = lose_and_come_back(two, first, second, version="2")
    wait_for(lambda: first.nodes.poll() or again.done())
    with pytest.raises(NodeFailed, match="install the same on both"):
        again.result()
    assert first.nodes.waiting == set()


def test_nodes_with_another_request_are_refused_at_the_start(two: Members) -> None:
    first, second = two.arrive(0, recipe="a"), two.arrive(1, recipe="b")
    with pytest.raises(RequestError, match="node 1"):
        first.result(30)
    with pytest.raises(NodeFailed) as failed:
        second.result(30)
    assert failed.value.exit_code == EXIT_REQUEST
