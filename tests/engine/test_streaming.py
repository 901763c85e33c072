"""Runs whose rows are tokenized while they train: the same on any number of processes, and resumed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.support.runs import ROOT, ROWS, TINY, Runs, column, difference, events
from tests.support.slow import slow_but
from tests.support.training import Case, train
from tests.tasks.test_pretrain import GPT

SHARDS = "data.streaming={buffer_size: 24, disk_gb: 0.01}"
STREAMED = (f"data.train={ROWS}", f"data.validation={ROWS}[:8]", "data.limit=null", SHARDS, "data.max_length=128")
SMALL = ("train.max_steps=10", "train.mixed_precision=no", "model.dropout=0")
TEXTS = (
    "task=pretrain",
    f"data.train={ROOT / 'docs'}",
    "data.format=documents",
    f"data.validation={ROOT / 'docs' / 'data.md'}",
    "data.limit=null",
    "data.max_length=64",
    "data.pack_length=128",
    SHARDS,
    f"model.config={GPT}",
)
KINDS = {"sft": STREAMED, "documents": TEXTS, "contiguous": (*TEXTS, "pretrain.windows=contiguous")}


@pytest.mark.parametrize("kind", slow_but("sft", among=tuple(KINDS)))
def test_losses_do_not_depend_on_processes_and_strategies(runs: Runs, kind: str) -> None:
    settings = (*KINDS[kind], *SMALL)
    one = train(runs, {"": Case((*settings, "parallel.strategy=single"))}, 1)[""]
    assert len(one.column("loss")) == 10
    cases = {name: Case((*settings, f"parallel.strategy={name}")) for name in ("ddp", "fsdp")}
    for name, trained in train(runs, cases, 2).items():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5, name
        assert trained.column("tokens") == one.column("tokens"), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_killed_and_resumed_without_the_cache(runs: Runs, kind: str) -> None:
    fixed = (*KINDS[kind], *SMALL, "train.max_steps=14", "checkpoint.every=2", "parallel.num_processes=2")
    uninterrupted = runs.trained(*fixed)
    started = runs.train(*fixed)
    started.wait_for_step(7)
    started.kill()
    assert started.wait().code == -signal.SIGKILL
    assert started.run is not None and not (started.run / "final").exists()
    copy = runs.copied(started.run)
    shutil.rmtree(runs.directory / "cache" / "streams")
    runs.resumed(started.run)
    for name in ("loss", "grad_norm", "tokens", "target_tokens"):
        assert column(started.run, name) == column(uninterrupted, name), name
    assert events(started.run, "start")[-1]["resumed_from"] >= 5
    runs.resumed(copy, "parallel.num_processes=1")
    assert column(copy, "tokens") == column(uninterrupted, "tokens")
    assert difference(column(copy, "loss"), column(uninterrupted, "loss")) < 1e-5
    assert list((runs.directory / "cache" / "streams").iterdir()) == []


@pytest.mark.slow
def test_each_node_tokenizes_for_its_own_ranks(runs: Runs, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run, settings = runs.new_directory("run"), (*STREAMED, *SMALL, "parallel.strategy=ddp")
    fixed = (str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *settings)
    options = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--num-processes", "2")
    caches = [tmp_path / f"cache-{node}" for node in (0, 1)]
    nodes = [
        runs.command("train", *fixed, *options, "--node-rank", str(node), TRAINWRIGHT_CACHE=str(cache))
        for node, cache in enumerate(caches)
    ]
    for node in nodes:
        ended = node.wait()
        assert ended.code == 0, ended.stderr
    one = runs.trained(*STREAMED, *SMALL, "parallel.num_processes=1")
    assert difference(column(run, "loss"), column(one, "loss")) < 1e-5
    for rank, cache in enumerate(caches):
        assert "shard 0 begins at row 0" in (run / "logs" / f"rank-{rank}.log").read_text()
        assert list((cache / "streams").iterdir()) == []


@pytest.mark.slow
def test_a_fork_goes_on_with_the_same_rows(runs: Runs) -> None:
    fixed = (*STREAMED, *SMALL, "parallel.num_processes=1")
    parent = runs.trained(*fixed, "checkpoint.every=5")
    whole = runs.trained(*fixed, "train.max_steps=14", "optimizer.schedule=constant")
    longer = runs.train(*fixed, "train.max_steps=14", f"train.fork={parent}")
    ended = longer.wait()
    assert ended.code == 0, ended.stderr
    assert longer.run is not None
    steps = events(longer.run, "step")
    assert [step["step"] for step in steps] == [11, 12, 13, 14]
    tokens = column(whole, "tokens")
    assert [step["tokens"] for step in steps] == tokens[10:]


@pytest.mark.slow
def test_a_wrong_row_ends_the_run_with_its_line(runs: Runs, tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"Number {n}?", "answer": "yes"}) for n in range(1300)]
    lines[1250] = json.dumps({"question": 5, "answer": ["no"]})
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = (*STREAMED, *SMALL, f"data.train={tmp_path / 'rows.jsonl'}", "train.max_steps=400")
    ended = runs.train(*settings, "parallel.num_processes=2", "data.streaming.buffer_size=100").wait()
    assert ended.code == 2, ended.stderr
    assert "rows.jsonl:1251: " in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_source_that_changed_is_refused(runs: Runs, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    shutil.copy(ROWS, source)
    settings = (*STREAMED, *SMALL, f"data.train={source}", "checkpoint.every=4", "parallel.num_processes=1")
    run = runs.trained(*settings)
    source.write_text("\n".join(reversed(source.read_text().splitlines())))
    ended = runs.resume(run, "train.max_steps=12").wait()
    assert ended.code == 2
    assert "data.train: the examples are not those of" in ended.stderr


def test_the_first_examples_are_shown_and_every_row_is_checked(runs: Runs) -> None:
    recipe = ROOT / "recipes" / "sft" / "tiny.yaml"
    shown = runs.command("data", "show", str(recipe), *STREAMED, *SMALL, "--count", "1").wait()
    assert shown.code == 0, shown.stderr
    assert "example 1: " in shown.stdout
    assert "tokenized while training, in shards of 24 examples" in shown.stdout + shown.stderr
    checked = runs.command("data", "check", str(recipe), *STREAMED, *SMALL).wait()
    assert checked.code == 0 and "ok" in checked.stdout + checked.stderr
