"""The result of all checks, as text and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainwright.doctor.checks.check import Finding, Outcome, Severity
from trainwright.utils.text import plural, span

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
            "checks": [_values(outcome) for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text: a line for each check with its facts, then the findings with their fixes."""
        yield f"{self.machine} (trainwright {self.version}, {self.checked})"
        yield ""
        width = max((len(outcome.name) for outcome in self.outcomes), default=0)
        for outcome in self.outcomes:
            yield from _outcome_lines(outcome, width)
        for severity in Severity:
            for outcome in self.outcomes:
                for finding in outcome.findings:
                    if finding.severity is severity:
                        yield from _finding_lines(finding, outcome.name)
        yield ""
        yield self._verdict()

    def _verdict(self) -> str:
        counts = {severity: sum(f.severity is severity for f in self.findings) for severity in Severity}
        ran = sum(outcome.skipped is None for outcome in self.outcomes)
        skipped = len(self.outcomes) - ran
        said = f"{plural(ran, 'check')} in {span(self.seconds)}"
        said += f", {skipped} skipped" if skipped else ""
        if not self.findings:
            return f"nothing found: {said}"
        parts = [
            f"{counts[Severity.BROKEN]} broken" if counts[Severity.BROKEN] else "",
            plural(counts[Severity.WARNING], "warning") if counts[Severity.WARNING] else "",
            plural(counts[Severity.NOTE], "note") if counts[Severity.NOTE] else "",
        ]
        return f"{', '.join(filter(None, parts))}: {said}"


def _outcome_lines(outcome: Outcome, width: int) -> Iterator[str]:
    name = f"{outcome.name:<{width}}"
    if outcome.skipped is not None:
        yield f"{name}  skipped: {outcome.skipped}"
        return
    worst = next((s.value for s in Severity if any(f.severity is s for f in outcome.findings)), "ok")
    facts = outcome.facts or (outcome.title,)
    yield f"{name}  {worst:<7}  {facts[0]}"
    for fact in facts[1:]:
        yield f"{'':<{width}}  {'':<7}  {fact}"


def _finding_lines(finding: Finding, name: str) -> Iterator[str]:
    yield ""
    yield f"{finding.severity.value}: {finding.what} [{name}]"
    yield f"  why:  {finding.why}"
    yield f"  do:   {finding.fix}"


def _values(outcome: Outcome) -> dict[str, Any]:
    findings = [
        {"severity": one.severity.value, "what": one.what, "why": one.why, "fix": one.fix} for one in outcome.findings
    ]
    return {
        "name": outcome.name,
        "title": outcome.title,
        "seconds": round(outcome.seconds, 2),
        "skipped": outcome.skipped,
        "facts": list(outcome.facts),
        "findings": findings,
    }
