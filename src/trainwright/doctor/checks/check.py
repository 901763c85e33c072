"""Checks and their findings: run one after another in limited time, or one without a limit.

None that fails prevents the others.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright import __version__
from trainwright.errors import RequestError, Stopped, TrainingError, TrainwrightError
from trainwright.machine.machine import Machine
from trainwright.machine.vendors import look_up_processor
from trainwright.run.process import preload_libraries, run_in_child
from trainwright.utils.text import draw, format_plural, format_seconds, is_terminal

if TYPE_CHECKING:
    from trainwright.run.shutdown.stop import Stopping


class Severity(StrEnum):
    """With ``BROKEN`` training fails or is wrong, with ``WARNING`` it may fail or is slow, ``NOTE`` informs."""

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


def read_answer(work: Callable[[Path], None], what: str, context: CheckContext) -> Any:
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
        raise CheckEnded(_describe_failure(what, str(error), log)) from None
    return json.loads(answer.read_text(encoding="utf-8"))


def _describe_failure(what: str, message: str, log: Path) -> Finding:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    reason = message.splitlines()[0].removeprefix("preparation failed: ").removesuffix(f"; see {log}")
    reason = reason.replace("preparation ended", "its process ended")
    why = "torch may be built for another processor or driver, or be damaged"
    fix = "install torch again: https://pytorch.org/get-started/locally"
    return build_explained_finding(f"{what}: {reason}", f"{message}\n{text}", why, fix)


def build_explained_finding(what: str, message: str, why: str, fix: str) -> Finding:
    """Return what is broken, with cause and fixes of the error in ``message`` if it is known, else these."""
    from trainwright.doctor.diagnosis import explain

    if (cause := explain(message).cause) is not None:
        why, fix = cause.error.cause, "; ".join(cause.error.fixes)
    return Finding(Severity.BROKEN, what, why, fix)


# Seconds after which no further check begins, and after which the last one is ended; on a CPU and with GPUs.
_BEGIN_SECONDS = {"cpu": 90.0, "gpu": 540.0}
_MOST_SECONDS = {"cpu": 115.0, "gpu": 590.0}
_STOPPED = "stopped; the checks were not finished, and nothing was kept"


def run_checks(checks: Sequence[Check], context: CheckContext) -> MachineReport:
    """Run the checks.

    Raises:
        Stopped: a stop was requested.
    """
    start, device, last = time.monotonic(), look_up_processor(context.machine.device), math.inf
    if len(checks) > 1:
        context, last = replace(context, end=start + _MOST_SECONDS[device]), start + _BEGIN_SECONDS[device]
    outcomes: list[Outcome] = []
    for check in checks:
        broken = {outcome.name for outcome in outcomes if outcome.is_broken}
        try:
            outcomes.append(_run_check(check, context, broken, is_late=time.monotonic() > last))
        except Stopped:
            raise Stopped(_STOPPED) from None
        if context.stopping.requested:
            raise Stopped(_STOPPED)
    return MachineReport(
        machine=context.machine.describe(),
        checked=datetime.now().astimezone().isoformat(timespec="seconds"),
        version=__version__,
        seconds=time.monotonic() - start,
        outcomes=tuple(outcomes),
    )


def _run_check(check: Check, context: CheckContext, broken: set[str], is_late: bool) -> Outcome:
    if (reason := _explain_skip(check, context.machine, broken, is_late)) is not None:
        return Outcome(check.name, check.title, skipped=reason)
    start, interactive = time.monotonic(), is_terminal(sys.stderr)
    if interactive:
        draw(f"checking {check.title} …", sys.stderr)
    try:
        result = check.load()(context)
    except CannotCheck as error:
        return Outcome(check.name, check.title, time.monotonic() - start, skipped=str(error))
    except CheckEnded as error:
        result = CheckResult((), (error.finding,))
    except Stopped:
        raise
    except TrainwrightError as error:
        result = CheckResult((), (_describe_refusal(error),))
    except Exception as error:  # a machine may be broken in ways that no check expects
        result = CheckResult((), (_describe_error(check, error),))
    finally:
        if interactive:
            draw("", sys.stderr)
    return Outcome(check.name, check.title, time.monotonic() - start, result.facts, result.findings)


def _explain_skip(check: Check, machine: Machine, broken: set[str], is_late: bool) -> str | None:
    if check.needs_gpu and not machine.gpus:
        return "this machine has no GPU that can be used"
    if prerequisites := [name for name in check.after if name in broken]:
        return f"{' and '.join(prerequisites)} must be fixed first"
    if is_late:
        return f"the other checks took all of the time limit; `trainwright doctor {check.name}` runs it alone"
    return None


def _describe_refusal(error: TrainwrightError) -> Finding:
    what = str(error)
    why = "training commands fail with the same error"
    fix = "the message says what is needed; `trainwright doctor` without names checks that too"
    return Finding(Severity.BROKEN, what, why, fix)


def _describe_error(check: Check, error: Exception) -> Finding:
    what = f"the check itself failed: {type(error).__name__}: {error}"
    why = "so the state of this part of the machine is unknown"
    fix = f"run it alone: `trainwright doctor {check.name}`; if it fails again, report it with the output of --json"
    return Finding(Severity.WARNING, what, why, fix)


_TORCH = ("packages", "torch")
_START = (*_TORCH, "limits", "shared-memory")  # no process can be started without these
_TOGETHER = (*_START, "links")

CHECKS: tuple[Check, ...] = (
    Check("packages", "compatible versions", "software:check_packages"),
    Check("torch", "torch, the driver and devices", "software:check"),
    Check("compilers", "compilers", "software:check_compilers"),
    Check("limits", "limits of the user", "limits:check"),
    Check("shared-memory", "/dev/shm", "limits:check_shared_memory"),
    Check("control-groups", "control groups", "limits:check_control_groups"),
    Check("cores", "clocks and throttling of the cores", "cores:check"),
    Check("disks", "disks", "disks:check"),
    Check("ports", "ports", "network:check_ports"),
    Check("interfaces", "interfaces and the name of this machine", "network:check"),
    Check("nccl", "variables of NCCL, Gloo and torch", "nccl:check"),
    Check("gpus", "health of the GPUs", "gpus:check", needs_gpu=True),
    Check("kernels", "kernels against fp32 on the CPU", "kernels:check", _TORCH),
    Check("offload", "pinned memory", "gpus:check_offload", _TORCH, needs_gpu=True),
    Check("links", "link between two processes", "two_processes:check_links", _START),
    Check("out-of-memory", "out of memory on one rank", "two_processes:check_out_of_memory", _TOGETHER),
    Check("killed-rank", "a rank is killed", "two_processes:check_killed_rank", _TOGETHER),
    Check("strategies", "two ranks of every strategy", "two_processes:check_strategies", _TOGETHER),
)


def select_checks(names: tuple[str, ...]) -> tuple[Check, ...]:
    """Return the checks with these names in the order of the table; all without any name.

    Raises:
        RequestError: a name is unknown.
    """
    check_names = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in check_names]:
        path = Path(unknown[0])
        is_log = path.is_file() or (path / "logs").is_dir()
        hint = f"; to find the cause in a log, pass --explain {unknown[0]}" if is_log else ""
        raise RequestError(f"{unknown[0]}: no such check; choose from {', '.join(check_names)}{hint}")
    return tuple(check for check in CHECKS if not names or check.name in names)


_FORMAT = 1  # version of the JSON


@dataclass(frozen=True)
class MachineReport:
    """The outcomes of all checks of a machine; ``str()`` returns the text that ``trainwright doctor`` prints.

    Attributes:
        machine: the machine in one line.
        checked: when, in ISO format.
        version: of Trainwright.
        seconds: that all checks took.
    """

    machine: str
    checked: str
    version: str
    seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all checks, the worst first."""
        order = list(Severity)
        findings = [finding for outcome in self.outcomes for finding in outcome.findings]
        return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))

    @property
    def is_broken(self) -> bool:
        """Whether something is broken."""
        return any(outcome.is_broken for outcome in self.outcomes)

    def values(self) -> dict[str, Any]:
        """Return the report as plain values; ``trainwright doctor --json`` prints them."""
        return {
            "format": _FORMAT,
            "machine": self.machine,
            "checked": self.checked,
            "version": self.version,
            "seconds": round(self.seconds, 1),
            "is_broken": self.is_broken,
            "checks": [_convert_outcome(outcome) for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text: a line for each check with its facts, then the findings with their fixes."""
        yield f"{self.machine} (trainwright {self.version}, {self.checked})"
        yield ""
        width = max((len(outcome.name) for outcome in self.outcomes), default=0)
        for outcome in self.outcomes:
            yield from _format_outcome(outcome, width)
        for severity in Severity:
            for outcome in self.outcomes:
                for finding in outcome.findings:
                    if finding.severity is severity:
                        yield from _format_finding(finding, outcome.name)
        yield ""
        yield self._build_verdict()

    def _build_verdict(self) -> str:
        counts = {severity: sum(f.severity is severity for f in self.findings) for severity in Severity}
        ran = sum(outcome.skipped is None for outcome in self.outcomes)
        skips = len(self.outcomes) - ran
        verdict = f"{format_plural(ran, 'check')} in {format_seconds(self.seconds)}"
        verdict += f", {skips} skipped" if skips else ""
        if not self.findings:
            return f"nothing found: {verdict}"
        parts = [
            f"{counts[Severity.BROKEN]} broken" if counts[Severity.BROKEN] else "",
            format_plural(counts[Severity.WARNING], "warning") if counts[Severity.WARNING] else "",
            format_plural(counts[Severity.NOTE], "note") if counts[Severity.NOTE] else "",
        ]
        return f"{', '.join(filter(None, parts))}: {verdict}"


def _format_outcome(outcome: Outcome, width: int) -> Iterator[str]:
    name = f"{outcome.name:<{width}}"
    if outcome.skipped is not None:
        yield f"{name}  skipped: {outcome.skipped}"
        return
    worst = next((s.value for s in Severity if any(f.severity is s for f in outcome.findings)), "ok")
    facts = outcome.facts or (outcome.title,)
    yield f"{name}  {worst:<7}  {facts[0]}"
    for fact in facts[1:]:
        yield f"{'':<{width}}  {'':<7}  {fact}"


def _format_finding(finding: Finding, name: str) -> Iterator[str]:
    yield ""
    yield f"{finding.severity.value}: {finding.what} [{name}]"
    yield f"  why:  {finding.why}"
    yield f"  do:   {finding.fix}"


def _convert_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "title": outcome.title,
        "seconds": round(outcome.seconds, 2),
        "skipped": outcome.skipped,
        "facts": list(outcome.facts),
        "findings": [asdict(finding) for finding in outcome.findings],
    }
