"""Check that installed packages are compatible, with ``pip check``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckResult, Finding, Severity

_SECONDS = 60.0
_DIFFERS = re.compile(
    r"^(?P<of>\S+) \S+ has requirement (?P<wanted>.+), but you have (?P<name>\S+) (?P<version>\S+)\.$"
)
_MISSING = re.compile(r"^(?P<of>\S+) \S+ requires (?P<wanted>\S+), which is not installed\.$")
_SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "triton", "flash-attn")
_OWN = "trainwright"


def check(context: CheckContext) -> CheckResult:
    """Report every requirement of an installed package that is not met."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "check"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCheck(f"pip check: {error}") from None
    if "No module named pip" in ended.stderr:
        raise CannotCheck("pip is not installed in this environment; `uv pip check` does the same")
    return CheckResult((", ".join(_versions()),), tuple(_findings(ended.stdout)))


def _versions() -> Iterator[str]:
    yield f"Python {sys.version.split()[0]}"
    for name in _SHOWN:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _findings(output: str) -> Iterator[Finding]:
    ours = _closure()
    for line in output.splitlines():
        match = _DIFFERS.match(line) or _MISSING.match(line)
        if match is None or match["of"].lower() not in ours:
            continue  # not used in training
        severity = Severity.BROKEN if match["of"] == _OWN else Severity.WARNING
        has = f"{match['name']} {match['version']} is" if "name" in match.re.groupindex else "it is not"
        yield Finding(
            severity,
            f"{match['of']} needs {match['wanted']}, and {has} installed",
            "code that was written for another version may fail, sometimes in the middle of a run",
            f"pip install '{match['wanted']}'"
            if match["of"] == _OWN
            else f"pip install --upgrade {match['of']}, or pip install '{match['wanted']}' if no newer version fits",
        )


def _closure() -> set[str]:
    """Return the names of the packages that Trainwright uses if they are installed, and what these require."""
    names, pending = set[str](), [_OWN]
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name != _OWN:  # extras of others are not ours
            required = [text for text in required if "extra ==" not in text]
        pending += [match[0].lower() for text in required if (match := re.match(r"[\w.-]+", text))]
    return names
