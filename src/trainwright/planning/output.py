"""Format a plan for people: a table of the candidates, and a description of the chosen one. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainwright.machine.measured.quick import describe_rates
from trainwright.planning.errors import SHARE, Errors
from trainwright.planning.plan import RunPlan
from trainwright.planning.reasons import (
    describe_fit,
    describe_shortage,
    describe_verdict,
    format_interval,
    is_same_place,
)
from trainwright.planning.search import Candidate
from trainwright.planning.step_time.step import StepTime
from trainwright.utils.drawing import build_figure, save_chart
from trainwright.utils.text import format_bytes, format_count, format_plural, format_seconds

# Groups of memory, from permanent to temporary, and the characters that draw them.
_GROUPS = {"weights": "█", "optimizer": "▓", "gradients": "▒", "activations": "░", "rest": "·"}
# A part belongs to the first group of which its name has a word.
_WORDS = {
    "optimizer": ("optimizer",),
    "gradients": ("gradient", "bucket"),
    "activations": ("activation", "loss", "logits"),
    "weights": ("parameter", "weight", "gathered", "adapter", "base"),
}
_BAR = 24
_MEMORY = f"  {'memory':<{_BAR}}"
_WIDE = 120  # columns that a line with the bar and most verdicts needs
_LABEL = 14
_SHOWN = 8


def group_memory(candidate: Candidate) -> dict[str, int]:
    """Return the bytes at the peak by ``_GROUPS``; the overhead of the process counts as the rest."""
    sums = dict.fromkeys(_GROUPS, 0)
    for name, amount in candidate.memory.parts.items():
        sums[next((group for group, words in _WORDS.items() if any(w in name for w in words)), "rest")] += amount
    sums["rest"] += sum(candidate.memory.overhead.values())
    return sums


def format_candidates(plan: RunPlan, everything: bool = False, width: int | None = None) -> Iterator[str]:
    """Yield a line for each candidate, the fastest first; without ``everything`` only the best of each strategy.

    If ``width`` is too narrow, memory is not drawn and a verdict has a line of its own.
    """
    narrow = width is not None and width < _WIDE
    best = plan.chosen if plan.fits else None
    rows = sort_candidates(plan, everything=everything)
    scale = max([candidate.needed_bytes for candidate in rows if candidate.runs] or [rows[0].needed_bytes])
    scale = max(scale, plan.chosen.available_bytes if plan.chosen.needed_bytes > scale // 2 else scale)
    yield (
        f"{'strategy':<18}{'on':>4} {'batch':>8}  {'recompute':<9}{'' if narrow else _MEMORY}{'needed':>10}"
        f"{'step':>10}{'tokens/s':>11}{'MFU':>5}{'' if narrow else '  verdict'}"
    )
    for candidate in rows:
        chosen = best is not None and is_same_place(candidate.choice, best.choice)
        row = _format_row(candidate, "" if narrow else f"  {_draw_bar(candidate, scale):<{_BAR}}", chosen=chosen)
        why = "chosen" + "; compiled, unlike the others" * candidate.choice.compile
        why = why if chosen else describe_verdict(candidate, plan.search.best)
        yield from (row, f"    {why}") if narrow else (f"{row}  {why}",)
    legend = "" if narrow else "  ".join(f"{mark} {name}" for name, mark in _GROUPS.items()) + "; "
    free = format_bytes(plan.chosen.available_bytes)
    sharing = "all processes together" if plan.cluster.device == "cpu" else "a device"
    yield f"{legend}{free} available ({sharing})"
    times = (candidate.time for candidate in rows)
    step_time = next((time for time in times if time is not None and time.mfu is not None), None)
    if step_time is not None:
        yield f"MFU: of the {_describe_peak(step_time)}"
    if any(not candidate.layout.reshard_after_forward for candidate in rows):
        yield "whole: weights stay gathered between forward and backward (parallel.reshard_after_forward=false)"


def describe_plan(plan: RunPlan) -> Iterator[str]:
    """Yield a description of the chosen plan: what runs, why, its memory, and the parts of its time."""
    if not plan.fits:
        yield describe_shortage(plan.chosen, plan.cluster, plan.suggestions)
        return
    candidate, time = plan.chosen, plan.chosen.time
    assert time is not None
    yield from _label_lines("chosen", plan.reasons or ["as the recipe says"])
    yield from _label_lines("attention", plan.attention)
    yield from _label_lines("memory", [*_format_memory(candidate), *_format_phases(candidate)])
    yield from _label_lines("step", [_describe_time(time.parts, time.seconds)])
    speed = f"{time.tokens_per_second:,.0f} tokens/s"
    if candidate.choice.num_processes > 1 and plan.cluster.has_gpus:
        speed += f", {time.tokens_per_second / candidate.choice.num_processes:,.0f} per device"
    if time.mfu is not None:
        speed += f", {time.mfu:.0%} of the {_describe_peak(time)}"
    yield from _label_lines("speed", [speed, _describe_speed_interval(candidate.errors, time.tokens_per_second)])
    if plan.workload.steps is not None:
        yield from _label_lines("run", [_describe_run(plan)])
    yield from _label_lines("assumed", [_describe_rates(plan), *_describe_own_runs(plan), *plan.assumptions])


def _describe_peak(time: StepTime) -> str:
    """Return what a share of the peak rate is a share of."""
    return "datasheet's peak rate" if time.peak_is_nominal else "measured peak rate"


def summarize_plan(plan: RunPlan) -> str:
    """Return the chosen plan in one line."""
    candidate, choice, time = plan.chosen, plan.chosen.choice, plan.chosen.time
    trouble = "" if plan.basis.trouble is None else f" by datasheets, as {plan.basis.trouble.partition(', so ')[0]}"
    prefix = f"plan{trouble}: {candidate.layout.describe(choice.num_processes)} on {choice.num_processes}"
    low, high = (format_bytes(round(value)) for value in candidate.errors.memory.of(candidate.memory.total))
    memory = f"{format_bytes(candidate.memory.total)} ({low} to {high}) per process"
    if time is None:
        return f"{prefix}, {memory} of {format_bytes(candidate.available_bytes)}: it does not fit"
    slow, fast = candidate.errors.speed.of(time.tokens_per_second)
    speed = f"{time.tokens_per_second:,.0f} ({slow:,.0f} to {fast:,.0f}) tokens/s"
    close, steps = ", which is close" * candidate.is_close, plan.workload.steps
    run = "" if steps is None else f", {format_seconds(steps * time.seconds)} for {format_plural(steps, 'step')}"
    return f"{prefix}, {memory}{close}, {format_seconds(time.seconds)} per step, {speed}{run}"


def sort_candidates(plan: RunPlan, *, everything: bool) -> list[Candidate]:
    """Return the candidates, the chosen one first, then the others by their speed and those that do not fit.

    Args:
        everything: not only the best one of each kind.
    """
    candidates = plan.search.candidates
    runs = sorted((one for one in candidates if one.runs), key=lambda one: one.time.seconds if one.time else 0)
    others = sorted((one for one in candidates if not one.runs), key=lambda one: one.shortfall)
    rows = [plan.chosen, *(one for one in [*runs, *others] if not is_same_place(one.choice, plan.chosen.choice))]
    if everything:
        return rows
    fastest: dict[tuple[object, ...], Candidate] = {}
    for candidate in rows:
        kind = candidate.choice.strategy, candidate.layout.offloads, candidate.choice.num_processes == 1
        fastest.setdefault(kind, candidate)
    return list(fastest.values())[:_SHOWN]


def _format_row(one: Candidate, memory: str, *, chosen: bool) -> str:
    choice, time = one.choice, one.time
    batch = f"{choice.micro_batch_size} x {choice.gradient_accumulation_steps}"
    recompute = str(choice.activation_checkpointing)
    recompute = f"1 in {recompute}" if recompute.isdigit() else recompute
    cells = ("-", "-") if time is None else (format_seconds(time.seconds), f"{time.tokens_per_second:,.0f}")
    mfu = "-" if time is None or time.mfu is None else f"{time.mfu:.0%}"
    mark = "*" if chosen else " "
    name = f"{mark}{one.layout.describe(choice.num_processes)}"
    return (
        f"{name:<18}{choice.num_processes:>4} {batch:>8}  {recompute:<9}{memory}"
        f"{format_bytes(one.needed_bytes):>10}{cells[0]:>10}{cells[1]:>11}{mfu:>5}"
    )


def _draw_bar(one: Candidate, scale: int) -> str:
    """Return a bar as long as the needed memory, with an arrow at the end if it does not fit."""
    groups = group_memory(one)
    total = max(1, sum(groups.values()))
    length = min(1.0, one.needed_bytes / scale) * _BAR
    bar, position = "", 0.0
    for name, mark in _GROUPS.items():
        position += groups[name] / total * length
        bar += mark * (round(position) - len(bar))
    return bar if one.fits else bar[: _BAR - 1] + ">"


def _format_memory(chosen: Candidate) -> Iterator[str]:
    parts = {**chosen.memory.parts, **chosen.memory.overhead}
    largest = sorted(parts.items(), key=lambda item: -item[1])
    least = 0.005 * chosen.memory.total
    text = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in largest if amount > least)
    yield f"{format_bytes(chosen.memory.total)} per process at the peak: {text}"
    if chosen.is_close:
        yield (
            f"{describe_fit(chosen)}, of {format_bytes(chosen.available_bytes)}: the largest step is tested before "
            "training"
        )
    else:
        runs = _describe_runs(chosen.errors, chosen.errors.memory.runs)
        yield f"{format_interval(chosen)} is the range of {SHARE * 10:.0f} of 10 such runs ({runs})"


def _describe_speed_interval(errors: Errors, predicted: float) -> str:
    low, high = errors.speed.of(predicted)
    runs = _describe_runs(errors, errors.speed.runs)
    return f"{low:,.0f} to {high:,.0f} tokens/s is the range of {SHARE * 10:.0f} of 10 such runs ({runs})"


def _describe_runs(errors: Errors, count: int) -> str:
    if not count:
        return f"{errors.words}: too few such runs, so all known runs are used"
    return f"{errors.words}: {format_plural(count, 'run')} compared with their plans"


def _format_phases(chosen: Candidate) -> list[str]:
    phases = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in chosen.memory.phases.items())
    lines = [f"tensors by phase: {phases}"]
    if chosen.host_needed_bytes:
        lines.append(f"{format_bytes(chosen.host_needed_bytes)} in the host's memory of each node")
    return lines


def _describe_time(parts: Mapping[str, float], seconds: float) -> str:
    shares = [f"{name} {part / seconds:.0%}" for name, part in sorted(parts.items(), key=lambda item: -item[1])]
    return f"{format_seconds(seconds)}: {', '.join(text for text in shares if not text.endswith(' 0%'))}"


def _describe_rates(plan: RunPlan) -> str:
    if plan.calibrated:
        return "times measured on this machine"
    if plan.basis.trouble is not None:
        return plan.basis.trouble
    if (calibration := plan.basis.measurement) is not None:
        line = f"times from rates measured on this machine ({calibration.measured}): {describe_rates(calibration)}"
        return f"{line}; `trainwright machine calibrate` measures them in more detail"
    # Any other machine may only be described, and not be present.
    on_cpu = plan.cluster.device == "cpu"
    return f"times from nominal rates{'; `trainwright machine calibrate` measures them' * on_cpu}"


def _describe_own_runs(plan: RunPlan) -> Iterator[str]:
    correction = plan.correction
    if not correction.runs:
        return
    way = "" if correction.exact else ", run in other ways"
    yield (
        f"this machine's own runs: {correction.runs}{way}, within {correction.spread:.0%}; they took "
        f"{correction.seconds:.2f} times the predicted time, and times are corrected by this factor"
    )


def _describe_run(plan: RunPlan) -> str:
    time, steps = plan.chosen.time, plan.workload.steps
    assert time is not None and steps is not None
    tokens = steps * time.tokens
    line = f"{format_plural(steps, 'step')}, {format_count(tokens)} tokens in {format_seconds(steps * time.seconds)}"
    if time.joules:
        line += f", {steps * time.joules / 3.6e6:.3g} kWh"
    return line


def _label_lines(label: str, lines: Sequence[str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        yield f"{label if not i else '':<{_LABEL}} {line}"


_MOST_BARS = 14
_COLORS = {
    "weights": "#2f5d8a",
    "optimizer": "#6fa3d0",
    "gradients": "#c78f3f",
    "activations": "#7a9e4e",
    "rest": "#b8b8b8",
}


def draw_plan(plan: RunPlan, file: Path) -> None:
    """Write a chart with a stacked bar for each candidate, a line for the available memory, and the speeds beside them.

    The chosen candidate is the first row, on a band.

    Raises:
        RequestError: ``file`` has an unsupported format, or its directory does not exist.
        MachineError: matplotlib is not installed.
    """
    rows = sort_candidates(plan, everything=True)[:_MOST_BARS]
    figure = build_figure(12, 1.4 + 0.45 * len(rows), "--chart")
    axes, speeds = figure.subplots(1, 2, sharey=True, width_ratios=(5, 3))
    names = [_name_candidate(candidate) for candidate in rows]
    names[0] += "\nchosen" if plan.fits else "\nneeds least"
    left = [0.0] * len(rows)
    for group, color in _COLORS.items():
        widths = []
        for candidate in rows:
            parts = group_memory(candidate)
            widths.append(parts[group] / max(1, sum(parts.values())) * candidate.needed_bytes / 2**30)
        axes.barh(names, widths, left=left, color=color, label=group)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(plan.chosen.available_bytes / 2**30, color="#a33", linestyle="--", label="available")
    axes.invert_yaxis()
    for subplot in (axes, speeds):
        subplot.axhspan(-0.5, 0.5, color="#2f5d8a", alpha=0.12, zorder=0)
    axes.get_yticklabels()[0].set_fontweight("bold")
    rates = [0.0 if candidate.time is None else candidate.time.tokens_per_second for candidate in rows]
    bars = speeds.barh(names, rates, color="#2f5d8a")
    speeds.bar_label(bars, [f"{rate:,.0f}" if rate else "" for rate in rates], padding=3, fontsize="small")
    speeds.margins(x=0.2)
    speeds.locator_params(axis="x", nbins=4)
    speeds.set_xlabel("tokens/s")
    axes.set_xlabel("GiB, all processes" if plan.cluster.device == "cpu" else "GiB per device")
    axes.set_title(f"{plan.workload.facts.family}, {plan.cluster.name}")
    axes.legend(loc="lower right", fontsize="small")
    save_chart(figure, file)


def _name_candidate(one: Candidate) -> str:
    choice = one.choice
    name = f"{one.layout.describe(choice.num_processes)} on {choice.num_processes}"
    batch = f"{choice.micro_batch_size}x{choice.gradient_accumulation_steps}, {choice.activation_checkpointing}"
    return f"{name}, {batch}" + ("" if one.fits else " (does not fit)") + (f" ({one.missing})" if one.missing else "")
