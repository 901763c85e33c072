"""Trackers get the figures of events.jsonl, and never stop or slow a run."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import environment
from tests.support.doctor import driver
from tests.support.runs import ON_ROWS, TINY, Runs, events
from trainwright.errors import RequestError
from trainwright.observe import trackers
from trainwright.observe.trackers import TrackerObserver, Values, extract_values
from trainwright.recipe import observer_spec

START = {"event": "start", "time": 1.0, "resumed_from": None}
FINISH = {"event": "finish", "time": 9.0, "status": "finished", "step": 2}


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "time": 2.0, "step": number, "loss": 1.0 / number, "metrics": {"spikes": 0.0}}


def evaluation(number: int) -> dict[str, Any]:
    return {"event": "evaluate", "time": 3.0, "step": number, "metrics": {"loss": 2.5}, "seconds": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("task: sft\ntrain: {max_steps: 2}\n")
    return tmp_path


class Recording:
    """Keeps what it is given; waits for ``gate`` before each value."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate, self.kept = gate, []

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        self.kept.append((run.name, dict(config), resumed))

    def log(self, step: int, values: Values) -> None:
        if self.gate is not None:
            self.gate.wait()
        self.kept.append((step, values))

    def end(self, status: str) -> None:
        self.kept.append(status)


def test_a_tracker_gets_the_figures_in_order(run: Path) -> None:
    tracker = Recording()
    observer = TrackerObserver("x", run, lambda: tracker)
    for event in (START, step(1), {"event": "generate", "step": 1}, evaluation(1), step(2), FINISH):
        observer(event)
    assert tracker.kept == [
        (run.name, {"task": "sft", "train": {"max_steps": 2}}, False),
        (1, {"train/loss": 1.0, "train/spikes": 0.0}),
        (1, {"evaluate/loss": 2.5}),
        (2, {"train/loss": 0.5, "train/spikes": 0.0}),
        "finished",
    ]


def test_a_tracker_that_does_not_answer_is_left_behind(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "_EVENTS", 5)
    monkeypatch.setattr(trackers, "_LAST_SECONDS", 0.2)
    gate = threading.Event()
    observer = TrackerObserver("x", run, lambda: Recording(gate))
    observer(START)
    for number in range(1, 100):
        observer(step(number))  # would not return if it waited
    observer(FINISH)
    said = capsys.readouterr().out
    gate.set()
    assert said.count("x does not keep up") == 1 and "has not taken the last events" in said


def test_a_tracker_that_fails_is_given_up_with_one_message(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Recording:
        raise ConnectionError("no route to host\nmore")

    observer = TrackerObserver("x", run, make)
    for event in (START, step(1), step(2), FINISH):
        observer(event)
    assert capsys.readouterr().out.split("\n")[0] == (
        "warning: logging.observers: x failed (ConnectionError: no route to host); the run goes on"
    )


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_spec, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"wandb is not installed; pip install .*\[wandb\]'"):
        observer_spec.check_installed({"wandb": True, "mlflow": False, "report": "auto"})


def _trained(runs: Runs, *overrides: str, **variables: str) -> Path:
    run = runs.new_directory("run")
    fixed = (
        ON_ROWS,
        "parallel.num_processes=1",
        "train.max_steps=4",
        "logging.observers.tensorboard=false",
        "data.validation=8",
    )
    every = ("evaluate.every=2", f"logging.run_directory={run}")
    ended = runs.command("train", str(TINY), *fixed, *every, *overrides, **variables).wait()
    assert ended.code == 0 and "warning: logging" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    return run


def _figures(run: Path) -> dict[tuple[int, str], float]:
    found = [event for kind in ("step", "evaluate") for event in events(run, kind)]
    return {(event["step"], name): value for event in found for name, value in extract_values(event).items()}


def _no_secrets(run: Path, secret: str) -> None:
    for file in run.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file


def _records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    at, pending = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        pending += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield pending
            pending = b""


@pytest.mark.slow
def test_wandb_offline_holds_the_same_numbers(runs: Runs) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    secret = "a" * 40
    run = _trained(runs, "logging.observers=[wandb]", WANDB_MODE="offline", WANDB_API_KEY=secret)
    (file,) = run.glob("wandb/offline-*/run-*.wandb")
    kept: dict[tuple[int, str], float] = {}
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        values = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        kept |= {(int(values["_step"]), name): value for name, value in values.items() if "/" in name}
    assert kept == pytest.approx(_figures(run))
    _no_secrets(run, secret)


