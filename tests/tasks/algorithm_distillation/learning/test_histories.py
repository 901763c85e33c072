"""Files of histories: what is written is read, lazily and in parts, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.histories import (
    ARRAYS,
    Histories,
    History,
    compute_episode_returns,
    write,
)
from trainwright.tasks.algorithm_distillation.learners import build_learners

h5py = pytest.importorskip("h5py")
SOURCE = {"name": "q-learning", "streams": 3, "steps": 45, "seed": 0}


@pytest.fixture(scope="module")
def some() -> dict[int, History]:
    environment = make("darkroom")
    goals = [3, 10, 80]
    recording = build_learners(
        environment, environment.tasks()[goals], torch.tensor(goals), {"name": "q-learning", "streams": 3}
    ).learn(45)
    return {goal: recording.goal(index) for index, goal in enumerate(goals)}


@pytest.fixture
def file(tmp_path: Path, some: dict[int, History]) -> Path:
    path = tmp_path / "histories.h5"
    write(path, make("darkroom"), SOURCE, some.items())
    return path


def test_what_is_written_is_read(file: Path, some: dict[int, History]) -> None:
    with Histories(file) as histories:
        assert histories.environment == {"name": "darkroom", "options": {"size": 9, "horizon": 20}}
        assert histories.source == SOURCE
        assert (histories.goals, histories.time, histories.streams) == ([3, 10, 80], 45, 3)
        assert histories.tasks.tolist() == [[0, 3], [1, 1], [8, 8]]
        for index, history in enumerate(some.values()):
            for name, array in histories.goal(index)._asdict().items():
                assert (array == getattr(history, name)).all()
                assert array.dtype == getattr(history, name).dtype
        part = histories.read([2, 0], time=slice(5, 20), streams=slice(1, 3))
        assert part.states.shape == (2, 15, 2, 2) and part.rewards.shape == (2, 15, 2)
        assert (part.next_states[1] == some[3].next_states[5:20, 1:3]).all()
        assert histories.find_indices(torch.tensor([[8, 8], [0, 3]])) == [2, 0]
        with pytest.raises(RequestError, match=r"has no history of 1 of 2 tasks, such as \[4, 4\]"):
            histories.find_indices([[4, 4], [0, 3]])


def test_a_file_in_the_home_directory_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(file.parent))
    with Histories(f"~/{file.name}") as histories:
        assert len(histories) == 3


def test_tasks_that_are_no_whole_numbers_are_found(tmp_path: Path) -> None:
    environment = make("bandit", arms=3, count=4)
    recording = build_learners(environment, environment.tasks(), torch.arange(4), {"name": "ucb", "streams": 2}).learn(
        10
    )
    write(tmp_path / "bandit.h5", environment, {}, ((goal, recording.goal(goal)) for goal in range(4)))
    with Histories(tmp_path / "bandit.h5") as histories:
        assert histories.find_indices(environment.tasks()[[2, 1]]) == [2, 1]


def as_the_reference_writes(path: Path, some: dict[int, History]) -> Path:
    """Groups by number, int32 throughout, and nothing that says what it is of."""
    with h5py.File(path, "w") as file:
        for goal, history in some.items():
            for name, array in history._asdict().items():
                kind = np.bool_ if name == "dones" else np.int32
                file.create_dataset(f"{goal}/{name}", data=array.astype(kind))
    return path


def test_files_of_the_reference_are_read(tmp_path: Path, some: dict[int, History]) -> None:
    with Histories(as_the_reference_writes(tmp_path / "history_darkroom_PPO_alg-seed42.hdf5", some)) as histories:
        assert histories.environment["name"] == "darkroom" and histories.source == {}
        assert histories.tasks.tolist() == [[0, 3], [1, 1], [8, 8]]
        history = histories.goal(1)
        assert history.rewards.dtype == np.float32 and history.dones.dtype == bool
        assert (history.states == some[10].states).all() and (history.rewards == some[10].rewards).all()


def test_what_a_file_does_not_say_is_given(tmp_path: Path) -> None:
    environment = make("darkroom-permuted")
    recording = build_learners(
        environment, environment.tasks()[:2], torch.arange(2), {"name": "q-learning", "streams": 2}
    ).learn(60)
    path = as_the_reference_writes(tmp_path / "permuted.hdf5", {goal: recording.goal(goal) for goal in range(2)})
    with Histories(path, environment) as histories:
        assert histories.environment["name"] == "darkroom-permuted" and histories.tasks.tolist() == [[0], [1]]
    with pytest.raises(RequestError, match="these are histories of another environment"):
        Histories(path, make("darkroom", size=2))


def changed(file: Path, change: Any) -> Path:
    with h5py.File(file, "r+") as opened:
        change(opened)
    return file


def without(name: str) -> Any:
    return lambda opened: opened["10"].pop(name)


def replaced(name: str, array: np.ndarray) -> Any:
    def change(opened: Any) -> None:
        del opened[name]
        opened[name] = array

    return change


def of(name: str, **options: int) -> Any:
    described = json.dumps({"name": name, "options": options})
    return lambda opened: opened.attrs.__setitem__("environment", described)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((without(name), f"goal 10 has no array {name}") for name in ARRAYS),
        (replaced("10/rewards", np.zeros((44, 3))), r"rewards of goal 10 is \[44, 3\], where \[45, 3\] is expected"),
        (replaced("3/states", np.zeros((45, 3, 5))), r"states of goal 3 is \[45, 3, 5\], where \[45, 3, 2\]"),
        (replaced("3/actions", np.full((45, 3), 5)), r"actions of goal 3 go from \[5\] to \[5\], .* below \[5\]"),
        (replaced("3/actions", np.full((45, 3), 0.5)), r"actions of goal 3 go .* whole numbers"),
        (replaced("3/actions", np.zeros((0, 3))), r"goal 3 has no array actions \[time, streams\]"),
        (replaced("3/rewards", np.full((45, 3), np.nan)), "rewards of goal 3 are not all finite"),
        (replaced("10/rewards", np.full((45, 3), b"1")), "rewards of goal 10 is of type .S1; numbers are expected"),
        (replaced("3/dones", np.zeros((45, 3), bool)), "an episode of 45 steps, but darkroom ends one after 20"),
        (lambda opened: [opened.pop("3/dones"), opened.create_group("3/dones")], "goal 3 has no array dones"),
        (
            lambda opened: opened.attrs.__setitem__("environment", "darkroom"),
            "environment is not a JSON object with name",
        ),
        (lambda opened: opened.attrs.__setitem__("source", "[1]"), "the attribute source is not a JSON object"),
        (lambda opened: opened.attrs.__setitem__("source", "[" * 60_000), "the attribute source is not a JSON object"),
        (lambda opened: opened["10"].attrs.__delitem__("task"), "goal 10 has no attribute task with the 2 numbers"),
        (lambda opened: opened.move("10", "81"), "has a goal 81, but darkroom has 81"),
        (
            of("darkroom", size=3),
            r"below \[3, 3\] are expected in darkroom: these are histories of another environment",
        ),
        (of("bandit"), r"where \[45, 3, 1\] is expected"),
        (of("darkrom"), "unknown environment 'darkrom'; did you mean darkroom"),
        (lambda opened: [opened.pop(goal) for goal in list(opened)], "has no histories: groups named 0, 1"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(file: Path, change: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        Histories(changed(file, change))
    assert str(file) in str(refused.value) or "'darkrom'" in str(refused.value)


def test_a_goal_that_does_not_fit_is_refused_as_it_is_read(file: Path) -> None:
    with Histories(changed(file, replaced("10/next_states", np.full((45, 3, 2), 9)))) as histories:
        assert histories.goal(0).actions.shape == (45, 3)
        with pytest.raises(RequestError, match=r"next_states of goal 10 go from \[9, 9\] .* another environment"):
            histories.goal(1)


def test_a_damaged_file_is_refused(file: Path) -> None:
    with h5py.File(file) as opened:
        place = opened["80/actions"].id.get_chunk_info(0)
    content = bytearray(file.read_bytes())
    content[place.byte_offset : place.byte_offset + place.size] = b"x" * place.size
    file.write_bytes(content)
    with Histories(file) as histories, pytest.raises(RequestError, match="goal 80 cannot be read, the file is damaged"):
        histories.goal(2)


def test_what_is_no_file_of_histories_is_refused(tmp_path: Path, some: dict[int, History]) -> None:
    with pytest.raises(RequestError, match="no such file; create it with trainwright collect"):
        Histories(tmp_path / "none.h5")
    with pytest.raises(RequestError, match="is a directory"):
        Histories(tmp_path)
    (tmp_path / "text.h5").write_text("histories")
    with pytest.raises(RequestError, match="is not a readable HDF5 file"):
        Histories(tmp_path / "text.h5")
    other = as_the_reference_writes(tmp_path / "other.h5", {81: some[3]})
    with pytest.raises(RequestError, match="has a goal 81, but darkroom has 81; the file does not name"):
        Histories(other)


def test_returns_of_episodes() -> None:
    rewards = np.arange(12, dtype=np.float32).reshape(6, 2)
    dones = np.zeros((6, 2), dtype=bool)
    dones[[1, 3], 0] = True
    dones[4, 1] = True
    found = compute_episode_returns(dones, rewards)
    assert found.dtype == np.float32
    assert found[0].tolist() == [0 + 2, 4 + 6] and found[1, 0] == 1 + 3 + 5 + 7 + 9 and np.isnan(found[1, 1])
    assert compute_episode_returns(np.zeros((6, 2), dtype=bool), rewards).shape == (2, 0)


LINKS = [(place, kind) for place in ("3", "10/rewards") for kind in ("external link", "soft link")]


@pytest.mark.parametrize(("place", "kind"), [*LINKS, ("10/rewards", "virtual"), ("10/rewards", "external storage")])
def test_arrays_of_other_files_are_not_read(file: Path, kind: str, place: str) -> None:
    other = file.with_name("other.h5")
    other.write_bytes(file.read_bytes())
    with h5py.File(file, "r+") as histories:
        array = histories["10/rewards"]
        shape, dtype = array.shape, array.dtype
        del histories[place]
        if kind == "external link":
            histories[place] = h5py.ExternalLink(other, place)
        elif kind == "soft link":
            histories["elsewhere"] = h5py.ExternalLink(other, "/")
            histories[place] = h5py.SoftLink(f"/elsewhere/{place}")
        elif kind == "virtual":
            layout = h5py.VirtualLayout(shape, dtype)
            layout[:] = h5py.VirtualSource(other, place, shape)
            histories.create_virtual_dataset(place, layout)
        else:
            histories.create_dataset(place, shape, dtype, external=[(other, 0, h5py.h5f.UNLIMITED)])
    with pytest.raises(RequestError, match=rf"{place} is (a link, which may lead to|stored in) other files"):
        Histories(file)
