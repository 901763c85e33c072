"""Trackers: services and programs that show the figures of runs. Their own variables apply.

Weights & Biases, MLflow, trackio; OpenTelemetry by OTLP over HTTP (https://opentelemetry.io/docs/specs/otlp), for
instance ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME`` and
``OTEL_RESOURCE_ATTRIBUTES`` (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables);
Prometheus, which asks for the newest figures at http://HOST:PORT/metrics.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainwright.engine.event_reader import EventRecord, find_resumed_step
from trainwright.errors import RequestError
from trainwright.machine.cache import try_write
from trainwright.machine.counters import read_all_gpus
from trainwright.observe.specs import PrometheusOptions
from trainwright.recipe.yaml_text import iterate_values
from trainwright.run.observers.hooks import ObservedRun
from trainwright.run.observers.tensorboard import Values, extract_values
from trainwright.run.process import find_console
from trainwright.utils.text import say

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


_OURS = "trainwright"  # the project, unless a variable names another
_MLFLOW_RUN = "mlflow-run"  # file in the run directory with the identity of MLflow's run, to continue it
_LONGEST = 500  # characters of a parameter; MLflow refuses longer ones


def wandb(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that records a run in Weights & Biases (https://docs.wandb.ai/ref/python/)."""
    return TrackerObserver("wandb", run.directory, Wandb)


