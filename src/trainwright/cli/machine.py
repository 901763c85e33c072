"""``trainwright machine``: this machine or one that is described, and the catalog of cards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.command import Commands
from trainwright.utils.text import format_plural, say

if TYPE_CHECKING:
    from trainwright.machine.catalog import Card
    from trainwright.machine.describe import Cluster
    from trainwright.machine.machine import Machine
    from trainwright.machine.measured.calibration import Calibration

app = typer.Typer(cls=Commands, invoke_without_command=True, help="Show, measure and list machines for plans.")

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")


@app.callback()
def show(
    context: typer.Context,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Show this machine instead of the current one: [NODES x] DEVICES x CARD [@ NETWORK], such as 8xH100 "
            "or 4x8xA100-40GB@8x200Gb; or a FILE.json written by --json.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show devices, memory, rates and links: of this machine, or of one that --on describes."""
    if context.invoked_subcommand is not None:
        return
    from trainwright.machine.describe import build_cluster, build_machine
    from trainwright.machine.measured.quick import describe_rates

    machine = calibration = measurement = None
    if on is not None:
        from trainwright.machine.describe import resolve_machine

        cluster, calibration, measurement = resolve_machine(on)
        machine = None if cluster.planned_only else build_machine(cluster)
    else:
        from trainwright.machine.detect import detect
        from trainwright.machine.measured.calibration import load_current_calibration
        from trainwright.machine.measured.quick import USUAL, measure_if_needed

        machine = detect()
        cluster = build_cluster(machine)
        calibration = load_current_calibration(machine)
        quick = measure_if_needed(machine, USUAL)
        measurement = quick.calibration
        for line in filter(None, (quick.message, quick.trouble)):
            say(line, file=sys.stderr)
    if as_json:
        import json

        say(json.dumps(_collect_values(cluster, calibration, measurement, machine), indent=2), wrap=False)
        return
    for name, value in _list_lines(cluster):
        say(f"{name:<14}{value}")
    if measurement is not None:
        say(f"{'measured':<14}{describe_rates(measurement)}, {measurement.measured}")
    if on is None and machine is not None:
        say(f"{'calibration':<14}{_describe_calibration(machine)}")


@app.command()
def cards() -> None:
    """List the cards of the catalog with their datasheets."""
    from trainwright.machine.catalog import list_cards as all_cards

    columns = "".join(f"{precision:>7}" for precision in _PRECISIONS)
    say(f"{'card':<19}{'GB':>4}{'GB/s':>7}{columns}{'W':>6}  link (each way)")
    for card in all_cards():
        rates = "".join(f"{_format_teraflops(card, precision):>7}" for precision in _PRECISIONS)
        size = f"{card.nominal_bytes / 1e9:.0f}"
        bandwidth = f"{card.memory_bandwidth / 1e9:.0f}"
        say(f"{card.name:<19}{size:>4}{bandwidth:>7}{rates}{card.watts:>6}  {card.link.describe()}")
    say("\nRates in TFLOP/s (int8: TOP/s), peak and dense. Sources:")
    for title, url in dict.fromkeys((c.source.title, c.source.url) for c in all_cards() if c.source):
        say(f"  {title}: {url}")


def _list_lines(cluster: Cluster) -> list[tuple[str, str]]:
    card = cluster.card
    lines = [("machine", cluster.name), ("device", _describe_device(cluster))]
    lines += [("", cluster.planned_only)] if cluster.planned_only else []
    if cluster.has_gpus:
        lines.append(("memory", _describe_device_memory(cluster)))
    if card.memory_bandwidth:
        lines.append(("bandwidth", f"{card.memory_bandwidth / 1e9:,.0f} GB/s"))
    rates = [
        f"{precision} {_format_teraflops(card, precision)}" for precision in _PRECISIONS if precision in card.rates
    ]
    if rates:
        lines.append(("TFLOP/s", ", ".join(rates) + " (peak, dense)"))
    if cluster.devices_per_node > 1:
        lines.append(("link", cluster.link.describe()))
    if cluster.network is not None:
        rate = cluster.network.bandwidth
        node = rate * cluster.devices_per_node * 8 / 1e9
        lines.append(("network", f"{node:,.0f} Gb/s per node, {rate / 1e9:.3g} GB/s per device each way"))
    lines += [("host", _describe_host(cluster))]
    lines += [("assumed", text) for text in cluster.assumptions]
    lines += [("note", card.note)] if card.note else []
    return lines + ([("source", f"{card.source.title}, {card.source.url}")] if card.source else [])


def _describe_device(cluster: Cluster) -> str:
    card = cluster.card
    if cluster.device == "cpu":
        return f"{card.name}, {cluster.cpu_cores} core{'s' * (cluster.cpu_cores != 1)}"
    kind = [card.vendor, card.architecture, f"compute capability {card.capability[0]}.{card.capability[1]}"]
    if card.watts:
        kind.append(f"{card.watts} W")
    return f"{card.name}: {', '.join(kind)}"


def _describe_device_memory(cluster: Cluster) -> str:
    card = cluster.card
    text = f"{card.memory_bytes / 2**30:.2f} GiB per device for programs, {card.nominal_bytes / 1e9:.0f} GB nominal"
    if cluster.device_free_bytes is not None:
        text += f", {cluster.device_free_bytes / 2**30:.2f} GiB free"
    return text


def _describe_host(cluster: Cluster) -> str:
    text = f"{format_plural(cluster.cpu_cores, 'core')}, {cluster.host_memory_bytes / 2**30:,.1f} GiB of memory"
    if cluster.host_free_bytes is not None:
        text += f", {cluster.host_free_bytes / 2**30:,.1f} GiB free"
    if cluster.disk_free_bytes is not None:
        text += f"; {cluster.disk_free_bytes / 2**30:,.0f} GiB free on this disk"
    return text


def _format_teraflops(card: Card, precision: str) -> str:
    rate = card.rates.get(precision)
    return "-" if rate is None else f"{rate / 1e12:.4g}"


def _describe_calibration(machine: Machine) -> str:
    from trainwright.machine.measured.calibration import load_calibration, locate_calibration, summarize_errors

    calibration = load_calibration(locate_calibration(machine))
    if calibration is None:
        return "none: `trainwright machine calibrate` measures the rates for plans in under a minute"
    changes = calibration.explain_outdated(machine)
    if changes:
        return (
            f"of {calibration.measured}, out of date ({', '.join(changes)}): run `trainwright machine calibrate` again"
        )
    errors = summarize_errors(calibration.errors("product/"))
    text = f"of {calibration.measured}; held-out matrix products are predicted within {errors}"
    if calibration.unreliable_reason is not None:
        text += f"; {calibration.unreliable_reason}, so plans do not use it: measure again without them"
    return text


def _collect_values(
    cluster: Cluster, calibration: Calibration | None, measurement: Calibration | None, machine: Machine | None
) -> dict[str, Any]:
    from dataclasses import asdict

    from trainwright.machine.measured.calibration import to_json

    return {
        **asdict(cluster),
        "devices": cluster.devices,
        "device": cluster.device,
        "calibration": None if calibration is None else to_json(calibration),
        "measurement": None if measurement is None else to_json(measurement),
        "machine": None if machine is None else asdict(machine),
    }
