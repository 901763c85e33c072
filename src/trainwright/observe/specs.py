"""The observers of this room: the report, trackers, and the ledger of each rank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainwright.recipe.observer_spec import ObserverSpec
from trainwright.recipe.sections.fields import Section

_TRACKERS = "trainwright.observe.trackers"
_REPORT = "trainwright.observe.report"
_LEDGER = "trainwright.observe.ledger"


class PrometheusOptions(Section):
    """Where the newest figures are served."""

    address: Annotated[int, Field(ge=1, le=65535)] | Annotated[str, Field(pattern=r"^[\w.-]+:\d{1,5}$")] = Field(
        9400, description="A port of 127.0.0.1, or HOST:PORT."
    )


REPORT = ObserverSpec(
    "report.html, while the run trains and at its end; auto: of runs of more than a minute.",
    create=f"{_REPORT}:build_observer",
    after_failure=f"{_REPORT}:write_after_failure",
    setting=bool | Literal["auto"],
    default="auto",
    library="vl_convert",
    extra="report",
)
PROMETHEUS = ObserverSpec(
    "The newest figures, served to Prometheus.",
    create=f"{_TRACKERS}:prometheus",
    options=PrometheusOptions,
    library="prometheus_client",
    extra="prometheus",
)
WANDB = ObserverSpec("Weights & Biases.", create=f"{_TRACKERS}:wandb", library="wandb", extra="wandb")
MLFLOW = ObserverSpec("MLflow.", create=f"{_TRACKERS}:mlflow", library="mlflow", extra="mlflow")
TRACKIO = ObserverSpec("trackio.", create=f"{_TRACKERS}:trackio", library="trackio", extra="trackio")
OPENTELEMETRY = ObserverSpec(
    "Gauges and spans, sent to a collector of OpenTelemetry.",
    create=f"{_TRACKERS}:opentelemetry",
    library="opentelemetry.exporter.otlp.proto.http",
    extra="opentelemetry",
)
LEDGER = ObserverSpec(
    "Every second of every rank, by what it was used for.",
    beside=f"{_LEDGER}:open_rank_ledger",
    samples=f"{_LEDGER}:NewestSamples",
    after_workers=f"{_LEDGER}:count_ends",
)
STALLS = ObserverSpec("Stalls of a rank inside collectives.", beside="trainwright.observe.ledger:open_stall_counter")
