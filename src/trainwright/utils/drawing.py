"""Plots with matplotlib, which is imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.errors import MachineError, RequestError
from trainwright.utils.installation import install_command


def build_figure(width: float, height: float, what: str) -> Any:
    """Return a matplotlib figure of this size in inches, which belongs to no window.

    Args:
        what: the feature that needs it, for the message.

    Raises:
        MachineError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MachineError(f"{what} needs matplotlib; {install_command('charts')}") from None
    return Figure(figsize=(width, height), layout="constrained")


def check_chart(file: Path) -> None:
    """Check before long work that ``save_chart`` will be able to write ``file``.

    Raises:
        RequestError: the format of ``file`` is not supported, or its directory does not exist.
        MachineError: matplotlib is not installed.
    """
    kinds = build_figure(1, 1, "--chart").canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in kinds:
        raise RequestError(f"--chart: {file} has an unsupported file type; choose from {', '.join(sorted(kinds))}")
    if not file.parent.is_dir():
        raise RequestError(f"--chart: {file}: no such directory {file.parent}")


def save_chart(figure: Any, file: Path) -> None:
    """Write the plot that ``--chart`` asks for.

    Raises:
        RequestError: the format of ``file`` is not supported, or its directory does not exist.
    """
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise RequestError(f"--chart: {file}: {error}") from error
