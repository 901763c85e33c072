"""What the live page asks for."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.commands import trainwright
from trainwright.machine.sharing import lock_directory
from trainwright.observe.following import RunFollower
from trainwright.observe.watching.app import Board, build_application

NAME = "a\u202e<script>'\""
STEP = {"event": "step", "loss": 2.0, "step_time": 1.0, "tokens": 10, "tokens_per_second": 9.0}
EVALUATE = {"event": "evaluate", "time": 15.0, "step": 3, "metrics": {"loss": 1.5}, "seconds": 1.0}
SAMPLE = {"event": "generate", "time": 15.0, "step": 3, "prompt": "<img>", "text": "x"}


def write(run: Path, *events: dict[str, Any], rate: float = 0.1) -> Path:
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "rank-0.log").write_text("line\n")
    (run / "recipe.yaml").write_text(
        f"task: sft\nkey_of_2030: 1\nmodel: {{name: m}}\noptimizer: {{learning_rate: {rate}}}\n"
    )
    start = {"event": "start", "time": 10.0, "max_steps": 5, "resumed_from": None, "parameters": 7}
    steps = [{**STEP, "time": 10.0 + n, "step": n, "tokens": 10 * n} for n in range(1, 4)]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, *steps, *events)))
    return run


def write_ledger(run: Path) -> None:
    """Write a ledger of two ranks."""
    (run / "ledger").mkdir()
    for rank in range(2):
        spent = {"forward": 3.0 + rank, "exchange": 1.0, "waiting for ranks": 1.0 - rank, "start: imports": 5.0}
        gpu = {"used": 0.9 + rank / 20, "memory": 61 << 30, "total_memory": 80 << 30, "power": 310, "temperature": 64}
        system = {"cpu": 1.0, "waited": 0.2 * rank, "gpu": gpu}
        line = {"launch": 1, "rank": rank, "step": 3, "started": 10.0, "seconds": spent, "system": system}
        lines = (json.dumps({**line, "time": time}) + "\n" for time in (15.0, 20.0))
        (run / "ledger" / f"rank-{rank}.jsonl").write_text("".join(lines))


@pytest.fixture
def board(tmp_path: Path) -> Board:
    write(tmp_path / "one", EVALUATE, SAMPLE, {"event": "finish", "time": 15.0, "status": "finished", "step": 3})
    write(tmp_path / "group" / NAME, rate=0.2)
    found = Board(tmp_path)
    found.look()
    return found


@pytest.fixture
def client(board: Board) -> Iterator[TestClient]:
    found = TestClient(build_application(board, "secret"))
    found.params = {"token": "secret"}
    yield found


@pytest.mark.parametrize("path", ["/", "/page.js", "/runs", "/events", "/log?run=one&file=rank-0.log"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_nothing_is_answered_without_the_token(board: Board, path: str, token: str) -> None:
    answer = TestClient(build_application(board, "secret")).get(path, headers={"x": "y"}, params={"token": token})
    assert answer.status_code == 403
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_page_has_only_its_own_scripts(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "http" not in page.text
    assert "unsafe" not in page.headers["content-security-policy"]
    assert client.get("/page.js").headers["content-type"].startswith("text/javascript")


def test_runs_are_shown_as_they_are(client: TestClient) -> None:
    rows = client.get("/runs").json()
    assert rows["one"]["status"] == "finished" and rows["one"]["best"] == 1.5
    assert (rows["one"]["step"], rows["one"]["steps"], rows["one"]["goodput"]) == (3, 5, 0.6)
    assert rows[f"group/{NAME}"]["status"] == "ended"


@pytest.mark.parametrize(
    ("axis", "places"),
    [("step", [1, 2, 3]), ("tokens", [10, 20, 30]), ("seconds", [1, 2, 3]), ("flops", [420, 840, 1260])],
)
def test_curves_of_several_runs_over_an_axis(client: TestClient, axis: str, places: list[float]) -> None:
    query = {"run": ["one", f"group/{NAME}"], "axis": axis}
    curves = client.get("/curves", params=query).json()
    assert [of_run["loss"][0] for of_run in curves.values()] == [places, places]
    assert curves["one"]["validation/loss"][:2] == [places[2:], [1.5]]


def test_every_metric_of_steps_and_evaluations_has_a_curve(board: Board, client: TestClient, tmp_path: Path) -> None:
    """Also the rare ones, of the steps that count."""
    more = [{**STEP, "time": 20.0 + n, "step": n, "metrics": {"reward": n / 2} if n % 2 else {}} for n in range(4, 9)]
    again = {"event": "start", "time": 30.0, "resumed_from": 6}
    accuracy = {**EVALUATE, "metrics": {"loss": 1.5, "accuracy": 0.5}}
    write(tmp_path / "more", accuracy, *more, again, {**more[-1], "step": 7, "metrics": {"reward": 9.0}})
    board.look()
    curves = client.get("/curves", params={"run": "more"}).json()["more"]
    assert curves["reward"][:2] == [[5, 7], [2.5, 9.0]]
    assert {"loss", "step_time", "tokens_per_second", "validation/loss", "validation/accuracy"} < curves.keys()
    assert "memory_bytes" not in curves, "the run has none"
    follower = RunFollower(tmp_path / "more")
    follower.look()
    restored = RunFollower.from_state(tmp_path / "more", follower.state())
    assert restored.metrics["reward"].points("reward", "step", 10)[:2] == [[5, 7], [2.5, 9.0]]


def test_colors_stay_as_runs_come_and_go(board: Board, tmp_path: Path) -> None:
    before = {name: row["number"] for name, row in board.rows().items()}
    assert sorted(before.values()) == [0, 1]
    write(tmp_path / "a-new-one")
    shutil.rmtree(tmp_path / "group")
    board.look()
    assert {name: row["number"] for name, row in board.rows().items()} == {"one": before["one"], "a-new-one": 2}


def test_tags_and_a_note_are_kept_with_the_run(board: Board, client: TestClient, tmp_path: Path) -> None:
    given = {"tags": ["good", "<b>"], "note": "first\nline"}
    assert client.post("/remarks", params={"run": "one"}, json=given).json() == "saved"
    again = Board(tmp_path)
    again.look()
    for row in (board.rows()["one"], again.rows()["one"]):
        assert (row["tags"], row["remark"]) == (given["tags"], given["note"])
    assert json.loads((tmp_path / "one" / "remarks.json").read_text()) == given


@pytest.mark.parametrize(
    ("run", "content", "code"),
    [
        ("one", '{"tags": "x"}', 400),
        ("one", '{"tags": [1]}', 400),
        ("one", json.dumps({"tags": ["x" * 41]}), 400),
        ("one", json.dumps({"note": "x" * 10_001}), 400),
        ("one", json.dumps({"note": "x" * 200_000}), 400),
        ("one", "[]", 400),
        ("one", "{", 400),
        ("../..", "{}", 404),
    ],
)
def test_wrong_remarks_are_not_written(client: TestClient, tmp_path: Path, run: str, content: str, code: int) -> None:
    assert client.post("/remarks", params={"run": run}, content=content).status_code == code
    assert not list(tmp_path.rglob("remarks.json"))


def test_details_logs_and_differences(client: TestClient) -> None:
    details = client.get("/details", params={"run": "one"}).json()
    assert [event["metrics"] for event in details["evaluations"]] == [{"loss": 1.5}]
    assert details["samples"][0]["prompt"] == "<img>" and details["logs"] == ["rank-0.log"]
    assert client.get("/log", params={"run": "one", "file": "rank-0.log"}).json() == "line\n"
    found = client.get("/differences", params={"run": ["one", f"group/{NAME}"]}).json()
    assert list(found) == ["optimizer.learning_rate"]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/log", {"run": "one", "file": "../events.jsonl"}),
        ("/details", {"run": "../.."}),
        ("/curves", {"run": "gone"}),
    ],
)
def test_only_runs_and_logs_are_read(client: TestClient, path: str, query: dict[str, str]) -> None:
    assert client.get(path, params=query).status_code == 404


def test_stop_asks_a_run_that_trains(client: TestClient, tmp_path: Path) -> None:
    refused = client.post("/stop", params={"run": "one"})
    assert refused.status_code == 400 and "not being trained" in refused.json()["error"]
    with lock_directory(tmp_path / "one", "locked"):
        assert client.post("/stop", params={"run": "one"}).json() == "stopping"
    assert (tmp_path / "one" / "stop").exists()
    assert client.get("/stop", params={"run": "one"}).status_code == 405


def test_a_checkpoint_is_asked_of_a_run_that_trains(client: TestClient, tmp_path: Path) -> None:
    assert client.post("/checkpoint", params={"run": "one"}).status_code == 400
    with lock_directory(tmp_path / "one", "locked"):
        assert client.post("/checkpoint", params={"run": "one"}).json() == "asked for a checkpoint"
    assert (tmp_path / "one" / "checkpoint").exists()


def test_a_fault_is_shown_after_the_restart(board: Board, client: TestClient, tmp_path: Path) -> None:
    fault = {"event": "fault", "time": 14.0, "step": 3, "kind": "process", "rank": 1, "detail": "", "action": "restart"}
    write(tmp_path / "again", fault, {"event": "start", "time": 15.0, "resumed_from": 2})
    board.look()
    shown = client.get("/details", params={"run": "again"}).json()["events"]
    assert [event["event"] for event in shown] == ["start", "fault", "start"]


def test_damage_and_deleted_runs(board: Board, client: TestClient, tmp_path: Path) -> None:
    with (tmp_path / "one" / "events.jsonl").open("a") as file:
        file.write("damaged\n")
    board.look()
    assert "1 damaged line left out" in client.get("/runs").json()["one"]["note"]
    shutil.rmtree(tmp_path / "one")
    board.look()
    assert list(client.get("/runs").json()) == [f"group/{NAME}"]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        done = trainwright("watch", str(tmp_path), "--port", str(listener.getsockname()[1]), cwd=tmp_path)
    assert done.returncode == 3 and "0 for any free one" in done.stderr


def test_a_run_of_a_newer_version_and_an_incomplete_line_are_named(board: Board, tmp_path: Path) -> None:
    run = write(
        tmp_path / "new", {"event": "start", "time": 20.0, "resumed_from": 3, "versions": {"trainwright": "99.1"}}
    )
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    board.look()
    note = board.rows()["new"]["note"]
    assert "written by trainwright 99.1, newer than this one" in note and "last line is incomplete" in note
    assert board.rows()["one"]["note"] == ""


def test_long_runs_have_a_row_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, {"event": "finish", "time": 15.0, "status": "finished", "step": 3})
    monkeypatch.setattr("trainwright.observe.watching.app._LITTLE_BYTES", 10)
    monkeypatch.setattr("trainwright.observe.watching.app._LOOK_SECONDS", 0.0)  # no time for long runs
    board = Board(tmp_path)
    assert not board.look()
    assert [(row["read"], row["status"], row["step"]) for row in board.rows().values()] == [(0.0, "finished", 3)] * 2
    monkeypatch.setattr("trainwright.observe.watching.app._LOOK_SECONDS", 60.0)
    board.curves(["two"], "step", 10)
    assert board.look()
    assert {row["read"] for row in board.rows().values()} == {1.0}


def test_the_seconds_of_every_rank_are_given_by_category(board: Board, client: TestClient, tmp_path: Path) -> None:
    assert client.get("/seconds", params={"run": "one"}).json() == {"categories": [], "ranks": [], "machine": []}
    write_ledger(tmp_path / "group" / NAME)
    found = client.get("/seconds", params={"run": f"group/{NAME}"}).json()
    assert found["categories"] == ["forward", "exchange", "waiting for ranks", "start: imports"]
    assert [rank["seconds"]["forward"] for rank in found["ranks"]] == [3.0, 4.0]
    assert found["ranks"][1]["trained"] == pytest.approx(0.5)
    assert list(found["ranks"][1]["now"].values()) == ["gpu 95%", "61/80 GiB", "310 W", "64 °C"]
    curves = {each["title"]: each for each in found["machine"]}
    assert curves["Use of each GPU (%)"]["ranks"] == {
        "0": [[5.0, 10.0], [90.0, 90.0]],
        "1": [[5.0, 10.0], [95.0, 95.0]],
    }
    assert [title for title, each in curves.items() if each["notable"]] == ["Waiting for a core (% of the time)"]
    assert client.get("/seconds", params={"run": "none"}).status_code == 404
