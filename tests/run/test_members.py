"""What the processes of a start have on their machines: who fits, and who uses which GPU."""

from __future__ import annotations

import pytest

from trainwright.errors import MachineError
from trainwright.run.group.device_slots import DeviceSlot, Member, assign_device_slots


def member(local_rank: int, gpus: tuple[str, ...] = (), cores: tuple[int, ...] = (0, 1), host: str = "a") -> Member:
    return Member(host, 0, local_rank, gpus, cores)


def test_processes_that_see_the_same_gpus_use_those_of_their_local_ranks() -> None:
    everyone = [member(rank, ("x", "y")) for rank in range(2)]
    assert assign_device_slots(everyone) == [DeviceSlot(0, False, 2), DeviceSlot(1, False, 2)]


def test_processes_that_see_one_gpu_each_use_their_first() -> None:
    everyone = [member(rank, (name,)) for rank, name in enumerate("xyz")]
    assert [place.gpu for place in assign_device_slots(everyone)] == [0, 0, 0]


def test_cores_of_ones_own_are_told_from_shared_ones() -> None:
    bound = [member(0, cores=(0, 1)), member(1, cores=(2, 3))]
    assert [place.own_cores for place in assign_device_slots(bound)] == [True, True]
    assert [place.own_cores for place in assign_device_slots([member(0), member(1)])] == [False, False]


def test_several_machines_are_looked_at_each_for_itself() -> None:
    everyone = [member(rank, ("x", "y"), host=host) for host in "ab" for rank in range(2)]
    assert [place.gpu for place in assign_device_slots(everyone)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("everyone", "named"),
    [
        ([member(rank, ("x", "y")) for rank in range(3)], "3 processes.* 2 GPUs"),
        ([member(0), member(0)], "ranks 0 and 1 both have local rank 0"),
        ([member(0, ("x",)), member(0, host="b")], "a has GPUs and b has none"),
        ([member(0, ("x",)), member(1, ("x", "y"))][::-1], None),
        ([member(0, ("x", "y")), member(1, ("y",))], "local rank 1.*sees only 1"),
    ],
)
def test_what_does_not_fit_is_refused(everyone: list[Member], named: str | None) -> None:
    if named is None:
        assert [place.gpu for place in assign_device_slots(everyone)] == [1, 0]
        return
    with pytest.raises(MachineError, match=named):
        assign_device_slots(everyone)


def test_what_is_posted_is_read_back() -> None:
    one = member(1, ("x",))
    assert Member.read(dict(one.to_plain(), gpus=["x"], cores=[0, 1])) == one