@pytest.mark.slow
def test_mlflows_files_hold_the_same_numbers(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = f"file:{tmp_path}/mlruns"
    run = _trained(runs, "logging.observers=[mlflow]", MLFLOW_TRACKING_URI=place)
    client = MlflowClient(place)
    found = client.get_run((run / "mlflow-run").read_text().strip())
    assert found.info.status == "FINISHED" and found.data.params["train.max_steps"] == "4"
    names = {name for _, name in _figures(run)}
    kept = {(m.step, name): m.value for name in names for m in client.get_metric_history(found.info.run_id, name)}
    assert kept == pytest.approx(_figures(run))


@pytest.mark.slow
def test_trackio_holds_the_same_numbers(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    monkeypatch.setenv("TRACKIO_DIR", place["TRACKIO_DIR"])  # read when it is imported
    pytest.importorskip("trackio")
    run = _trained(runs, "logging.observers=[trackio]", **place)
    from trackio.sqlite_storage import SQLiteStorage

    kept = {}
    for row in SQLiteStorage.get_logs("trainwright", run.name):
        kept |= {(row["step"], name): value for name, value in row.items() if "/" in name}
    assert kept == pytest.approx(_figures(run))


@pytest.mark.slow
def test_prometheus_reads_the_newest_figures_while_the_run_trains(runs: Runs) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = runs.new_directory("run")
    fixed = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=100000", "logging.observers.tensorboard=false")
    started = runs.command(
        "train", str(TINY), *fixed, f"logging.run_directory={run}", f"logging.observers.prometheus={{address: {port}}}"
    )
    started.run = run
    started.wait_for_step(3)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert f'trainwright_train_loss{{run="{run.name}"}}' in text and "trainwright_step{" in text
    (run / "stop").touch()
    assert started.wait().code == 75
    time.sleep(0.1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is a library of Linux")
def test_prometheus_reads_what_gpus_do(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    program = """if True:
        from prometheus_client import CollectorRegistry, generate_latest
        from trainwright.observe.trackers import GPUCollector
        registry = CollectorRegistry()
        registry.register(GPUCollector())
        print(generate_latest(registry).decode())
    """
    command = [*driver(tmp_path), sys.executable, "-c", program]
    text = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in ("", "#"))
    assert float(figures['trainwright_gpu_utilization{gpu="0"}']) == 0.97
    assert float(figures['trainwright_gpu_memory_total_bytes{gpu="0"}']) == 80 << 30
    assert float(figures['trainwright_gpu_power_watts{gpu="0"}']) == 350
    assert float(figures['trainwright_gpu_temperature_celsius{gpu="0"}']) == 91


class Collector:
    """Answers OTLP over HTTP, and keeps what it was sent."""

    def __init__(self) -> None:
        kept: dict[str, list[tuple[bytes, dict[str, str]]]] = {"/v1/metrics": [], "/v1/traces": []}

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                kept[self.path].append((body, dict(self.headers)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self.kept = kept
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_collector_gets_figures_and_spans_by_otlp(
    run: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from trainwright.observe.trackers import OpenTelemetry

    secret = "Bearer-of-a-secret"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={secret}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    observer = TrackerObserver("opentelemetry", run, OpenTelemetry)
    checkpoint = {"event": "checkpoint", "time": 4.0, "step": 2, "path": "x", "seconds": 2.0, "blocked_seconds": 0.5}
    for event in (START, step(1), step(2), evaluation(2), checkpoint, FINISH):
        observer(event)

    metrics = ExportMetricsServiceRequest.FromString(collector.kept["/v1/metrics"][-1][0])
    (resource,) = metrics.resource_metrics
    told = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (told["service.name"], told["trainwright.run"]) == ("mine", run.name)
    values = {m.name: m.gauge.data_points[0].as_double for s in resource.scope_metrics for m in s.metrics}
    assert values["trainwright.train.loss"] == 0.5 and values["trainwright.evaluate.loss"] == 2.5
    assert values["trainwright.step"] == 2.0

    sent = [ExportTraceServiceRequest.FromString(body) for body, _ in collector.kept["/v1/traces"]]
    spans = {span.name: span for each in sent for r in each.resource_spans for s in r.scope_spans for span in s.spans}
    assert set(spans) == {"run", "evaluate", "checkpoint"}
    assert {spans[name].parent_span_id for name in ("evaluate", "checkpoint")} == {spans["run"].span_id}
    assert spans["checkpoint"].end_time_unix_nano - spans["checkpoint"].start_time_unix_nano == 2_000_000_000
    assert {"status": "finished", "task": "sft"}.items() <= {
        each.key: each.value.string_value for each in spans["run"].attributes
    }.items()
    assert collector.kept["/v1/traces"][0][1]["authorization"] == secret
    _no_secrets(run, secret)


@pytest.mark.slow
def test_a_collector_that_is_down_does_not_stop_a_run(runs: Runs) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = runs.new_directory("run")
    fixed = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=4", "logging.observers.tensorboard=false")
    asked = ("logging.observers=[opentelemetry]", f"logging.run_directory={run}")
    away = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
    ended = runs.command("train", str(TINY), *fixed, *asked, **away).wait()
    said = ended.stdout + ended.stderr
    assert ended.code == 0 and said.count("warning: logging.observers: opentelemetry") == 1, said
    assert "Traceback" not in said
