"""The newest figures of a run for Prometheus, at http://HOST:PORT/metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.engine.event_reader import EventRecord
from trainwright.errors import RequestError
from trainwright.machine.usage.gpu import all_gpus
from trainwright.observe.specs import PrometheusOptions
from trainwright.run.observers.hooks import ObservedRun
from trainwright.run.observers.tensorboard import values_of

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

# By name of `all_gpus`: the gauge, and what it is.
_GPU_GAUGES = {
    "used": ("utilization", "share of the time in which the GPU computed"),
    "memory": ("memory_used_bytes", "memory of the GPU in use, of all programs"),
    "total_memory": ("memory_total_bytes", "memory of the GPU"),
    "power": ("power_watts", "power that the GPU draws"),
    "temperature": ("temperature_celsius", "temperature of the GPU"),
}


def of_run(run: ObservedRun, setting: Any) -> PrometheusObserver:
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


class GPUCollector:
    """What the GPUs of this machine do, by index, as NVML tells when it is collected; nothing without NVML."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each figure."""
        from prometheus_client.core import GaugeMetricFamily

        gpus = all_gpus()
        for key, (name, described) in _GPU_GAUGES.items():
            gauge = GaugeMetricFamily(f"trainwright_gpu_{name}", described, labels=["gpu"])
            for index, gpu in enumerate(gpus):
                if key in gpu:
                    gauge.add_metric([str(index)], float(gpu[key]))
            if gauge.samples:
                yield gauge
