"""Parts of HTML pages: everything that comes from data is escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from trainwright.observe.reports import charts
from trainwright.observe.reports.figures import SMOOTHING
from trainwright.utils.text import printable

# Nothing is loaded or sent. Vega compiles its expressions, which needs unsafe-eval.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"


def escaped(value: object) -> str:
    """Return text as HTML; characters that control terminals or the direction of text are shown, not used."""
    return html.escape(printable(str(value)))


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return labelled values as a list of boxes."""
    items = "".join(f'<li class="tile"><span>{escaped(k)}</span><b>{escaped(v)}</b></li>' for k, v in values)
    return f'<ul class="tiles">{items}</ul>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    text: Sequence[int] = (),
    numbers: Sequence[int] = (),
    names: Sequence[int] = (),
    warned: Sequence[int] = (),
) -> str:
    """Return a table.

    Args:
        text: columns of longer text, whose line breaks are kept.
        numbers: columns of numbers that are compared with each other: on one line, and one below the other.
        names: columns of names that may be very long: cut at the width of the column, and shown whole as a tooltip.
        warned: rows in the color of a warning.
    """
    kinds = dict.fromkeys(text, " class=text dir=auto") | dict.fromkeys(numbers, " class=number")
    kinds |= dict.fromkeys(names, " class=name")
    shown = "".join(
        f'<th scope="col"{kinds.get(column, "") if column in numbers else ""}>{escaped(name)}</th>'
        for column, name in enumerate(head)
    )
    lines = "".join(
        f"<tr{' class=warn' if number in warned else ''}>"
        + "".join(
            f"<td{kinds.get(column, '')}{_tooltip(cell) if column in names else ''}>{escaped(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{shown}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _tooltip(cell: object) -> str:
    return f' title="{escaped(cell)}"'


def prose(sentence: str) -> str:
    """Return a sentence as a paragraph, with what is between backticks as code."""
    inside = re.sub("`([^`]+)`", r"<code>\1</code>", escaped(sentence))
    return f"<p>{inside[:1].upper()}{inside[1:]}</p>"


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; "" if all parts are empty."""
    inside = "".join(parts)
    return f"<section><h2>{escaped(title)}</h2>{inside}</section>" if inside else ""


class Page:
    """A page with charts. ``add`` its parts in order, then ``render`` it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._charts: list[charts.Specification] = []

    def add(self, part: str) -> None:
        """Append a part."""
        self._parts.append(part)

    def charts(self, specifications: Sequence[charts.Specification]) -> str:
        """Return the places of charts, which are drawn when the page is opened."""
        places = []
        for specification in specifications:
            places.append(f'<div class="chart"><div id="chart-{len(self._charts)}"></div></div>')
            self._charts.append(specification)
        return f'<div class="charts">{"".join(places)}</div>' if places else ""

    def render(self) -> str:
        """Return the page. Raises RequestError if the script of charts is missing."""
        library = charts.script().replace("</script", "<\\/script")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escaped(self._title)}</title><style>{_own('page.css')}</style></head><body><main>{''.join(self._parts)}</main>"
            f'<script type="application/json" id="axes">{_json(charts.AXES)}</script>'
            f'<script type="application/json" id="charts">{_json(self._charts)}</script>'
            f"<script>{library}</script><script>{_own('page.js')}</script></body></html>\n"
        )


CURVE_MENU = (
    '<p class="no-print"><label for="axis">Horizontal axis: </label><select id="axis">'
    + "".join(f'<option value="{name}">{title}</option>' for name, title in charts.AXES.items())
    + '</select> <label for="smoothing">Smoothing: </label><select id="smoothing"><option value="">none</option>'
    + "".join(f'<option value="{charts.smoothing_field(weight)}">{weight}</option>' for weight in SMOOTHING)
    + '</select> <span class="soft hint">Scroll to zoom, drag to move, double-click to reset.</span></p>'
)


def _own(name: str) -> str:
    return (files("trainwright.observe.reports") / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return as_json(value).replace("<", "\\u003c")


def as_json(value: Any) -> str:
    """Return JSON with null for the numbers that JSON does not have, and text for what is none of its types."""
    return json.dumps(_plain(value), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
