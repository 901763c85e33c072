"""Charts as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from trainwright.engine.event_reader import find_curve_part
from trainwright.errors import RequestError
from trainwright.machine.cache import find_cache_root, try_write
from trainwright.observe.reports.figures import PlottedCurve, RunFigures, build_curves
from trainwright.utils.installation import install_command

AXES = {"step": "Step", "tokens": "Tokens", "seconds": "Seconds of training", "flops": "FLOPs"}
_HEIGHT = 220
_LOGARITHMIC = 30.0  # ratio of the largest to the smallest value

Specification = dict[str, Any]


def build_curve_charts(runs: Sequence[RunFigures]) -> list[Specification]:
    """Return a chart for every curve that any of the runs has, with a line for each run.

    Each point has its place on every axis of ``AXES``, so that a page can change the axis.
    """
    run_names = [run.name for run in runs]
    # Runs of the same name are shown with their paths.
    names = [str(run.directory) if run_names.count(run.name) > 1 else run.name for run in runs]
    every = [build_curves(run) for run in runs]
    run_positions = [{axis: run.positions(axis) for axis in AXES} for run in runs]
    charts = []
    for curve in dict.fromkeys(name for curves in every for name in curves):
        rows = []
        for name, curves, places_of in zip(names, every, run_positions, strict=True):
            rows += _build_rows(curves[curve], name, places_of) if curve in curves else []
        first_curve = next(curves[curve] for curves in every if curve in curves)
        # The shape of a schedule shows on a linear axis; it may end close to 0.
        several, linear = len(runs) > 1, curve == "learning_rate"
        charts.append(_build_line_chart(first_curve.title, first_curve.unit, rows, several=several, linear=linear))
    return charts


def _build_rows(curve: PlottedCurve, run: str, places: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Return a row for each point; ``part`` counts the gaps before it, ``alone`` says that it is between two."""
    rows = []
    for index, (step, value) in enumerate(curve.points):
        row = {axis: _find_place(places[axis], step) for axis in AXES} | {"step": step, "value": value, "run": run}
        row |= {name_smoothing_field(weight): values[index] for weight, values in curve.smoothed.items()}
        rows.append(row | {"part": find_curve_part(curve.breaks, step)})
    sizes = Counter(row["part"] for row in rows)
    return [row | {"alone": True} if sizes[row["part"]] == 1 else row for row in rows]


def name_smoothing_field(weight: float) -> str:
    """Return the field of the rows of a chart with the values that are smoothed."""
    return f"smoothed-{str(weight).partition('.')[2]}"


def build_time_chart(title: str, unit: str, rows: list[dict[str, Any]]) -> Specification:
    """Return a chart over the seconds since a run began, with a line for each rank.

    Args:
        rows: ``after``, ``value`` and ``run``, the name of the line.
    """
    several = len({row["run"] for row in rows}) > 1
    return _build_line_chart(title, unit, rows, several=several, axis=("after", "Seconds"))


def build_heat_chart(title: str, rows: Sequence[Mapping[str, Any]]) -> Specification:
    """Return a chart of shares by rank and category. ``rows``: ``rank``, ``part`` and ``share``."""
    rank = {"field": "rank", "type": "ordinal", "title": "Rank", "axis": {"labelAngle": 0}}
    share = {"field": "share", "type": "quantitative", "title": "Share", "legend": {"format": ".0%"}}
    height = 60 + 24 * _count_parts(rows)
    return _build_chart(title, height, rows, {"type": "rect"}, {"x": rank, "y": _PART, "color": share})


def build_point_chart(key: str, metric: str, rows: Sequence[Mapping[str, Any]]) -> Specification:
    """Return a chart of a metric by the values of a key. ``rows``: ``scale_type``, ``value``, ``run`` and ``steps``."""
    numbers = [row["place"] for row in rows if isinstance(row["place"], float)]
    is_rate = key.endswith("rate") and min(numbers, default=0.0) > 0
    scale = {**_choose_scale(numbers), **({"type": "log"} if is_rate else {})}
    scale_type = {"type": "quantitative", "scale": scale} if len(numbers) == len(rows) else {"type": "nominal"}
    value = {"field": "value", "type": "quantitative", "title": metric}
    encoding = {
        "x": {"field": "place", "title": key, **scale_type},
        "y": {**value, "scale": _choose_scale([row["value"] for row in rows])},
        "color": {"field": "steps", **_LEGEND},
        "tooltip": [{"field": "run", "type": "nominal"}, value],
    }
    mark = {"type": "point", "filled": True, "size": 80}
    return {**_build_chart(key, _HEIGHT, rows, mark, encoding), "description": f"{metric} by {key}"}


