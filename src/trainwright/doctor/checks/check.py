"""The types of checks and of their findings."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import TrainingError
from trainwright.run.process import preload_libraries, run_in_child

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine
    from trainwright.run.shutdown.stop import Stopping


class Severity(Enum):
    """The severity of a finding. ``BROKEN``: training fails or would be wrong; ``WARNING``: it may fail or is slow;
    ``NOTE``: for information.
    """

    BROKEN = "broken"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A problem: what is wrong and where, why it matters, and what to do."""

    severity: Severity
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. ``facts``: what was observed or measured, one line each."""

    facts: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


class CannotCheck(Exception):
    """The check is not possible here: a permission, a device or a program is missing. The message says which."""


class CheckEnded(Exception):
    """Raised to end a check with a finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


@dataclass
class CheckContext:
    """The input of checks.

    Attributes:
        machine: this machine.
        directories: where disks are measured.
        ports: ports that must be free; empty: the one of a launcher's variables, or its default.
        work: a temporary directory for files of checks.
        stopping: the stop requests of the command.
        variables: the environment.
        end: time.monotonic() at which all checks must have ended.
    """

    machine: Machine
    directories: tuple[Path, ...]
    ports: tuple[int, ...]
    work: Path
    stopping: Stopping
    variables: Mapping[str, str]
    end: float = math.inf


@dataclass(frozen=True)
class Check:
    """A check of the registry.

    Attributes:
        name: on the command line and in JSON.
        title: what is checked, for tables.
        entry_point: the function, as ``module:function`` below this package; called with `CheckContext`, it returns
            `CheckResult` or raises `CannotCheck` or `CheckEnded`.
        after: names of checks; if one of them found something broken, this one is skipped.
        needs_gpu: whether it is only for machines with a GPU.
    """

    name: str
    title: str
    entry_point: str
    after: tuple[str, ...] = ()
    needs_gpu: bool = False

    def load(self) -> Callable[[CheckContext], CheckResult]:
        """Return the function of the check."""
        module, _, name = self.entry_point.partition(":")
        function: Callable[[CheckContext], CheckResult] = getattr(import_module(f"{__package__}.{module}"), name)
        return function


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check that was run, or the reason for which it was ``skipped``."""

    name: str
    title: str
    seconds: float = 0.0
    facts: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether something is broken."""
        return any(finding.severity is Severity.BROKEN for finding in self.findings)


def answer_of(work: Callable[[Path], None], what: str, context: CheckContext) -> Any:
    """Return the JSON that ``work`` writes to the file it is given.

    Args:
        what: a name of the work, for messages.

    Raises:
        CheckEnded: the process crashed or raised an exception.
    """
    preload_libraries()
    answer, log = context.work / "answer.json", context.work / "child.log"
    answer.unlink(missing_ok=True)
    try:
        run_in_child(functools.partial(work, answer), log, context.stopping)
    except TrainingError as error:
        raise CheckEnded(_failed(what, str(error), log)) from None
    return json.loads(answer.read_text(encoding="utf-8"))


def _failed(what: str, message: str, log: Path) -> Finding:
    from trainwright.doctor.diagnosis import explain

    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    cause = explain(f"{message}\n{text}").cause
    reason = message.splitlines()[0].removeprefix("preparation failed: ").removesuffix(f"; see {log}")
    reason = reason.replace("preparation ended", "its process ended")
    return Finding(
        Severity.BROKEN,
        f"{what}: {reason}",
        cause.error.cause if cause is not None else "torch may be built for another processor or driver, or be damaged",
        "; ".join(cause.error.fixes)
        if cause is not None
        else "install torch again: https://pytorch.org/get-started/locally",
    )
