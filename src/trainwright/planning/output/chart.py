"""A chart of a plan: memory by part for the candidates."""

from __future__ import annotations

from pathlib import Path

from trainwright.drawing import new_figure, save_chart
from trainwright.planning.output.table import grouped
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
    """Write a chart with a stacked bar for each candidate and a line for the available memory.

    Raises:
        RequestError: ``file`` has an unsupported format, or its directory does not exist.
        MachineError: matplotlib is not installed.
    """
    candidates = list(plan.found.candidates)[:_MOST_BARS]
    figure = new_figure(9, 1.4 + 0.45 * len(candidates), "--chart")
    axes = figure.subplots()
    names = [_name(one) for one in candidates]
    left = [0.0] * len(candidates)
    for group, color in _COLORS.items():
        widths = []
        for one in candidates:
            parts = grouped(one)
            widths.append(parts[group] / max(1, sum(parts.values())) * one.needed_bytes / 2**30)
        axes.barh(names, widths, left=left, color=color, label=group)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(plan.chosen.available_bytes / 2**30, color="#a33", linestyle="--", label="available")
    axes.invert_yaxis()
    axes.set_xlabel("GiB, all processes" if plan.cluster.device == "cpu" else "GiB per device")
    axes.set_title(f"{plan.workload.architecture.family}, {plan.cluster.name}")
    axes.legend(loc="lower right", fontsize="small")
    save_chart(figure, file)


def _name(one: Candidate) -> str:
    choice = one.choice
    name = f"{one.layout.describe(choice.num_processes)} on {choice.num_processes}"
    batch = f"{choice.micro_batch_size}x{choice.gradient_accumulation_steps}, {choice.activation_checkpointing}"
    return f"{name}, {batch}" + ("" if one.fits else " (does not fit)") + (f" ({one.missing})" if one.missing else "")
