"""Find the polynomials of a batch that give the sizes of several traces of a model at different shapes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.planning.trace.record import Done, MemoryEvent, Segment
from trainwright.planning.trace.units import BASIS, Moment, Operation, PassTrace, Size

Values = npt.NDArray[np.float64]
_INDEX = {name: index for index, name in enumerate(BASIS)}
# Tokens and pairs of all sequences of a pack but its longest two.
_OTHERS = np.zeros((2, len(BASIS)))
for _row, _names in enumerate((("tokens", "length", "second"), ("pairs", "length²", "second²"))):
    for _name, _sign in zip(_names, (1, -1, -1), strict=True):
        _OTHERS[_row, _INDEX[_name]] = _sign
_EXACT = 1e-9
_MOST_TERMS = 3


class Fitter:
    """Fit numbers to the shapes of traces.

    Args:
        shapes: the values of ``BASIS`` at each shape. Terms that are equal or multiples of earlier ones are left out.
    """

    def __init__(self, shapes: Sequence[Sequence[float]]) -> None:
        self._shapes = np.array(shapes, dtype=float)
        self._shapes = np.hstack([self._shapes, self._shapes @ _OTHERS.T])
        self._columns: list[int] = []
        for column in range(self._shapes.shape[1]):
            values = self._shapes[:, column]
            is_multiple = any(_are_multiples(values, self._shapes[:, other_column]) for other_column in self._columns)
            if values.any() and not is_multiple:
                self._columns.append(column)
        # By the number of terms: their columns, the shapes scaled by the largest, its factors, and the inverses.
        term_limit = min(_MOST_TERMS, len(shapes) - 1, len(self._columns))
        self._systems = [self._system(terms) for terms in range(1, term_limit + 1)]
        self._found: dict[tuple[int, ...], Values] = {}

    def __call__(self, numbers: Sequence[int]) -> Values:
        """Return the coefficients of a polynomial with few terms that gives ``numbers`` at the shapes, or is near."""
        key = tuple(numbers)
        if key not in self._found:
            self._found[key] = self._fitted(np.array(key, dtype=float))
        return self._found[key]

    def _system(self, terms: int) -> tuple[npt.NDArray[np.intp], Values, Values, Values]:
        columns = np.array([*itertools.combinations(self._columns, terms)], dtype=np.intp)
        selection = self._shapes[:, columns].transpose(1, 0, 2)
        largest = selection.max(1)
        scaled_shapes = selection / largest[:, None]
        return columns, scaled_shapes, largest, np.linalg.pinv(scaled_shapes)

    def _fitted(self, numbers: Values) -> Values:
        best, nearest = np.zeros(self._shapes.shape[1]), np.inf
        if not numbers.any():
            return best[: len(BASIS)]
        exact = _EXACT * np.abs(numbers).max()
        for columns, scaled_shapes, largest, inverses in self._systems:
            solutions = inverses @ numbers
            errors = np.abs((scaled_shapes @ solutions[..., None])[..., 0] - numbers).max(1)
            errors[(errors > exact) & (solutions * numbers[0] < 0).any(1)] = np.inf
            number = int((errors <= exact).argmax() if (errors <= exact).any() else errors.argmin())
            if errors[number] < nearest:
                nearest, best = errors[number], np.zeros(self._shapes.shape[1])
                best[columns[number]] = solutions[number] / largest[number]
            if nearest <= exact:
                return _round_values(_convert_to_basis(best))
        return _convert_to_basis(best)  # the nearest one, which extrapolates, as all its terms grow


def _convert_to_basis(values: Values) -> Values:
    """Return coefficients of ``BASIS`` from those of it and of ``_OTHERS``."""
    return values[: len(BASIS)] + values[len(BASIS) :] @ _OTHERS


def _are_multiples(a: Values, b: Values) -> bool:
    ratios = a[b != 0] / b[b != 0]
    return bool(len(ratios) and (a[b == 0] == 0).all() and np.allclose(ratios, ratios[0], rtol=1e-12))


def _round_values(values: Values) -> Values:
    """Return values without the errors of solving, as most sizes are whole numbers of bytes."""
    rounded_values = values.round(6)
    return np.where(np.abs(rounded_values - values) < 1e-6 * np.maximum(1, np.abs(values)), rounded_values, values)


def fit_pass(segments: Sequence[Segment], fitter: Fitter, natural: Values) -> PassTrace[Size]:
    """Return the pass that the segments of several traces stand for.

    Args:
        natural: maps coefficients to those of terms that are never negative.
    """
    remaining = [list(segment.remaining.values()) for segment in segments]
    saved_sizes: list[Size] = []
    if segments[0].direction == "forward" and len({len(sizes) for sizes in remaining}) == 1:
        saved_sizes = [_convert_size(fitter(sizes)) for sizes in zip(*remaining, strict=True)]
    return PassTrace(
        tuple(_fit_moments([segment.events for segment in segments], fitter, natural)),
        tuple(_merge_operations([segment.done for segment in segments], fitter)),
        tuple(saved_sizes),
    )


def _fit_moments(events: Sequence[Sequence[MemoryEvent]], fitter: Fitter, natural: Values) -> list[Moment[Size]]:
    moments: list[Moment[Size]] = []
    live = np.zeros(len(BASIS))
    parts = [_split_at_gradients(trace) for trace in events]
    names = [[gradient for _, gradient in trace] for trace in parts]
    if any(trace != names[0] for trace in names):  # in another order: all at the end
        parts, names = [[(list(trace), "")] for trace in events], [[""]]
    for number, name in enumerate(names[0]):
        lines = [trace[number][0] for trace in parts]
        candidates, live = _fit_high_points(lines, live, fitter)
        moments.append(Moment(name, _select_largest(candidates, natural), _convert_size(live)))
    return moments


def _split_at_gradients(events: Sequence[MemoryEvent]) -> list[tuple[list[MemoryEvent], str]]:
    parts: list[tuple[list[MemoryEvent], str]] = []
    begin = 0
    for index, event in enumerate(events):
        if event.kind == "gradient":
            parts.append((list(events[begin : index + 1]), event.of))
            begin = index + 1
    return [*parts, (list(events[begin:]), "")]


def _fit_high_points(
    lines: Sequence[Sequence[MemoryEvent]], live: Values, fitter: Fitter
) -> tuple[list[Values], Values]:
    """Return the live bytes at every high point, and at the end."""
    changes = [[event.size if event.kind == "allocated" else -event.size for event in line] for line in lines]
    kinds = [[event.kind for event in line] for line in lines]
    candidates = [live]
    if all(line == kinds[0] for line in kinds):
        for position, kind in enumerate(kinds[0]):
            change = fitter([abs(line[position]) for line in changes])
            if kind == "allocated":
                live = live + change
            else:
                candidates.append(live)
                live = live - change
        return [*candidates, live], live
    # Loops that depend on the shape: only the highest point is known.
    base = live
    sums = [np.concatenate([[0], np.cumsum(line)]) for line in changes]
    live = base + fitter([int(line[-1]) for line in sums])
    return [base, base + fitter([int(line.max()) for line in sums]), live], live


def _select_largest(candidates: Sequence[Values], natural: Values) -> tuple[Size, ...]:
    """Return the candidates that are the largest for some batch."""
    unique = np.unique(np.array(candidates).round(6), axis=0)
    plain = unique @ natural
    indices = [
        index
        for index, row in enumerate(plain)
        if not any((other_row >= row).all() and (other_row > row).any() for other_row in plain)
    ]
    return tuple(_convert_size(unique[index]) for index in indices)


def _convert_size(values: Values) -> Size:
    numbers = [int(value) if value == int(value) else float(value) for value in values.round(6)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _merge_operations(done: Sequence[Sequence[Done]], fitter: Fitter) -> list[Operation[Size]]:
    """Return equal operations merged. Those of a loop of the loss stand for all of its iterations."""
    lines = [[item for item in line if item.scope in _REPRESENTATIVE] for line in done]
    labels = [[item[:5] for item in line] for line in lines]
    values_by_key: dict[tuple[Any, ...], list[Values]] = {}
    if all(line == labels[0] for line in labels):
        for same in zip(*lines, strict=True):
            sizes = [fitter(numbers) for numbers in zip(*(item.sizes for item in same), strict=True)]
            scope, dimensions = same[0].scope, sizes[:4]
            totals = [_sum_iterations(scope, size) for size in sizes[4:]]
            launches = _sum_iterations(scope, np.eye(len(BASIS))[_INDEX["1"]])
            key = (*same[0][:2], *same[0][3:5], *(tuple(size) for size in dimensions), scope)
            _add(values_by_key, key, dimensions, [launches, *totals])
    else:
        counts = [Counter(item[:5] for item in line) for line in lines]
        for label in dict.fromkeys(label for count in counts for label in count):
            alike = [[item.sizes for item in line if item[:5] == label] for line in lines]
            largest = [fitter([max((sizes[i] for sizes in item), default=0) for item in alike]) for i in range(4)]
            sums = [fitter([sum(sizes[i] for sizes in item) for item in alike]) for i in range(4, 7)]
            launches = fitter([count[label] for count in counts])
            _add(values_by_key, (*label[:2], *label[3:5], label[2]), largest, [launches, *sums])
    operations: list[Operation[Size]] = []
    for key, sums in values_by_key.items():
        m, n, k, times, count, flops, read, written = map(_convert_size, sums)
        operations.append(Operation(key[0], key[1], count, m, n, k, times, flops, read, written, key[2], key[3]))
    return operations


def _add(
    found: dict[tuple[Any, ...], list[Values]], key: tuple[Any, ...], each: list[Values], totals: list[Values]
) -> None:
    if key in found:
        found[key] = [*found[key][:4], *(a + b for a, b in zip(found[key][4:], totals, strict=True))]
    else:
        found[key] = [*each, *totals]


# Scopes outside of loops, of the first three iterations of chunks, and of a chunk's first block.
_REPRESENTATIVE = ("", "chunk0", "chunk1", "chunk2", "chunk0block0")


def _sum_iterations(scope: str, size: Values) -> Values:
    """Return the sum over the iterations of a loop, of a size in one iteration."""
    if scope in ("", "chunk0", "chunk1"):
        return size
    result = size.copy()
    constant, chunk, block = (_INDEX[name] for name in ("1", "chunk", "block"))
    if scope == "chunk2":  # all but the first two, the second of which converts the sum of gradients
        result[_INDEX["chunks"]] += size[constant]
        result[_INDEX["targets"]] += size[chunk]
        result[constant], result[chunk] = 0 - 2 * size[constant], 0 - 2 * size[chunk]
        return result
    result[_INDEX["blocks"]] += size[constant]
    result[_INDEX["targets"]] += size[block]
    result[constant] = result[block] = 0
    return result


def build_natural_terms(packed: bool) -> Values:
    """Return the map of coefficients to those of terms that are never negative and independent of each other.

    A pack has its longest sequence, the second longest and the others, instead of all of its tokens and pairs.
    """
    result = np.eye(len(BASIS))
    if packed:
        for whole, parts in (("tokens", ("length", "second")), ("pairs", ("length²", "second²"))):
            for part in parts:
                result[_INDEX[whole], _INDEX[part]] = 1
    return result
