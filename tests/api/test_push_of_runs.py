"""Runs that upload their model and their checkpoints, to a stand-in for the Hub."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, function
from tests.support.hub import Hub
from tests.support.runs import ON_ROWS, TINY

TOKEN = "hf_secret_of_the_test"


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub()
    yield served
    served.close()


def command(
    hub: Hub, *arguments: str, token: str | None = TOKEN, cwd: Path = ROOT, module: str = "trainwright"
) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN_PATH": str(cwd / "none")}
    variables |= {} if token is None else {"HF_TOKEN": token}
    return function("tests.support.hub:command", module, *arguments, cwd=cwd, **variables)


def train(
    hub: Hub, run: Path, *overrides: str, token: str | None = TOKEN, module: str = "trainwright"
) -> subprocess.CompletedProcess[str]:
    fixed = (
        f"logging.run_directory={run}",
        "logging.observers.tensorboard=false",
        "train.max_steps=4",
        "checkpoint.every=2",
    )
    fixed = (*fixed, "data.limit=24", "data.validation=4", ON_ROWS, "parallel.num_processes=1")
    words = ["train"] * (module == "trainwright")
    return command(hub, *words, str(TINY), *fixed, *overrides, token=token, module=module)


def test_a_run_uploads_its_model_and_its_checkpoints(hub: Hub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train(hub, run, "push={repository: me/tiny, checkpoints: true}")
    assert ended.returncode == 0, ended.stderr
    assert "push: sent: http" in ended.stdout
    files = hub.files["me/tiny"]
    assert hub.private == {"me/tiny": True} and hub.tokens == {f"Bearer {TOKEN}"}
    assert files["model.safetensors"] == (run / "final" / "model.safetensors").read_bytes()
    assert b"library_name: transformers" in files["README.md"] and b"push" not in files["README.md"]
    newest = run / "checkpoints" / "step-00000004"
    for file in newest.rglob("*"):
        if file.is_file():
            assert files[f"checkpoints/step-00000004/{file.relative_to(newest)}"] == file.read_bytes()
    written = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in content for content in written)


def test_a_run_of_another_launcher_uploads_its_model(hub: Hub, tmp_path: Path) -> None:
    ended = train(hub, tmp_path / "run", "push.repository=me/tiny", module="trainwright.worker")
    assert ended.returncode == 0 and "push: sent: http" in ended.stdout, ended.stderr
    assert "push: uploading" in ended.stderr and "model.safetensors" in hub.files["me/tiny"]


@pytest.mark.slow
def test_an_upload_that_fails_is_repeated_and_leaves_the_run_whole(hub: Hub, tmp_path: Path) -> None:
    hub.refused = 1
    ended = train(hub, tmp_path / "first", "push.repository=me/tiny")
    assert ended.returncode == 0 and "model.safetensors" in hub.files["me/tiny"]
    hub.files.clear()
    hub.refused = 99
    run = tmp_path / "run"
    ended = train(hub, run, "push={repository: me/tiny, private: true, checkpoints: true}")
    assert ended.returncode == 0 and "finished at step 4" in ended.stdout
    again = f"trainwright push {run} me/tiny --private"
    assert f"the run is complete, upload it with {again}" in ended.stderr and TOKEN not in ended.stderr + ended.stdout
    of_checkpoint = f"trainwright push {run} me/tiny --checkpoint 4 --private"
    assert "the checkpoint of step 4 was not uploaded: me/tiny: the Hub refused: 403" in ended.stderr + ended.stdout
    assert of_checkpoint in ended.stderr + ended.stdout
    hub.refused = 0
    for line in (again, of_checkpoint):
        repeated = command(hub, *line.split()[1:])
        assert repeated.returncode == 0, repeated.stderr
    assert {"model.safetensors", "checkpoints/step-00000004/manifest.json"} <= hub.files["me/tiny"].keys()


@pytest.mark.parametrize(
    ("override", "token", "said"),
    [
        ("push.repository=me/tiny", None, "push.repository: no token for the Hub: set HF_TOKEN"),
        ("push.repository=tiny", TOKEN, "push.repository"),
        ("push={repository: me/tiny, token: abc}", TOKEN, "push.token"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_run(
    hub: Hub, tmp_path: Path, override: str, token: str | None, said: str
) -> None:
    ended = train(hub, tmp_path / "run", override, token=token)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists() and not hub.files
