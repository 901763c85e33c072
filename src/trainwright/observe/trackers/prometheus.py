"""The newest figures of a run for Prometheus, at http://HOST:PORT/metrics."""

from __future__ import annotations

from pathlib import Path

from trainwright.errors import RequestError
from trainwright.observe.reader import EventRecord
from trainwright.observe.trackers.base import check_installed, values_of


class PrometheusObserver:
    """Observer that answers Prometheus in a thread: a gauge for every figure, and ``trainwright_step``.

    Args:
        place: a port of this machine alone (127.0.0.1), or HOST:PORT.

    Raises:
        RequestError: prometheus-client is missing, or the port is in use.
    """

    def __init__(self, run: Path, place: int | str) -> None:
        check_installed("prometheus")
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._labels = {"run": run.resolve().name}
        self._gauges: dict[str, object] = {}
        host, _, port = str(place).rpartition(":")
        try:
            self._server, _ = start_http_server(int(port), addr=host or "127.0.0.1", registry=self._registry)
        except OSError as error:
            raise RequestError(f"logging.prometheus: port {port} cannot be used: {error.strerror}") from None

    def __call__(self, event: EventRecord) -> None:
        """Keep the figures of an event; at the end of the run, close the port."""
        if event["event"] in ("step", "evaluate"):
            for name, value in {**values_of(event), "step": float(event["step"])}.items():
                self._set(name, value)
        elif event["event"] == "finish":
            self._server.shutdown()
            self._server.server_close()

    def _set(self, name: str, value: float) -> None:
        from prometheus_client import Gauge

        plain = "trainwright_" + "".join(each if each.isalnum() else "_" for each in name)
        gauge = self._gauges.get(plain)
        if gauge is None:
            gauge = self._gauges[plain] = Gauge(plain, f"{name} of the run", ["run"], registry=self._registry)
        gauge.labels(**self._labels).set(value)  # type: ignore[attr-defined]
