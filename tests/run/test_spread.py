"""Which nodes run a launch, and how many processes each."""

from __future__ import annotations

import pytest

from trainwright.run.launches import Spread, choose_spread
from trainwright.run.nodes import SILENCE_LIMIT, Silence


@pytest.mark.parametrize(
    ("usable", "rooms", "expected"),
    [
        ((1, 2), {0: 1, 1: 1}, Spread((0, 1), 1)),
        ((1, 2), {0: 1}, Spread((0,), 1)),
        ((4, 8), {0: 8, 1: 8}, Spread((0, 1), 4)),  # as many nodes as possible
        ((2, 3, 4), {0: 2, 1: 1}, Spread((0, 1), 1)),
        ((3,), {0: 2, 1: 2, 2: 0}, None),
        ((2, 4, 6), {0: 2, 2: 2, 5: 2}, Spread((0, 2, 5), 2)),
        ((4,), {0: 2, 2: 2, 5: 2}, Spread((0, 2), 2)),
        ((1, 2), {1: 2}, None),  # rank 0 is on node 0
        ((1, 2), {0: 0, 1: 2}, None),
        ((1,), {}, None),
    ],
)
def test_the_largest_usable_number_is_divided_equally(
    usable: tuple[int, ...], rooms: dict[int, int], expected: Spread | None
) -> None:
    assert choose_spread(usable, rooms) == expected


def test_ranks_follow_the_order_of_the_nodes_of_a_launch() -> None:
    assert [Spread((0, 3, 4), 2).find_first_rank(node) for node in (0, 3, 4)] == [0, 2, 4]


def test_a_node_is_silent_only_for_time_in_which_this_one_ran() -> None:
    now = [0.0]
    silence = Silence(lambda: now[0])

    def pass_by(seconds: int) -> list[int]:
        for _ in range(seconds):
            now[0] += 1
            silence.hear(1)
            found = silence.list_silent([1, 2])
        return found

    silence.hear(2)
    assert pass_by(int(SILENCE_LIMIT)) == []
    assert pass_by(1) == [2]
    silence.hear(2)
    assert pass_by(20) == []
    now[0] += 3600  # this machine was suspended
    assert pass_by(20) == []
    assert pass_by(12) == [2]
    assert silence.list_silent([3]) == [], "it has just begun to be watched"
