"""Format a calibration as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trainwright.machine.measured.calibration import Calibration, Curve, ProcessRates, summary
from trainwright.utils.text import size

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_LAYOUTS = ("forward", "input", "weight")
_SHOWN_PRODUCT = {"cpu": (1024, 1024, 1024), "cuda": (8192, 4096, 4096)}
_SHOWN_BYTES, _SHOWN_LENGTHS = (2**20, 2**24, 2**28), (128, 512, 2048)
_OTHERS = (
    ("optimizer", "AdamW, million elements/s", 1e6),
    ("host_optimizer", "AdamW in the host's memory, million elements/s", 1e6),
    ("loss/fp32", "loss of fp32 logits, million/s", 1e6),
    ("loss/bf16", "loss of bf16 logits, million/s", 1e6),
    ("host/to", "host to GPU, GB/s", 1e9),
    ("host/from", "GPU to host, GB/s", 1e9),
)


def lines(calibration: Calibration) -> Iterator[str]:
    """Yield the table: rates of each setting, each group with its error on held-out sizes."""
    total = sum(calibration.parts.values())
    yield f"{calibration.machine}, measured {calibration.measured} in {total:.0f} s: " + ", ".join(
        f"{part} {seconds:.0f}" for part, seconds in calibration.parts.items()
    )
    for setting in calibration.settings:
        yield ""
        each = "" if setting.threads is None else f" of {setting.threads} thread{'s' * (setting.threads > 1)}"
        yield f"{setting.processes} process{'es' * (setting.processes > 1)}{each}" + (
            ", all at once, each:" if setting.processes > 1 else ":"
        )
        yield from _operations(setting)
        yield from _collectives(setting)
        yield from _in_step(setting)
    yield ""
    yield "error: median (worst) error of the curve for held-out sizes"
    yield f"all together: {summary(calibration.errors(''))}"
    yield f"other programs used the cores during {calibration.disturbance:.0%} of the measurements"


def _operations(setting: ProcessRates) -> Iterator[str]:
    shape = _SHOWN_PRODUCT["cpu" if setting.threads else "cuda"]
    title = f"matrix products, GFLOP/s at {' x '.join(map(str, shape))}"
    yield _row(title, ("x @ W^T", "dy @ W", "dy^T @ x"), "error", indent=2)
    operations = 2 * shape[0] * shape[1] * shape[2]
    for precision in _precisions(setting, "product"):
        curves = [setting.curves[f"product/{precision}/{layout}"] for layout in _LAYOUTS]
        rates = (f"{operations / curve.seconds(*shape) / 1e9:,.0f}" for curve in curves)
        yield _row(precision, rates, _errors(*curves))
    yield _row("read and written, GB/s", map(size, _SHOWN_BYTES), "error", indent=2)
    for precision in _precisions(setting, "traffic"):
        for kind in ("copy", "elementwise", "reduction"):
            curve = setting.curves[f"traffic/{precision}/{kind}"]
            rates = (f"{count / curve.seconds(count) / 1e9:.1f}" for count in _SHOWN_BYTES)
            yield _row(f"{precision} {kind}", rates, _errors(curve))
    yield _row("attention, ns per token and channel", (f"{n:,}" for n in _SHOWN_LENGTHS), "error", indent=2)
    for precision in _precisions(setting, "attention"):
        for direction in ("forward", "backward"):
            curve = setting.curves[f"attention/{precision}/{direction}"]
            times = (f"{curve.seconds(length) * 1e9:.3f}" for length in _SHOWN_LENGTHS)
            yield _row(f"{precision} {direction}", times, _errors(curve))
    for name, text, unit in _OTHERS:
        if (curve_or_none := setting.curves.get(name)) is not None:
            amount = max(sample.sizes[0] for sample in curve_or_none.samples)
            rate = f"{amount / curve_or_none.seconds(amount) / unit:,.1f}"
            yield _row(text, (rate, "", ""), _errors(curve_or_none), indent=2)
    batch = setting.curves["data"]
    microseconds = f"{batch.seconds(8, 1024) * 1e6:,.0f}"
    yield _row("a batch of 8 sequences and 1,024 tokens, us", (microseconds, "", ""), _errors(batch), indent=2)
    yield f"  {'a small kernel, us':<46}{setting.launch * 1e6:>10.1f}"


def _collectives(setting: ProcessRates) -> Iterator[str]:
    if setting.processes == 1:
        return
    yield _row("collectives of all processes", ("alpha us", "GB/s", ""), "error", indent=2)
    for kind in _COLLECTIVES:
        curve = setting.curves[f"collective/{kind}"]
        alpha, beta = curve.coefficients
        yield _row(kind, (f"{alpha * 1e6:.0f}", f"{1 / beta / 1e9:.2f}" if beta else "-", ""), _errors(curve))
    yield f"  {'share that overlaps with computation':<46}{setting.overlap:>10.0%}"


def _in_step(setting: ProcessRates) -> Iterator[str]:
    if not setting.in_step:
        return
    yield _row("in a step, factor on times alone", ("products", "attention", "memory"), "error", indent=2)
    for precision, fitted in setting.in_step.items():
        factors = (f"{factor:.2f}" for factor in (fitted.products, fitted.attention, fitted.traffic))
        host = f"{precision}, and {fitted.host * 1e6:.0f} us more for each kernel"
        yield _row(host, factors, summary(fitted.errors))
    if setting.processes > 1:
        exchange = setting.exchange
        text = f"collectives, and {exchange.waited * 1e3:.1f} ms more for each"
        yield _row(text, (f"{exchange.factor:.2f}", "", ""), summary(exchange.errors))


def _row(text: str, values: Iterable[str], last: str, indent: int = 4) -> str:
    return f"{'':<{indent}}{text:<{48 - indent}}{''.join(f'{value:>10}' for value in values)}  {last}"


def _precisions(setting: ProcessRates, group: str) -> Sequence[str]:
    return list(dict.fromkeys(name.split("/")[1] for name in setting.curves if name.startswith(f"{group}/")))


def _errors(*curves: Curve) -> str:
    return summary(error for curve in curves for error in curve.errors)
