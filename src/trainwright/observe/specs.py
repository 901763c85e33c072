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
    create=f"{_REPORT}:of_run",
    after_failure=f"{_REPORT}:write_after_failure",
    setting=bool | Literal["auto"],
    default="auto",
    library="vl_convert",
    extra="report",
)
PROMETHEUS = ObserverSpec(
    create=f"{_TRACKERS}.prometheus:of_run",
    setting=bool,
    options=PrometheusOptions,
    library="prometheus_client",
    extra="prometheus",
)
WANDB = ObserverSpec(create=f"{_TRACKERS}.services:wandb", setting=bool, library="wandb", extra="wandb")
MLFLOW = ObserverSpec(create=f"{_TRACKERS}.services:mlflow", setting=bool, library="mlflow", extra="mlflow")
TRACKIO = ObserverSpec(create=f"{_TRACKERS}.services:trackio", setting=bool, library="trackio", extra="trackio")
OPENTELEMETRY = ObserverSpec(
    create=f"{_TRACKERS}.opentelemetry:of_run",
    setting=bool,
    library="opentelemetry.exporter.otlp.proto.http",
    extra="opentelemetry",
)
LEDGER = ObserverSpec(
    beside=f"{_LEDGER}:of_rank", samples=f"{_LEDGER}:NewestSamples", after_workers=f"{_LEDGER}:count_ends"
)
STALLS = ObserverSpec(beside="trainwright.observe.stalls:of_rank")
