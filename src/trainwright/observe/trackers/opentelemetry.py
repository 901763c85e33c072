"""OpenTelemetry by OTLP over HTTP (https://opentelemetry.io/docs/specs/otlp); the SDK's variables apply.

For instance ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME`` and
``OTEL_RESOURCE_ATTRIBUTES`` (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.engine.event_reader import EventRecord
from trainwright.observe.trackers.base import TrackerObserver, Values, print_notice_of
from trainwright.run.observers.hooks import ObservedRun

_NAMESPACE = "trainwright"
_LAST_MILLISECONDS = 10_000
_NANOSECONDS = 1e9


def of_run(run: ObservedRun, _: object) -> TrackerObserver:
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

        _print_once("opentelemetry")
        own = {"service.name": _NAMESPACE, f"{_NAMESPACE}.run": run.resolve().name}
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
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

    def __init__(self, name: str) -> None:
        super().__init__(logging.ERROR)
        self._name = name
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            first = record.getMessage().strip().splitlines()
            print_notice_of(
                self._name, f"does not get everything ({first[0] if first else 'no reason given'}); the run goes on"
            )


def _print_once(name: str) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_Once(name)]
    logger.propagate = False