def build_bar_chart(title: str, parts: Mapping[str, float], unit: str) -> Specification:
    """Return a chart with a bar for each part."""
    rows = [{"part": part, "value": value} for part, value in parts.items()]
    return _build_chart(title, 60 + 24 * len(rows), rows, {"type": "bar"}, _encode_bars(unit))


def build_pair_chart(title: str, rows: Sequence[Mapping[str, Any]], unit: str) -> Specification:
    """Return a chart with two bars for each part. ``rows``: ``part``, ``kind`` and ``value``."""
    kinds = {"yOffset": {"field": "kind", "sort": None}, "color": {"field": "kind", "sort": None, **_LEGEND}}
    return _build_chart(title, 80 + 28 * _count_parts(rows), rows, {"type": "bar"}, {**_encode_bars(unit), **kinds})


_PART = {"field": "part", "type": "nominal", "sort": None, "title": None}
_LEGEND = {"type": "nominal", "title": None, "legend": {"orient": "top"}}


def _encode_bars(unit: str) -> dict[str, Any]:
    return {"y": _PART, "x": {"field": "value", "type": "quantitative", "title": unit}}


def _count_parts(rows: Sequence[Mapping[str, Any]]) -> int:
    return len({row["part"] for row in rows})


def _build_chart(
    title: str, height: int, rows: Sequence[Mapping[str, Any]], mark: dict[str, Any], encoding: dict[str, Any]
) -> Specification:
    head = {"title": title, "description": title, "height": height, "data": {"values": list(rows)}}
    return {**head, "mark": {**mark, "tooltip": True}, "encoding": encoding}


def _choose_scale(values: Sequence[float]) -> dict[str, Any]:
    """Return a scale from the lowest to the highest value, logarithmic if they are far apart."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    ends = {"domain": [low, high], "padding": 12} if low < high else {}
    return {"type": "log" if low > 0 and high > _LOGARITHMIC * low else "linear", **ends}


@cache
def read_script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, from the package vl-convert-python.

    Raises:
        RequestError: the package is missing.
    """
    try:
        import vl_convert
    except ImportError:
        raise RequestError(
            f"a report needs vl-convert-python, which has the script of its charts; {install_command('report')}"
        ) from None
    cache_file = find_cache_root() / "scripts" / f"vega-{version('vl-convert-python')}.js"
    try:
        return cache_file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        bundle = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
        try_write(cache_file, bundle)
        return bundle


def _build_line_chart(
    title: str,
    unit: str,
    rows: list[dict[str, Any]],
    *,
    several: bool,
    linear: bool = False,
    axis: tuple[str, str] = ("step", AXES["step"]),
) -> Specification:
    values = [row["value"] for row in rows]
    logarithmic = not linear and min(values) > 0 and max(values) > _LOGARITHMIC * min(values)
    dot = {"type": "point", "filled": True, "size": 24, "clip": True}
    is_alone = any(row.get("alone") for row in rows)
    alone = [{"transform": [{"filter": "datum.alone"}], "mark": dot}] if is_alone else []
    x_field = {"field": axis[0], "type": "quantitative", "title": axis[1]}
    scale = {"type": "log" if logarithmic else "linear"}
    # A line for each power of ten, not for its multiples too, as soon as there are some of them.
    lines = {"axis": {"tickCount": 3}} if logarithmic else {}
    hover = {"name": "hover", "select": {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True}}
    color = {"color": {"field": "run", **_LEGEND}} if several else {}
    tip = [{"field": "run", "type": "nominal", "title": "Run"}] if several else []
    return {
        "title": title,
        "description": title,
        "height": _HEIGHT,
        "data": {"values": rows},
        "encoding": {
            "x": {**x_field, "scale": {"nice": False}, "axis": {"tickMinStep": 1}},
            "y": {"field": "value", "type": "quantitative", "title": unit or None, "scale": scale, **lines},
            **color,
        },
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 1.75, "clip": True},
                "params": [{"name": "zoom", "select": "interval", "bind": "scales"}],
                "encoding": {"detail": {"field": "part"}},
            },
            *alone,
            {
                "mark": {"type": "point", "filled": True, "size": 70, "clip": True},
                "params": [hover],
                "encoding": {
                    "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
                    "tooltip": [
                        *tip,
                        x_field,
                        {"field": "value", "type": "quantitative", "title": title, "format": ".5~g"},
                    ],
                },
            },
        ],
    }


def _find_place(places: Mapping[int, float], step: int) -> float:
    """Return the place of a step: of the last one before it if its own is missing, 0 before the first."""
    if step not in places:
        step = max((earlier for earlier in places if earlier < step), default=0)
    return places.get(step, 0.0)
