"""Format a calibration as a table."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.machine.measured.calibration import Calibration, Curve, ProcessRates, summary
from trainwright.utils.text import size

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_KINDS = ("copy", "elementwise", "reduction")
_SHOWN_PRODUCT = {"cpu": (1024, 1024, 1024), "cuda": (8192, 4096, 4096)}
_SHOWN_BYTES = (2**20, 2**24, 2**28)


def lines(calibration: Calibration) -> Iterator[str]:
    """Yield the table: rates of each setting, each group with its error on held-out sizes."""
    taken = sum(calibration.parts.values())
    yield f"{calibration.machine}, measured {calibration.measured} in {taken:.0f} s: " + ", ".join(
        f"{part} {seconds:.0f}" for part, seconds in calibration.parts.items()
    )
    for setting in calibration.settings:
        yield ""
        each = "" if setting.threads is None else f" of {setting.threads} thread{'s' * (setting.threads > 1)}"
        yield f"{setting.processes} process{'es' * (setting.processes > 1)}{each}" + (
            ", all at once, each:" if setting.processes > 1 else ":"
        )
        yield from _products(setting)
        yield from _traffic(setting)
        yield from _attention(setting)
        yield from _others(setting)
        yield from _collectives(setting)
        yield from _in_step(setting)
    yield ""
    yield "error: median (worst) error of the curve for held-out sizes"
    yield f"all together: {summary(calibration.errors(''))}"
    yield f"other programs used the cores during {calibration.disturbance:.0%} of the measurements"


def _products(setting: ProcessRates) -> Iterator[str]:
    shape = _SHOWN_PRODUCT["cpu" if setting.threads else "cuda"]
    size = " x ".join(map(str, shape))
    yield f"  {f'matrix products, GFLOP/s at {size}':<46}{'x @ W^T':>10}{'dy @ W':>10}{'dy^T @ x':>10}  error"
    operations = 2 * shape[0] * shape[1] * shape[2]
    for precision in _seen(setting, "product"):
        curves = [setting.curves[f"product/{precision}/{layout}"] for layout in ("forward", "input", "weight")]
        rates = "".join(f"{operations / curve.seconds(*shape) / 1e9:>10,.0f}" for curve in curves)
        yield f"    {precision:<44}{rates}  {_errors(curves)}"


def _traffic(setting: ProcessRates) -> Iterator[str]:
    yield f"  {'read and written, GB/s':<46}" + "".join(f"{size(count):>10}" for count in _SHOWN_BYTES) + "  error"
    for precision in _seen(setting, "traffic"):
        for kind in _KINDS:
            curve = setting.curves[f"traffic/{precision}/{kind}"]
            yield f"    {f'{precision} {kind}':<44}{_rates(curve)}  {_errors([curve])}"


def _attention(setting: ProcessRates) -> Iterator[str]:
    lengths = (128, 512, 2048)
    yield f"  {'attention, ns per token and channel':<46}" + "".join(f"{n:>10,}" for n in lengths) + "  error"
    for precision in _seen(setting, "attention"):
        for direction in ("forward", "backward"):
            curve = setting.curves[f"attention/{precision}/{direction}"]
            times = "".join(f"{curve.seconds(length) * 1e9:>10.3f}" for length in lengths)
            yield f"    {f'{precision} {direction}':<44}{times}  {_errors([curve])}"


def _others(setting: ProcessRates) -> Iterator[str]:
    for name, text, unit in (
        ("optimizer", "AdamW, million elements/s", 1e6),
        ("host_optimizer", "AdamW in the host's memory, million elements/s", 1e6),
        ("loss/fp32", "loss of fp32 logits, million/s", 1e6),
        ("loss/bf16", "loss of bf16 logits, million/s", 1e6),
        ("host/to", "host to GPU, GB/s", 1e9),
        ("host/from", "GPU to host, GB/s", 1e9),
    ):
        if (curve := setting.curves.get(name)) is not None:
            amount = max(sample.sizes[0] for sample in curve.samples)
            yield f"  {text:<46}{amount / curve.seconds(amount) / unit:>10,.1f}{'':>20}  {_errors([curve])}"
    batch = setting.curves["data"]
    yield f"  {'a batch of 8 sequences and 1,024 tokens, us':<46}{batch.seconds(8, 1024) * 1e6:>10,.0f}{'':>20}  " + (
        _errors([batch])
    )
    yield f"  {'a small kernel, us':<46}{setting.launch * 1e6:>10.1f}"


def _collectives(setting: ProcessRates) -> Iterator[str]:
    if setting.processes == 1:
        return
    yield f"  {'collectives of all processes':<46}{'alpha us':>10}{'GB/s':>10}{'':>10}  error"
    for kind in _COLLECTIVES:
        curve = setting.curves[f"collective/{kind}"]
        alpha, beta = curve.coefficients
        rate = f"{1 / beta / 1e9:>10.2f}" if beta else f"{'-':>10}"
        yield f"    {kind:<44}{alpha * 1e6:>10.0f}{rate}{'':>10}  {_errors([curve])}"
    yield f"  {'share that overlaps with computation':<46}{setting.overlap:>10.0%}"


def _in_step(setting: ProcessRates) -> Iterator[str]:
    if not setting.in_step:
        return
    yield f"  {'in a step, factor on times alone':<46}{'products':>10}{'attention':>10}{'memory':>10}  error"
    for precision, fitted in setting.in_step.items():
        factors = "".join(f"{factor:>10.2f}" for factor in (fitted.products, fitted.attention, fitted.traffic))
        host = f"{precision}, and {fitted.host * 1e6:.0f} us more for each kernel"
        yield f"    {host:<44}{factors}  {summary(fitted.errors)}"
    if setting.processes > 1:
        exchange = setting.exchange
        collectives = f"collectives, and {exchange.waited * 1e3:.1f} ms more for each"
        yield f"    {collectives:<44}{exchange.factor:>10.2f}{'':>20}  {summary(exchange.errors)}"


def _seen(setting: ProcessRates, group: str) -> list[str]:
    """Return the precisions of a group of curves."""
    return list(dict.fromkeys(name.split("/")[1] for name in setting.curves if name.startswith(f"{group}/")))


def _rates(curve: Curve) -> str:
    return "".join(f"{count / curve.seconds(count) / 1e9:>10.1f}" for count in _SHOWN_BYTES)


def _errors(curves: list[Curve]) -> str:
    return summary(error for curve in curves for error in curve.errors)
