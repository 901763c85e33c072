"""A chart of a plan: memory by part, and speed beside it, for the candidates."""

from __future__ import annotations

from pathlib import Path

from trainwright.drawing import new_figure, save_chart
from trainwright.planning.output.table import candidates, grouped
from trainwright.planning.plan import Plan
from trainwright.planning.search import Candidate

_MOST_BARS = 14
_COLORS = {
    "weights": "#2f5d8a",
    "optimizer": "#6fa3d0",
    "gradients": "#c78f3f",
    "activations": "#7a9e4e",
    "rest": "#b8b8b8",
}


def draw(plan: Plan, file: Path) -> None:
    """Write a chart with a stacked bar for each candidate, a line for the available memory, and the speeds beside them.

    The chosen candidate is the first row, on a band.

    Raises:
        RequestError: ``file`` has an unsupported format, or its directory does not exist.
        MachineError: matplotlib is not installed.
    """
    shown = candidates(plan, everything=True)[:_MOST_BARS]
    figure = new_figure(12, 1.4 + 0.45 * len(shown), "--chart")
    axes, speeds = figure.subplots(1, 2, sharey=True, width_ratios=(5, 3))
    names = [_name(one) for one in shown]
    names[0] += "\nchosen" if plan.fits else "\nneeds least"
    left = [0.0] * len(shown)
    for group, color in _COLORS.items():
        widths = []
        for one in shown:
            parts = grouped(one)
            widths.append(parts[group] / max(1, sum(parts.values())) * one.needed_bytes / 2**30)
        axes.barh(names, widths, left=left, color=color, label=group)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(plan.chosen.available_bytes / 2**30, color="#a33", linestyle="--", label="available")
    axes.invert_yaxis()
    for each in (axes, speeds):
        each.axhspan(-0.5, 0.5, color="#2f5d8a", alpha=0.12, zorder=0)
    axes.get_yticklabels()[0].set_fontweight("bold")
    rates = [0.0 if one.time is None else one.time.tokens_per_second for one in shown]
    bars = speeds.barh(names, rates, color="#2f5d8a")
    speeds.bar_label(bars, [f"{rate:,.0f}" if rate else "" for rate in rates], padding=3, fontsize="small")
    speeds.margins(x=0.2)
    speeds.locator_params(axis="x", nbins=4)
    speeds.set_xlabel("tokens/s")
    axes.set_xlabel("GiB, all processes" if plan.cluster.device == "cpu" else "GiB per device")
    axes.set_title(f"{plan.workload.architecture.family}, {plan.cluster.name}")
    axes.legend(loc="lower right", fontsize="small")
    save_chart(figure, file)


def _name(one: Candidate) -> str:
    choice = one.choice
    name = f"{one.layout.describe(choice.num_processes)} on {choice.num_processes}"
    batch = f"{choice.micro_batch_size}x{choice.gradient_accumulation_steps}, {choice.activation_checkpointing}"
    return f"{name}, {batch}" + ("" if one.fits else " (does not fit)") + (f" ({one.missing})" if one.missing else "")