def mlflow(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that records a run in MLflow (https://mlflow.org/docs/latest/tracking)."""
    return TrackerObserver("mlflow", run.directory, Mlflow)


def trackio(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that records a run in trackio (https://huggingface.co/docs/trackio), by default here."""
    return TrackerObserver("trackio", run.directory, Trackio)


class _Logged:
    """A run of a library whose runs have ``log``."""

    _run: Any

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        self._run.log(values, step=step)

    def end(self, status: str) -> None:
        """End the run."""
        self._run.finish()


class Wandb(_Logged):
    """A run of Weights & Biases, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this directory."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _OURS),
            id=hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16],
            name=run.resolve().name,
            config=dict(config),
            dir=os.environ.get("WANDB_DIR", str(run)),
            resume="allow" if resumed else None,
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )

    def end(self, status: str) -> None:
        """End the run."""
        self._run.summary["status"] = status
        super().end(status)


class Trackio(_Logged):
    """A run of trackio, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this name."""
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _OURS),
            name=run.resolve().name,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
        )


class Mlflow:
    """A run of MLflow, continued when the run is resumed."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue the one of this directory."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        id_file = run / _MLFLOW_RUN
        if resumed and id_file.is_file():
            self._id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _OURS)
        experiment = self._client.get_experiment_by_name(name)
        identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(identity, run_name=run.resolve().name).info.run_id
        try_write(id_file, f"{self._id}\n")
        for key, value in iterate_values(config):
            self._client.log_param(self._id, key, str(value)[:_LONGEST])

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def end(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FINISHED" if status == "finished" else "KILLED")


_EVENTS = 10_000  # those that wait for a slow tracker; about an hour of steps
_LAST_SECONDS = 30.0


class Tracker(Protocol):
    """A tracker of experiments; called in one thread. One with a method ``span`` also gets ``evaluate`` and
    ``checkpoint`` events, to record how long they took.
    """

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue one. ``config``: the recipe as plain values."""

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""

    def end(self, status: str) -> None:
        """End the run: ``finished`` or ``stopped``."""


class TrackerObserver:
    """Pass a run's figures to a tracker in a thread, so that no step waits for it.

    A tracker that fails, or does not answer, is given up with one message: the run goes on, and its events are in
    ``events.jsonl``. What a killed run repeats is recorded again, with the same steps.

    Args:
        name: for messages.
        make: makes the tracker, in the thread; importing its library may take seconds.
    """

    def __init__(self, name: str, run: Path, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._run = run
        self._make = make
        self._events: queue.Queue[EventRecord] = queue.Queue(_EVENTS)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def __call__(self, event: EventRecord) -> None:
        """Pass an event on; at the end of the run, wait until it has arrived, half a minute at most."""
        if event["event"] not in ("start", "step", "evaluate", "checkpoint", "finish"):
            return
        if self._thread is None:
            # A daemon: a run that fails must not wait for a tracker.
            self._thread = threading.Thread(target=self._pass_on, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say(f"does not keep up; it misses events, which are in {self._run / 'events.jsonl'}")
        if event["event"] == "finish":
            self._thread.join(_LAST_SECONDS)
            if self._thread.is_alive():
                self._say(f"has not taken the last events within {_LAST_SECONDS:.0f} s; the run ends without it")

    def _pass_on(self) -> None:
        try:
            tracker = self._make()
            span = getattr(tracker, "span", None)
            while True:
                event = self._events.get()
                if event["event"] == "start":
                    tracker.begin(self._run, _read_config(self._run), find_resumed_step(event) is not None)
                elif event["event"] == "finish":
                    tracker.end(str(event["status"]))
                    return
                else:
                    if values := extract_values(event):
                        tracker.log(int(event["step"]), values)
                    if span is not None and event["event"] in ("evaluate", "checkpoint"):
                        span(event)
        except Exception as error:
            reason = str(error).strip().splitlines()
            self._say(f"failed ({type(error).__name__}: {reason[0] if reason else 'no reason given'}); the run goes on")

    def _say(self, what: str) -> None:
        print_notice_of(self._name, what)


def print_notice_of(tracker: str, what: str) -> None:
    """Tell the user what is wrong with a tracker: on the console, or in the worker's log."""
    say(f"warning: logging.observers: {tracker} {what}", file=find_console())


def _read_config(run: Path) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


_NAMESPACE = "trainwright"
_LAST_MILLISECONDS = 10_000
_NANOSECONDS = 1e9


def opentelemetry(run: ObservedRun, _: object) -> TrackerObserver:
    """Return an observer that sends a run's figures and spans to a collector."""
    return TrackerObserver("opentelemetry", run.directory, OpenTelemetry)


class OpenTelemetry:
    """Gauges of a run's figures, and spans: one of the launch, within it one of each evaluation and checkpoint."""

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a span of this launch."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_span_in_context

        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [_Once(logging.ERROR)], False
        service_attributes = {"service.name": _NAMESPACE, f"{_NAMESPACE}.run": run.resolve().name}
        resource = Resource.create(service_attributes).merge(OTELResourceDetector().detect())
        # Not the providers of the process: libraries and the user's own code may have theirs.
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._metrics.get_meter(_NAMESPACE)
        self._gauges: dict[str, Any] = {}
        self._tracer = self._spans.get_tracer(_NAMESPACE)
        attributes: dict[str, str | bool] = {"task": str(config.get("task", "")), "resumed": resumed}
        self._span = self._tracer.start_span("run", attributes=attributes)
        self._within = set_span_in_context(self._span)

    def log(self, step: int, values: Values) -> None:
        """Set the gauges."""
        for name, value in {**values, "step": float(step)}.items():
            plain = f"{_NAMESPACE}." + "".join(c if c.isalnum() or c in "._-/" else "_" for c in name).replace("/", ".")
            if plain not in self._gauges:
                self._gauges[plain] = self._meter.create_gauge(plain)
            self._gauges[plain].set(value)

    def span(self, event: EventRecord) -> None:
        """Record an evaluation or a checkpoint, which ends at the time of its event."""
        end = float(event["time"])
        span = self._tracer.start_span(
            str(event["event"]),
            context=self._within,
            start_time=int((end - float(event.get("seconds") or 0.0)) * _NANOSECONDS),
            attributes={"step": int(event["step"])},
        )
        span.end(end_time=int(end * _NANOSECONDS))

    def end(self, status: str) -> None:
        """End the span of this launch, and send what has not been sent."""
        self._span.set_attribute("status", status)
        self._span.end()
        self._spans.force_flush(_LAST_MILLISECONDS)
        self._metrics.force_flush(_LAST_MILLISECONDS)
        self._spans.shutdown()
        self._metrics.shutdown(_LAST_MILLISECONDS)


class _Once(logging.Handler):
    """Say the first thing that the exporters log, and nothing more: they try again for each export."""

    _has_said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_said:
            self._has_said = True
            lines = record.getMessage().strip().splitlines()
            reason = lines[0] if lines else "no reason given"
            print_notice_of("opentelemetry", f"does not get everything ({reason}); the run goes on")


# By name of `read_all_gpus`: the gauge, and what it is.
_GPU_GAUGES = {
    "used": ("utilization", "share of the time in which the GPU computed"),
    "memory": ("memory_used_bytes", "memory of the GPU in use, of all programs"),
    "total_memory": ("memory_total_bytes", "memory of the GPU"),
    "power": ("power_watts", "power that the GPU draws"),
    "temperature": ("temperature_celsius", "temperature of the GPU"),
}


def prometheus(run: ObservedRun, setting: Any) -> PrometheusObserver:
    """Return an observer that serves the newest figures of a run."""
    options = PrometheusOptions.model_validate(setting if isinstance(setting, dict) else {})
    return PrometheusObserver(run.directory, options.address)


class PrometheusObserver:
    """Observer that answers Prometheus in a thread: a gauge for every figure, ``trainwright_step``, and what the GPUs
    of this machine do when Prometheus asks.

    Args:
        address: a port of this machine alone (127.0.0.1), or HOST:PORT.

    Raises:
        RequestError: the port is in use.
    """

    def __init__(self, run: Path, address: int | str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._registry.register(GPUCollector())
        self._labels = {"run": run.resolve().name}
        self._gauges: dict[str, object] = {}
        host, _, port = str(address).rpartition(":")
        try:
            self._server, _ = start_http_server(int(port), addr=host or "127.0.0.1", registry=self._registry)
        except OSError as error:
            raise RequestError(f"logging.observers.prometheus: port {port} cannot be used: {error.strerror}") from None

    def __call__(self, event: EventRecord) -> None:
        """Keep the figures of an event; at the end of the run, close the port."""
        if event["event"] in ("step", "evaluate"):
            for name, value in {**extract_values(event), "step": float(event["step"])}.items():
                self._set(name, value)
        elif event["event"] == "finish":
            self._server.shutdown()
            self._server.server_close()

    def _set(self, name: str, value: float) -> None:
        from prometheus_client import Gauge

        plain = "trainwright_" + "".join(character if character.isalnum() else "_" for character in name)
        gauge = self._gauges.get(plain)
        if gauge is None:
            gauge = self._gauges[plain] = Gauge(plain, f"{name} of the run", ["run"], registry=self._registry)
        gauge.labels(**self._labels).set(value)  # type: ignore[attr-defined]


class GPUCollector:
    """What the GPUs of this machine do, by index, as NVML tells when it is collected; nothing without NVML."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each figure."""
        from prometheus_client.core import GaugeMetricFamily

        gpus = read_all_gpus()
        for key, (name, description) in _GPU_GAUGES.items():
            gauge = GaugeMetricFamily(f"trainwright_gpu_{name}", description, labels=["gpu"])
            for index, gpu in enumerate(gpus):
                if key in gpu:
                    gauge.add_metric([str(index)], float(gpu[key]))
            if gauge.samples:
                yield gauge
